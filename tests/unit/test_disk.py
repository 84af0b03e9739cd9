"""What is told of a disk that gets full, and when the broker is restarted."""

from __future__ import annotations

from pathlib import Path

from services.cli.disk import LOW_BYTES, ROOM_BYTES, BrokerLog, Look, Watch

PLENTY = 10 * LOW_BYTES


def test_each_stage_is_told_once_and_the_broker_restarted_once_there_is_room() -> None:
    watch = Watch("/d")
    looks = [
        Look(PLENTY, False),
        Look(LOW_BYTES - 1, False),
        Look(LOW_BYTES - 2, False),
        Look(0, False),
        Look(0, True),
        Look(ROOM_BYTES - 1, True),
        Look(ROOM_BYTES, True),
        Look(ROOM_BYTES, True),  # what the broker said before it ended
        Look(PLENTY, False),
    ]
    seen = [watch.see(look) for look in looks]
    assert [restart for _, restart in seen] == [False] * 6 + [True, False, False]
    told = [line for lines, _ in seen for line in lines]
    assert len(told) == 3
    assert "nearly full" in told[0]
    assert "is full" in told[1]
    assert "room again" in told[2]


def test_a_failed_write_that_is_told_only_when_there_is_room_restarts_too() -> None:
    """The broker's log lies on the same disk: it may say nothing while it is full."""
    watch = Watch("/d")
    assert watch.see(Look(0, False))[1] is False
    told, restart = watch.see(Look(PLENTY, False))
    assert not restart
    assert ["room again" in line for line in told] == [True]
    assert watch.see(Look(PLENTY, False)) == ([], False)
    assert watch.see(Look(PLENTY, True))[1] is True


def test_a_second_full_disk_is_told_again() -> None:
    watch = Watch("/d")
    for _ in range(2):
        assert any("is full" in line for line in watch.see(Look(0, True))[0])
        assert watch.see(Look(PLENTY, False))[1]
        assert watch.see(Look(PLENTY, False)) == ([], False)


def test_the_brokers_log_is_read_on(tmp_path: Path) -> None:
    path = tmp_path / "nats.log"
    path.write_text("an old run: no space left on device\n")
    log = BrokerLog(path)
    assert not log.failed()
    with path.open("a") as file:
        file.write("[ERR] JetStream failed to store a msg: no space left on device\n")
    assert log.failed()
    assert not log.failed()
