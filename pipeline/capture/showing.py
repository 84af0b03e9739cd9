"""Images in a session's tokens: of one placeholder that the template writes, as many as the policy's processor makes of the image.

Promises: what the tree holds, and so what is trained, has one placeholder for each row of the encoder's output, and says which
are whose; no pixel is unpacked here, whatever the bytes claim; what the policy's processor refuses, or would take a large
picture's memory, is a `BadRequest`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image as Picture

from pipeline.capture.call import BadRequest
from pipeline.capture.dialogue import Dialogue, Step
from pipeline.capture.messages import Image, Message
from pipeline.capture.renderers.base import Renderer, TemplateError
from pipeline.capture.tokenizer import PolicyTokenizer
from pipeline.capture.tree import Ids, Node
from pipeline.engines.base import ImageItem as EngineImage
from pipeline.vision.items import FORMATS, patches, tokens
from schemas.payload import ImageItem
from schemas.vision import Vision

MAX_PIXELS = 1 << 26
"""Largest picture, unpacked: 192 MiB of RGB."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """New steps of a dialogue: of each its tokens; and, where the policy is trained on images, those that it shows."""

    ids: list[Ids]
    images: list[tuple[ImageItem, ...]] = field(default_factory=list[tuple[ImageItem, ...]])


class Showing:
    """How one policy is shown images. Safe to share between threads.

    token: id of the placeholder. seen: is given the images of a dialogue that the policy is asked to go on with, on the event
    loop; with each request anew, as agents send them, so that what could not be done with one is tried again."""

    def __init__(
        self, token: int, vision: Vision, seen: Callable[[Image], None] = lambda image: None
    ) -> None:
        self.token = token
        self._seen = seen
        self._vision = vision
        # Reads the modules of the formats, which would be in some agent's time.
        Picture.preinit()

    def see(self, steps: Sequence[Step]) -> None:
        """The policy is asked to go on after them."""
        for image in _images(message for step in steps for message in step.messages):
            self._seen(image)

    def expanded(self, rendered: Sequence[Sequence[int]], steps: Sequence[Step]) -> Rendered:
        """The renderings of those steps, with each image's placeholder as often as it has tokens. Raises BadRequest."""
        found = [self._expand(ids, _images(step.messages)) for ids, step in zip(rendered, steps, strict=True)]
        return Rendered([ids for ids, _ in found], [images for _, images in found])

    def _expand(self, ids: Sequence[int], images: Sequence[Image]) -> tuple[Ids, tuple[ImageItem, ...]]:
        found = np.asarray(ids, np.int32)
        places = np.flatnonzero(found == self.token)
        if len(places) != len(images):
            raise BadRequest(
                f"the template shows {len(places)} images of the {len(images)} in a turn: leave images out there",
                "messages",
            )
        items: list[ImageItem] = []
        added = 0
        for place, image in zip(places.tolist(), images, strict=True):
            item = self._item(image, place + added)
            items.append(item)
            added += item.end - item.start - 1
        counts = np.ones(len(found), np.int64)
        counts[places] = [item.end - item.start for item in items]
        return np.repeat(found, counts), tuple(items)

    def _item(self, image: Image, start: int) -> ImageItem:
        height, width = size_of(image)
        try:
            rows = tokens(height, width, self._vision)
        except ValueError as error:
            raise BadRequest(f"{error}: send another", "messages") from None
        return ImageItem(
            digest=image.digest,
            bytes=len(image.data),
            height=height,
            width=width,
            patches=patches(height, width, self._vision),
            start=start,
            end=start + rows,
        )


def size_of(image: Image) -> tuple[int, int]:
    """(height, width) in pixels, as the image's header says. Raises BadRequest."""
    try:
        with Picture.open(io.BytesIO(image.data), formats=FORMATS) as picture:
            width, height = picture.size
    # Pillow's readers raise what they like over damaged bytes, and its own limit is beyond ours.
    except Exception as error:
        raise BadRequest(
            f"image {image.digest[:12]} of {len(image.data)} bytes is no readable {image.media_type}: {error!r}",
            "messages",
        ) from None
    if not 0 < height * width <= MAX_PIXELS:
        raise BadRequest(
            f"image {image.digest[:12]} is {height} x {width} pixels, over the limit of {MAX_PIXELS}: send it smaller",
            "messages",
        )
    return height, width


def placed(
    showing: Showing | None, dialogue: Dialogue, known: Node, rendered: Rendered, prompt: Ids
) -> list[EngineImage]:
    """The dialogue's images as an engine takes them, in order: those of the path to `known` and those of the steps after it, by
    their places in the prompt. The agent sends them with each request: nothing of a session holds their bytes.

    Raises BadRequest when the policy has sampled a placeholder: the engine would take it for an image's."""
    images = _images(dialogue.messages)
    if showing is None or not images:
        return [EngineImage(image.digest, image.media_type, image.data) for image in images]
    items = list(image_items(known.path()))
    first = known.tokens
    for ids, shown in zip(rendered.ids, rendered.images, strict=True):
        items += (_moved(item, first) for item in shown)
        first += len(ids)
    if np.count_nonzero(prompt == showing.token) != sum(item.end - item.start for item in items):
        raise BadRequest(
            "the policy has sampled the placeholder of images in this dialogue, which can show none any more",
            "messages",
            "sampled_placeholder",
        )
    return [
        EngineImage(image.digest, image.media_type, image.data, item.start, item.end - item.start)
        for image, item in zip(images, items, strict=True)
    ]


def image_items(path: Iterable[Node]) -> tuple[ImageItem, ...]:
    """The images of a path from the root's child on, in order, by their places in the path's own tokens."""
    return tuple(
        _moved(item, node.parent.tokens) for node in path if node.parent is not None for item in node.images
    )


def _moved(item: ImageItem, by: int) -> ImageItem:
    return item.model_copy(update={"start": item.start + by, "end": item.end + by})


def _images(messages: Iterable[Message]) -> list[Image]:
    return [image for message in messages for image in message.images]


def load_showing(
    policy_dir: str | Path, renderer: Renderer, vision: Vision, seen: Callable[[Image], None]
) -> Showing | None:
    """How the policy of a directory is shown images; None where `vision` names no placeholder.

    Raises TemplateError when the renderer does not write the placeholder just once for an image, or a text can be one."""
    if not vision.placeholder:
        return None
    token = PolicyTokenizer.load(policy_dir).token_id(vision.placeholder)
    remedy = "set engine.vision.placeholder to the token that the policy's chat template writes for an image"
    if token is None or not renderer.images:
        lacks = "vocabulary has no such token" if token is None else "template takes no images"
        raise TemplateError(
            f"engine.vision.placeholder is {vision.placeholder!r}, and the policy's {lacks}: {remedy}"
        )
    one = Message("user", ("a", Image("0" * 64, "image/png", b""), "b"))
    spelled = Message("user", f"a {vision.placeholder} b")
    for message, expected in ((one, 1), (spelled, 0)):
        count = renderer.steps(Dialogue((message,)), 1)[0].count(token)
        if count != expected:
            what = "an image" if expected else "its text"
            raise TemplateError(
                f"engine.vision.placeholder is {vision.placeholder!r}, and the policy's template writes {count} of them for {what}, "
                f"not {expected}: {remedy}"
            )
    return Showing(token, vision, seen)
