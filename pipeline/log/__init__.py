"""The event log of a run: one JetStream stream, facts published with exactly-once effect, folds and work consumers."""

from pipeline.log.connection import BrokerUnavailable, connect
from pipeline.log.log import Log, Published
from pipeline.log.tasks import end_tasks
from pipeline.log.work import Delivery, Work, serve_work

__all__ = ["BrokerUnavailable", "Delivery", "Log", "Published", "Work", "connect", "end_tasks", "serve_work"]
