"""Acknowledgements against a real nats-server: every publish ends, with its own answer."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest
from nats.errors import ConnectionClosedError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.api import StreamConfig
from nats.js.errors import APIError, NoStreamResponseError

from pipeline.log.acks import Acks
from pipeline.log.connection import connect
from tests.natsserver import NatsServer

pytestmark = pytest.mark.timeout(60)


async def test_each_publish_gets_its_own_answer(nats_server: NatsServer, run_name: str) -> None:
    client = await connect(nats_server.broker, "test")
    await client.jetstream().add_stream(
        StreamConfig(name=run_name, subjects=[f"{run_name}.>"], max_msg_size=100)
    )
    acks = Acks(client, 5.0)

    async def one(number: int) -> int | str:
        body = b"x" * (200 if number % 7 == 0 else 10)
        subject = f"other-{run_name}.{number}" if number % 11 == 5 else f"{run_name}.{number}"
        try:
            return (await acks.publish(subject, body, {"Nats-Msg-Id": str(number % 90)})).seq
        except APIError as error:
            return str(error.err_code)
        except NoStreamResponseError:
            return "none"

    found = await asyncio.gather(*(one(n) for n in range(100)))
    for number, answer in enumerate(found):
        wanted = "none" if number % 11 == 5 else "10054" if number % 7 == 0 else None
        assert answer == wanted or (wanted is None and isinstance(answer, int))
    assert not acks._waiting
    stored = {found[n] for n in range(90) if isinstance(found[n], int)}
    assert len(stored) == sum(isinstance(found[n], int) for n in range(90))
    again = await acks.publish(f"{run_name}.1", b"", {"Nats-Msg-Id": "1"})
    assert again.duplicate
    assert again.seq == found[1]
    await client.close()


async def test_without_an_answer_it_ends_by_its_timeout_and_a_late_one_is_dropped(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "own")
    server.start()
    client = await connect(server.broker, "test")
    await client.jetstream().add_stream(StreamConfig(name="T", subjects=["t.>"]))
    acks = Acks(client, 0.4)
    # Nobody answers on a subject without a stream that somebody listens to.
    await client.subscribe("deaf.>", cb=_deaf)
    began = asyncio.get_running_loop().time()
    with pytest.raises(NatsTimeoutError):
        await acks.publish("deaf.1", b"", {})
    assert asyncio.get_running_loop().time() - began >= 0.4
    assert (await acks.publish("t.1", b"", {})).seq == 1
    await client.publish(f"{acks._prefix}1", b'{"seq": 99}')
    assert (await acks.publish("t.2", b"", {})).seq == 2
    server.kill()
    lost = asyncio.create_task(acks.publish("t.3", b"", {}))
    with pytest.raises((NatsTimeoutError, ConnectionError, OSError)):
        await asyncio.wait_for(lost, 10)
    server.start()
    async with asyncio.timeout(20):
        while True:
            try:
                assert (await acks.publish("t.4", b"", {})).seq >= 3
                break
            except NatsTimeoutError:
                continue
    await client.close()
    server.stop()


async def test_what_cannot_be_sent_leaves_nothing_behind(nats_server: NatsServer) -> None:
    client = await connect(nats_server.broker, "test")
    acks = Acks(client, 0.1)
    await acks._open()
    complaints: list[dict[str, object]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, complaint: complaints.append(complaint))
    await client.close()
    with pytest.raises(ConnectionClosedError):
        await acks.publish("t.1", b"", {})
    async with asyncio.timeout(10):
        while acks._expiring:
            await asyncio.sleep(0.02)
    gc.collect()
    assert complaints == []


async def _deaf(_) -> None:
    return None
