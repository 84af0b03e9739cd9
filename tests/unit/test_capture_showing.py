"""Images in a session: expanded in its tokens, collapsed for the engine, stored once, told in the contexts that show them."""

from __future__ import annotations

import asyncio
import hashlib
import io
import itertools
import logging
import struct
import zlib
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import orjson
import pytest
from PIL import Image as Picture

from pipeline.capture.call import BadRequest
from pipeline.capture.dialogue import Dialogue
from pipeline.capture.messages import Content, Image, Message
from pipeline.capture.renderers.base import TemplateError
from pipeline.capture.renderers.chatml import ChatMLRenderer
from pipeline.capture.renderers.choose import load_renderer
from pipeline.capture.session import Session
from pipeline.capture.showing import MAX_PIXELS, Showing, load_showing, size_of
from pipeline.capture.uploads import Uploads
from pipeline.engines import sglang_wire, vllm_wire
from pipeline.engines.base import ImageItem as EngineImage
from pipeline.engines.progress import Ask, BadAnswer, Progress
from pipeline.engines.wire import SamplingParams
from pipeline.store import ObjectMissing, ObjectStore, StoreUnavailable
from schemas.config import Batch, Behaviour
from schemas.envelope import Event
from schemas.facts import Fact, SequenceFinished, SequenceOpened
from schemas.keys import image_key
from schemas.vision import Vision
from services.agent_loop.ending import Ending
from services.process import Context
from tests.capture_parts import ScriptedEngine, complete
from tests.renderer_parts import CALL_MARKS, IM, VISION_MARKS, byte_level, policy

PAD = VISION_MARKS[1]
SMALL = Vision(patch=2, merge=2, min_pixels=16, max_pixels=400, placeholder=PAD)
OPENED = SequenceOpened(
    source="s", sample="s-000000", sequence="s-000000-0", attempt=1, pool="p", task_index=0, host="al",
    base_url="http://127.0.0.1:1", session="s-000000-0-1", budget_s=1.0,
)  # fmt: skip
RENDERER = ChatMLRenderer(byte_level((*IM, *CALL_MARKS, *VISION_MARKS)))
TOKEN = cast("int", RENDERER.tokenizer.special(PAD))


def a_picture(height: int, width: int, seed: int = 0, kind: str = "PNG") -> Image:
    made = Picture.new("RGB", (width, height), (seed % 256, seed // 256, 7))
    file = io.BytesIO()
    made.save(file, kind)
    data = file.getvalue()
    return Image(hashlib.sha256(data).hexdigest(), f"image/{kind.lower()}", data)


class Engine(ScriptedEngine):
    """Keeps the images that it was given."""

    def __init__(self, reply: str = "ok") -> None:
        super().__init__(lambda _: reply, RENDERER)
        self.shown: list[list[EngineImage]] = []

    async def generate(self, token_ids, params, request_id, session_id, *, images=(), **given):  # type: ignore[override, no-untyped-def]
        self.shown.append(list(images))
        return await super().generate(token_ids, params, request_id, session_id, images=images, **given)


def tenant(engine: ScriptedEngine, showing: Showing | None, name: str = "s", **behaviour: object) -> Session:
    given = {"max_turns": 1000, "max_tokens": 16, **behaviour}
    return Session(name, Behaviour.model_validate(given), 100_000, RENDERER, engine, showing=showing)


def asking(*contents: Content) -> Dialogue:
    roles = ("user", "assistant")
    return Dialogue(tuple(Message(roles[i % 2], content) for i, content in enumerate(contents)))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_the_size_is_the_headers(kind: str) -> None:
    assert size_of(a_picture(5, 9, kind=kind)) == (5, 9)


def a_header(width: int, height: int) -> Image:
    """A PNG that claims a size and has no pixels."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    data += struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
    return Image("a" * 64, "image/png", data)


@pytest.mark.parametrize(
    ("image", "told"),
    [
        (a_header(100_000, 100_000), "no readable image/png"),
        (a_header(MAX_PIXELS // 8 + 1, 8), f"over the limit of {MAX_PIXELS}"),
        (a_header(0, 5), "no readable|over the limit"),
        (Image("a" * 64, "image/png", a_picture(5, 5).data[:20]), "no readable image/png"),
        (Image("a" * 64, "image/webp", b"RIFF\0\0\0\0WEBPrest"), "no readable image/webp"),
        (a_picture(1, 250), "1 x 250 pixels"),
    ],
)
async def test_what_cannot_be_shown_is_a_bad_request(image: Image, told: str) -> None:
    session = tenant(Engine(), Showing(TOKEN, SMALL))
    with pytest.raises(BadRequest, match=told):
        await complete(session, "1", asking(("look", image)))


async def test_payloads_have_a_placeholder_for_each_row_and_engines_get_one_an_image() -> None:
    engine, seen = Engine(), []
    session = tenant(engine, Showing(TOKEN, SMALL, seen.append))
    a, b = a_picture(8, 12, 1), a_picture(4, 4, 2)
    await complete(session, "1", asking(("see ", a, a, " and")))
    await complete(session, "2", asking(("see ", a, a, " and"), "ok", ("now", b)))
    fork = await complete(session, "3", asking(("see ", a, a, " and"), "ok", (b, b)))
    assert seen == [a, a, a, a, b, a, a, b, b]
    # 8 x 12 pixels are 2 x 3 tokens of 4 x 4.
    prompt = engine.prompts[1]
    assert prompt.count(TOKEN) == 6 + 6 + 1
    assert fork.prompt_tokens == len(engine.prompts[2])
    export = session.export()
    assert [context.label for context in export.contexts] == ["main", "fork"]
    tokens = export.columns["tokens"]
    for context in export.contexts:
        own = tokens[context.offset : context.offset + context.tokens]
        assert np.flatnonzero(own == TOKEN).tolist() == [
            at for image in context.images for at in range(image.start, image.end)
        ]
    main, other = export.contexts
    assert [(i.digest, i.height, i.width, i.patches, i.end - i.start) for i in main.images] == [
        (a.digest, 8, 12, 24, 6),
        (a.digest, 8, 12, 24, 6),
        (b.digest, 4, 4, 4, 1),
    ]
    assert main.images[:2] == other.images[:2]
    assert [image.bytes for image in main.images] == [len(a.data), len(a.data), len(b.data)]
    # What the engine is sent, is the template's own rendering.
    plain = Engine()
    await complete(tenant(plain, None), "1", asking(("see ", a, a, " and"), "ok", ("now", b)))
    ask = Ask(np.asarray(prompt, np.int32), SamplingParams(), "r", "s", engine.shown[1])
    sent = orjson.loads(vllm_wire.request_body(ask, lambda _: False))
    assert sent["token_ids"].count(TOKEN) == len(sent["content_parts"]) == 3
    assert orjson.loads(sglang_wire.request_body(ask, False))["input_ids"] == sent["token_ids"]
    assert [(each.start, each.tokens) for each in engine.shown[1]] == [
        (image.start, image.end - image.start) for image in main.images
    ]
    assert sent["token_ids"] == plain.prompts[0]


async def test_without_a_placeholder_nothing_changes() -> None:
    engine = Engine()
    session = tenant(engine, None)
    await complete(session, "1", asking(("see ", a_picture(8, 12))))
    assert engine.prompts[0].count(TOKEN) == 1
    assert [(each.start, each.tokens) for each in engine.shown[0]] == [(0, 0)]
    assert session.export().contexts[0].images == ()


async def test_counting_tokens_counts_those_of_images_and_stores_none() -> None:
    seen: list[Image] = []
    session = tenant(Engine(), Showing(TOKEN, SMALL, seen.append))
    dialogue = asking(("see ", a_picture(8, 12)))
    counted = await session.count(dialogue)
    assert seen == []
    answer = await complete(session, "1", dialogue)
    assert counted == answer.prompt_tokens


async def test_a_sampled_placeholder_takes_no_images_place() -> None:
    engine = Engine()
    engine.script = lambda _: [TOKEN, RENDERER.stop_token_ids[0]]
    session = tenant(engine, Showing(TOKEN, SMALL))
    first = await complete(session, "1", asking("q"))
    await complete(session, "2", asking("q", first.content, "no image"))
    with pytest.raises(BadRequest, match="sampled the placeholder"):
        await complete(session, "3", asking("q", first.content, ("image", a_picture(4, 4))))


def a_policy(folder: Path, image: str) -> Path:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{% if p.type == 'image' %}"
        + image
        + "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return policy(folder, template, (*IM, *VISION_MARKS))


@pytest.mark.parametrize(
    ("image", "placeholder", "told"),
    [
        ("<|vision_start|><|image_pad|><|vision_end|>", PAD, None),
        ("<|vision_start|><|image_pad|><|vision_end|>", "", None),
        ("<|image_pad|><|image_pad|>", PAD, "writes 2 of them for an image"),
        ("<|vision_start|><|image_pad|><|vision_end|>", "<|nothing|>", "no such token"),
        ("<|vision_start|><|image_pad|><|vision_end|>", "a", "writes"),
        ("", PAD, "takes no images"),
    ],
)
def test_a_placeholder_that_does_not_fit_is_refused_at_the_start(
    tmp_path: Path, image: str, placeholder: str, told: str | None
) -> None:
    folder = a_policy(tmp_path / "p", image)
    renderer = load_renderer(folder, "template")
    vision = SMALL.model_copy(update={"placeholder": placeholder})
    if told is None:
        found = load_showing(folder, renderer, vision, lambda image: None)
        assert (found is not None) == bool(placeholder)
        return
    with pytest.raises(TemplateError, match=told):
        load_showing(folder, renderer, vision, lambda image: None)


def test_an_engine_that_makes_other_counts_of_an_image_is_told() -> None:
    ask = Ask(
        [1, TOKEN, TOKEN, 2], SamplingParams(), "r", "s", [EngineImage("a" * 64, "image/png", b"", 1, 2)]
    )
    meta = {
        "prompt_tokens": 5,
        "completion_tokens": 1,
        "output_token_logprobs": [[-0.5, 7, None]],
        "finish_reason": {"type": "stop"},
    }
    data = orjson.dumps({"meta_info": meta})
    with pytest.raises(BadAnswer, match=r"5 tokens of the prompt where engine\.vision makes 4"):
        sglang_wire.take(data, Progress(ask.token_ids, ask.params), ask, None, 0)
    sglang_wire.take(
        orjson.dumps({"meta_info": meta | {"prompt_tokens": 4}}),
        Progress(ask.token_ids, ask.params),
        ask,
        None,
        0,
    )


class Counting:
    """A store in memory whose puts can be held back or made to fail, and are counted."""

    def __init__(self) -> None:
        self.store = ObjectStore.in_memory()
        self.puts: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.url = self.store.url

    async def create(self, key: str, data: bytes) -> object:
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        self.puts.append(key)
        return await self.store.create(key, data)

    async def size(self, key: str) -> int | None:
        return await self.store.size(key)


def uploads_to(counting: Counting, remembered: int = 100) -> Uploads:
    return Uploads(counting, "r", remembered)  # pyright: ignore[reportArgumentType]


async def test_an_image_is_uploaded_once_whoever_shows_it_and_settled_when_it_is_there() -> None:
    counting = Counting()
    one, other = uploads_to(counting), uploads_to(counting, remembered=1)
    a, b = a_picture(3, 3, 1), a_picture(3, 3, 2)
    counting.gate.clear()
    for _ in range(3):
        one.see(a)
    settling = asyncio.create_task(one.settle([a.digest]))
    await asyncio.sleep(0)
    assert not settling.done()
    counting.gate.set()
    await settling
    for image in (a, b, a, b):
        other.see(image)
        await other.settle([image.digest])
    one.see(a)
    await one.settle([a.digest, b.digest])
    assert counting.puts == [image_key("r", a.digest), image_key("r", b.digest)]
    assert await counting.store.get(image_key("r", a.digest)) == a.data


async def test_uploads_that_fail_are_told_and_begin_anew() -> None:
    counting = Counting()
    uploads, image = uploads_to(counting), a_picture(3, 3)
    counting.failure = StoreUnavailable("memory:", "no", "wait")
    uploads.see(image)
    with pytest.raises(StoreUnavailable):
        await uploads.settle([image.digest])
    with pytest.raises(ObjectMissing):
        await uploads.settle([image.digest])
    counting.failure = None
    uploads.see(image)
    await uploads.settle([image.digest])
    # A journal of a host that died names images that nobody here has seen.
    with pytest.raises(ObjectMissing, match="no object runs/r/images/bbbb"):
        await uploads.settle(["b" * 64])
    counting.gate.clear()
    uploads.see(a_picture(3, 3, 5))
    await uploads.close()


async def test_bytes_with_deltas_and_without() -> None:
    """20 turns, each with a new screenshot and all the ones before it, of 8 siblings whose first one is the same."""
    with_deltas, without = await uploaded(turns=20, siblings=8, height=24, width=32)
    assert with_deltas == 1 + 8 * 19
    assert without == 8 * sum(range(1, 21))


async def uploaded(turns: int, siblings: int, height: int, width: int) -> tuple[int, int]:
    """Images that the store was sent, and that it would be sent without deltas: all of each request. For the bench, times the
    bytes of one: all are of one size."""
    counting, numbers = Counting(), itertools.count(1)
    uploads = uploads_to(counting)
    sent = 0
    first = a_picture(height, width)
    sessions: list[Session] = []
    for member in range(siblings):
        session = tenant(Engine(), Showing(TOKEN, SMALL, uploads.see), f"s{member}")
        sessions.append(session)
        history: list[Content] = []
        for turn in range(turns):
            screen = first if turn == 0 else a_picture(height, width, next(numbers))
            history.append(("screen", screen))
            await complete(session, str(turn), asking(*history))
            sent += turn + 1
            history.append("ok")
    digests = {image.digest for s in sessions for context in s.export().contexts for image in context.images}
    await uploads.settle(digests)
    assert len(digests) == len(counting.puts)
    return len(counting.puts), sent


async def test_an_upload_that_an_outage_ended_begins_anew_with_the_next_turn() -> None:
    counting, image = Counting(), a_picture(8, 12)
    uploads = uploads_to(counting)
    session = tenant(Engine(), Showing(TOKEN, SMALL, uploads.see))
    counting.failure = StoreUnavailable("memory:", "no", "wait")
    await complete(session, "1", asking(("see ", image)))
    with pytest.raises(StoreUnavailable):
        await uploads.settle([image.digest])
    counting.failure = None
    # The agent sends the image again; its turn is known, and in the tree.
    await complete(session, "2", asking(("see ", image), "ok", "and now?"))
    assert len(session.export().contexts) == 1
    await uploads.settle([image.digest])
    assert counting.puts == [image_key("r", image.digest)]


class Told:
    """A log that takes every fact."""

    def __init__(self) -> None:
        self.facts: list[Fact] = []

    async def publish(self, fact: Fact, cause: object) -> None:
        self.facts.append(fact)


async def test_a_sequence_finishes_with_its_images_or_says_that_one_is_missing() -> None:
    store, told, image = ObjectStore.in_memory(), Told(), a_picture(8, 12)
    uploads = Uploads(store, "r")
    session = tenant(Engine(), Showing(TOKEN, SMALL, uploads.see))
    await complete(session, "1", asking(("see ", image)))
    exported = session.export()
    await uploads.settle([image.digest])
    opened = Event(OPENED, "1", datetime.now(UTC), "test", seq=1)
    config = SimpleNamespace(batch=Batch())
    for where, present in ((store, True), (ObjectStore.in_memory(), False)):
        ctx = SimpleNamespace(run="r", store=where, log=told, logger=logging.getLogger("test"), config=config)
        # Another host, which has seen no image: the attempt comes from a journal.
        ending = Ending(cast(Context, ctx), Uploads(where, "r"))
        failure = await ending.finish(opened, 1.0, "completed", 1, exported)
        assert (failure is None) == present
        if failure is not None:
            assert (failure.kind, failure.reason) == ("infra", "image_missing")
            assert image.digest in failure.detail
    (finished,) = told.facts
    assert isinstance(finished, SequenceFinished)
    assert [shown.digest for shown in finished.contexts[0].images] == [image.digest]
    assert await store.get(image_key("r", image.digest)) == image.data
