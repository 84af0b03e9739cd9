"""Each scaffold on the stage, headless, for each protocol that it speaks, started as its own description says."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.capture.rules import load_rules
from pipeline.harnesses.scaffolds import install as installing
from pipeline.harnesses.scaffolds import scaffold
from pipeline.harnesses.scaffolds.base import Job, Places
from schemas.config import Behaviour
from tests.scaffolds.install import ROOT
from tests.scaffolds.played import Client
from tests.scaffolds.stage import Stage

TASK = "Look at a.txt"
_DRIVERS = Path(installing.__file__).with_name("drivers")


def _client(
    name: str,
    wire: str,
    settings: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    context: int = 200_000,
    output: int = 4096,
) -> Client:
    found = scaffold(name)

    def command(stage: Stage, url: str) -> tuple[Sequence[str], dict[str, str], str]:
        (stage.work / "a.txt").write_text("hello a\n")
        folder = installing.at(found, ROOT)
        python = installing.python_of(folder)
        places = Places(
            str(folder),
            str(installing.node_bin() / "node"),
            str(python),
            str(python.parents[1] / "lib"),
            str(_DRIVERS),
            str(stage.home),
        )
        given = {**(settings or {})}
        if "openai_base_url" in given:
            given["openai_base_url"] = url
        behaviour = Behaviour(max_turns=11, max_tokens=output)
        launch = found.launch(Job(TASK, url, wire, behaviour, context, output, places, given))
        for path, text in launch.files.items():
            (stage.home / path).parent.mkdir(parents=True, exist_ok=True)
            (stage.home / path).write_text(text)
        return launch.argv, {**stage.environment(), **launch.env, **(env or {})}, launch.stdin

    return Client(name, wire, load_rules(name.replace("-", "_")), command)


def pi(wire: str, context: int = 200_000, **settings: Any) -> Client:
    return _client("pi", wire, {"retry": {"baseDelayMs": 50}, **settings}, context=context, output=2048)


def mini_swe_agent(wire: str) -> Client:
    return _client("mini-swe-agent", wire)


def claude_code(**environment: str) -> Client:
    return _client("claude-code", "messages", env=environment)


def opencode(wire: str, context: int = 200_000) -> Client:
    return _client("opencode", wire, context=context)


def codex(builtin: bool = False, config: dict[str, str] | None = None) -> Client:
    """`builtin`: its own provider, moved to our URL, which first asks for a WebSocket; `config`: values in TOML."""
    settings = {name: tomllib.loads(f"value = {value}")["value"] for name, value in (config or {}).items()}
    if builtin:
        settings |= {"model_provider": "openai", "openai_base_url": "the session's"}
    return _client("codex", "responses", settings)


def openhands(wire: str, condense: dict[str, int] | None = None) -> Client:
    return _client("openhands", wire, {"condense": condense} if condense else None)


def terminus(**options: Any) -> Client:
    return _client("terminus", "chat", options)
