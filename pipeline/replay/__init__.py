"""What a run's log says about its decisions: re-made and compared, made otherwise, and traced. Pure, over events."""

from pipeline.replay.changes import BadChange, change, read_setting
from pipeline.replay.rerun import Divergence, Pending, Place, Report, Rerun
from pipeline.replay.service import SERVICES, Service
from pipeline.replay.trace import NoSuchId, Trace, Tracer
from pipeline.replay.whatif import Difference, WhatIf

__all__ = [
    "SERVICES",
    "BadChange",
    "Difference",
    "Divergence",
    "NoSuchId",
    "Pending",
    "Place",
    "Report",
    "Rerun",
    "Service",
    "Trace",
    "Tracer",
    "WhatIf",
    "change",
    "read_setting",
]
