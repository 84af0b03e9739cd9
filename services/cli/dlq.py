"""What `packtrain dlq` prints and does.

Promises:
- bodies, headers and reasons are a stranger's: they are printed as ASCII, JSON or hexadecimal, so that no control
  character reaches the terminal, and cut, with a note;
- of several letters each is changed that can be; the others are named with their reasons, and the command fails.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Literal

from pipeline.log import Letter, LetterError, Log
from schemas.config import RunConfig
from schemas.names import MALFORMED, checked_name, dead_letter_subject
from services.cli.embedded import BadInput, LaunchError
from services.cli.reach import LAUNCHER, READER, find_run, open_log
from services.cli.where import Where

_TEXT = 16_384
_BYTES = 1_024
_REASON = 160
_NAMED = re.compile(r"(?:([A-Za-z0-9_-]{1,128})/)?([1-9][0-9]{0,18})")
Write = Callable[[str], None]


def _log(config: RunConfig, user: str = READER) -> AbstractAsyncContextManager[Log]:
    return open_log(config, user=user)


def show_all(where: Where, closed_too: bool, as_json: bool, write: Write, note: Write) -> None:
    """One line a letter: those that are buried, or all. `note` is told what stands there and is no letter."""
    asyncio.run(_show_all(find_run(where), closed_too, as_json, write, note))


async def _show_all(config: RunConfig, closed_too: bool, as_json: bool, write: Write, note: Write) -> None:
    async with _log(config) as log:
        letters, strangers = await log.letters.all()
        shown = [letter for letter in letters if closed_too or letter.state == "buried"]
        for letter in shown:
            write(_as_json(letter) if as_json else _line(letter))
        if not shown and not as_json:
            note(f"run {log.run} has no {'' if closed_too else 'open '}dead letters")
        if strangers:
            note(
                f"{strangers} messages on {dead_letter_subject(log.run)}.> are no dead letters of this version"
            )


def show_one(where: Where, letter: str, write: Write) -> None:
    """Reason, headers and body of a letter; raises LetterError or BadInput when there is none, or several."""
    asyncio.run(_show_one(find_run(where), letter, write))


async def _show_one(config: RunConfig, named: str, write: Write) -> None:
    async with _log(config) as log:
        found = await _find(log, named)
        letter = await log.letters.find(found.reader, found.seq)
        write(_line(letter))
        write(f"stored      message {letter.at} of stream {log.stream}")
        write(f"original    message {letter.seq}, {letter.bytes} bytes, on {_safe(letter.subject)}")
        for name, value in sorted(letter.headers.items()):
            write(f"header      {_safe(name)}: {_safe(value)}")
        write("")
        for line in _body(letter.body):
            write(line)
        if len(letter.body) < letter.bytes:
            write(
                f"(the letter holds the first {len(letter.body)} of {letter.bytes} bytes; the whole is message {letter.seq} of stream {log.stream})"
            )


def change(
    where: Where, letters: list[str], all_of: str | None, what: Literal["retry", "drop"], write: Write
) -> None:
    """Retries or drops letters, one line each. Raises BadInput, and LaunchError that names those that could not be."""
    if bool(letters) == (all_of is not None):
        raise BadInput(f"name the letters to {what}, or --all-of READER, not both; see `packtrain dlq list`")
    if all_of is not None:
        checked_name(all_of, "--all-of")
    asyncio.run(_change(find_run(where), letters, all_of, what, write))


async def _change(
    config: RunConfig, named: list[str], all_of: str | None, what: Literal["retry", "drop"], write: Write
) -> None:
    async with _log(config, LAUNCHER) as log:
        failed: list[str] = []
        for name in named or await _open_letters(log, all_of):
            try:
                letter = await _find(log, name)
                await (log.letters.retry(letter) if what == "retry" else log.letters.drop(letter))
            except LetterError as error:
                failed.append(str(error))
                continue
            write(f"{letter.name}: {_done(letter, what)}")
        if failed:
            raise LaunchError("\n".join(failed))


async def _open_letters(log: Log, reader: str | None) -> list[str]:
    letters, _ = await log.letters.all()
    found = [letter.name for letter in letters if letter.reader == reader and letter.state == "buried"]
    if not found:
        readers = sorted({letter.reader for letter in letters if letter.state == "buried"})
        raise LetterError(
            f"no open dead letter of {reader!r}; readers with some: {', '.join(readers) or 'none'}"
        )
    return found


def _done(letter: Letter, what: str) -> str:
    if what == "drop":
        return "dropped"
    if letter.reader == MALFORMED:
        return "retried: this version reads it as an event; a service does when it is restarted and reads the log again"
    return f"retried: {letter.reader} is given message {letter.seq} again"


async def _find(log: Log, named: str) -> Letter:
    parts = _NAMED.fullmatch(named)
    if parts is None:
        raise BadInput(
            f"{named[:140]!r} names no dead letter: give READER/SEQ or SEQ, as in `packtrain dlq list`"
        )
    reader, seq = parts[1], int(parts[2])
    if reader is not None:
        return await log.letters.find(reader, seq)
    letters, _ = await log.letters.all()
    found = [letter for letter in letters if letter.seq == seq]
    if len(found) > 1:
        raise BadInput(
            f"message {seq} has several dead letters: {', '.join(letter.name for letter in found)}"
        )
    if not found:
        raise LetterError(
            f"run {log.run} has no dead letter of message {seq}; see `packtrain dlq list --all`"
        )
    return found[0]


def _line(letter: Letter) -> str:
    at = f"{letter.time:%Y-%m-%d %H:%M:%S}" if letter.time else "-"
    reason = letter.reason if len(letter.reason) <= _REASON else f"{letter.reason[:_REASON]}..."
    delivered = f"{letter.deliveries}x" if letter.deliveries else "-"
    return (
        f"{letter.name:<24} {letter.state:<7} {delivered:>4}  {at}  {_safe(letter.subject)}  {_safe(reason)}"
    )


def _as_json(letter: Letter) -> str:
    return json.dumps(
        {
            "letter": letter.name,
            "reader": letter.reader,
            "seq": letter.seq,
            "state": letter.state,
            "reason": letter.reason,
            "subject": letter.subject,
            "deliveries": letter.deliveries,
            "bytes": letter.bytes,
            "time": letter.time.isoformat() if letter.time else None,
            "headers": letter.headers,
        }
    )


def _safe(text: str) -> str:
    """Printable ASCII as it is, everything else escaped as in JSON."""
    return json.dumps(text)[1:-1].replace('\\"', '"').replace("\x7f", "\\u007f")


def _body(body: bytes) -> list[str]:
    """JSON with one value a line, or a hexadecimal dump; cut with a note."""
    try:
        # ASCII only: no control character, and no lone surrogate, gets out.
        text = json.dumps(json.loads(body), indent=2).replace("\x7f", "\\u007f")
    except (ValueError, RecursionError):
        lines = [_dump(body[at : at + 16], at) for at in range(0, min(len(body), _BYTES), 16)]
        return [*lines, f"(the first {_BYTES} of {len(body)} bytes)"] if len(body) > _BYTES else lines
    if len(text) > _TEXT:
        return [*text[:_TEXT].splitlines(), f"(the first {_TEXT} of {len(text)} characters)"]
    return text.splitlines()


def _dump(part: bytes, at: int) -> str:
    shown = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in part)
    return f"{at:08x}  {part.hex(' '):<47}  {shown}"
