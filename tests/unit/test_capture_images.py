"""Images and bodies as they come in: what bytes are, what is refused, what is repaired."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.capture.call import BadRequest
from pipeline.capture.dialects import images
from pipeline.capture.dialects.body import digest_of, load, one_preamble, read_json
from pipeline.capture.dialects.images import MAX_IMAGE_BYTES, MAX_IMAGES, ImageIntake
from pipeline.capture.messages import Message
from tests.dialect_parts import PNG

KINDS = {
    "image/png": b"\x89PNG\r\n\x1a\nrest",
    "image/jpeg": b"\xff\xd8\xff\xe0rest",
    "image/gif": b"GIF89arest",
    "image/webp": b"RIFF\x00\x00\x00\x00WEBPrest",
}


@pytest.mark.parametrize(("media_type", "data"), KINDS.items())
def test_an_image_is_what_its_bytes_say(media_type: str, data: bytes) -> None:
    text = base64.b64encode(data).decode()
    taken = ImageIntake()
    for image in (
        taken.base64(text, "w"),
        taken.url(f"data:image/anything;base64,{text}", "w"),
        taken.url(f"DATA:;x=1;BASE64,{text}", "w"),
    ):
        assert (image.media_type, image.data) == (media_type, data)
        assert image.digest == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("https://example.com/" + "a" * 500, "nothing is fetched"),
        ("file:///etc/passwd", "nothing is fetched"),
        ("", "nothing is fetched"),
        ("data:image/png,raw", "not base64"),
        ("data:image/png;base64,####", "not base64"),
        ("data:image/png;base64,AAA", "not base64"),
        ("data:image/png;base64,\u00e4", "not base64"),
        ("data:image/png;base64,", "0 bytes"),
        ("data:image/png;base64,PHN2Zz48L3N2Zz4=", "no PNG, JPEG, GIF or WebP"),
    ],
)
def test_what_is_no_image_is_refused(url: str, told: str) -> None:
    with pytest.raises(BadRequest, match=told) as refused:
        ImageIntake().url(url, "messages.3.content.1")
    assert refused.value.param == "messages.3.content.1"
    assert str(refused.value).startswith("messages.3.content.1: ")
    assert len(str(refused.value)) < 250


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_IMAGE_BYTES == 16 << 20
    taken = ImageIntake()
    for _ in range(MAX_IMAGES):
        taken.base64(PNG, "w")
    with pytest.raises(BadRequest, match=f"more than {MAX_IMAGES} images"):
        taken.base64(PNG, "w")
    size = len(base64.b64decode(PNG))
    monkeypatch.setattr(images, "MAX_IMAGE_BYTES", size)
    assert ImageIntake().base64(PNG, "w").media_type == "image/png"
    for limit in range(1, size):
        monkeypatch.setattr(images, "MAX_IMAGE_BYTES", limit)
        with pytest.raises(BadRequest, match=f"over the limit of {limit}"):
            ImageIntake().base64(PNG, "w")


# st.text leaves surrogates out.
halves = st.integers(0xD800, 0xDFFF).map(chr)
said = st.lists(st.characters() | halves, max_size=4).map("".join)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | said,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(said, inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_every_json_text_is_read_and_can_be_digested(value: Any) -> None:
    text = json.dumps({"v": value}).replace("Infinity", "1e999")
    read, ignored = load(text.encode())
    assert len(digest_of(read, ())) == 64
    again, _ = read_json(json.dumps(read))
    assert again == read
    if re.search("[\ud800-\udfff]", json.dumps(json.loads(text), ensure_ascii=False)):
        assert ignored == ("(repaired)",)


@pytest.mark.parametrize("depth", [240, 300, 900, 5000])
def test_what_nests_too_deep_is_refused(depth: int) -> None:
    text = b'{"v": ' + b"[" * depth + b"]" * depth + b"}"
    if depth == 240:
        digest_of(load(text)[0], ())
        return
    with pytest.raises(BadRequest, match=r"nests too deep|not JSON"):
        digest_of(load(text)[0], ())
    with pytest.raises(BadRequest):
        digest_of(load(text.replace(b"[]", b'["\\ud800"]'))[0], ())


def test_leading_system_messages_are_one() -> None:
    a, b, u = Message("system", "a"), Message("system", "b"), Message("user", "u")
    assert one_preamble([a, b, u, a]) == (Message("system", "a\nb"), u, a)
    assert one_preamble([u, a, b]) == (u, a, b)
    assert one_preamble([a, b]) == (Message("system", "a\nb"),)
    assert one_preamble([]) == ()
