"""`packtrain payload show`: the columns of a sequence's payload, and its text with the trained tokens highlighted; of a
sidecar its columns and what they come to, segment by segment; of any other object of a run what it is."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.capture.tokenizer import PolicyTokenizer
from pipeline.log import BrokerUnavailable
from pipeline.store import ObjectMissing, ObjectStore
from pipeline.store.keys import checked_key
from pipeline.store.payload import read_columns, read_header, values
from schemas.config import RunConfig
from schemas.facts import SequenceFinished
from schemas.keys import sidecar_key
from schemas.names import sample_index, sequence_id
from schemas.payload import ROLES, PayloadHeader
from services.cli.embedded import BadInput, LaunchError
from services.cli.gc import fate
from services.cli.policy import policy_directory
from services.cli.reach import LogView, find_run, open_log, store_of
from services.cli.stored import kind, read_text, sidecar
from services.cli.where import Where

Columns = dict[str, NDArray[Any]]
LOSS_STYLE = "bold green"
_SHAPED = ("advantages.0", "advantages.1")
_SHOWN = ("tokens", "loss_mask", "logprobs", "policy_version", "segments")


def show(what: str, where: Where, console: Console) -> None:
    """Prints the object of a key or of a finished sequence; every block is verified on the way.

    Raises StoreError, BrokerUnavailable, LaunchError.
    """
    sequence = _sequence(what)
    found = find_run(where)
    store = store_of(found)
    key = what if sequence is None else asyncio.run(_payload_key(found, *sequence))
    try:
        _show(key, found, store, console)
    except ObjectMissing as missing:
        why = ""
        # Without the log nobody can tell why, and the object is missing all the same.
        with suppress(BrokerUnavailable, LaunchError):
            why = asyncio.run(fate(found, missing.key))
        if not why:
            raise
        raise LaunchError(f"no object {missing.key} in {store.url}: {why}") from missing


def _show(key: str, found: RunConfig, store: ObjectStore, console: Console) -> None:
    if (other := kind(key)) is not None:
        size, shown = asyncio.run(read_text(store, key, other))
        _tell(console, f"{key}, {size} bytes: {other.told}; no payload")
        if shown:
            _tell(console, printable(shown))
    elif (beside := sidecar(key)) is not None:
        _show_sidecar(store, key, *beside, console)
    else:
        header, columns, sidecars = asyncio.run(_fetch(store, key, found))
        known = not isinstance(found, LogView)
        tokenizer = PolicyTokenizer.load(policy_directory(found.engine.policy)) if known else None
        _show_payload(header, columns, tokenizer, console)
        for each in sidecars:
            _tell(console, f"beside it: {each}")


async def _read(store: ObjectStore, key: str) -> tuple[PayloadHeader, Columns]:
    header = await read_header(store, key)
    try:
        return header, await read_columns(store, header, _SHOWN)
    except KeyError as error:
        raise LaunchError(str(error.args[0])) from error


async def _fetch(store: ObjectStore, key: str, config: RunConfig) -> tuple[PayloadHeader, Columns, list[str]]:
    """A payload's header, its columns, and the keys of its sidecars."""
    header, columns = await _read(store, key)
    teachers = [
        f"teacher.{t}" for source in config.sources if f"/{source.name}/" in key for t in source.teachers
    ]
    beside = [sidecar_key(key, name) for name in (*teachers, *_SHAPED)]
    return header, columns, [each for each in beside if await store.size(each) is not None]


def _show_payload(
    header: PayloadHeader, columns: Columns, tokenizer: PolicyTokenizer | None, console: Console
) -> None:
    marks = not console.is_terminal
    _tell(console, f"{header.key}, {header.bytes} bytes")
    console.print(columns_table(header))
    console.print(segments_table(columns))
    if tokenizer is None:
        _tell(console, "its text needs the policy's tokenizer, which the log does not name: give --config")
        return
    legend = (
        "tokens that carry loss stand in [[ ]]"
        if marks
        else Text("tokens that carry loss look like this", LOSS_STYLE)
    )
    _tell(console, legend)
    _tell(console, text(columns, tokenizer, marks))


def _tell(console: Console, line: str | Text) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _show_sidecar(store: ObjectStore, key: str, payload: str, name: str, console: Console) -> None:
    async def fetch() -> tuple[PayloadHeader, Columns, Columns]:
        header = await read_header(store, key)
        own = await read_columns(store, header, [column.name for column in values(header)])
        return header, own, (await _read(store, payload))[1]

    header, own, columns = asyncio.run(fetch())
    tokens = int(columns["loss_mask"].sum())
    if rows := [f"{column.name} {column.shape[0]}" for column in values(header) if column.shape[0] != tokens]:
        raise LaunchError(f"{key} has rows {', '.join(rows)}; its payload {payload} has {tokens} loss tokens")
    told = f"{name} of {payload}, a row for each of its {tokens} loss tokens"
    _tell(console, f"{key}, {header.bytes} bytes: {told}")
    console.print(columns_table(header))
    console.print(sidecar_table(own, columns))


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
        table.add_row(str(i), f"{start}..{end}", _role(role), str(context), str(int(loss.sum())), *sampled)
    return table


def sidecar_table(own: Columns, columns: Columns) -> Table:
    """The turns with loss: of each float column of the sidecar, [loss tokens], its mean and range there; and the mean of the
    rollout's log-probabilities beside a teacher's."""
    values = {name: column for name, column in own.items() if column.ndim == 1 and column.dtype.kind == "f"}
    loss = columns["loss_mask"].astype(bool)
    if "logprobs" in values:
        values |= {"rollout logprobs": columns["logprobs"][loss]}
    heads = [head for name in values for head in (f"mean {name}", "range")]
    table = Table("segment", "rows", "role", "context", "loss tokens", *heads)
    before = np.concatenate([[0], np.cumsum(loss)])
    for i, (start, end, role, _flags, context) in enumerate(columns["segments"].tolist()):
        first, last = int(before[start]), int(before[end])
        if first == last:
            continue
        cells = [
            cell
            for each in (column[first:last] for column in values.values())
            for cell in (f"{each.mean():.3f}", f"{each.min():.3f}..{each.max():.3f}")
        ]
        table.add_row(str(i), f"{start}..{end}", _role(role), str(context), str(last - first), *cells)
    return table


def _role(role: int) -> str:
    return ROLES[role] if 0 <= role < len(ROLES) else str(role)


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
