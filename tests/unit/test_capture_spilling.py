"""What an event has no room for, and what the payload gives back; routing in pieces, by pipeline stage."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.batch.segments import spans_of_segments
from pipeline.batch.stages import stage_layers
from pipeline.batch.windows import plan_window
from pipeline.capture.export import Export, export
from pipeline.capture.routing import by_stage, routed_rows
from pipeline.capture.spilling import fitting, spill
from pipeline.capture.tree import ContextTree, Node, SampledTurn
from pipeline.engines.base import Routing
from pipeline.store import ObjectStore
from pipeline.store.payload import describe_payload, read_columns
from schemas.config import Batch, Store
from schemas.envelope import encode, new_event
from schemas.facts import MAX_BODY, Failure, SequenceFinished
from schemas.payload import ContextMeta, Flag, Span
from schemas.plan import Plan
from services.agent_loop.ending import Ending
from tests.unit.test_agent_loop import OPENED, Told, ending, event
from tests.unit.test_effects import SAMPLE, Life, member, run_config
from tests.window_parts import key_of, packed

TURNS = 5_000


def dialogue(turns: int, routed: int = 0, size: int = 2) -> ContextTree:
    """One long dialogue: prompt, answer, and so on; `routed`: of how many layers its experts are known."""
    tree = ContextTree()
    node = tree.nodes[0]
    rng = np.random.default_rng(turns)
    for i in range(turns):
        prompt = tree.append(Node(len(tree.nodes), node, 1, np.full(3, 7 + i, np.int32)))
        ids = np.arange(size + i % 3, dtype=np.int32) + 1000
        routing = None
        if routed:
            # The last token was no input yet; the turn before had all but its last.
            rows = prompt.tokens + 1 + len(ids) - 1 - prompt.routed
            routing = Routing(prompt.routed, rng.integers(0, 9, (rows, routed, 2)).astype(np.uint8))
        turn = SampledTurn(
            np.array([1], np.int32),
            ids,
            -rng.random(len(ids)).astype(np.float32),
            np.full(len(ids), i, np.int32),
            np.array([2], np.int32),
            routing=routing,
        )
        node = tree.append(Node(len(tree.nodes), prompt, 2, turn.ids, turn))
    return tree


def finished(found: Export) -> SequenceFinished:
    header = describe_payload(key_of("a"), found.pieces)
    return SequenceFinished(
        source="s", sample="s-000000", sequence="s-000000-0", attempt=1, reward=1.0, termination="completed",
        turns=TURNS, contexts=found.contexts, payload=header,
    )  # fmt: skip


def test_a_sequence_of_5000_turns_has_its_event_its_plan_and_the_windows_of_one_that_is_not_spilled() -> None:
    found = export(dialogue(TURNS))
    assert len(found.pieces["tokens"]) == 1, "thousands of small pieces are one"
    fact = fitting(finished(found))
    assert len(encode(new_event(fact, "test"), "r").body) < MAX_BODY
    (plain,), (short,) = found.contexts, fact.contexts
    assert len(plain.loss_spans) == TURNS
    assert (short.loss_spans, short.spilled) == ((), plain.loss_tokens())
    assert spans_of_segments(found.columns["segments"].astype(np.int32), 0) == plain.loss_spans

    objects = {key_of("a"): found.columns}
    batch = Batch(dp=1, cp=2, layout="megatron", token_budget=50_000)
    run = run_config(None, group_size=2).model_copy(update={"batch": batch})
    plans: list[Plan] = []

    def windows(context: ContextMeta) -> list[dict[str, Any]]:
        """By the sampler: a group of it and of one that it is better than."""
        given = member(0, 1.0).model_copy(update={"contexts": (context,), "payload": fact.payload})
        (plan,) = Life(run, given, member(1, 0.0, tokens=30_000)).plans
        plans.append(plan)
        long = [m for m in range(plan.microbatches) if plan.rows.microbatch[place(plan)] == m]
        return [packed(plan_window(plan, 0, long[0], rank), objects) for rank in range(2)]

    def place(plan: Plan) -> int:
        return [plan.sequences[at].sequence for at in plan.rows.sequence].index(f"{SAMPLE}-0")

    for ours, theirs in zip(windows(short), windows(plain), strict=True):
        assert ours.keys() == theirs.keys()
        for name, array in ours.items():
            np.testing.assert_array_equal(array, theirs[name])
        assert ours["loss_mask"].sum() > 0
    assert plans[0].rows == plans[1].rows
    assert plans[0].sequences[plans[0].rows.sequence[place(plans[0])]].contexts == (short,)


@st.composite
def contexts(draw: st.DrawFn) -> list[ContextMeta]:
    made: list[ContextMeta] = []
    for count, flagged in draw(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=6)):
        spans = tuple(Span(start=2 * i, end=2 * i + 1) for i in range(count))
        flags = (Flag(start=0, end=1, rules=1),) if flagged and count else ()
        made.append(
            ContextMeta(offset=0, tokens=2 * count + 1, generated=count, loss_spans=spans, min_version=0, max_version=0, flags=flags)
        )  # fmt: skip
    return made


@given(given_=contexts(), room=st.integers(0, 5_000))
def test_the_longest_lists_go_and_no_more_than_must(given_: list[ContextMeta], room: int) -> None:
    def size(found: tuple[ContextMeta, ...]) -> int:
        body = finished(export(dialogue(1))).model_copy(update={"contexts": found})
        empty = body.model_copy(update={"contexts": ()})
        return len(encode(new_event(body, "t"), "r").body) - len(encode(new_event(empty, "t"), "r").body)

    found = spill(given_, room)
    assert [context.loss_tokens() for context in found] == [context.loss_tokens() for context in given_]
    gone = [i for i, context in enumerate(found) if context.spilled]
    for i, context in enumerate(found):
        if i not in gone:
            assert context == given_[i]
        ContextMeta.model_validate(context.model_dump())
    kept = [len(c.loss_spans) for c in found if c.loss_spans and not c.flags]
    lost = [len(given_[i].loss_spans) for i in gone]
    assert min(lost, default=99) >= max(kept, default=0)
    if size(found) > room:
        assert all(count <= 1 for count in kept), "what is left would not help"
    if gone:
        last = min(gone, key=lambda i: len(given_[i].loss_spans))
        without = tuple(given_[i] if i == last else context for i, context in enumerate(found))
        assert size(without) > room, "one less had done"


def test_flags_stay_with_their_spans_and_the_event_is_too_large() -> None:
    found = export(dialogue(TURNS))
    flagged = found.contexts[0].model_copy(update={"flags": (Flag(start=0, end=9, rules=1),)})
    assert spill([flagged], 100) == (flagged,)


def test_a_context_without_segments_is_refused() -> None:
    with pytest.raises(ValueError, match="no segment of 1 is of context 3"):
        spans_of_segments(np.array([[0, 2, 1, 3, 0]], np.int32), 3)


@given(
    layers=st.integers(0, 60),
    pp=st.integers(1, 9),
)
def test_layers_are_divided_evenly_the_rest_to_the_earlier_stages(layers: int, pp: int) -> None:
    stages = stage_layers(layers, pp)
    counts = [end - first for first, end in stages]
    assert [layer for first, end in stages for layer in range(first, end)] == list(range(layers))
    assert counts == sorted(counts, reverse=True)
    assert max(counts) - min(counts) <= 1


def test_layers_are_divided_as_configured() -> None:
    assert stage_layers(7, 3, (0, 4, 3)) == [(0, 0), (0, 4), (4, 7)]
    with pytest.raises(ValueError, match=r"\[4, 4\] are 8 layers of 2 stages; the policy routes 7 layers"):
        stage_layers(7, 2, (4, 4))


def test_columns_are_the_trees_own_arrays_and_stages_have_their_layers() -> None:
    tree = dialogue(4, routed=5, size=10_000)
    found = export(tree)
    turns = [node.turn for node in tree.nodes if node.turn is not None]
    for name, arrays in (
        ("tokens", [turn.ids for turn in turns]),
        ("logprobs", [turn.logprobs for turn in turns]),
        ("routed_experts.L0-4", [turn.routing.rows for turn in turns if turn.routing is not None]),
    ):
        for array in arrays:
            assert any(np.shares_memory(array, piece) for piece in found.pieces[name]), name
    whole = found.columns["routed_experts.L0-4"]
    parts = {
        name: np.concatenate(pieces)
        for name, pieces in by_stage(found.pieces, 3, (2, 0, 3)).items()
        if name.startswith("routed")
    }
    assert list(parts) == ["routed_experts.L0-1", "routed_experts.L2-4"]
    np.testing.assert_array_equal(np.concatenate(list(parts.values()), axis=1), whole)
    assert by_stage(found.pieces, 1, ()).keys() == found.pieces.keys()


def test_a_payloads_routing_is_of_the_narrowest_type_and_what_is_not_known_is_0() -> None:
    def rows(values: list[int], dtype: Any) -> Any:
        return np.array(values, dtype).reshape(-1, 1, 1)

    narrow = Routing(0, rows([1, 2], np.uint8))
    wide = Routing(3, rows([300], np.uint16))
    fits = Routing(3, rows([200, 9], np.uint16))
    assert routed_rows([(4, [])]) == []
    for last, dtype, expected in ((wide, np.uint16, 300), (fits, np.uint8, 200)):
        column = np.concatenate(routed_rows([(4, [narrow, last]), (2, [])]))
        assert column.dtype == dtype
        assert column[:, 0, 0].tolist() == [1, 2, 0, expected, 0, 0]


def test_a_payload_is_written_by_stage_and_layers_that_are_others_are_told(tmp_path: Path) -> None:
    found = export(dialogue(3, routed=4))

    async def written(batch: Batch, at: str) -> tuple[Failure | None, Told]:
        told = Told()
        ends: Ending = ending(tmp_path / at, told, batch)
        return await ends.finish(event(OPENED), 1.0, "completed", 3, found), told

    async def run() -> tuple[dict[str, Any], Failure | None]:
        failure, told = await written(Batch(pp=2), "even")
        assert failure is None
        (fact,) = told.facts
        assert isinstance(fact, SequenceFinished)
        store = ObjectStore.open(Store(url=(tmp_path / "even").as_uri()))
        names = [column.name for column in fact.payload.columns if column.name.startswith("routed")]
        refused, _ = await written(Batch(pp=2, pp_layers=(2, 3)), "other")
        return await read_columns(store, fact.payload, names), refused

    columns, refused = asyncio.run(run())
    assert sorted(columns) == ["routed_experts.L0-1", "routed_experts.L2-3"]
    whole = found.columns["routed_experts.L0-3"]
    np.testing.assert_array_equal(np.concatenate([columns[name] for name in sorted(columns)], 1), whole)
    assert refused is not None
    assert refused.reason == "routing_layers"
    assert "the policy routes 4 layers" in refused.detail
