"""Long dialogues: whether a turn costs what is new in it. In this process, with a double of an engine that answers at once."""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from collections.abc import Sequence
from typing import Any

from capture_world import MAX_CONTEXT, MAX_TOKENS, Figure, answer_ids, figure, prose, say

from pipeline.capture.call import Call
from pipeline.capture.dialogue import Dialogue, steps
from pipeline.capture.messages import Message, Tool, ToolCall
from pipeline.capture.renderers.base import Renderer
from pipeline.capture.renderers.choose import load_renderer
from pipeline.capture.session import Session
from pipeline.engines.base import Generation
from pipeline.engines.policies import TINY, policy_dir
from schemas.config import Behaviour

FLAT = 1.5
_EDGE = 16
_TOOL = Tool("read", prose(40, 3), {"type": "object", "properties": {"path": {"type": "string"}}})


class AtOnce:
    """A double of an engine: samples the same tokens always. `prompt` is how many it was given last."""

    def __init__(self, ids: Sequence[int]) -> None:
        count = len(ids)
        self._generation = Generation(tuple(ids), (-0.5,) * count, (1,) * count, "stop")
        self.prompt = 0

    async def generate(self, token_ids: Any, *given: Any, **named: Any) -> Generation:
        self.prompt = len(token_ids)
        return self._generation

    async def version(self) -> int:
        return 1

    async def healthy(self) -> bool:
        return True

    async def close(self) -> None:
        pass


class Agent:
    """Sends its whole history with each turn, as agents do: the answers as they were returned, and each tool's result."""

    def __init__(self, renderer: Renderer) -> None:
        self.engine = AtOnce(answer_ids(renderer))
        behaviour = Behaviour(max_turns=10_000, max_tokens=MAX_TOKENS)
        self.session = Session("long", behaviour, MAX_CONTEXT, renderer, self.engine)
        self.messages = [Message("system", prose(400, 1)), Message("user", prose(60, 2))]
        self.turns = 0

    @property
    def dialogue(self) -> Dialogue:
        return Dialogue(tuple(self.messages), (_TOOL,))

    async def turn(self, result: str) -> float:
        """Seconds of a turn, after which `result` is what the agent brings to the next one."""
        call = Call(f"d{self.turns}", self.dialogue, "policy")
        began = time.perf_counter()
        answer = await self.session.answer(call, {}).whole()
        taken = time.perf_counter() - began
        self.turns += 1
        self.messages += [Message("assistant", answer.content, answer.tool_calls), Message("user", result)]
        return taken


def tokenizing(turns: int, words: int) -> list[Figure]:
    """Seconds that a turn's tokens take, over so many turns of as much each: by suffix, and anew from the beginning."""
    renderer = load_renderer(policy_dir(TINY))
    messages = [Message("system", prose(400, 1)), Message("user", prose(60, 2))]
    suffix, whole = list[float](), list[float]()
    known, edge = 0, min(_EDGE, (turns - 1) // 2)
    for turn in range(turns):
        dialogue = Dialogue(tuple(messages), (_TOOL,))
        count = len(steps(dialogue))
        # The best of three: what else runs on the machine is not what grows.
        suffix.append(min(_timed(renderer, dialogue, known) for _ in range(3)))
        # The first turn brings the system text and the tools, too: it is no turn like the others.
        if turn in (*range(1, 1 + edge), *range(turns - edge, turns)):
            whole.append(_timed(renderer, dialogue, 0))
        # The answer comes next; it is sampled, so it is never rendered.
        known = count + 1
        call = ToolCall(f"c{turn}", "read", '{"path": "pipeline/feed.py"}')
        messages += [
            Message("assistant", prose(20, turn), (call,)),
            Message("tool", prose(words, turn), tool_call_id=call.id),
        ]
    ours, anew = _growth(suffix[1:], edge), _growth(whole, edge)
    last, last_anew = (1000 * statistics.mean(taken[-edge:]) for taken in (suffix, whole))
    say(
        f"tokenizing over {turns} turns: x{ours:.2f}, {last:.2f} ms at the end; anew x{anew:.1f}, {last_anew:.1f} ms"
    )
    return [
        figure("tokenize.growth", ours, "ratio", FLAT, anew),
        figure("tokenize.last", last, "ms", 0, last_anew),
    ]


def _timed(renderer: Renderer, dialogue: Dialogue, first: int) -> float:
    # Of this thread: what else runs on the machine does not count.
    began = time.thread_time()
    renderer.steps(dialogue, first)
    return time.thread_time() - began


def _growth(taken: Sequence[float], edge: int) -> float:
    return statistics.mean(taken[-edge:]) / statistics.mean(taken[:edge])


async def long_dialogue(tokens: int, turns: int) -> list[Figure]:
    """A dialogue of so many tokens at its end: the time of its last turns, and what a turn adds to memory there."""
    renderer = load_renderer(policy_dir(TINY))
    agent = Agent(renderer)
    # So many words a turn that the dialogue has its tokens after its turns; tokens a word are measured.
    sample = prose(4000, 5)
    words = int(tokens / turns * 4000 / len(renderer.steps(Dialogue((Message("user", sample),)), 1)[0]))
    edge = max(turns // 8, 1)
    marks = (1, 1 + edge, turns - edge, turns)
    held, lengths = list[int](), list[int]()
    tracemalloc.start()
    try:
        for turn in range(turns + 1):
            await agent.turn(prose(words, turn))
            if turn in marks:
                held.append(_held())
                lengths.append(agent.engine.prompt)
    finally:
        tracemalloc.stop()
    early, late = ((held[i + 1] - held[i]) / (lengths[i + 1] - lengths[i]) for i in (0, 2))
    # Without what traces memory, which slows everything: the next turns on the same session.
    last = statistics.median([await agent.turn("Go on.") for _ in range(5)])
    began = time.perf_counter()
    renderer.steps(agent.dialogue, 0)
    anew = time.perf_counter() - began
    say(
        f"{lengths[-1]:,} tokens: a turn {1000 * last:.1f} ms, tokenized anew {1000 * anew:,.0f} ms; "
        f"{late:.1f} bytes a new token, {early:.1f} at the beginning; {held[-1] / 1e6:.1f} MB in all"
    )
    return [
        figure("long.turn", 1000 * last, "ms", 0, 1000 * anew),
        figure("long.memory", late, "B/token", FLAT * early, early),
        figure("long.tokens", lengths[-1], "tokens", 0, tokens, "higher"),
    ]


def _held() -> int:
    """Bytes that are held but for what this benchmark made: the agent's own texts are not its session's."""
    gc.collect()
    shot = tracemalloc.take_snapshot().filter_traces(
        [
            tracemalloc.Filter(False, __file__),
            tracemalloc.Filter(False, tracemalloc.__file__),
            tracemalloc.Filter(False, "*capture_world.py"),
        ]
    )
    return sum(trace.size for trace in shot.statistics("filename"))
