"""The event log of a run: one JetStream stream, facts published with exactly-once effect, folds and work consumers."""

from pipeline.log.connection import BrokerUnavailable, connect
from pipeline.log.dead_letters import DeadLetters, Letter, LetterError
from pipeline.log.log import Log
from pipeline.log.patience import LogError
from pipeline.log.publish import Published
from pipeline.log.serving import serve_work
from pipeline.log.tasks import end_tasks
from pipeline.log.work import Delivery, Work

__all__ = [
    "BrokerUnavailable",
    "DeadLetters",
    "Delivery",
    "Letter",
    "LetterError",
    "Log",
    "LogError",
    "Published",
    "Work",
    "connect",
    "end_tasks",
    "serve_work",
]
