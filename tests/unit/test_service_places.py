"""What `packtrain service` makes of a configuration with and without an index: names, addresses of a gang, refusals."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from pydantic import ValidationError

import services.packer
from pipeline.feed.places import Place, claim
from pipeline.feed.server import listen
from pipeline.feed.wire import socket_path
from pipeline.hosts.health import Health
from pipeline.hosts.report import HostReport
from schemas.config import RunConfig
from services.cli.embedded import BadInput
from services.cli.gang import gang, own_bind
from services.cli.service import check_place, own_label
from services.cli.status import expected, status_of, view
from services.packer import _take
from tests.log_parts import until

if TYPE_CHECKING:
    from services.process import Context


def config(**sections: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "agent_loop": {"hosts": 1},
            "pools": [{"name": "chat", "harness": "chat", "hosts": 2}],
            "sources": [{"name": "s", "pool": "chat", "groups": 1, "environment": {"kind": "arithmetic"}}],
            **sections,
        }
    )


def options(arguments: tuple[str, ...]) -> dict[str, str]:
    """The options of a command line that ends in pairs of name and value."""
    pairs = arguments[arguments.index("--config") :]
    return dict(zip(pairs[::2], pairs[1::2], strict=True))


def test_a_gang_is_all_ranks_at_one_rendezvous_with_a_port_each() -> None:
    unit = gang(
        config(
            batch={"dp": 2, "tp": 2},
            trainer={"rendezvous": "127.0.0.1:29500"},
            metrics={"bind": "0.0.0.0:9464"},
        ),
        Path("/run.toml"),
    )
    assert unit.ends
    assert [options(member.argv) for member in unit.members] == [
        {
            "--config": "/run.toml",
            "--index": str(rank),
            "--rendezvous": "127.0.0.1:29500",
            "--metrics-bind": f"0.0.0.0:{9464 + rank}",
        }
        for rank in range(4)
    ]


def test_a_gang_without_a_rendezvous_meets_at_a_free_loopback_port() -> None:
    first, second = gang(config(batch={"dp": 2}), Path("run.toml")).members
    place = options(first.argv)["--rendezvous"]
    assert place.startswith("127.0.0.1:")
    assert int(place.rpartition(":")[2]) > 0
    assert options(second.argv)["--rendezvous"] == place
    assert "--metrics-bind" not in first.argv


@pytest.mark.parametrize(
    ("bind", "rank", "own"),
    [
        ("", 3, ""),
        ("127.0.0.1:0", 3, "127.0.0.1:0"),
        ("[::1]:9464", 3, "[::1]:9467"),
        ("h:65534", 1, "h:65535"),
    ],
)
def test_where_a_rank_serves_its_metrics(bind: str, rank: int, own: str) -> None:
    assert own_bind(bind, rank) == own


def test_ports_that_there_are_not_are_refused_before_a_rank_starts() -> None:
    with pytest.raises(BadInput, match=r"metrics\.bind h:65535: rank 1 would serve on port 65536"):
        gang(config(batch={"dp": 2}, metrics={"bind": "h:65535"}), Path("run.toml"))


def test_what_has_no_index_is_not_counted_and_what_has_one_is() -> None:
    for name, pool in (("agent-loop", ""), ("harness", "chat"), ("packer", ""), ("trainer", "")):
        check_place(config(), name, None, pool)
    with pytest.raises(BadInput, match="--index 1 is out of range"):
        check_place(config(), "agent-loop", 1, "")
    with pytest.raises(BadInput, match="needs --pool"):
        check_place(config(), "harness", None, "")
    with pytest.raises(BadInput, match=r"trainer\.rendezvous is empty: .* leave --index out"):
        check_place(config(), "trainer", 0, "")
    with pytest.raises(BadInput, match=r"trainer\.rendezvous 'here' is not host:port"):
        check_place(config(trainer={"rendezvous": "here"}), "trainer", None, "")
    with pytest.raises(BadInput, match=r"trainer\.kind is external"):
        check_place(config(trainer={"kind": "external"}), "trainer", None, "")


def one_packer(tmp_path: Path) -> SimpleNamespace:
    """What a packer of a run with one place is given."""
    run = config(packer={"socket_dir": str(tmp_path)}, batch={"dp": 1})
    return SimpleNamespace(
        config=run, index=None, health=Health(), stop=asyncio.Event(), logger=logging.getLogger("packer")
    )


async def test_a_packer_that_stands_by_stays_ready_while_a_place_is_free_and_its_socket_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = one_packer(tmp_path)
    tried: list[int] = []

    def counted(directory: Path, number: int) -> Place | None:
        tried.append(number)
        return claim(directory, number)

    monkeypatch.setattr(services.packer, "claim", counted)
    monkeypatch.setattr(services.packer, "_AGAIN_S", 0.01)
    with listen(socket_path(ctx.config, 0)):
        taking = asyncio.create_task(_take(cast("Context", ctx)))
        await until(lambda: len(tried) > 3)
        assert ctx.health.fault() == ""
        ctx.stop.set()
        assert await taking is None


async def test_a_packer_that_stood_by_is_not_ready_until_it_serves(tmp_path: Path) -> None:
    ctx = one_packer(tmp_path)
    before = claim(socket_path(ctx.config, 0).parent, 0)
    assert before is not None
    taking = asyncio.create_task(_take(cast("Context", ctx)))
    await until(lambda: ctx.health.fault() == "")
    before.close()
    taken = await taking
    assert taken is not None
    for each in taken:
        each.close()
    assert ctx.health.fault() == "takes place 0"


def test_a_host_without_an_index_is_named_by_its_pool_and_machine() -> None:
    name, held = own_label("harness", "chat")
    assert held is not None
    with held:
        assert name.startswith("harness-chat-")
    assert own_label("sampler", "") == ("sampler", None)


def report(host: str, service: str, pool: str = "") -> HostReport:
    return HostReport(
        host=host,
        service=service,
        pool=pool,
        time=datetime.now(UTC),
        tenants=0,
        capacity=1,
        done=0,
        pending=0,
    )


def test_hosts_that_are_named_by_their_machines_are_not_missed_by_number() -> None:
    run = config()
    loop = report("agent-loop-3f2a", "agent-loop")
    chat = [report("harness-chat-a", "harness", "chat"), report("harness-chat-1", "harness", "chat")]
    assert list(expected(run)) == ["agent-loop-0", "harness-chat-0", "harness-chat-1"]
    assert list(expected(run, [loop])) == ["harness-chat-0", "harness-chat-1", "agent-loop-3f2a"]
    status = status_of(run, [loop, *chat], 0, datetime.now(UTC))
    assert {row.host: row.silent for row in status.rows} == {
        "agent-loop-3f2a": False,
        "harness-chat-1": False,
        "harness-chat-a": False,
    }
    assert "silent" not in "".join(str(part) for part in view(status).renderables[1:])


def test_numbered_hosts_are_missed_as_before() -> None:
    status = status_of(config(), [report("harness-chat-1", "harness", "chat")], 0, datetime.now(UTC))
    assert [row.host for row in status.rows if row.silent] == ["agent-loop-0", "harness-chat-0"]


@pytest.mark.parametrize("bind", ["8100", ":8100", "host:", "host:65536", "host:9x", "0.0.0.0:0"])
def test_where_an_engine_listens_is_host_and_port(bind: str) -> None:
    with pytest.raises(ValidationError, match=r"is not host:port|no port that engine\.url could name"):
        config(engine={"url": "http://engine:8100", "bind": bind})


def test_an_engine_that_listens_somewhere_is_the_tiny_one_and_has_a_url() -> None:
    assert config(engine={"url": "http://engine:8100", "bind": "[::]:8100"}).engine.bind == "[::]:8100"
    with pytest.raises(ValidationError, match=r"engine\.url where others reach it: give url too"):
        config(engine={"bind": "0.0.0.0:8100"})
    with pytest.raises(
        ValidationError, match=r"engine\.bind is for the tiny engine, and engine\.kind is 'vllm'"
    ):
        config(engine={"kind": "vllm", "url": "http://engine:8100", "bind": "0.0.0.0:8100"})
