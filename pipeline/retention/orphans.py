"""Objects that no event of the run names, and that none ever will.

Promises: what may still be in the making is no orphan. An object of a sequence is one only when its group is decided, a plan
or a checkpoint only when its step is; an image, or anything of a group that was never decided, only when the run is over.
What is of no form that a run's objects have is left alone.
"""

from __future__ import annotations

from pipeline.retention.core import RetentionCore
from pipeline.retention.names import owner

GRACE_S = 3600.0
"""An object is named by the event that its writer publishes next: this long, it waits for a broker that is away."""


def orphan(core: RetentionCore, key: str) -> bool:
    """Whether an object that no event names is one; `core` has folded the whole log, and nothing was taken from it."""
    own = owner(core.run, key)
    if own is None or core.unreadable:
        return False
    if core.over:
        return True
    match own.form:
        case "payload" | "artefact" | "grading":
            return core.settled(own.sample)
        case "plan":
            return own.step <= core.yielded
        case "weights" | "optimizer":
            return own.step <= core.trained
        case _:
            return False
