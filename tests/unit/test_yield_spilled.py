"""Loss spans that the event left to the payload, read back."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.signal.shaping import loss_rows
from pipeline.store import ObjectDamaged, ObjectStore
from pipeline.store.payload import write_payload
from pipeline.store.spilled import spilled_spans
from tests.hook_parts import CONTEXTS, LENGTH, SEGMENTS, SPILLED


async def test_they_are_those_that_the_event_would_have_had_and_as_many(store: ObjectStore) -> None:
    columns = {
        "tokens": np.arange(LENGTH, dtype=np.int32),
        "loss_mask": np.zeros(LENGTH, np.uint8),
        "logprobs": np.zeros(LENGTH, np.float32),
        "policy_version": np.zeros(LENGTH, np.int32),
        "segments": SEGMENTS,
    }
    header = await write_payload(store, "p", columns)
    found = await spilled_spans(store, header, SPILLED)
    assert found == {1: CONTEXTS[1].loss_spans}
    assert loss_rows(SPILLED, found) == loss_rows(CONTEXTS)
    with pytest.raises(ValueError, match="context 1 leaves its loss spans to the payload"):
        loss_rows(SPILLED)
    before = store.counters.bytes_read
    assert await spilled_spans(store, header, CONTEXTS) == {}
    assert store.counters.bytes_read == before, "nothing is read for nothing"
    fewer = (SPILLED[0], SPILLED[1].model_copy(update={"spilled": 5}))
    with pytest.raises(ObjectDamaged, match="6 loss tokens in context 1, the event says 5"):
        await spilled_spans(store, header, fewer)
    with pytest.raises(ObjectDamaged, match="no segment of 8 is of context 2"):
        await spilled_spans(store, header, (*CONTEXTS, SPILLED[1]))
