"""What a configuration names as a kind: one that ships, another package's entry point, or an import path.

Promises: no entry point takes the place of a kind that ships; what cannot be had is one error of the caller's own class, which says
what there is, or why it cannot be imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any


@dataclass(frozen=True)
class Kinds:
    """what: hook, grader, ... in messages; built_in: `module:attribute` of each kind that ships, empty for one that nothing is
    imported for; group: of the entry points by which other packages name theirs, empty: there are none; form: of an import path."""

    what: str
    built_in: Mapping[str, str]
    fault: Callable[[str], Exception]
    group: str = ""
    form: str = "module:Class"
    remedy: str = ""
    """What else is said where an import fails."""

    def load(self, kind: str) -> Any:
        """What the kind names. Raises `fault`."""
        target = self.built_in.get(kind, kind)
        if ":" not in target:
            target = self.named().get(kind, "")
        module, _, attribute = target.partition(":")
        if not module or not attribute:
            known = sorted({*self.built_in, *self.named()})
            raise self.fault(f"{self.what} {kind!r} is none of {known}, and not of the form {self.form}")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            remedy = f"; {self.remedy}" if self.remedy else ""
            raise self.fault(f"{self.what} {kind!r} cannot be imported: {error}{remedy}") from error

    def named(self) -> dict[str, str]:
        """The import path of each kind that other packages gave."""
        if not self.group:
            return {}
        return {p.name: p.value for p in entry_points(group=self.group) if p.name not in self.built_in}
