"""Recorded turns as bytes, for the journal. Pure.

A record is its length and CRC-32C (two little-endian uint32), then a JSON header's length (uint32), the header, and the
arrays that it lists, one after the other. Promises: what `decode` gives is what `encode` was given; a record that is cut
off or damaged ends the reading, and nothing after it is taken.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import orjson

from pipeline.capture.call import Answer, Finish
from pipeline.capture.rules import Kind
from pipeline.capture.tree import Node, SampledTurn
from pipeline.checksum import crc32c
from pipeline.engines.base import Routing
from schemas.payload import ImageItem

_FRAME = struct.Struct("<II")
_HEADER = struct.Struct("<I")
_Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Recorded:
    """One turn of a session: the nodes that it added, without parents (`parents` has their numbers), and how it ended.
    `main`: whether it is a turn of the main agent's own dialogue. `flags`: bits that rules have given to the sampled node
    of number `flagged`. A record of flags alone has no nodes."""

    session: str
    nodes: tuple[Node, ...]
    parents: tuple[int, ...]
    finish: Finish
    malformed: int
    main: bool
    flagged: int = 0
    flags: int = 0


def encode(session: str, nodes: Sequence[Node], answer: Answer, flags: int = 0) -> bytes:
    """The record of a turn; `nodes` and `flags` as in `Journal.record`."""
    arrays: list[_Array] = []
    header: dict[str, Any] = {
        "session": session,
        "finish": answer.finish,
        "malformed": answer.malformed,
        "nodes": [_node(node, arrays) for node in nodes],
    }
    if flags:
        header |= {"flagged": nodes[-1].number, "flags": flags}
    return _framed(header, arrays)


def encode_flags(session: str, number: int, flags: int) -> bytes:
    """The record of what rules have said of a sampled node since it was recorded."""
    return _framed({"session": session, "nodes": [], "flagged": number, "flags": flags}, [])


def _framed(header: Mapping[str, Any], arrays: Sequence[_Array]) -> bytes:
    text = orjson.dumps(header)
    body = b"".join([_HEADER.pack(len(text)), text, *(np.ascontiguousarray(a).tobytes() for a in arrays)])
    return _FRAME.pack(len(body), crc32c(body)) + body


def places(data: bytes) -> tuple[list[tuple[str, int, int]], int]:
    """The records of a segment, up to its end or to the first that is not whole: of each its session and the bytes
    [start, end) that `recorded` reads. Then, how many bytes they take together."""
    found: list[tuple[str, int, int]] = []
    at = 0
    while at + _FRAME.size <= len(data):
        length, checksum = _FRAME.unpack_from(data, at)
        start = at + _FRAME.size
        body = memoryview(data)[start : start + length]
        if len(body) < max(length, _HEADER.size) or crc32c(body) != checksum:
            break
        at = start + length
        found.append((_header(body)["session"], start, at))
    return found, at


def decode(data: bytes) -> Iterator[Recorded]:
    """The records of a segment, up to its end or to the first that is not whole."""
    for _, start, end in places(data)[0]:
        yield recorded(memoryview(data)[start:end])


def _node(node: Node, arrays: list[_Array]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "number": node.number,
        "parent": node.parent.number if node.parent else 0,
        "role": node.role,
        "images": [image.model_dump() for image in node.images],
        "ids": _put(arrays, node.ids),
    }
    turn = node.turn
    if turn is not None:
        found |= {
            "agent": node.kind.agent,
            "label": node.kind.label,
            "lead": _put(arrays, turn.lead),
            "logprobs": _put(arrays, turn.logprobs),
            "versions": _put(arrays, turn.versions),
            "tail": _put(arrays, turn.tail),
        }
        if turn.candidates:
            flat = np.fromiter(chain.from_iterable(turn.candidates), np.int32)
            found["sizes"] = _put(arrays, np.asarray([len(ids) for ids in turn.candidates], np.int32))
            found["candidates"] = _put(arrays, flat)
        if turn.routing is not None:
            found |= {"routed_from": turn.routing.start, "routing": _put(arrays, turn.routing.rows)}
    return found


def _put(arrays: list[_Array], array: _Array) -> list[Any]:
    arrays.append(array)
    return [array.dtype.str, array.shape]


def _header(body: bytes | memoryview) -> dict[str, Any]:
    (length,) = _HEADER.unpack_from(body)
    return orjson.loads(body[_HEADER.size : _HEADER.size + length])


def recorded(body: bytes | memoryview) -> Recorded:
    """The turn in a record's bytes, as `places` gives them."""
    header = _header(body)
    at = _HEADER.size + _HEADER.unpack_from(body)[0]
    nodes: list[Node] = []

    def take(form: list[Any]) -> Any:
        nonlocal at
        dtype, shape = np.dtype(cast(str, form[0])), tuple(form[1])
        count = int(np.prod(shape))
        array = np.frombuffer(body, dtype, count, at).reshape(shape).copy()
        at += array.nbytes
        return array

    for found in header["nodes"]:
        ids = take(found["ids"])
        turn, kind = None, Kind()
        if "lead" in found:
            kind = Kind(found["agent"], found["label"])
            lead, logprobs, versions, tail = (
                take(found[name]) for name in ("lead", "logprobs", "versions", "tail")
            )
            candidates: tuple[tuple[int, ...], ...] = ()
            if "sizes" in found:
                ends = np.cumsum(take(found["sizes"]))
                parts = np.split(take(found["candidates"]), ends[:-1])
                candidates = tuple(tuple(part.tolist()) for part in parts)
            routing = Routing(found["routed_from"], take(found["routing"])) if "routing" in found else None
            turn = SampledTurn(lead, ids, logprobs, versions, tail, candidates, routing)
        images = tuple(ImageItem.model_validate(image) for image in found["images"])
        nodes.append(Node(found["number"], None, found["role"], ids, turn, kind, images))
    return Recorded(
        session=header["session"],
        nodes=tuple(nodes),
        parents=tuple(found["parent"] for found in header["nodes"]),
        finish=header.get("finish", "stop"),
        malformed=header.get("malformed", 0),
        main=bool(nodes) and nodes[-1].kind == Kind(),
        flagged=header.get("flagged", 0),
        flags=header.get("flags", 0),
    )
