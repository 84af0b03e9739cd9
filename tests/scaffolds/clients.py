"""How each scaffold is started on the stage, headless, for each protocol that it speaks.

What is set beside the base URL keeps the client from the network (updates, telemetry, lists of models), which the stage does
not have, or shortens its waits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipeline.capture.rules import load_rules
from tests.scaffolds.install import SCAFFOLDS, node_bin
from tests.scaffolds.played import Client, bare
from tests.scaffolds.stage import Stage

TASK = "Look at a.txt"
Command = tuple[Sequence[str | Path], dict[str, str]]
_DRIVERS = Path(__file__).with_name("drivers")


def _client(name: str, wire: str, command: Callable[[Stage, str], Command]) -> Client:
    def prepared(stage: Stage, url: str) -> Command:
        (stage.work / "a.txt").write_text("hello a\n")
        return command(stage, url)

    return Client(name, wire, load_rules(name.replace("-", "_")), prepared)


def pi(wire: str, context: int = 200_000, **settings: Any) -> Client:
    api = {"chat": "openai-completions", "responses": "openai-responses", "messages": "anthropic-messages"}

    def command(stage: Stage, url: str) -> Command:
        folder = stage.home / ".pi/agent"
        folder.mkdir(parents=True)
        model = {"id": "policy", "reasoning": True, "contextWindow": context, "maxTokens": 2048}
        provider = {
            "baseUrl": bare(url) if wire == "messages" else url,
            "api": api[wire],
            "apiKey": "none",
            "models": [model],
        }
        (folder / "models.json").write_text(json.dumps({"providers": {"ours": provider}}))
        (folder / "settings.json").write_text(json.dumps({"retry": {"baseDelayMs": 50}, **settings}))
        argv = [SCAFFOLDS["pi"].path, "-p", "--mode", "json", "--provider", "ours", "--model", "policy"]
        environment = {**stage.environment([node_bin()]), "PI_TELEMETRY": "0"}
        return [*argv, "--offline", TASK], environment

    return _client("pi", wire, command)


def mini_swe_agent(wire: str) -> Client:
    def command(stage: Stage, url: str) -> Command:
        environment = {
            **stage.environment(),
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "4",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OPENAI_API_KEY": "none",
            "OPENAI_BASE_URL": url,
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_API_BASE": bare(url),
        }
        argv: list[str | Path] = [SCAFFOLDS["mini-swe-agent"].path, "-y", "--exit-immediately", "-l", "0"]
        argv += ["-m", "anthropic/policy" if wire == "messages" else "openai/policy"]
        argv += ["--model-class", "litellm_response"] if wire == "responses" else []
        return [*argv, "-t", TASK, "-o", stage.folder / "trajectory.json"], environment

    return _client("mini-swe-agent", wire, command)


def claude_code(**environment: str) -> Client:
    def command(stage: Stage, url: str) -> Command:
        quiet = ("DISABLE_TELEMETRY", "DISABLE_AUTOUPDATER", "DISABLE_ERROR_REPORTING")
        names = ("MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_HAIKU_MODEL")
        given = {
            **stage.environment([node_bin()]),
            **dict.fromkeys(quiet, "1"),
            **{f"ANTHROPIC_{name}": "policy" for name in names},
            "ANTHROPIC_BASE_URL": bare(url),
            "ANTHROPIC_API_KEY": "none",
            "CLAUDE_CODE_SUBAGENT_MODEL": "policy",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            # It refuses to skip permissions as root outside of a sandbox.
            "IS_SANDBOX": "1",
            **environment,
        }
        argv = [SCAFFOLDS["claude-code"].path, "-p", TASK, "--dangerously-skip-permissions"]
        return [*argv, "--output-format", "json"], given

    return _client("claude-code", "messages", command)


def opencode(wire: str, context: int = 200_000) -> Client:
    package = {
        "chat": "@ai-sdk/openai-compatible",
        "messages": "@ai-sdk/anthropic",
        "responses": "@ai-sdk/openai",
    }

    def command(stage: Stage, url: str) -> Command:
        model = {"limit": {"context": context, "output": 4096}, "tool_call": True, "reasoning": True}
        provider = {
            "npm": package[wire],
            "name": "ours",
            "options": {"baseURL": url, "apiKey": "none"},
            "models": {"policy": {"name": "policy", **model}, "small": {"name": "small", **model}},
        }
        config = {
            "provider": {"ours": provider},
            "model": "ours/policy",
            "small_model": "ours/small",
            "permission": "allow",
            "autoupdate": False,
            "share": "disabled",
        }
        off = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
        environment = {
            **stage.environment([node_bin()]),
            **{f"OPENCODE_DISABLE_{name}": "1" for name in off},
            "OPENCODE_CONFIG_CONTENT": json.dumps(config),
        }
        return [SCAFFOLDS["opencode"].path, "run", "--format", "json", TASK], environment

    return _client("opencode", wire, command)


def codex(builtin: bool = False, config: dict[str, str] | None = None) -> Client:
    """`builtin`: its own provider, moved to our URL, which first asks for a WebSocket."""

    def command(stage: Stage, url: str) -> Command:
        (stage.home / ".codex").mkdir()
        provider = f'{{name="ours",base_url="{url}",env_key="OPENAI_API_KEY",wire_api="responses"}}'
        settings = (
            {"openai_base_url": f'"{url}"'}
            if builtin
            else {"model_provider": '"ours"', "model_providers.ours": provider}
        )
        settings |= {"check_for_update_on_startup": "false", "analytics.enabled": "false", **(config or {})}
        argv: list[str | Path] = [SCAFFOLDS["codex"].path, "exec", "--json", "--skip-git-repo-check"]
        argv += ["--dangerously-bypass-approvals-and-sandbox", "-m", "policy"]
        for name, value in settings.items():
            argv += ["-c", f"{name}={value}"]
        environment = {**stage.environment([node_bin()]), "OPENAI_API_KEY": "none"}
        return [*argv, TASK], environment

    return _client("codex", "responses", command)


def openhands(wire: str, condense: dict[str, int] | None = None) -> Client:
    # It chooses the protocol by the model's name.
    model = {"chat": "openai/policy", "messages": "anthropic/policy", "responses": "openai/gpt-5-mini"}

    def command(stage: Stage, url: str) -> Command:
        options = {
            "instruction": TASK,
            "model": model[wire],
            "base_url": bare(url) if wire == "messages" else url,
            "api_key": "none",
            "num_retries": 3,
            "retry_min_wait": 1,
            "retry_max_wait": 1,
            "condense": condense,
        }
        environment = {
            **stage.environment(),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OPENHANDS_SUPPRESS_BANNER": "1",
        }
        argv = [SCAFFOLDS["openhands"].path, _DRIVERS / "run_openhands.py", json.dumps(options)]
        return argv, environment

    return _client("openhands", wire, command)


def terminus(**options: Any) -> Client:
    def command(stage: Stage, url: str) -> Command:
        given = {
            "instruction": TASK,
            "model_name": "openai/policy",
            "api_base": url,
            "max_turns": 12,
            "model_info": {"max_input_tokens": 200_000, "max_output_tokens": 4096},
            **options,
        }
        environment = {
            **stage.environment(),
            "OPENAI_API_KEY": "none",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "HARBOR_TELEMETRY": "0",
            "TMUX_TMPDIR": str(stage.folder / "tmp"),
        }
        argv = [SCAFFOLDS["terminus"].path, _DRIVERS / "run_terminus.py", json.dumps(given)]
        return argv, environment

    return _client("terminus", "chat", command)
