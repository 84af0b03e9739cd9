"""What `packtrain payload show` says of each kind of object."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from pipeline.config import dumps, load
from pipeline.store import ObjectStore, StoreError
from pipeline.store.payload import write_payload, write_sidecar
from schemas.config import Store
from schemas.keys import (
    artefact_key,
    claim_key,
    grading_key,
    image_key,
    payload_key,
    plan_key,
    sidecar_key,
    weights_key,
)
from schemas.signal import Teacher
from services.cli import payload
from services.cli.embedded import LaunchError
from services.cli.stored import MAX_SHOWN
from services.cli.where import Where

PAYLOAD = payload_key("demo", "arithmetic", "arithmetic-000000-0-a1")
TEACHER, ADVANTAGES = sidecar_key(PAYLOAD, "teacher.large"), sidecar_key(PAYLOAD, "advantages.0")
COLUMNS = {
    "tokens": np.arange(8, dtype=np.int32),
    "loss_mask": np.array([0, 0, 1, 1, 0, 1, 0, 0], np.uint8),
    "logprobs": np.array([0, 0, -1, -3, 0, -5, 0, 0], np.float32),
    "policy_version": np.zeros(8, np.int32),
    "segments": np.array([[0, 2, 1, 0, 0], [2, 4, 2, 3, 0], [4, 5, 3, 0, 0], [5, 8, 2, 3, 0]], np.int32),
}


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """The store of a run `demo` whose record lies in `tmp_path`."""
    place = Store(url=(tmp_path / "objects").as_uri())
    config = load(Path(__file__).parents[2] / "examples" / "demo.toml")
    home = tmp_path / "runs" / "demo"
    home.mkdir(parents=True)
    scored = config.sources[0].model_copy(update={"teachers": ("large",)})
    config = config.model_copy(
        update={
            "run": "demo",
            "directory": str(tmp_path),
            "store": place,
            "sources": (scored, *config.sources[1:]),
            "teachers": (Teacher(name="large"),),
        }
    )
    (home / "config.toml").write_text(dumps(config))
    return ObjectStore.open(place)


def shown(tmp_path: Path, key: str) -> str:
    console = Console(width=200, force_terminal=False)
    with console.capture() as capture:
        payload.show(key, Where(directory=tmp_path, run="demo"), console)
    return capture.get()


INHERITED = "runs/demo/inherited/arithmetic/arithmetic-000000-0-a1.safetensors"


@pytest.mark.parametrize("key", [PAYLOAD, INHERITED], ids=["its own", "another run's"])
def test_sidecars_are_shown_turn_by_turn_and_named_beside_their_payload(
    tmp_path: Path, store: ObjectStore, key: str
) -> None:
    of_teacher, advantages = sidecar_key(key, "teacher.large"), sidecar_key(key, "advantages.0")

    async def fill() -> None:
        await write_payload(store, key, COLUMNS)
        await write_sidecar(store, advantages, {"advantages": np.array([1, 2, -0.5], np.float32)})
        await write_sidecar(
            store,
            of_teacher,
            {
                "logprobs": np.array([-2, -4, -0.25], np.float32),
                "top_ids": np.zeros((3, 2), np.int32),
                "top_logprobs": np.zeros((3, 2), np.float32),
            },
        )

    asyncio.run(fill())
    teacher = shown(tmp_path, of_teacher)
    assert teacher.splitlines()[0].endswith(
        f"bytes: teacher.large of {key}, a row for each of its 3 loss tokens"
    )
    assert "top_logprobs" in teacher
    assert "3 x 2" in teacher
    rows = [line.replace("│", " ").split() for line in teacher.splitlines()]
    assert [
        "1",
        "2..4",
        "assistant",
        "0",
        "2",
        "-3.000",
        "-4.000..-2.000",
        "-2.000",
        "-3.000..-1.000",
    ] in rows
    assert [
        "3",
        "5..8",
        "assistant",
        "0",
        "1",
        "-0.250",
        "-0.250..-0.250",
        "-5.000",
        "-5.000..-5.000",
    ] in rows
    rows = [line.replace("│", " ").split() for line in shown(tmp_path, advantages).splitlines()]
    assert ["1", "2..4", "assistant", "0", "2", "1.500", "1.000..2.000"] in rows
    assert [row[0] for row in rows if len(row) == 7] == ["1", "3"]
    assert shown(tmp_path, key).splitlines()[-2:] == [
        f"beside it: {each}" for each in (of_teacher, advantages)
    ]


def test_a_sidecar_that_fits_not_its_payload_or_is_damaged_is_refused(
    tmp_path: Path, store: ObjectStore
) -> None:
    async def fill() -> None:
        await write_payload(store, PAYLOAD, COLUMNS)
        await write_sidecar(store, ADVANTAGES, {"advantages": np.zeros(2, np.float32)})
        await write_sidecar(store, TEACHER, {"logprobs": np.zeros(3, np.float32)})

    asyncio.run(fill())
    with pytest.raises(LaunchError, match=r"has rows advantages 2; its payload .* has 3 loss tokens"):
        shown(tmp_path, ADVANTAGES)
    path = tmp_path / "objects" / TEACHER
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(StoreError, match=r"teacher\.large\.safetensors is damaged: column logprobs"):
        shown(tmp_path, TEACHER)


def test_what_is_no_payload_is_told_and_not_called_damaged(tmp_path: Path, store: ObjectStore) -> None:
    report = {"grader": "rubric", "answer": {"sequences": [{"reason": "caf\u00e9\x1b[31m"}]}}
    objects = {
        artefact_key("demo", "arithmetic-000000-0-a1", "agent_log"): b"line one\n\x1b[31mred \xff\n",
        grading_key("demo", "arithmetic", "arithmetic-000000"): json.dumps(report).encode(),
        plan_key("demo", 1, 7): b"{}",
        weights_key("demo", 1, "n"): b"0123456789",
        "runs/demo/inherited/0123abcd.json": b"[]",
        artefact_key("demo", "arithmetic-000000-0-a1", "empty"): b"",
        artefact_key("demo", "arithmetic-000000-0-a1", "long"): b"x" * (MAX_SHOWN + 5),
        claim_key("demo"): b"{}",
        image_key("demo", "0" * 64): b"\x89PNG",
    }

    async def fill() -> None:
        for key, body in objects.items():
            await store.create(key, body)

    asyncio.run(fill())
    log, grading, plan, weights, groups, empty, long, claim, image = (
        (key, shown(tmp_path, key)) for key in objects
    )
    assert log[1] == (
        f"{log[0]}, 20 bytes: an artefact, which a trial left to be looked at; no payload\nline one\n\\x1b[31mred \N{REPLACEMENT CHARACTER}\n\n"
    )
    assert "a grader's report on a group (JSON); no payload\n{\n" in grading[1]
    assert '"reason": "café\\u001b[31m"' in grading[1]
    assert plan[1] == f"{plan[0]}, 2 bytes: the plan of a batch (JSON), which packers read; no payload\n"
    assert weights[1] == f"{weights[0]}, 10 bytes: the weights after a step (safetensors); no payload\n"
    assert groups[1] == f"{groups[0]}, 2 bytes: the facts of another run's groups (JSON); no payload\n[]\n"
    assert empty[1].count("\n") == 1
    assert long[1].endswith("\n[5 bytes after this are not shown]\n")
    assert "2 bytes: the claim: which log the objects beside it are of (JSON); no payload\n{}" in claim[1]
    assert image[1] == f"{image[0]}, 4 bytes: an image, which sequences share; no payload\n"
    with pytest.raises(StoreError, match="no object runs/demo/artefacts/a/b"):
        shown(tmp_path, "runs/demo/artefacts/a/b")
