"""The file of an export: the same bytes for the same run, all of it back, and nothing that was altered gets through."""

from __future__ import annotations

import base64
import io
import subprocess
import tarfile
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.checksum import crc32c
from pipeline.log import archive_writer
from pipeline.log.archive import Archive, read_archive
from pipeline.log.archive_format import (
    CRC,
    ArchiveError,
    Manifest,
    canonical,
    member_header,
    message_line,
)
from pipeline.log.archive_writer import ArchiveWriter
from pipeline.log.fold import Found

OBJECTS = {"runs/r/a.json": b"{}", "runs/r/b/" + "long" * 40 + ".bin": bytes(range(256)) * 5, "runs/r/c": b""}


def manifest(messages: list[Found], stored: dict[str, bytes], /, **changes: object) -> Manifest:
    values: dict[str, object] = {
        "run": "r",
        "first": messages[0].seq,
        "last": messages[-1].seq,
        "messages": len(messages),
        "payloads": bool(stored),
        "objects": len(stored),
        "object_bytes": sum(map(len, stored.values())),
    }
    return Manifest.model_validate(values | changes)


def write(
    path: Path, messages: list[Found], objects: dict[str, bytes] = OBJECTS, head: Manifest | None = None
) -> Path:
    with ArchiveWriter(path, head or manifest(messages, objects), "steps = 5\n") as writer:
        for found in messages:
            writer.message(found)
        for key, data in objects.items():
            writer.object(key, data)
        writer.close()
    return path


def some(count: int, first: int = 1) -> list[Found]:
    return [
        Found(f"rl.r.a.b.c.{i}", {"ce-id": str(i)}, b"body %d" % i, i) for i in range(first, first + count)
    ]


def check(path: Path) -> None:
    with Archive(path) as archive:
        for _ in archive.check():
            pass


def made(path: Path, *members: tuple[str, bytes]) -> Path:
    """A file whose members are whole, but which need not be what an export writes."""
    parts = []
    for name, data in members:
        parts += [member_header(name, len(data), crc32c(data)), data, bytes(-len(data) % 512)]
    path.write_bytes(b"".join(parts) + bytes(1024))
    return path


def with_lines(path: Path, *lines: bytes, last: int = 1, **changes: object) -> Path:
    head = manifest(some(last), {}, **changes).model_dump_json().encode()
    return made(
        path, ("manifest.json", head), ("config.toml", b""), ("messages/000000000001.jsonl", b"".join(lines))
    )


names = st.text("abcdefghij-", min_size=1, max_size=9)
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"), max_size=30)
tokens = st.text(
    st.characters(min_codepoint=33, exclude_categories=["Cs", "Z", "Cc"], exclude_characters=".*>"),
    min_size=1,
)


@settings(max_examples=60)
@given(
    first=st.integers(1, 10**12),
    bodies=st.lists(
        st.tuples(st.sampled_from(["rl.r", "dlq.r"]), tokens, st.dictionaries(names, texts, max_size=4), st.binary(max_size=300)),
        min_size=1,
        max_size=30,
    ),
    per_chunk=st.integers(1, 7),
)  # fmt: skip
def test_every_message_comes_back_as_it_went(tmp_path_factory, first: int, bodies, per_chunk: int) -> None:
    path = tmp_path_factory.mktemp("a") / "r.tar"
    messages = [
        Found(f"{root}.{token}", headers, body, first + i) for i, (root, token, headers, body) in enumerate(bodies)
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archive_writer, "CHUNK_MESSAGES", per_chunk)
        write(path, messages)
    expected = [canonical(found, first) for found in messages]
    assert [canonical(found, first) for found in expected] == expected
    assert list(read_archive(path)) == expected
    with Archive(path) as archive:
        for _ in archive.check():
            pass
        assert {key: archive.read(member) for key, member in archive.objects()} == OBJECTS
        for start in range(first, first + len(messages)):
            assert next(iter(archive.messages(start))).seq == start


def test_the_same_run_gives_the_same_bytes_which_tar_reads_without_a_word(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one.tar", some(2500)), write(tmp_path / "two.tar", some(2500))
    assert one.read_bytes() == two.read_bytes()
    with tarfile.open(one) as tar:
        assert [m.name for m in tar][:3] == ["manifest.json", "config.toml", "messages/000000000001.jsonl"]
        key = max(OBJECTS, key=len)
        assert tar.extractfile(f"objects/{key}").read() == OBJECTS[key]  # pyright: ignore[reportOptionalMemberAccess]
    listed = subprocess.run(["tar", "-tf", str(one)], capture_output=True, text=True, check=True)
    assert len(listed.stdout.splitlines()) == 2 + 3 + len(OBJECTS)
    assert listed.stderr == ""


def test_a_file_appears_whole_or_not_at_all_and_replaces_none(tmp_path: Path) -> None:
    path = tmp_path / "r.tar"
    for messages, said in (
        (some(1), "ends at message 1 with 0 objects, of 2 and 0"),
        (some(1, 3), "message 3 came where 1 was expected"),
        ([Found("rl.other.a", None, b"", 1)], "no subject of run r"),
    ):
        with pytest.raises(ArchiveError, match=said):
            write(path, messages, {}, manifest(some(2), {}))
    assert list(tmp_path.iterdir()) == []
    write(path, some(2))
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileExistsError):
        write(path, some(2))


def test_no_byte_can_be_altered_and_no_end_cut_off(tmp_path: Path) -> None:
    path = write(tmp_path / "r.tar", some(3))
    check(path)
    whole = path.read_bytes()
    for at in [*range(0, len(whole), 61), *range(len(whole) - 1500, len(whole), 7)]:
        changed = bytearray(whole)
        changed[at] ^= 1 << (at % 8)
        path.write_bytes(changed)
        with pytest.raises(ArchiveError):
            check(path)
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        with pytest.raises(ArchiveError, match=r"cut off|does not|holds no|not where"):
            check(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(ArchiveError, match="something follows its end"):
        check(path)


def line(**changes: object) -> bytes:
    value: dict[str, object] = {"seq": 1, "subject": "rl.r.a", "headers": [], "body": ""}
    return orjson.dumps(value | changes) + b"\n"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([line(subject="rl.other.a")], "no subject of run r"),
        ([line(subject="rl.r.>")], "no subject of run r"),
        ([line(subject="rl.r.a b")], "no subject of run r"),
        ([line(subject="rl.r.")], "no subject of run r"),
        ([line(subject="rl.r.a\r\nPUB x 0")], "no subject of run r"),
        ([line(subject="$JS.API.STREAM.DELETE.RL_r")], "no subject of run r"),
        ([line(subject="rl.r." + "a" * 5000)], "no subject of run r"),
        ([line(subject=7)], "line 1 is not message 1"),
        ([line(headers=[["Nats-Rollup", "all"]])], "message 1 has headers that may not be in it"),
        ([line(headers=[["nats-ttl", "1"]])], "message 1 has headers that may not be in it"),
        ([line(headers=[["a", "b\r\nNats-Rollup: all"]])], "message 1 has headers that may not be in it"),
        ([line(headers=[["a: b\r\nc", "d"]])], "message 1 has headers that may not be in it"),
        ([line(headers=[["a", "b"], ["a", "c"]])], "line 1 is not message 1"),
        ([line(headers=[["a", 1]])], "line 1 is not message 1"),
        ([line(headers=None)], "line 1 is not message 1"),
        ([line(body="****")], "line 1 is not message 1"),
        ([line(seq=2)], "line 1 is not message 1"),
        ([line(seq=True)], "line 1 is not message 1"),
        ([line(more=1)], "line 1 is not message 1"),
        ([line(), line(seq=2)], "holds 2 messages, expected 1"),
        ([], "holds 0 messages, expected 1"),
        ([b"[]\n"], "line 1 is not message 1"),
        ([b"{\n"], "line 1 is not message 1"),
    ],
)  # fmt: skip
def test_messages_that_are_none_of_the_run_are_refused(tmp_path: Path, lines: list[bytes], said: str) -> None:
    with pytest.raises(ArchiveError, match=said):
        check(with_lines(tmp_path / "r.tar", *lines))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"run": "a/../b"}, "run: String should match"),
        ({"format": 2}, "format"),
        ({"messages": 5}, "messages is not last - first"),
        ({"last": "1"}, "last"),
        ({"more": 1}, "more: Extra inputs"),
        ({"objects": 1}, "it holds 0 objects of 0 bytes, its manifest says 1 of 0"),
    ],
)
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    head = orjson.dumps(manifest(some(1), {}).model_dump() | changes)
    path = made(
        tmp_path / "r.tar",
        ("manifest.json", head),
        ("config.toml", b""),
        ("messages/000000000001.jsonl", line()),
    )
    with pytest.raises(ArchiveError, match=said):
        check(path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("objects/../../etc/passwd", "not a relative path"),
        ("objects//etc/passwd", "not a relative path"),
        ("objects/runs/other/x", "is none of run r"),
        ("objects/runs/r/../other/x", "not a relative path"),
        ("/etc/passwd", "limit 0"),
        ("../x", "limit 0"),
        ("messages/../x", "stand|place"),
    ],
)
def test_members_that_lie_elsewhere_are_refused(tmp_path: Path, name: str, said: str) -> None:
    head = manifest(some(1), {}, payloads=True, objects=1, object_bytes=1).model_dump_json().encode()
    path = made(
        tmp_path / "r.tar", ("manifest.json", head), ("config.toml", b""), ("messages/000000000001.jsonl", line()), (name, b"x")
    )  # fmt: skip
    with pytest.raises(ArchiveError, match=said):
        check(path)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (tarfile.SYMTYPE, "is a symbolic link"),
        (tarfile.LNKTYPE, "is a hard link"),
        (tarfile.CHRTYPE, "is a device"),
        (tarfile.DIRTYPE, "is a directory"),
        (tarfile.REGTYPE, "without a checksum"),
    ],
)
@pytest.mark.parametrize("pax", [False, True])
def test_other_kinds_of_members_are_refused(tmp_path: Path, kind: bytes, said: str, pax: bool) -> None:
    path = write(tmp_path / "r.tar", some(1), {})
    info = tarfile.TarInfo("objects/runs/r/x")
    info.type, info.linkname = kind, "/etc/passwd" if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
    if pax:
        info.pax_headers = {CRC: f"00000000-{crc32c(info.name.encode()):08x}"}
        info.mode = 0o777
        said = said if kind != tarfile.REGTYPE else "not as an export writes it"
    path.write_bytes(path.read_bytes()[:-1024] + info.tobuf(tarfile.PAX_FORMAT) + bytes(1024))
    with pytest.raises(ArchiveError, match=said):
        check(path)


def test_a_claimed_size_costs_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "r.tar", some(1), {})
    body = path.read_bytes()[:-1024]
    path.write_bytes(body + member_header("objects/runs/r/x", 4 << 30, 0) + bytes(1024))
    with pytest.raises(ArchiveError, match="cut off in member 'objects/runs/r/x'"):
        check(path)
    path.write_bytes(body + member_header("objects/runs/r/x", 6 << 30, 0) + bytes(1024))
    with pytest.raises(ArchiveError, match="has 6442450944 bytes, limit 5368709120"):
        check(path)
    huge = tarfile.TarInfo("pax")
    huge.type, huge.size = tarfile.XHDTYPE, 1 << 33
    path.write_bytes(body + huge.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    with pytest.raises(ArchiveError, match="without a checksum"):
        check(path)


def test_what_is_no_tar_file_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"x" * 5000, bytes(1024), bytes(10240)):
        (tmp_path / "f").write_bytes(content)
        with pytest.raises(ArchiveError, match=str(tmp_path / "f")):
            check(tmp_path / "f")
    other = io.BytesIO()
    with tarfile.open(fileobj=other, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("manifest.json"))
    (tmp_path / "f").write_bytes(other.getvalue())
    with pytest.raises(ArchiveError, match="without a checksum"):
        check(tmp_path / "f")


def test_objects_stand_in_order(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="in the order of their keys"):
        write(tmp_path / "r.tar", some(1), {"runs/r/b": b"", "runs/r/a": b""})
    assert base64.b64decode(orjson.loads(message_line(some(1)[0]))["body"]) == b"body 1"
