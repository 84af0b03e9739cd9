"""LiteLLM's calls against a proxy, in the interpreter that has LiteLLM: reads {"url": base URL without /v1} from standard
input (it holds a secret), prints what it was answered as JSON. Run with `-W error`."""

from __future__ import annotations

import asyncio
import json
import sys
import warnings
from typing import Any

# Not in the environment that checks this file's types.
import litellm  # pyright: ignore[reportMissingImports]
from litellm.llms.custom_httpx.async_client_cleanup import (  # pyright: ignore[reportMissingImports]
    close_litellm_async_clients,
)

ASK = [{"role": "user", "content": "q"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
PARAMETERS = {"api_key": "x", "num_retries": 0}


async def chat(url: str, model: str) -> dict[str, Any]:
    """Chat Completions, or Messages by LiteLLM's translation of it: `model` says which."""
    given: dict[str, Any] = {"model": model, "api_base": url, **PARAMETERS}
    whole = await litellm.acompletion(messages=ASK, **given)
    stream = await litellm.acompletion(
        messages=ASK, stream=True, stream_options={"include_usage": True}, **given
    )
    chunks = [chunk async for chunk in stream]
    called = await litellm.acompletion(
        messages=[{"role": "user", "content": "use a tool"}], tools=[TOOL], **given
    )
    return {
        "whole": whole.choices[0].message.content,
        "tokens": whole.usage.completion_tokens,
        "streamed": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
        "finish": [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason],
        "called": [call.function.name for call in called.choices[0].message.tool_calls or ()],
        "called_finish": called.choices[0].finish_reason,
    }


def kind(event: Any) -> str:
    """Its type, which LiteLLM has as an enum for some events and as text for others."""
    return getattr(event.type, "value", event.type)


async def responses(url: str) -> dict[str, Any]:
    given: dict[str, Any] = {"model": "openai/policy", "api_base": url, **PARAMETERS}
    whole = await litellm.aresponses(input="q", **given)
    stream = await litellm.aresponses(input="q", stream=True, **given)
    events = [event async for event in stream]
    return {
        "whole": whole.output[0].content[0].text,
        "tokens": whole.usage.output_tokens,
        "streamed": "".join(e.delta for e in events if kind(e) == "response.output_text.delta"),
        "last": kind(events[-1]),
    }


async def messages(url: str) -> dict[str, Any]:
    """Messages as it is; its stream needs FastAPI in LiteLLM, so that only `chat` streams it, translated."""
    whole = await litellm.anthropic.messages.acreate(
        model="anthropic/policy", api_base=url, max_tokens=100, messages=ASK, **PARAMETERS
    )
    return {"whole": whole["content"][0]["text"], "tokens": whole["usage"]["output_tokens"]}


async def refused(url: str) -> str:
    """What an overflow is to LiteLLM."""
    try:
        await litellm.acompletion(
            model="openai/policy",
            api_base=url,
            messages=[{"role": "user", "content": "x" * 20_000}],
            **PARAMETERS,
        )
    except litellm.ContextWindowExceededError as error:
        return type(error).__name__
    return "answered"


async def answers(url: str) -> dict[str, Any]:
    return {
        "chat": await chat(f"{url}/v1", "openai/policy"),
        "translated": await chat(url, "anthropic/policy"),
        "responses": await responses(f"{url}/v1"),
        "messages": await messages(url),
        "refused": await refused(f"{url}/v1"),
    }


async def main() -> None:
    # Else it prints where to report its bugs with every refused call.
    litellm.suppress_debug_info = True
    # It puts usage of another class into its own copy of a streamed response and then writes that copy, whoever answered.
    warnings.filterwarnings("ignore", r"(?s)Pydantic serializer warnings.*Expected `ResponseAPIUsage`")
    url = json.load(sys.stdin)["url"]
    try:
        print(json.dumps(await answers(url)))
    finally:
        await close_litellm_async_clients()


if __name__ == "__main__":
    asyncio.run(main())
