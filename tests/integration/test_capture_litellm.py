"""LiteLLM, which several scaffolds speak through, against the proxy: all three protocols, and no warning."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from tests.capture_http_parts import proxied

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 100
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def interpreter() -> Path | None:
    """One that has LiteLLM: its own venv, a scaffold's that brings it, or this one."""
    for name in ("litellm-*", "mini-swe-agent-*"):
        # The file that an installer writes last.
        found = sorted(
            (ROOT / ".scaffolds").glob(f"{name}/lib/python*/site-packages/litellm-*.dist-info/RECORD")
        )
        if found:
            return found[-1].parents[4] / "bin" / "python"
    return Path(sys.executable) if importlib.util.find_spec("litellm") else None


async def test_litellm_speaks_all_three_protocols_without_a_warning() -> None:
    python = interpreter()
    if python is None:
        pytest.skip(
            "LiteLLM is in none of .scaffolds/litellm-*, .scaffolds/mini-swe-agent-* (`make scaffolds`) and this environment"
        )
    async with proxied(lambda prompt: CALL if "use a tool" in prompt else "hello") as proxy:
        session = proxy.open()
        process = await asyncio.create_subprocess_exec(
            python,
            *("-I", "-W", "error", ROOT / "tests" / "litellm_calls.py"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": os.environ["PATH"], "HOME": str(ROOT), "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        )
        try:
            async with asyncio.timeout(LIMIT_S):
                out, err = await process.communicate(json.dumps({"url": proxy.bare_url()}).encode())
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert not err, err.decode()
        assert process.returncode == 0
        answered = json.loads(out)
    hello, call = (len(proxy.engine.turn(text)) for text in ("hello", CALL))
    chat = {
        "whole": "hello",
        "tokens": hello,
        "streamed": "hello",
        "finish": ["stop"],
        "called": ["f"],
        "called_finish": "tool_calls",
    }
    assert answered == {
        "chat": chat,
        "translated": chat,
        "responses": {
            "whole": "hello",
            "tokens": hello,
            "streamed": "hello",
            "last": "response.completed",
        },
        "messages": {"whole": "hello", "tokens": hello},
        "refused": "ContextWindowExceededError",
    }
    # The same call whole and streamed is one turn; LiteLLM's two ways to Messages differ in what they send.
    assert sum(context.generated for context in session.export().contexts) == sum(
        len(made.token_ids) for made in proxy.engine.generations
    )
    assert call in {len(made.token_ids) for made in proxy.engine.generations}
