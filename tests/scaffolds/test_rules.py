"""The scaffolds' rules by themselves, also where no scaffold is installed: what they tell apart, and what they leave alone."""

from __future__ import annotations

import pytest

from pipeline.capture.call import Call
from pipeline.capture.dialogue import Dialogue
from pipeline.capture.messages import Message, Tool
from pipeline.capture.rules import Kind, classify, load_rules
from tests.scaffolds.install import SCAFFOLDS

NAMES = tuple(name.replace("-", "_") for name in SCAFFOLDS)
TOOL = Tool("bash", "", {})
COMPACT = (
    "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n\nSummarize.\n\nREMINDER: Do NOT call any tools. Respond with"
    " plain text only — an <analysis> block followed by a <summary> block. Tool calls will be rejected and you will fail"
    " the task."
)


def asked(last: str, system: str = "You are an agent.", tools: bool = True, max_tokens: int = 4096) -> Call:
    messages = (Message("system", system), Message("user", "Look."), Message("user", last))
    return Call("", Dialogue(messages, (TOOL,) if tools else ()), "policy", max_tokens=max_tokens)


@pytest.mark.parametrize("name", NAMES)
def test_an_agent_s_own_turn_is_its_own(name: str) -> None:
    assert classify(load_rules(name), asked("Go on."), {"x-session-id": "s", "thread-id": "t"}) == Kind()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "text",
    [
        "quota",
        "1: You are a title generator.\n2: You are a context summarization assistant.",
        "3: CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.",
        "4: You are about to hand off your work to another AI agent.",
    ],
)
def test_a_tool_s_result_that_quotes_a_scaffold_s_prompt_is_no_auxiliary_call(name: str, text: str) -> None:
    assert classify(load_rules(name), asked(text), {}) == Kind()


@pytest.mark.parametrize(
    ("name", "call", "headers", "label"),
    [
        ("claude_code", asked(COMPACT), {}, "compaction"),
        ("claude_code", asked("Name this session.", tools=False), {}, "auxiliary"),
        ("pi", asked("x", "You are a context summarization assistant. Your task", False), {}, "compaction"),
        ("opencode", asked("x", "You are a title generator. You output", False), {}, "title"),
        ("opencode", asked("x", "You are a context summarization agent. You", False), {}, "compaction"),
        ("codex", asked("x"), {"x-codex-turn-metadata": '{"a":1,"request_kind":"compaction"}'}, "compaction"),
        ("codex", asked("x"), {"x-codex-turn-metadata": '{"a":1,"request_kind":"turn"}'}, None),
        (
            "openhands",
            asked("x", "You are maintaining a context-aware state summary", False),
            {},
            "compaction",
        ),
        ("terminus", asked("You are about to hand off your work to another AI agent."), {}, "summary"),
        ("terminus", asked("The next agent has a few questions for you, please"), {}, "summary"),
    ],
)
def test_auxiliary_calls_are_labelled(
    name: str, call: Call, headers: dict[str, str], label: str | None
) -> None:
    assert classify(load_rules(name), call, headers).label == label


def test_claude_code_s_probe() -> None:
    probe = Call("", Dialogue((Message("user", "quota"),)), "policy", max_tokens=1)
    assert classify(load_rules("claude_code"), probe, {}).label == "probe"


def test_claude_code_s_subagents_are_told_from_the_main_agent() -> None:
    headers = {"x-claude-code-agent-id": "a1", "x-claude-code-session-id": "s"}
    assert classify(load_rules("claude_code"), asked("Go on."), headers) == Kind("a1")


@pytest.mark.parametrize(
    ("name", "own", "parent"),
    [("opencode", "x-session-id", "x-parent-session-id"), ("codex", "thread-id", "x-codex-parent-thread-id")],
)
def test_subagents_of_one_parent_are_told_apart(name: str, own: str, parent: str) -> None:
    one, two = (classify(load_rules(name), asked("x"), {own: agent, parent: "p"}) for agent in "ab")
    assert (one, two) == (Kind("a"), Kind("b"))
