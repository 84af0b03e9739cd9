"""The pure parts of listing and moving runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import Override, load
from schemas.names import BadName
from services.cli.archive import groups, portable
from services.cli.reach import home_of, running_broker
from services.cli.run_list import Row, as_line, ordered, state_of

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"


@given(st.lists(st.integers(0, 100 << 20), max_size=60))
def test_objects_move_in_groups_of_bounded_size_all_of_them_in_order(sizes: list[int]) -> None:
    objects = [(f"runs/r/{i:03d}", count) for i, count in enumerate(sizes)]
    cut = list(groups(objects))
    assert [entry for group in cut for entry in group] == objects
    for group in cut:
        assert 1 <= len(group) <= 16
        assert len(group) == 1 or sum(count for _, count in group) <= 64 << 20


def test_what_belongs_to_a_machine_does_not_travel() -> None:
    here = {
        ("directory",): "/here",
        ("broker", "url"): "nats://10.0.0.1:4222",
        ("broker", "token_file"): "/here/token",
        ("store", "url"): "s3://here/x",
        ("store", "endpoint"): "http://10.0.0.1:9000",
        ("store", "credentials_file"): "/here/keys",
        ("engine", "url"): "http://10.0.0.1:8000",
        ("engine", "token_file"): "/here/engine",
        ("agent_loop", "bind"): "10.0.0.1",
        ("agent_loop", "advertise"): "10.0.0.1",
        ("agent_loop", "run_key_file"): "/here/key",
        ("packer", "socket_dir"): "/here/sockets",
        ("trainer", "rendezvous"): "10.0.0.1:29500",
    }
    config = load(DEMO, [Override("", path, value) for path, value in here.items()])
    moved = portable(config)
    text = moved.model_dump_json()
    assert "/here" not in text
    assert "10.0.0.1" not in text
    assert portable(moved) == moved == portable(load(DEMO))
    assert moved.decisions() == config.decisions()


def test_a_run_is_over_running_or_unfinished_in_that_order() -> None:
    assert state_of("completed", running=True, importing=False, began=True) == "completed"
    assert state_of("cancelled", running=False, importing=False, began=True) == "cancelled"
    assert state_of(None, running=True, importing=False, began=True) == "running"
    assert state_of(None, running=False, importing=True, began=True) == "import unfinished"
    assert state_of(None, running=False, importing=False, began=True) == "unfinished"
    assert state_of(None, running=False, importing=False, began=False) == "not begun"


def test_the_newest_is_last_and_what_has_no_time_is_first() -> None:
    rows = [
        Row("b", "x", time="2026-01-02T00:00:00+00:00"),
        Row("a", "x", time="2026-01-03T00:00:00+00:00"),
        Row("c", "no log"),
    ]
    assert [row.run for row in ordered(rows)] == ["c", "b", "a"]
    assert json.loads(as_line(rows[2]))["last"] is None


@pytest.mark.parametrize("run", ["..", "a/b", "", "a.b"])
def test_no_name_leads_out_of_the_directory(run: str) -> None:
    with pytest.raises(BadName):
        home_of(Path("/d"), run)


def test_the_running_broker_is_the_one_that_was_started_last(tmp_path: Path) -> None:
    assert running_broker(tmp_path) is None
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/nats.conf").write_text('listen: "127.0.0.1:4711"\nserver_name: x\n')
    broker = running_broker(tmp_path)
    assert broker is not None
    assert broker.url == "nats://127.0.0.1:4711"
