"""A request's body as (role, text) of its turns, read from the protocol's own form and by nothing of capture's.

An assistant's turn is told by its text alone: what of it the policy sampled is checked by its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Turn = tuple[str, str]


def turns(path: str, body: dict[str, Any]) -> list[Turn]:
    """The turns; leading system texts are one."""
    path = path.partition("?")[0]
    read = (
        _chat
        if path.endswith("/chat/completions")
        else _responses
        if path.endswith("/responses")
        else _anthropic
    )
    found = list(read(body))
    leading = next((i for i, (role, _) in enumerate(found) if role != "system"), len(found))
    if leading:
        found[:leading] = [("system", "\n".join(text for _, text in found[:leading]))]
    return found


def tool_names(body: dict[str, Any]) -> list[str]:
    """Those that the policy is offered from the beginning; those of a namespace with its name before."""
    found: list[str] = []
    for tool in body.get("tools") or ():
        if tool.get("type") == "namespace":
            found += [f"{tool['name']}.{inner['name']}" for inner in tool["tools"]]
        elif "defer_loading" not in tool and ("function" in tool or "name" in tool):
            found.append(tool.get("function", tool)["name"])
    return found


def _text(content: Any) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(part.get("text", "") for part in content)


def _chat(body: dict[str, Any]) -> Iterator[Turn]:
    for message in body["messages"]:
        role = "system" if message["role"] == "developer" else message["role"]
        yield role, _text(message.get("content"))


def _anthropic(body: dict[str, Any]) -> Iterator[Turn]:
    if body.get("system"):
        blocks = body["system"] if isinstance(body["system"], list) else [{"text": body["system"]}]
        # Changes from session to session, and is for the provider's books.
        yield "system", _text([b for b in blocks if not b["text"].startswith("x-anthropic-billing-header")])
    for message in body["messages"]:
        content = message["content"]
        if message["role"] != "user" or isinstance(content, str):
            blocks = (
                [block for block in content if block["type"] == "text"]
                if isinstance(content, list)
                else content
            )
            yield message["role"], _text(blocks)
            continue
        for block in content:
            if block["type"] == "tool_result":
                text = _text(block.get("content"))
                # A template has no place for the flag; the policy is told in words.
                error = block.get("is_error") and not text.lstrip().startswith("Error:")
                yield "tool", f"Error:\n{text}" if error else text
        rest = [block for block in content if block["type"] != "tool_result"]
        if rest or not content:
            yield "user", _text(rest)


def _responses(body: dict[str, Any]) -> Iterator[Turn]:
    if body.get("instructions"):
        yield "system", body["instructions"]
    if isinstance(body["input"], str):
        yield "user", body["input"]
        return
    said: list[str] | None = None
    for item in body["input"]:
        kind = item.get("type", "message")
        if kind in ("reasoning", "function_call", "custom_tool_call") or item.get("role") == "assistant":
            said = [*(said or ()), _text(item.get("content")) if kind == "message" else ""]
            continue
        if said is not None:
            yield "assistant", "".join(said)
            said = None
        if kind == "message":
            yield ("system" if item["role"] == "developer" else item["role"]), _text(item["content"])
        else:
            yield "tool", _text(item["output"])
    if said is not None:
        yield "assistant", "".join(said)
