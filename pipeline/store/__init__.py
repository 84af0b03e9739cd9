"""Objects: write-once bytes by key, the payload format, and reads by column and by row range."""

from pipeline.store.errors import (
    BadStore,
    ObjectDamaged,
    ObjectExists,
    ObjectMissing,
    StoreError,
    StoreUnavailable,
)
from pipeline.store.objects import Counters, ObjectStore

__all__ = [
    "BadStore",
    "Counters",
    "ObjectDamaged",
    "ObjectExists",
    "ObjectMissing",
    "ObjectStore",
    "StoreError",
    "StoreUnavailable",
]
