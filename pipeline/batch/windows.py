"""Windows: which rows one packer reads of a micro-batch, and the packed arrays that its ranks train on. Pure.

Promises:
- a window holds the rows that the plan's layout gives its context-parallel rank of every context of its pack, in plan order, and
  no other; putting the windows of all ranks together gives the pack as if it had been made in one piece, and whatever the cut;
- payloads are in token space (row t describes token t); a window is in label space: row t predicts token t + 1 of its own context.
  A label-space range [a, b) is token rows [a + 1, b + 1), cut at the context's end: one row of halo; the last token of every
  context predicts nothing: its row is 0. Routing stays in input space. Nothing is rolled over the pack;
- a context that is cut (`skip`) begins at its first kept token, whose own loss nothing predicts; padding is 0 but for position
  ids, which go on counting;
- the loss mask equals the spans that the plan was made from, where it is read, so the weights of a batch sum to what the plan
  says; logprobs and policy versions are of loss tokens, and 0 elsewhere;
- of a sequence with a sidecar, a part reads the advantages of its own loss tokens and no others;
- what the plan changes is changed after that, on the tokens that it names: however contexts are cut, a token has the advantage
  and weight that the plan gives it;
- rows of sequences that a batch goes on without keep their place, and are as if they had no token and no loss;
- a pipeline stage has the arrays that it has a use for: tokens the first, what belongs to the loss the last.

Arrays, for the T rows of a rank and a pack of B sequences (a layout's dummy included): those of `PACKED`, each [T]; `cu_seqlens`
(cumulative real lengths) and `cu_seqlens_padded` int32 [B + 1] and `max_seqlen` int32 [] (longest padded), of the whole pack;
`routed_experts` uint8 or uint16 [T, layers of the stage, k]; `candidates.offsets` int64 [T + 1] and `candidates.ids` int32: the
candidate set of row t's label is ids[offsets[t]:offsets[t + 1]], empty: the whole vocabulary.
"""

from __future__ import annotations

from pipeline.batch.windows_pack import Piece, frame, job_pieces, pack, pieces
from pipeline.batch.windows_plan import (
    INPUT,
    LABEL,
    PACKED,
    Window,
    estimate,
    meta,
    plan_window,
    row_arrays,
    shapes,
    unknown_bytes,
    with_offsets,
    with_segments,
    with_spans,
)
from pipeline.batch.windows_reads import PART_BYTES, Job, Read, Routing, Stage, split
from pipeline.batch.windows_rows import Array, Changes, Part, Row, Spans

__all__ = [
    "INPUT",
    "LABEL",
    "PACKED",
    "PART_BYTES",
    "Array",
    "Changes",
    "Job",
    "Part",
    "Piece",
    "Read",
    "Routing",
    "Row",
    "Spans",
    "Stage",
    "Window",
    "estimate",
    "frame",
    "job_pieces",
    "meta",
    "pack",
    "pieces",
    "plan_window",
    "row_arrays",
    "shapes",
    "split",
    "unknown_bytes",
    "with_offsets",
    "with_segments",
    "with_spans",
]
