"""Whose rows the encoder's output becomes: for one window, what its rank encodes, sends, gets, and where that belongs. Pure.

A round is the micro-batches of one number of all data-parallel ranks: its images are encoded by its dp * cp ranks and go, row
by row, to the ranks in whose windows their tokens lie.

Promises:
- every token of every image that a context shows (but those of `without`) is filled exactly once, with its own row of the
  encoder's output, by the window that has the token: an image may straddle ranks, and be shown in many places;
- a row goes once to each rank that has use for it, however often that rank shows it;
- what any two ranks expect of each other is equal, whatever `without` each of them was built with: rows that are left out
  keep their places in the exchange, as in the window, so that no collective can hang. Only nobody reads them, and an image
  that only such rows show is encoded as black, for its object may be what is damaged;
- tokens that a row skips, and padding, own nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.batch.layouts import Segment, pack_bounds, segments
from pipeline.vision.items import shown
from schemas.payload import ImageItem
from schemas.plan import Plan

Array = NDArray[Any]

CHANNELS = 3
"""Red, green and blue: as what is decoded comes to the encoder's rank."""

IMAGE_ARRAYS: dict[str, str] = {
    "images.pixels": "uint8",
    "images.offsets": "int64",
    "images.shapes": "int64",
    "images.lengths": "int64",
    "images.send": "int64",
    "images.send_counts": "int64",
    "images.receive_counts": "int64",
    "images.take": "int64",
    "images.local": "int64",
}
"""Arrays of a window of a round with images, and their dtypes. Of n images that the rank encodes, in order:
pixels [bytes], image i is pixels[offsets[i]:offsets[i + 1]], shapes[i] = (height, width, 3) as its object has it; lengths [n],
rows of the encoder's output. Those rows, of all n in order, are its embeddings: send [S] are the rows of them that it sends,
send_counts [dp * cp] how many to each rank, receive_counts [dp * cp] how many it gets from each. Local row local[i] of the
window is received row take[i]; local [N] is ascending."""


class Piece(NamedTuple):
    """Rows [first, end) of the encoder's output for image `image`, an index into `WindowImages.order`, are the window's local rows
    from dst on."""

    image: int
    first: int
    end: int
    dst: int


class Encode(NamedTuple):
    """An image that the window's rank encodes; its pixels are bytes [start, end) of `images.pixels`. `blank`: it is not to be
    fetched, and stays 0."""

    item: ImageItem
    start: int
    end: int
    blank: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.item.height, self.item.width, CHANNELS

    @property
    def rows(self) -> int:
        return self.item.end - self.item.start


@dataclass(frozen=True)
class WindowImages:
    """The images of one window. `order`: those of the round, by encoder rank, then as the plan has them; `mine`: [first, end) of
    them that this rank encodes; `pieces`: ascending by dst; `sends`: of each rank, the rows of this rank's embeddings that it
    gets, int64, ascending; `receives`: of each rank, how many rows come from it."""

    rank: int
    order: tuple[ImageItem, ...]
    encode: tuple[Encode, ...]
    pieces: tuple[Piece, ...]
    sends: tuple[Array, ...] = field(compare=False)
    receives: Array = field(compare=False)
    take: Array = field(compare=False)

    @property
    def pixel_bytes(self) -> int:
        """Of `images.pixels`."""
        return self.encode[-1].end if self.encode else 0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all arrays of IMAGE_ARRAYS."""
        count, ranks = len(self.encode), len(self.sends)
        rows = int(sum(len(rows) for rows in self.sends))
        return {
            "images.pixels": (self.pixel_bytes,),
            "images.offsets": (count + 1,),
            "images.shapes": (count, 3),
            "images.lengths": (count,),
            "images.send": (rows,),
            "images.send_counts": (ranks,),
            "images.receive_counts": (ranks,),
            "images.take": (len(self.take),),
            "images.local": (len(self.take),),
        }

    def arrays(self) -> dict[str, Array]:
        """All of IMAGE_ARRAYS but the pixels, which are fetched: see `encode`."""
        found: dict[str, Sequence[Any] | Array] = {
            "images.offsets": [0, *(each.end for each in self.encode)],
            "images.shapes": np.reshape([each.shape for each in self.encode], (-1, 3)),
            "images.lengths": [each.rows for each in self.encode],
            "images.send": np.concatenate(self.sends),
            "images.send_counts": [len(rows) for rows in self.sends],
            "images.receive_counts": self.receives,
            "images.take": self.take,
            "images.local": self._local,
        }
        return {name: np.asarray(values, np.int64) for name, values in found.items()}

    @cached_property
    def _local(self) -> Array:
        return _ranges((piece.dst, piece.dst + piece.end - piece.first) for piece in self.pieces)


def window_images(
    plan: Plan, dp: int, microbatch: int, cp: int = 0, without: Collection[str] = frozenset()
) -> WindowImages | None:
    """Of the window of (dp, cp) of pipeline stage 0. None when no context of the round shows an image: then no rank of it has
    any of the arrays, and there is no exchange. `without`: ids of sequences that are left out.

    Raises ValueError when the plan does not say who encodes an image that is shown, or says it of one that is not."""
    round_ = _Round(plan, microbatch, without)
    if not round_.items:
        return None
    order = sorted(round_.items, key=lambda digest: round_.encoder[digest])
    index = {digest: i for i, digest in enumerate(order)}
    lengths = [round_.items[digest].end - round_.items[digest].start for digest in order]
    bases = np.asarray([0, *accumulate(lengths)], np.int64)
    ranks, rank = plan.dp * plan.cp, dp * plan.cp + cp
    # bases[edges[e]:edges[e + 1]] are the images of encoder e.
    edges = np.searchsorted([round_.encoder[digest] for digest in order], np.arange(ranks + 1))
    mine = {order[i] for i in range(edges[rank], edges[rank + 1])}

    placed: list[tuple[Piece, bool]] = []
    sends = [np.empty(0, np.int64)] * ranks
    for (owner_dp, group), rows in round_.packs.items():
        own = owner_dp == dp and cp // round_.size == group
        if not own and not any(image.digest in mine for row in rows for image in round_.shown(row)):
            continue
        for inside, cut in enumerate(round_.cut(rows)):
            owner = owner_dp * plan.cp + group * round_.size + inside
            found = list(round_.pieces(rows, cut, index, None if owner == rank else mine))
            if owner == rank:
                placed = sorted(found)
                placed.sort(key=lambda each: each[0].dst)
            sent = [piece for piece, _ in found if order[piece.image] in mine]
            if sent:
                sends[owner] = np.unique(_rows(sent, bases)) - bases[edges[rank]]

    wanted, take = np.unique(_rows([piece for piece, _ in placed], bases), return_inverse=True)
    receives = np.diff(np.searchsorted(wanted, bases[edges]))
    kept = np.repeat(
        np.asarray([not blank for _, blank in placed], np.bool_),
        [piece.end - piece.first for piece, _ in placed],
    )
    encode: list[Encode] = []
    for digest in order[edges[rank] : edges[rank + 1]]:
        item = round_.items[digest]
        start = encode[-1].end if encode else 0
        end = start + item.height * item.width * CHANNELS
        encode.append(Encode(item, start, end, digest not in round_.needed))
    return WindowImages(
        rank=rank,
        order=tuple(round_.items[digest] for digest in order),
        encode=tuple(encode),
        pieces=tuple(piece for piece, blank in placed if not blank),
        sends=tuple(sends),
        receives=receives.astype(np.int64),
        take=take.astype(np.int64)[kept],
    )


def showing(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Of each image the sequences that depend on it, as indices into the plan's: those with a row that shows it."""
    if plan.images is None:
        return {}
    rows = plan.rows
    found: dict[str, dict[int, None]] = {}
    for sequence, context, skip in zip(
        rows.sequence, rows.context, rows.skip or [0] * len(rows.sequence), strict=True
    ):
        for image in shown(plan.sequences[sequence].contexts[context], skip):
            found.setdefault(image.digest, {})[sequence] = None
    return {digest: tuple(sequences) for digest, sequences in found.items()}


class _Round:
    """The packs of one micro-batch number, by (dp, group), each the plan's rows in it, and the images that they show."""

    def __init__(self, plan: Plan, microbatch: int, without: Collection[str]) -> None:
        self._plan = plan
        self._without = without
        self.size = plan.cp_sizes[microbatch] if plan.cp_sizes else plan.cp
        self.packs: dict[tuple[int, int], list[int]] = {}
        self.items: dict[str, ImageItem] = {}
        self.encoder: dict[str, int] = {}
        self.needed: set[str] = set()
        if plan.images is None:
            return
        for row in np.flatnonzero(np.asarray(plan.rows.microbatch) == microbatch).tolist():
            group = plan.rows.group[row] if plan.rows.group else 0
            self.packs.setdefault((plan.rows.dp[row], group), []).append(row)
            for image in self.shown(row):
                self.items.setdefault(image.digest, image)
                if not self.blank(row):
                    self.needed.add(image.digest)
        planned = plan.images
        for at in np.flatnonzero(np.asarray(planned.microbatch) == microbatch).tolist():
            self.encoder[planned.digest[at]] = planned.encoder[at]
        if wrong := self.items.keys() ^ self.encoder.keys():
            digest = min(wrong)
            raise ValueError(
                f"plan {plan.run}/{plan.step}: image {digest} of micro-batch {microbatch} is "
                + (
                    "shown, and nobody encodes it"
                    if digest in self.items
                    else "encoded, and no context shows it"
                )
            )
        # As the plan has them, so that what is equal in it is equal here.
        self.items = {digest: self.items[digest] for digest in self.encoder}

    def shown(self, row: int) -> tuple[ImageItem, ...]:
        rows, sequences = self._plan.rows, self._plan.sequences
        return shown(sequences[rows.sequence[row]].contexts[rows.context[row]], self._skip(row))

    def blank(self, row: int) -> bool:
        return self._plan.sequences[self._plan.rows.sequence[row]].sequence in self._without

    def _skip(self, row: int) -> int:
        return self._plan.rows.skip[row] if self._plan.rows.skip else 0

    def cut(self, rows: Sequence[int]) -> list[dict[int, list[Segment]]]:
        """The segments of each context-parallel rank of a pack, by the pack's row."""
        plan = self._plan
        lengths = [
            plan.sequences[plan.rows.sequence[row]].contexts[plan.rows.context[row]].tokens - self._skip(row)
            for row in rows
        ]
        bounds = pack_bounds(plan.layout, lengths, self.size, plan.tp, plan.fp8)
        found: list[dict[int, list[Segment]]] = []
        for rank in range(self.size):
            by_row: dict[int, list[Segment]] = {}
            for segment in segments(plan.layout, bounds, self.size, rank):
                by_row.setdefault(segment.row, []).append(segment)
            found.append(by_row)
        return found

    def pieces(
        self,
        rows: Sequence[int],
        cut: dict[int, list[Segment]],
        index: dict[str, int],
        only: Collection[str] | None,
    ) -> Iterator[tuple[Piece, bool]]:
        """What the window with those segments shows of the images (of `only`, if given), and whether that row is left out."""
        for i, row in enumerate(rows):
            skip, blank = self._skip(row), self.blank(row)
            for image in self.shown(row):
                if only is not None and image.digest not in only:
                    continue
                start, end = max(image.start - skip, 0), image.end - skip
                for segment in cut.get(i, ()):
                    a, b = max(start, segment.start), min(end, segment.end)
                    if a < b:
                        first = a + skip - image.start
                        dst = segment.dst + a - segment.start
                        yield Piece(index[image.digest], first, first + b - a, dst), blank


def _rows(pieces: Iterable[Piece], bases: Array) -> Array:
    """The pieces' rows, numbered over all images of the round."""
    return _ranges((bases[piece.image] + piece.first, bases[piece.image] + piece.end) for piece in pieces)


def _ranges(spans: Iterable[tuple[int, int]]) -> Array:
    return np.concatenate([np.empty(0, np.int64), *(np.arange(a, b, dtype=np.int64) for a, b in spans)])
