"""Dead letters: messages that nobody could handle, with the reason, until a person retries or drops them.

Promises:
- a letter stands in the run's own stream, on `dlq.<run>.<reader>.<seq>`: `reader` is the work consumer that could not
  handle message `seq`, or `malformed` for a message that is no event. It has the original's body and headers, but for
  those that the broker acts on;
- a letter is a state machine on its subject (`buried` -> `retried` | `dropped`, and `buried` again), moved by
  compare-and-set on its last message: of two who bury the same message, or change the same letter, one does;
- no original makes a letter impossible: what is too large is cut, what may not stand in a header is left out.
"""

# nats-py's signatures hold untyped dictionaries and keyword arguments; values are typed where they enter our code.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
from __future__ import annotations

import logging
import re
import uuid
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, RawStreamMsg
from nats.js.errors import APIError, NotFoundError

from pipeline.log.fold import Found, fold_name
from pipeline.log.patience import LogError, Patience
from pipeline.log.publish import PUBLISH_TIMEOUT_S, WRONG_LAST_SEQUENCE
from pipeline.log.pull import Pull
from schemas.envelope import EXPECTED_LAST, Invalid, decode
from schemas.facts import MAX_BODY
from schemas.names import BadName, checked_name, dead_letter_subject

_LOG = logging.getLogger("packtrain.log")
HEADER_ROOM = 4096
MAX_MESSAGE = MAX_BODY + HEADER_ROOM
"""Bytes of headers and body that the stream takes."""
REASON = 1000
"""Bytes of a letter's reason."""
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_LIST_S = 2.0

State = Literal["buried", "retried", "dropped"]
_STATES: tuple[State, ...] = ("buried", "retried", "dropped")


class LetterError(LogError):
    """The letter is not there, or may not be changed so; the message says why."""


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter as it is now. What it says is as hostile as the original."""

    reader: str
    seq: int
    """Stream sequence of the original."""
    state: State
    at: int
    """Stream sequence of the letter's last message."""
    reason: str
    subject: str
    """The original's."""
    deliveries: int
    """How often the original was delivered; 0 for what is no event."""
    bytes: int
    """Of the original's body; the letter has less of it when it was too large."""
    time: datetime | None
    """When the broker stored the letter's last message."""
    headers: dict[str, str]
    body: bytes

    @property
    def name(self) -> str:
        return f"{self.reader}/{self.seq}"


class DeadLetters:
    """The letters of one run. Waits while the broker is away; raises LogError when it will never take them."""

    def __init__(
        self, client: Client, js: JetStreamContext, patiently: Patience, run: str, stream: str
    ) -> None:
        self._client = client
        self._js = js
        self._patiently = patiently
        self._run = run
        self._stream = stream

    async def bury(
        self,
        reader: str,
        original: Found,
        reason: str,
        deliveries: int = 0,
        *,
        after: int = 0,
        state: State = "buried",
    ) -> bool:
        """Writes the letter of `original`; False when there is one already.

        `after`: sequence of the letter's last message, when it is there already and goes back to `buried`.
        """
        reason = printable(reason, REASON)
        _LOG.warning(
            "dead letter %s/%d, %s: message on %s: %s", reader, original.seq, state, original.subject, reason
        )
        marks = {
            "dlq-state": state,
            "dlq-reason": reason,
            "dlq-subject": printable(original.subject, 500),
            "dlq-seq": str(original.seq),
            "dlq-deliveries": str(deliveries),
            "dlq-bytes": str(len(original.body)),
        }
        head, body = {**_kept(original.headers), **marks}, original.body
        room = MAX_MESSAGE - _CHANGE_BYTES
        if _size(head) + len(body) > room:
            # The message itself stays in the stream, whole, at `dlq-seq`.
            head, body = marks, body[: room - _size(marks)]
        return await self._write(dead_letter_subject(self._run, reader, original.seq), head, body, after)

    async def open(self, found: Found) -> tuple[int, bool] | None:
        """(sequence of the original, whether it is to be handled) of a letter that a work consumer was given; None: no letter.

        Only a retried letter is to be handled, and only while that is its last word.
        """
        named = self._named(found.subject)
        if named is None:
            return None
        if (found.headers or {}).get("dlq-state") != "retried":
            return named[1], False
        newest = await self._patiently(lambda: self._last(found.subject), f"read of {found.subject}")
        return named[1], newest is not None and newest.seq == found.seq

    async def original(self, seq: int) -> Found | None:
        """A message of the stream by its sequence; None when it is gone."""
        raw = await self._patiently(lambda: self._get(seq), f"read of message {seq}")
        return None if raw is None else Found(raw.subject or "", raw.headers, raw.data or b"", seq)

    async def _get(self, seq: int) -> RawStreamMsg | None:
        try:
            return await self._js.get_msg(self._stream, seq=seq)
        except NotFoundError:
            return None

    async def all(self) -> tuple[list[Letter], int]:
        """Every letter as it is now, without its body, oldest change first; and how many messages stand there that are none."""
        return await self._patiently(self._all, "read of the dead letters")

    async def _all(self) -> tuple[list[Letter], int]:
        info = await self._js.add_consumer(
            self._stream,
            ConsumerConfig(
                name=fold_name(),
                filter_subject=f"{dead_letter_subject(self._run)}.>",
                deliver_policy=DeliverPolicy.LAST_PER_SUBJECT,
                ack_policy=AckPolicy.NONE,
                headers_only=True,
                inactive_threshold=30.0,
                mem_storage=True,
                num_replicas=1,
            ),
        )
        expected, got, letters = info.num_pending or 0, 0, list[Letter]()
        pull = Pull(self._client, self._stream, info.name)
        await pull.open()
        try:
            while got < expected:
                messages = await pull.take(min(256, expected - got), _LIST_S)
                # None left: a letter was changed meanwhile, and its former message is nobody's last any more.
                if not messages:
                    break
                for message in messages:
                    got += 1
                    place = message.metadata
                    letter = self._letter(
                        message.subject, message.headers, b"", place.sequence.stream, place.timestamp
                    )
                    if letter is not None:
                        letters.append(letter)
        finally:
            await pull.close()
        return letters, got - len(letters)

    async def find(self, reader: str, seq: int) -> Letter:
        """The letter, with its body; raises LetterError when there is none."""
        subject = dead_letter_subject(self._run, reader, seq)
        raw = await self._patiently(lambda: self._last(subject), f"read of {subject}")
        letter = raw and self._letter(subject, raw.headers, raw.data or b"", raw.seq or 0, raw.time)
        if not letter:
            raise LetterError(
                f"run {self._run} has no dead letter {reader}/{seq}; see `packtrain dlq list --all`"
            )
        return letter

    async def _last(self, subject: str) -> RawStreamMsg | None:
        try:
            return await self._js.get_last_msg(self._stream, subject)
        except NotFoundError:
            return None

    async def retry(self, letter: Letter) -> None:
        """Gives the original to the letter's reader again, as if for the first time. Raises LetterError.

        What was malformed is given to nobody: it is read, and folded, when a service that understands it starts.
        """
        if letter.state == "retried":
            raise LetterError(f"dead letter {letter.name} is retried already")
        original = await self.original(letter.seq)
        if original is None:
            raise LetterError(
                f"dead letter {letter.name}: message {letter.seq} is no longer in the stream; drop the letter"
            )
        found = decode(original.subject, original.headers, original.body, original.seq)
        if isinstance(found, Invalid):
            reason = printable(found.reason, REASON)
            raise LetterError(f"dead letter {letter.name}: it is no event to this version either: {reason}")
        await self._change(letter, "retried")

    async def drop(self, letter: Letter) -> None:
        """A person has seen the letter and wants no more of it. Raises LetterError."""
        if letter.state == "dropped":
            raise LetterError(f"dead letter {letter.name} is dropped already")
        await self._change(letter, "dropped")

    async def _change(self, letter: Letter, state: State) -> None:
        subject = dead_letter_subject(self._run, letter.reader, letter.seq)
        if letter.body or not letter.bytes:
            headers, body = letter.headers, letter.body
        else:
            whole = await self.find(letter.reader, letter.seq)
            headers, body = whole.headers, whole.body
        head = {**_kept(headers), **_marks(headers), "dlq-state": state}
        body = body[: max(0, MAX_MESSAGE - _CHANGE_BYTES - _size(head))]
        if not await self._write(subject, head, body, letter.at):
            now = await self.find(letter.reader, letter.seq)
            raise LetterError(
                f"dead letter {letter.name} was changed by somebody else: it is {now.state}; look again"
            )

    async def _write(self, subject: str, headers: dict[str, str], body: bytes, after: int) -> bool:
        """Whether this became the letter's last message; False when another came first."""
        change = uuid.uuid4().hex
        head = {**headers, _CHANGE: change, EXPECTED_LAST: str(after)}

        async def publish() -> bool:
            try:
                await self._js.publish(subject, body, headers=dict(head), timeout=PUBLISH_TIMEOUT_S)
            except APIError as error:
                if error.err_code not in WRONG_LAST_SEQUENCE:
                    raise
                # Another came first, or this did and its acknowledgement was lost.
                last = await self._last(subject)
                return last is not None and str((last.headers or {}).get(_CHANGE)) == change
            return True

        return await self._patiently(publish, f"publish of {subject}", stores=True)

    def _named(self, subject: str) -> tuple[str, int] | None:
        """(reader, sequence of the original) of a letter's subject."""
        tokens = subject.split(".")
        if len(tokens) != 4 or tokens[:2] != ["dlq", self._run]:
            return None
        try:
            reader = checked_name(tokens[2], "reader")
        except BadName:
            return None
        if not _SEQ.fullmatch(tokens[3]):
            return None
        return reader, int(tokens[3])

    def _letter(
        self, subject: str, headers: dict[str, str] | None, body: bytes, at: int, time: datetime | None
    ) -> Letter | None:
        named, head = self._named(subject), headers or {}
        state = head.get("dlq-state")
        if named is None or state not in _STATES:
            return None
        return Letter(
            reader=named[0],
            seq=named[1],
            state=state,
            at=at,
            reason=head.get("dlq-reason", ""),
            subject=head.get("dlq-subject", ""),
            deliveries=_number(head.get("dlq-deliveries", "")),
            bytes=_number(head.get("dlq-bytes", "")),
            time=time,
            headers=head,
            body=body,
        )


_SEQ = re.compile(r"[1-9][0-9]{0,18}")
_CHANGE = "dlq-change"
_MARKS = ("dlq-state", "dlq-reason", "dlq-subject", "dlq-seq", "dlq-deliveries", "dlq-bytes")
_CHANGE_BYTES = len(f"{_CHANGE}: {'0' * 32}\r\n{EXPECTED_LAST}: {'9' * 19}\r\n")


def _number(text: str) -> int:
    return int(text) if _SEQ.fullmatch(text) else 0


def _kept(headers: dict[str, str] | None) -> dict[str, str]:
    """The headers of an original that may stand in a letter: not those that the broker or its client acts on, nor ours."""
    return {
        name: printable(value, HEADER_ROOM)
        for name, value in (headers or {}).items()
        if _HEADER_NAME.fullmatch(name)
        and not name.lower().startswith(("nats-", "dlq-"))
        and name.lower() not in ("status", "description")
    }


def _marks(headers: dict[str, str]) -> dict[str, str]:
    return {name: printable(headers[name], REASON) for name in _MARKS if name in headers}


def _size(headers: dict[str, str]) -> int:
    """Bytes of the headers on the wire: a status line, one line each, an empty one."""
    return 12 + sum(len(f"{name}: {value}\r\n".encode()) for name, value in headers.items())


def printable(text: str, most: int) -> str:
    """The text on one line, without control characters or lone surrogates: at most so many bytes of UTF-8."""
    plain = "".join(c if c.isprintable() else " " for c in text[:most])
    return " ".join(plain.encode(errors="replace")[:most].decode(errors="ignore").split())
