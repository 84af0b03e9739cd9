"""Teachers: what they say of a sequence's loss tokens is what their models say, and nobody waits for one that is away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.engines.base import EngineRefused, EngineUnavailable
from pipeline.engines.scores import Scores
from pipeline.engines.tiny.engine import TinyEngine
from pipeline.engines.tiny.server import create_app, serve
from pipeline.log import Log
from pipeline.signal.chunks import chunks, rows_of
from pipeline.store import ObjectStore, StoreUnavailable, outage
from pipeline.store.payload import read_columns, write_sidecar
from schemas.config import Broker, Teacher
from schemas.facts import SequenceFinished, SequenceScored
from schemas.keys import sidecar_key
from schemas.names import teacher_work
from schemas.payload import ImageItem, Span
from services.cli.embedded import free_port
from services.teacher import asking
from services.teacher.asking import Asker, Unscorable
from services.teacher.engines import TinyScorer
from tests.teacher_parts import answers, finished, said, serving, teaching, tokens
from tests.tiny_engine_parts import random_policy

TWO = [(tokens(40), [(5, 9), (30, 40)]), (tokens(12, 1), []), (tokens(25, 2), [(24, 25)])]
"""Contexts of which one carries no loss."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_policy(tmp_path_factory.mktemp("teacher"))


@asynccontextmanager
async def listening(policy: Path, max_context: int = 2048, port: int = 0) -> AsyncIterator[str]:
    runner, port = await serve(
        create_app(TinyEngine(policy, max_context=max_context)), "127.0.0.1", port, None
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


async def read(store: ObjectStore, fact: SequenceScored) -> dict[str, np.ndarray]:
    assert fact.scores is not None, fact.failure
    return await read_columns(store, fact.scores, [column.name for column in fact.scores.columns])


async def test_scores_are_those_of_a_forward_pass_whole_or_in_chunks(
    policy: Path, tmp_path: Path, broker: Broker, run_name: str, log: Log, store: ObjectStore
) -> None:
    """Of both forms, by a server and in this process; the server takes no row as long as the longest."""
    long = tokens(200, 3)
    spans = [(3, 20), (100, 104), (150, 200)]
    async with listening(policy, max_context=64) as url:
        teachers = [
            {"name": "served", "kind": "vllm", "url": url, "top_k": 3, "max_context": 64, "overlap": 16},
            {"name": "own", "policy": str(policy)},
            {"name": "own-k", "policy": str(policy), "top_k": 5},
            {"name": "unused", "policy": "absent"},
        ]
        config = teaching(tmp_path, broker, run_name, teachers, math=["served", "own", "own-k"], code=["own"])
        facts = [
            await finished(store, run_name, "math", 0, TWO, spill=True),
            await finished(store, run_name, "math", 1, [(long, spans)]),
            await finished(store, run_name, "code", 0, TWO),
        ]
        before = store.counters.bytes_read
        await log.publish_all([(fact, None) for fact in facts])
        async with serving(config, store):
            found = await answers(log, 7)
    # The tokens, and the six segments where spans are left to them, and nothing else, once a teacher.
    assert store.counters.bytes_read - before == 4 * (3 * (77 + 200) + 77) + 3 * 6 * 20
    assert {teacher for source, teacher in found if source.startswith("code")} == {"own"}
    whole = [(said(policy, row), row, spans) for row, spans in TWO if spans]
    for source, name, k in [
        ("math", "served", 3),
        ("math", "own", 0),
        ("math", "own-k", 5),
        ("code", "own", 0),
    ]:
        fact = found[f"{source}-000000-0", name]
        assert fact.tokens == 15
        columns = await read(store, fact)
        assert {n: (c.dtype.name, c.shape) for n, c in columns.items()} == {
            "logprobs": ("float32", (15,)),
            **({"top_ids": ("int32", (15, k)), "top_logprobs": ("float32", (15, k))} if k else {}),
        }
        rows = [
            (every[t - 1], row[t])
            for every, row, spans in whole
            for start, end in spans
            for t in range(start, end)
        ]
        assert columns["logprobs"] == pytest.approx([float(of[token]) for of, token in rows], abs=1e-4)
        if k:
            best = torch.stack([of for of, _ in rows]).topk(k)
            assert columns["top_ids"].tolist() == best.indices.tolist()
            assert columns["top_logprobs"] == pytest.approx(best.values.numpy(), abs=1e-4)
    alone = await read(store, found["math-000000-1", "own"])
    every = said(policy, long)
    rows = rows_of([Span(start=start, end=end) for start, end in spans])
    assert alone["logprobs"] == pytest.approx([float(every[t - 1][long[t]]) for t in rows], abs=1e-4)
    cut = await read(store, found["math-000000-1", "served"])
    pieces = chunks(rows, 63, 16)
    assert len(pieces) > 2
    upon = [(said(policy, long[chunk.start : chunk.end]), chunk) for chunk in pieces]
    expected = [float(of[t - chunk.start - 1][long[t]]) for of, chunk in upon for t in chunk.rows]
    assert cut["logprobs"] == pytest.approx(expected, abs=1e-4)
    # What has its whole context is exact, the rest is near it: this model forgets.
    assert cut["logprobs"][:17] == pytest.approx(alone["logprobs"][:17], abs=1e-4)
    assert not np.allclose(cut["logprobs"], alone["logprobs"], atol=1e-4)


async def test_a_teacher_that_is_away_loses_nothing_and_holds_up_no_other_source(
    policy: Path,
    tmp_path: Path,
    broker: Broker,
    run_name: str,
    log: Log,
    store: ObjectStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(asking, "LOOK_S", 0.05)
    monkeypatch.setattr(asking, "PAUSE_S", 0.05)
    caplog.set_level(logging.INFO, "packtrain.test")
    port = free_port()
    far = {
        "name": "far",
        "kind": "vllm",
        "url": f"http://127.0.0.1:{port}",
        "timeout_s": 0.2,
        "concurrency": 2,
    }
    config = teaching(
        tmp_path, broker, run_name, [far, {"name": "own", "policy": str(policy)}], math=["far"], code=["own"]
    )
    for source in ("math", "code"):
        await log.publish_all(
            [(await finished(store, run_name, source, member, TWO), None) for member in range(6)]
        )
    async with serving(config, store):
        assert {teacher for _, teacher in await answers(log, 6)} == {"own"}
        async with asyncio.timeout(30):
            while True:
                waiting = await log.js.consumer_info(log.stream, teacher_work("far", "math"))
                if waiting.num_ack_pending == 2 and "teacher far is away" in caplog.text:
                    break
                await asyncio.sleep(0.02)
        assert waiting.num_pending == 4
        assert waiting.config.max_ack_pending == 8
        assert len(await answers(log, 6)) == await count(log)
        async with listening(policy, port=port):
            found = await answers(log, 12)
            assert [fact.failure for fact in found.values()] == [None] * 12
            told = [record.getMessage() for record in caplog.records if "teacher far" in record.message]
        assert await deliveries(log, "far") == 6
    # Told when it changes, not by every sequence and look.
    away, back = (f"teacher far is {state}" for state in ("away", "back"))
    assert [line.startswith(away) for line in told] == [True, False] * (len(told) // 2)
    assert told[-1] == back


async def deliveries(log: Log, teacher: str) -> int:
    """Of the work of a teacher and the source `math`: of a sequence that was handed back, two and more."""
    delivered = (await log.js.consumer_info(log.stream, teacher_work(teacher, "math"))).delivered
    assert delivered is not None
    return delivered.consumer_seq


async def count(log: Log) -> int:
    """Answers in the log now."""
    head, found = await log.head(), 0
    async for event in log.subscribe():
        found += event.fact.type == "sequence.scored"
        if event.seq >= head:
            break
    return found


async def test_what_cannot_be_scored_is_answered_at_once_with_why(
    policy: Path, tmp_path: Path, broker: Broker, run_name: str, log: Log, store: ObjectStore
) -> None:
    async with listening(policy) as url:
        teachers = [
            {"name": "served", "kind": "vllm", "url": url},
            {"name": "own", "policy": str(policy), "top_k": 2},
        ]
        config = teaching(tmp_path, broker, run_name, teachers, math=["served", "own"])
        bare, strange, first, lost, torn, other, seen = [
            await finished(store, run_name, "math", member, contexts)
            for member, contexts in enumerate(
                [
                    [(tokens(9), [])],
                    [([1, 2, 99, 3], [(2, 4)])],
                    [([1, 2, 3], [(0, 2)])],
                    TWO,
                    TWO,
                    TWO,
                    TWO,
                ]
            )
        ]
        objects = tmp_path / "objects"
        (objects / lost.payload.key).unlink()
        column = torn.payload.column("tokens")
        whole = bytearray((objects / torn.payload.key).read_bytes())
        whole[column.offset] ^= 1
        (objects / torn.payload.key).write_bytes(whole)
        # Left by a run of another configuration.
        await write_sidecar(
            store, sidecar_key(other.payload.key, "teacher.own"), {"logprobs": np.zeros(15, np.float32)}
        )
        # Left by a process that was killed before it could tell.
        left = await write_sidecar(
            store, sidecar_key(other.payload.key, "teacher.served"), {"logprobs": np.zeros(15, np.float32)}
        )
        image = ImageItem(digest="0" * 64, bytes=1, height=28, width=28, patches=4, start=0, end=1)
        shows = seen.contexts[0].model_copy(update={"images": (image,)})
        seen = seen.model_copy(update={"contexts": (shows, *seen.contexts[1:])})
        facts: list[SequenceFinished] = [bare, strange, first, lost, torn, other, seen]
        await log.publish_all([(fact, None) for fact in facts])
        async with serving(config, store):
            found = await answers(log, 14)
            assert await deliveries(log, "served") == await deliveries(log, "own") == 7
    for name in ("served", "own"):
        empty = found[bare.sequence, name]
        assert (empty.tokens, empty.failure) == (0, None)
        assert [len(column) for column in (await read(store, empty)).values()] == [0] * (
            1 + 2 * (name == "own")
        )
        for fact, why in [
            (strange, "vocabulary of 61"),
            (first, "its first token carries loss"),
            (lost, "no object"),
            (torn, "is damaged"),
            (seen, "context 0: it shows images"),
        ]:
            answer = found[fact.sequence, name]
            assert (answer.tokens, answer.scores) == (0, None)
            assert why in str(answer.failure)
    assert "already exists" in str(found[other.sequence, "own"].failure)
    assert found[other.sequence, "served"].scores == left


@pytest.mark.parametrize("top_k", [0, 2])
async def test_a_number_that_is_no_log_probability_fails_its_sequence(
    policy: Path,
    tmp_path: Path,
    broker: Broker,
    run_name: str,
    log: Log,
    store: ObjectStore,
    monkeypatch: pytest.MonkeyPatch,
    top_k: int,
) -> None:
    """-9999 is what vLLM writes for -inf; one in a row that carries no loss is nobody's."""
    scored = TinyScorer._scored

    def floored(self: TinyScorer, ids: tuple[int, ...], k: int) -> Scores:
        scores = scored(self, ids, k)
        (scores.top_logprobs[:, 1] if k else scores.logprobs)[31 if len(ids) == 40 else 3] = -9999.0
        return scores

    monkeypatch.setattr(TinyScorer, "_scored", floored)
    own = {"name": "own", "policy": str(policy), "top_k": top_k}
    config = teaching(tmp_path, broker, run_name, [own], math=["own"])
    facts = [await finished(store, run_name, "math", i, [row]) for i, row in enumerate((TWO[0], TWO[2]))]
    await log.publish_all([(fact, None) for fact in facts])
    async with serving(config, store):
        found = await answers(log, 2)
    bad, good = (found[fact.sequence, "own"] for fact in facts)
    assert bad.failure == "context 0, token 31: the teacher gives -9999 for a log-probability"
    assert good.failure is None


async def test_a_store_that_is_away_is_waited_for_and_uses_up_no_delivery(
    policy: Path,
    tmp_path: Path,
    broker: Broker,
    run_name: str,
    log: Log,
    store: ObjectStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outage, "RETRY_S", 0.01)
    config = teaching(tmp_path, broker, run_name, [{"name": "own", "policy": str(policy)}], math=["own"])
    await log.publish(await finished(store, run_name, "math", 0, TWO))
    tried: list[str] = []
    for name in ("get_ranges", "put"):
        monkeypatch.setattr(store, name, _away(getattr(store, name), name, tried))
    async with serving(config, store):
        found = await answers(log, 1)
        assert await deliveries(log, "own") == 1
    assert [fact.failure for fact in found.values()] == [None]
    assert tried == ["get_ranges"] * 4 + ["put"] * 4


def _away(method: Any, name: str, tried: list[str]) -> Any:
    async def call(*arguments: Any, **named: Any) -> Any:
        tried.append(name)
        if tried.count(name) < 4:
            raise StoreUnavailable("file://", "down", "wait")
        return await method(*arguments, **named)

    return call


@dataclass
class Scripted:
    """A scorer whose answers to rows and to probes are these, in turn; the last stays. None: it scores."""

    rows: list[Exception | None]
    probes: list[Exception | None]
    asked: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    async def score(
        self, token_ids: Any, top_k: int, request_id: str, session_id: str = "", within: float | None = None
    ) -> Scores:
        self.asked.append(len(token_ids))
        self.names.append(request_id)
        answers = self.probes if len(token_ids) == 2 else self.rows
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer is not None:
            raise answer
        return Scores(
            np.zeros(len(token_ids), np.float32),
            np.zeros((len(token_ids), 0), np.int32),
            np.zeros((len(token_ids), 0), np.float32),
        )

    async def healthy(self) -> bool:
        return True

    async def close(self) -> None: ...


REFUSED, AWAY = EngineRefused("status 400: too long"), EngineUnavailable("status 404")


@pytest.mark.parametrize(
    ("rows", "probes", "asked"),
    [
        ([AWAY, None], [None], [3, 2, 3]),
        ([AWAY, None], [AWAY, AWAY, None], [3, 2, 2, 2, 3]),
        # A teacher that refuses whatever it is asked is set up wrongly, which is no sequence's fault.
        ([REFUSED, None], [REFUSED, None], [3, 2, 2, 3]),
    ],
)
async def test_a_teacher_that_scores_nothing_is_waited_for(
    rows: list[Exception | None],
    probes: list[Exception | None],
    asked: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asking, "PAUSE_S", 0.0)
    scorer = Scripted(rows, probes)
    asker = Asker(Teacher(name="t"), scorer, logging.getLogger("packtrain.test"))
    assert len((await asker.ask([1, 2, 3], "r", "s")).logprobs) == 3
    assert scorer.asked == asked


async def test_no_two_requests_have_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server refuses a name that it is at work on, for whoever it works: a lost process, or another row's probe."""
    monkeypatch.setattr(asking, "PAUSE_S", 0.0)
    names: list[str] = []
    for _ in range(2):
        scorer = Scripted([AWAY, AWAY, None], [AWAY, None])
        asker = Asker(Teacher(name="t"), scorer, logging.getLogger("packtrain.test"))
        await asyncio.gather(asker.ask([1, 2, 3], "r", "s"), asker.ask([1, 2, 3], "q", "s"))
        names += scorer.names
    assert len(names) == len(set(names)) >= 2 * (4 + 3)


@pytest.mark.parametrize(("answer", "tries"), [(REFUSED, 1), (AWAY, asking.TRIES)])
async def test_what_fails_while_the_teacher_scores_others_is_the_rows_fault(
    answer: Exception, tries: int
) -> None:
    scorer = Scripted([answer], [None])
    asker = Asker(Teacher(name="t"), scorer, logging.getLogger("packtrain.test"))
    with pytest.raises(Unscorable, match="status 40"):
        await asker.ask([1, 2, 3], "r", "s")
    assert scorer.asked.count(3) == tries


def test_the_work_of_no_two_pairs_has_one_name() -> None:
    pairs = [("a-b", "c"), ("a", "b-c"), ("a", "b"), ("t" * 32, "s" * 64)]
    names = [teacher_work(*pair) for pair in pairs]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) <= 128
