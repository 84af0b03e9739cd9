"""`packtrain payload show`: the columns of a sequence's payload, and its text with the trained tokens highlighted."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.capture.tokenizer import PolicyTokenizer
from pipeline.store import ObjectStore
from pipeline.store.keys import checked_key
from pipeline.store.payload import read_columns, read_header
from schemas.config import RunConfig
from schemas.facts import SequenceFinished
from schemas.names import sample_index, sequence_id
from schemas.payload import ROLES, PayloadHeader
from services.cli.embedded import BadInput, LaunchError
from services.cli.policy import policy_directory
from services.cli.reach import find_run, open_log

Columns = dict[str, NDArray[Any]]
LOSS_STYLE = "bold green"
_SHOWN = ("tokens", "loss_mask", "logprobs", "policy_version", "segments")


def show(what: str, config: Path | None, directory: Path, run: str | None, console: Console) -> None:
    """Prints the object of a key or of a finished sequence; every block is verified on the way.

    Raises StoreError, BrokerUnavailable, LaunchError.
    """
    sequence = _sequence(what)
    found = find_run(config, directory, run)

    async def fetch() -> tuple[PayloadHeader, Columns]:
        store = ObjectStore.open(found.store)
        key = what if sequence is None else await _payload_key(found, *sequence)
        header = await read_header(store, key)
        return header, await read_columns(store, header, _SHOWN)

    try:
        header, columns = asyncio.run(fetch())
    except KeyError as error:
        raise LaunchError(str(error.args[0])) from error
    tokenizer = PolicyTokenizer.load(policy_directory(found.engine.policy))
    marks = not console.is_terminal
    console.print(f"{header.key}, {header.bytes} bytes", markup=False, highlight=False, soft_wrap=True)
    console.print(columns_table(header))
    console.print(segments_table(columns))
    legend = (
        "tokens that carry loss stand in [[ ]]"
        if marks
        else Text("tokens that carry loss look like this", LOSS_STYLE)
    )
    console.print(legend, markup=False, highlight=False)
    console.print(text(columns, tokenizer, marks), markup=False, highlight=False, soft_wrap=True)


def _sequence(what: str) -> tuple[str, str] | None:
    """(source, sequence) of a sequence id; None for the key of an object. Raises BadInput on what is neither."""
    sample, _, member = what.rpartition("-")
    source = sample.rpartition("-")[0]
    try:
        if "/" in what:
            checked_key(what)
            return None
        sample_index(sample, source)
        if sequence_id(sample, int(member)) == what:
            return source, what
    except ValueError:  # BadKey and BadName among them
        pass
    raise BadInput(
        f"{what[:140]!r} is neither a sequence, as calculator-000022-7, nor the key of an object, as runs/<run>/payloads/...; "
        "events list --type sequence.finished shows the sequences"
    )


async def _payload_key(config: RunConfig, source: str, sequence: str) -> str:
    async with open_log(config) as log:
        event = await log.last(SequenceFinished.type, source, sequence)
    if event is None or not isinstance(event.fact, SequenceFinished):
        raise LaunchError(
            f"run {config.run} has no finished sequence {sequence}; events list --id {sequence} shows what became of it"
        )
    return event.fact.payload.key


def columns_table(header: PayloadHeader) -> Table:
    """Name, dtype, shape and place of every column."""
    table = Table("column", "dtype", "shape", "bytes", "offset")
    for column in header.columns:
        shape = " x ".join(str(n) for n in column.shape)
        table.add_row(column.name, column.dtype, shape, str(column.bytes), str(column.offset))
    return table


def segments_table(columns: Columns) -> Table:
    """The turns: rows, role, context, and what was sampled."""
    table = Table("segment", "rows", "role", "context", "loss tokens", "policy version", "mean logprob")
    for i, (start, end, role, _flags, context) in enumerate(columns["segments"].tolist()):
        loss = columns["loss_mask"][start:end].astype(bool)
        versions, logprobs = columns["policy_version"][start:end][loss], columns["logprobs"][start:end][loss]
        sampled = (
            (f"{versions.min()}..{versions.max()}", f"{logprobs.mean():.3f}") if loss.any() else ("", "")
        )
        name = ROLES[role] if 0 <= role < len(ROLES) else str(role)
        table.add_row(str(i), f"{start}..{end}", name, str(context), str(int(loss.sum())), *sampled)
    return table


def text(columns: Columns, tokenizer: PolicyTokenizer, marks: bool) -> Text:
    """The decoded tokens, special ones written out. A run of loss tokens is decoded as one, so that no character is cut."""
    tokens, loss = columns["tokens"], columns["loss_mask"].astype(bool)
    edges = [0, *(np.flatnonzero(loss[1:] != loss[:-1]) + 1).tolist(), len(tokens)]
    out = Text()
    for start, end in itertools.pairwise(edges):
        if start == end:
            continue
        piece = printable(tokenizer.decode(tokens[start:end].tolist(), keep_special=True))
        if not loss[start]:
            out.append(piece)
        else:
            out.append(f"[[{piece}]]" if marks else piece, LOSS_STYLE)
    return out


def printable(raw: str) -> str:
    """Text from a model or a tool may hold terminal commands: what does not print is shown as its code."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in raw)
