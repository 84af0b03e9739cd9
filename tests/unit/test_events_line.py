"""An event as a line for people."""

from __future__ import annotations

from datetime import UTC, datetime

from schemas.envelope import Event
from schemas.facts import Failure, SequenceFailed
from services.cli.events import line


def test_a_failure_says_why_in_one_line() -> None:
    fact = SequenceFailed(
        source="sums",
        sample="sums-000012",
        sequence="sums-000012-5",
        attempts=5,
        failure=Failure(kind="infra", reason="verifier_timeout", detail="no verdict\nwithin 3 s"),
    )
    event = Event(seq=7, id="e", time=datetime(2026, 1, 2, tzinfo=UTC), producer="al-0", fact=fact)
    assert line(event).endswith(
        r'sequence.failed     sums sums-000012-5  attempts=5 reason="verifier_timeout" detail="no verdict\nwithin 3 s"'
    )
