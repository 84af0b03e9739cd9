"""The payload: the immutable object that holds a sequence's columns, and the header that describes it.

The header travels in `sequence.finished`, so that planning reads no object and packing fetches no header.
All columns are in token space: row t describes token t.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from schemas.names import Name

PAYLOAD_VERSION = 1
BLOCK_TOKENS = 65_536
"""Rows (of the column's first dimension) that one CRC32C covers."""
GRANULE_ROWS = 64
"""Rows that one CRC32C of a table of `Checksums` covers."""

Key = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*$", max_length=512)
]
"""An object key: relative, and no component starts with a dot, so that none is `.` or `..`."""
DType = Literal["uint8", "uint16", "int32", "int64", "float32"]
Crc32c = Annotated[int, Field(ge=0, lt=2**32)]

COLUMNS: dict[str, DType] = {
    "tokens": "int32",
    "loss_mask": "uint8",
    "logprobs": "float32",
    "policy_version": "int32",
    "segments": "int32",
}
"""Columns that every payload has. `segments` is [S, 5]: start, end, role, flags, context; the others are [T]."""

ROLES: tuple[str, ...] = ("system", "user", "assistant", "tool", "template")
"""Segment roles by their number in `segments`; `template` is what the chat template added around a turn."""


class Frozen(BaseModel):
    """Base of everything in the contract: immutable, no unknown keys, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Ref(Frozen):
    """A reference to an object in the store, with what is needed to verify it."""

    key: Key = Field(description="object key, relative to the store's root")
    bytes: int = Field(ge=0, description="size of the object")
    crc32c: Crc32c = Field(description="CRC-32C (Castagnoli) of the whole object")


def _none(value: object) -> bool:
    return not value


def _one(value: object) -> bool:
    return value == 1


class ColumnHeader(Frozen):
    """Where one column lies in the object."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=128)] = Field(
        description="tokens, loss_mask, logprobs, policy_version, segments, or an extra column's"
    )
    dtype: DType = Field(description="of its elements, little-endian")
    shape: tuple[int, ...] = Field(
        description="rows first, C order; rows are tokens, or segments in `segments`"
    )
    offset: int = Field(ge=0, description="first byte of the column, from the start of the object")
    bytes: int = Field(ge=0, description="size of the column")
    crc32c: tuple[Crc32c, ...] = Field(description="one per BLOCK_TOKENS rows, in order")


class Checksums(Frozen):
    """A column of the payload that has the CRC32C of small parts of other columns, so that a short range of a long one can be
    verified by itself. Element [g, c], an int32 with the checksum's bits, is of rows [g * GRANULE_ROWS, (g + 1) * GRANULE_ROWS)
    of `columns[c]`, which all have the same number of rows."""

    table: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=128)] = Field(
        description="name of the column that has them: int32 [ceil(rows / GRANULE_ROWS), columns]"
    )
    columns: tuple[str, ...] = Field(min_length=1, description="the columns that they are of")


class PayloadHeader(Frozen):
    """What `sequence.finished` says about its payload object."""

    version: Literal[1] = Field(default=1, description="version of the payload's layout")
    key: Key = Field(description="object key, relative to the store's root")
    bytes: int = Field(ge=0, description="size of the whole object")
    columns: tuple[ColumnHeader, ...] = Field(description="in the order in which they lie in the object")
    checksums: tuple[Checksums, ...] = Field(
        default=(),
        exclude_if=_none,
        description="of parts of the columns that are long or wide; a column is in at most one of them; left out: there are none",
    )

    def column(self, name: str) -> ColumnHeader:
        """The column's header; raises KeyError naming the columns that there are."""
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(f"payload {self.key} has no column {name!r}; it has {[c.name for c in self.columns]}")

    def has(self, name: str, dtype: DType, shape: tuple[int, ...]) -> bool:
        """Whether it has the column, in that form."""
        return (name, dtype, shape) in [(c.name, c.dtype, c.shape) for c in self.columns]


class Span(Frozen):
    """Rows [start, end) of a payload."""

    start: int = Field(ge=0, description="first row")
    end: int = Field(ge=0, description="row after the last")


class ImageItem(Frozen):
    """An image that a context shows: all that the planning of its encoding needs."""

    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] = Field(
        description="SHA-256 of the image's bytes as received, in hexadecimal; its object is `images/<digest>` of the run"
    )
    bytes: int = Field(ge=1, description="size of the object")
    height: int = Field(ge=1, description="pixels, as the object has them")
    width: int = Field(ge=1, description="pixels, as the object has them")
    patches: int = Field(
        ge=1, description="patches that the encoder sees, of all frames, after the processor's resizing"
    )
    frames: int = Field(
        default=1, ge=1, exclude_if=_one, description="frames of equal size; 1: a still image"
    )
    start: int = Field(ge=0, description="first of its tokens, from the context's own row 0")
    end: int = Field(ge=1, description="token after its last: one token for each row of the encoder's output")


class Flag(Frozen):
    """Rows [start, end) of a context that rules have flagged."""

    start: int = Field(ge=0, description="first row, from the context's own row 0")
    end: int = Field(ge=1, description="row after the last")
    rules: int = Field(ge=1, lt=1 << 16, description="bit i: the source's penalty i, from 0, flagged them")


class ContextMeta(Frozen):
    """One context of a finished sequence: all that planning may know about it. Spans count from the context's own row 0."""

    label: Name = Field(default="main", description="main, subagent, auxiliary, ...")
    offset: int = Field(ge=0, description="first row of the context in the payload")
    tokens: int = Field(ge=1, description="rows of the context: prompt, sampled and template tokens")
    generated: int = Field(ge=0, description="tokens that the policy sampled here")
    loss_spans: tuple[Span, ...] = Field(description="rows with loss_mask 1, ascending, disjoint")
    min_version: int = Field(ge=0, description="oldest policy version among the sampled tokens")
    max_version: int = Field(ge=0, description="newest policy version among the sampled tokens")
    flags: tuple[Flag, ...] = Field(
        default=(),
        # Left out where there are none, so that plans of runs without rules are the same bytes as ever.
        exclude_if=_none,
        description="sampled rows that the source's penalties have flagged, ascending, disjoint",
    )
    spilled: int = Field(
        default=0,
        ge=0,
        exclude_if=_none,
        description="rows with loss_mask 1, when their spans are too many for an event: then loss_spans is empty, and the spans are the payload's `segments` that carry loss; 0: loss_spans has them",
    )
    images: tuple[ImageItem, ...] = Field(
        default=(), exclude_if=_none, description="the images that it shows, ascending by token, disjoint"
    )

    @model_validator(mode="after")
    def _consistent(self) -> ContextMeta:
        # Weights are divided by these counts: a span that is reversed, doubled or outside would change every row's loss.
        at = 0
        for span in self.loss_spans:
            if not at <= span.start < span.end <= self.tokens:
                raise ValueError(
                    f"loss span [{span.start}, {span.end}) of a context of {self.tokens} tokens is empty, outside, or not after row {at}"
                )
            at = span.end
        at = 0
        for flag in self.flags:
            if not at <= flag.start < flag.end <= self.tokens:
                raise ValueError(
                    f"flagged rows [{flag.start}, {flag.end}) of a context of {self.tokens} tokens are empty, outside, or not after row {at}"
                )
            at = flag.end
        at = 0
        for image in self.images:
            if not at <= image.start < image.end <= self.tokens:
                raise ValueError(
                    f"image {image.digest[:12]} at tokens [{image.start}, {image.end}) of a context of {self.tokens} is empty, outside, or not after token {at}"
                )
            at = image.end
        if self.spilled and (self.loss_spans or self.flags):
            raise ValueError(
                f"{self.spilled} loss tokens are left to the payload's segments, but there are {len(self.loss_spans)} loss spans and "
                f"{len(self.flags)} flags: a context has all of its spans, or none and no flags"
            )
        if self.loss_tokens() > self.generated:
            raise ValueError(
                f"{self.loss_tokens()} tokens carry loss, but only {self.generated} were generated"
            )
        if self.min_version > self.max_version:
            raise ValueError(f"min_version {self.min_version} is above max_version {self.max_version}")
        return self

    def loss_tokens(self, skip: int = 0) -> int:
        """Rows with loss_mask 1 that are left when the first `skip` rows are left out. The first row that is kept then counts
        not: no row before it predicts it. Raises ValueError where its spans are not here, so that they cannot be cut."""
        if not skip:
            return self.spilled or sum(span.end - span.start for span in self.loss_spans)
        if self.spilled:
            raise ValueError(f"context {self.label}, whose spans are in the payload, is cut by {skip} tokens")
        return sum(max(0, span.end - max(span.start, skip + 1)) for span in self.loss_spans)
