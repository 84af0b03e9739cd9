"""The plan of a batch: which contexts go to which micro-batch of which data-parallel rank, with their factors.

Written once to the store by the sampler at yield, read by the packers. Metadata only: making it touches no tensor.

Promises (`Plan.check` checks them):
- every row's context is in exactly one pack, (dp, microbatch, group), and every rank has the same number of micro-batches;
- no pack holds more than `token_budget * size / cp` tokens, where `size` is the context-parallel size of its micro-batch; whoever
  makes the plan counts padding too, which is the layout's; one of a batch with fewer rows than packs is empty;
- of a context that is cut its last tokens are left, with the loss that they carry, but for the first of them;
- every image that a row shows has one encoder in the row's micro-batch number, and no other image has any;
- denominators ride in the plan: a row's `loss_weight` is per trained token, so ranks only sum, and to 1;
- what penalties change is a loss token of its row's context, and is changed once;
- a sidecar has one advantage for each loss token of its sequence.
"""

from __future__ import annotations

from collections import Counter
from math import fsum
from typing import Literal

import numpy as np
from pydantic import Field

from schemas.names import Name
from schemas.parallel import LayoutName
from schemas.payload import ContextMeta, Frozen, PayloadHeader, Span

PLAN_VERSION = 1
_WEIGHT_ERROR = 1e-6
"""That the weights of a batch may differ from 1 by, through rounding."""


def _absent(value: object) -> bool:
    return not value


def _one(value: object) -> bool:
    return value == 1


def _contiguous(value: object) -> bool:
    return value == "contiguous"


class PlanSequence(Frozen):
    """A sequence whose contexts are rows of the plan; its header spares the packers a fetch."""

    source: Name = Field(description="source id")
    sample: Name = Field(description="sample id: the group")
    sequence: Name = Field(description="sequence id")
    payload: PayloadHeader = Field(description="as in sequence.finished")
    contexts: tuple[ContextMeta, ...] = Field(description="as in sequence.finished")
    advantages: PayloadHeader | None = Field(
        default=None,
        exclude_if=_absent,
        description="sidecar with an advantage for each loss token (float32 column `advantages`, payload order), which stands for the rows' own; left out: the rows' own count",
    )


class PlanRows(Frozen):
    """The rows as columns, all of one length. Row i is context `context[i]` of `sequences[sequence[i]]`."""

    sequence: tuple[int, ...] = Field(description="index into the plan's sequences")
    context: tuple[int, ...] = Field(description="index into that sequence's contexts")
    dp: tuple[int, ...] = Field(description="data-parallel rank that the row goes to, from 0")
    microbatch: tuple[int, ...] = Field(description="micro-batch of that rank, from 0")
    advantage: tuple[float, ...] = Field(description="of every loss token of the row")
    loss_weight: tuple[float, ...] = Field(
        description="of every loss token of the row; the weights of a batch sum to 1 over its loss tokens"
    )
    scale: tuple[float, ...] = Field(
        default=(),
        exclude_if=_absent,
        description="what the advantages of the row are multiplied by, outside its changed tokens; left out: 1",
    )
    group: tuple[int, ...] = Field(
        default=(),
        exclude_if=_absent,
        description="in a micro-batch whose context-parallel size is below the plan's cp: which of its cp / size packs; pack g is of the context-parallel ranks [g * size, (g + 1) * size); left out: 0",
    )
    skip: tuple[int, ...] = Field(
        default=(),
        exclude_if=_absent,
        description="tokens at the context's beginning that are left out, because it is longer than a micro-batch; left out: 0",
    )


class PlanChanges(Frozen):
    """What penalties do to the advantages of flagged tokens, as columns, all of one length: on tokens [start, end) of row
    `row`'s context the advantage A becomes `multiply * A + add`, and where `keep` is false they are not trained."""

    row: tuple[int, ...] = Field(description="row of the plan, ascending")
    start: tuple[int, ...] = Field(
        description="first token, from the context's own row 0; ascending in a row, disjoint"
    )
    end: tuple[int, ...] = Field(description="token after the last")
    multiply: tuple[float, ...] = Field(description="factor of the advantage")
    add: tuple[float, ...] = Field(description="added to the product")
    keep: tuple[bool, ...] = Field(description="whether the tokens are trained")


class PlanImages(Frozen):
    """Who encodes which image, as columns, all of one length: one entry for each image of each micro-batch number, whatever the
    number of contexts and data-parallel ranks that show it there. Its size and patches are in the contexts that show it."""

    microbatch: tuple[int, ...] = Field(description="number of the micro-batch, ascending")
    digest: tuple[str, ...] = Field(description="of the image; once in a micro-batch number")
    encoder: tuple[int, ...] = Field(
        description="the rank that encodes it: dp * cp + c is context-parallel rank c of data-parallel rank dp"
    )


class Plan(Frozen):
    """The plan of one batch; `check` asserts what its fields must say together."""

    version: Literal[1] = Field(default=1, description="version of the plan's form")
    run: Name = Field(description="run id")
    step: int = Field(ge=1, description="number of the batch, from 1")
    policy_version: int = Field(ge=0, description="version that the batch will update")
    dp: int = Field(ge=1, description="data-parallel ranks")
    cp: int = Field(default=1, ge=1, description="context-parallel ranks")
    tp: int = Field(
        default=1, ge=1, exclude_if=_one, description="tensor-parallel ranks, by which rows are padded"
    )
    layout: LayoutName = Field(
        default="contiguous",
        exclude_if=_contiguous,
        description="how packs are padded and cut over context-parallel ranks; left out: contiguous",
    )
    fp8: bool = Field(
        default=False, exclude_if=_absent, description="whether rows are padded as FP8 kernels want them"
    )
    cp_sizes: tuple[int, ...] = Field(
        default=(),
        exclude_if=_absent,
        description="context-parallel size of each micro-batch number, a divisor of cp; left out: cp",
    )
    microbatches: int = Field(ge=1, description="per data-parallel rank")
    token_budget: int = Field(ge=1, description="largest micro-batch, in tokens")
    loss_tokens: int = Field(ge=0, description="of the whole batch")
    sequences: tuple[PlanSequence, ...] = Field(description="the batch's sequences, each once")
    rows: PlanRows = Field(description="the contexts that are trained, one a row, as columns")
    changes: PlanChanges | None = Field(
        default=None, exclude_if=_absent, description="of flagged tokens; left out: there are none"
    )
    images: PlanImages | None = Field(
        default=None, exclude_if=_absent, description="of contexts with images; left out: there are none"
    )

    def check(self) -> None:
        """Asserts the promises; raises ValueError that names the row, sequence or micro-batch at fault."""
        self._check_rows()
        self._check_places()
        self._check_images()
        self._check_sidecars()
        untrained = self._check_changes()
        rows = self.rows
        skips = rows.skip or [0] * len(untrained)
        trained = [
            self._context(i).loss_tokens(skip) - lost
            for i, (skip, lost) in enumerate(zip(skips, untrained, strict=True))
        ]
        if sum(trained) != self.loss_tokens:
            raise ValueError(
                f"{self._name()}: its rows have {sum(trained)} trained tokens, loss_tokens is {self.loss_tokens}"
            )
        weight = fsum(each * tokens for each, tokens in zip(rows.loss_weight, trained, strict=True))
        if self.loss_tokens and abs(weight - 1) > _WEIGHT_ERROR:
            raise ValueError(
                f"{self._name()}: the weights of its {self.loss_tokens} trained tokens sum to {weight}, not to 1"
            )

    def _name(self) -> str:
        return f"plan {self.run}/{self.step}"

    def _context(self, row: int) -> ContextMeta:
        return self.sequences[self.rows.sequence[row]].contexts[self.rows.context[row]]

    def _check_rows(self) -> None:
        """That every row is of a context, each of another, and what is cut of it."""
        rows = self.rows
        count = len(rows.sequence)
        lengths = {name: len(getattr(rows, name)) for name in type(rows).model_fields}
        for optional in ("scale", "group", "skip"):
            if not getattr(rows, optional):
                del lengths[optional]
        if set(lengths.values()) != {count}:
            raise ValueError(f"{self._name()}: columns of unequal length {lengths}")
        contexts = [len(sequence.contexts) for sequence in self.sequences]
        for i, (sequence, context) in enumerate(zip(rows.sequence, rows.context, strict=True)):
            if not 0 <= sequence < len(contexts):
                raise ValueError(
                    f"{self._name()}: row {i} is of sequence {sequence}, there are {len(contexts)}"
                )
            if not 0 <= context < contexts[sequence]:
                raise ValueError(
                    f"{self._name()}: row {i} is of context {context}, which its sequence does not have"
                )
        places = list(zip(rows.sequence, rows.context, strict=True))
        if len(set(places)) != count:
            twice = next(place for place, n in Counter(places).items() if n > 1)
            raise ValueError(f"{self._name()}: sequence {twice[0]} context {twice[1]} is planned twice")
        for i, skip in enumerate(rows.skip):
            context = self._context(i)
            if not 0 <= skip < context.tokens or (skip and context.spilled):
                where = "its spans are in the payload" if context.spilled else "at least one is left"
                raise ValueError(
                    f"{self._name()}: row {i} is without its first {skip} tokens of {context.tokens}: {where}"
                )

    def _check_places(self) -> None:
        rows, count = self.rows, len(self.rows.sequence)
        if self.cp_sizes and len(self.cp_sizes) != self.microbatches:
            raise ValueError(
                f"{self._name()}: {len(self.cp_sizes)} cp_sizes for {self.microbatches} micro-batches a rank"
            )
        for number, size in enumerate(self.cp_sizes):
            if size < 1 or self.cp % size:
                raise ValueError(
                    f"{self._name()}: micro-batch {number} has context-parallel size {size}, no divisor of cp {self.cp}"
                )
        sizes = np.array(self.cp_sizes or [self.cp] * self.microbatches, np.int64)
        dp, number = np.array(rows.dp, np.int64), np.array(rows.microbatch, np.int64)
        outside = (dp < 0) | (dp >= self.dp) | (number < 0) | (number >= self.microbatches)
        for i in np.flatnonzero(outside)[:1].tolist():
            raise ValueError(
                f"{self._name()}: row {i} sits at {(rows.dp[i], rows.microbatch[i])}, outside the batch"
            )
        group = np.array(rows.group or [0] * count, np.int64)
        packs = self.cp // sizes[number]
        for i in np.flatnonzero((group < 0) | (group >= packs))[:1].tolist():
            raise ValueError(
                f"{self._name()}: row {i} sits in pack {group[i]} of micro-batch {number[i]}, which has {packs[i]}"
            )
        tokens = np.array([self._context(i).tokens for i in range(count)], np.int64)
        home = (dp * self.microbatches + number) * self.cp + group
        homes, of = np.unique(home, return_inverse=True)
        # Sums of int64, as those of floats would not be exact.
        fill = np.zeros(len(homes), np.int64)
        np.add.at(fill, of, tokens - np.array(rows.skip or [0] * count, np.int64))
        budget = self.token_budget * sizes[homes // self.cp % self.microbatches] // self.cp
        for k in np.flatnonzero(fill > budget)[:1].tolist():
            rank, at = divmod(int(homes[k]) // self.cp, self.microbatches)
            pack = f" pack {homes[k] % self.cp}" if self.cp_sizes else ""
            raise ValueError(
                f"{self._name()}: micro-batch {(rank, at)}{pack} holds {fill[k]} tokens, budget {budget[k]}"
            )

    def _check_images(self) -> None:
        shown = {
            (number, image.digest)
            for i, (sequence, number) in enumerate(zip(self.rows.sequence, self.rows.microbatch, strict=True))
            if any(context.images for context in self.sequences[sequence].contexts)
            for image in self._context(i).images
            if image.end > (self.rows.skip[i] if self.rows.skip else 0)
        }
        images = self.images or PlanImages(microbatch=(), digest=(), encoder=())
        lengths = {name: len(getattr(images, name)) for name in PlanImages.model_fields}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"{self._name()}: columns of images of unequal length {lengths}")
        planned = list(zip(images.microbatch, images.digest, strict=True))
        if list(images.microbatch) != sorted(images.microbatch) or len(set(planned)) != len(planned):
            raise ValueError(
                f"{self._name()}: images do not ascend by micro-batch, or one has two encoders in a micro-batch"
            )
        for number, digest in sorted(shown.symmetric_difference(planned))[:1]:
            fault = "has no encoder" if (number, digest) in shown else "is shown by no row"
            raise ValueError(f"{self._name()}: image {digest} of micro-batch {number} {fault}")
        ranks = self.dp * self.cp
        for rank in images.encoder:
            if not 0 <= rank < ranks:
                raise ValueError(f"{self._name()}: rank {rank} is to encode an image, there are {ranks}")

    def _check_sidecars(self) -> None:
        for sequence in self.sequences:
            if sequence.advantages is None:
                continue
            tokens = sum(context.loss_tokens() for context in sequence.contexts)
            if not sequence.advantages.has("advantages", "float32", (tokens,)):
                found = {c.name: (c.dtype, c.shape) for c in sequence.advantages.columns}
                raise ValueError(
                    f"{self._name()}: sidecar {sequence.advantages.key} of sequence {sequence.sequence}, which has {tokens} loss "
                    f"tokens, must have the column advantages, float32 ({tokens},); it has {found}"
                )

    def _check_changes(self) -> list[int]:
        """Of each row the loss tokens that its changes leave untrained."""
        untrained = [0] * len(self.rows.sequence)
        changes = self.changes
        if changes is None:
            return untrained
        lengths = {name: len(getattr(changes, name)) for name in type(changes).model_fields}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"{self._name()}: columns of changes of unequal length {lengths}")
        last, at, s, tokens = -1, 0, 0, 0
        spans: tuple[Span, ...] = ()
        for row, start, end, keep in zip(changes.row, changes.start, changes.end, changes.keep, strict=True):
            if row != last or row < 0:
                if not last < row < len(untrained):
                    raise ValueError(
                        f"{self._name()}: a change is of row {row}, after row {last} of {len(untrained)}"
                    )
                context = self._context(row)
                skip = self.rows.skip[row] if self.rows.skip else 0
                last, s, tokens, spans = row, 0, context.tokens, context.loss_spans
                # Of what is cut nothing is changed, nor is the first that is left, which carries no loss.
                at = skip + 1 if skip else 0
            if not at <= start < end <= tokens:
                raise ValueError(
                    f"{self._name()}: changed tokens [{start}, {end}) of row {row}, of {tokens} tokens, are empty, "
                    f"outside, or not after token {at}"
                )
            at = start
            while at < end:
                while s < len(spans) and spans[s].end <= at:
                    s += 1
                if s == len(spans) or spans[s].start > at:
                    raise ValueError(
                        f"{self._name()}: token {at} of row {row} is changed in [{start}, {end}), and carries no loss"
                    )
                at = min(end, spans[s].end)
            if not keep:
                untrained[row] += end - start
        return untrained
