"""Items of OpenAI's Responses dialect: an answer as output items, and what their ids and seals say when they come back.

Promises: the order is reasoning, message, calls; every item's id names its turn, so that items which come back are put
together into the turns that they were; reasoning travels in `encrypted_content`, signed, for clients keep the state.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any, Literal

from pipeline.capture.call import Answer, Call, Reply
from pipeline.capture.dialects.responses_tools import Toolbox, free_text_of
from pipeline.capture.messages import ToolCall

Status = Literal["in_progress", "completed", "incomplete"]

# OpenAI's own ids are longer.
_ITEM_ID = re.compile(r"(?:rs|msg|fc|ctc)_([0-9a-f]{32})(?:_[0-9]{1,9})?")


def turn_of(item_id: object) -> str | None:
    """The turn that an item of ours belongs to; None for an id that is not ours."""
    found = _ITEM_ID.fullmatch(item_id) if isinstance(item_id, str) else None
    return found and found[1]


def turn_name(call: Call) -> str:
    """What the ids of the turn's items have in common: equal requests have the same turn."""
    return call.digest[:32]


def seal(reply: Reply, reasoning: str) -> str:
    """Reasoning as `encrypted_content`: signed, not secret."""
    return f"{reply.sign(reasoning)}.{base64.urlsafe_b64encode(reasoning.encode()).decode()}"


def unseal(reply: Reply, sealed: object) -> str | None:
    """The reasoning that the session sealed; None for everything else."""
    if not isinstance(sealed, str):
        return None
    signature, _, text = sealed.partition(".")
    try:
        reasoning = base64.b64decode(text, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    return reasoning if reply.signed(reasoning, signature) else None


def reasoning_item(turn: str, text: str, sealed: str | None) -> dict[str, Any]:
    """`sealed` is None while the item is not complete."""
    summary = [] if sealed is None else [{"type": "summary_text", "text": text}]
    return {"id": f"rs_{turn}", "type": "reasoning", "summary": summary, "encrypted_content": sealed}


def message_item(turn: str, text: str, status: Status) -> dict[str, Any]:
    """Without content while it is in progress."""
    content = [] if status == "in_progress" else [output_text(text)]
    return {
        "id": f"msg_{turn}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call_item(turn: str, index: int, call: ToolCall, box: Toolbox, whole: bool = True) -> dict[str, Any]:
    """`index` counts the turn's calls; an item that is not `whole` has no arguments yet."""
    offered = box.of(call.name)
    item: dict[str, Any] = {"call_id": call.id, "name": offered.name}
    if offered.namespace is not None:
        item["namespace"] = offered.namespace
    if offered.kind == "custom":
        text = free_text_of(call) if whole else ""
        return {"id": f"ctc_{turn}_{index}", "type": "custom_tool_call", "input": text, **item}
    return {
        "id": f"fc_{turn}_{index}",
        "type": "function_call",
        "arguments": call.arguments if whole else "",
        "status": "completed" if whole else "in_progress",
        **item,
    }


def message_status(answer: Answer) -> Status:
    """Of the answer's message item."""
    return "incomplete" if answer.length and not answer.tool_calls else "completed"


def output_items(call: Call, answer: Answer, reply: Reply, box: Toolbox) -> list[dict[str, Any]]:
    """The whole answer. One that says nothing and calls nothing has an empty message: it is a turn all the same."""
    turn = turn_name(call)
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        items.append(reasoning_item(turn, answer.reasoning, seal(reply, answer.reasoning)))
    if answer.content or not answer.tool_calls:
        items.append(message_item(turn, answer.content, message_status(answer)))
    items += [call_item(turn, i, made, box) for i, made in enumerate(answer.tool_calls)]
    return items
