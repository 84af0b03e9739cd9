"""The penalties of a configuration: each rule must be there and take its options, and a strategy its value.

Promises: rules that ship are made here, other people's are only asked for (`services.cli.plugins`).
"""

from __future__ import annotations

from pydantic import ValidationError

from pipeline.signal.rules import BadRule, resolve
from schemas.config import Penalty, RunConfig
from services.cli.plugins import Asked, refused

Place = tuple[int | str, ...]
_VALUED = ("scale", "set", "subtract")


def check_penalties(config: RunConfig) -> tuple[list[tuple[Place, str]], list[tuple[Place, Asked]]]:
    """What is wrong, and what is to be asked of other people's rules; each with its place."""
    found: list[tuple[Place, str]] = []
    asked: list[tuple[Place, Asked]] = []
    for i, source in enumerate(config.sources):
        for j, penalty in enumerate(source.penalties):
            at: Place = ("sources", i, "penalties", j)
            if ":" in penalty.rule:
                asked.append(((*at, "rule"), Asked("rule", penalty.rule, penalty.options)))
            else:
                found += [((*at, key), what) for key, what in _rule(penalty)]
            if penalty.value and penalty.strategy not in _VALUED:
                found.append(
                    (
                        (*at, "value"),
                        f"strategy {penalty.strategy!r} takes no value, and is given {penalty.value:g}: leave it out, or use {', '.join(_VALUED)}",
                    )
                )
            if penalty.strategy == "subtract" and not penalty.value:
                found.append(((*at, "strategy"), "strategy 'subtract' of 0 changes nothing: give a value"))
    return found, asked


def _rule(penalty: Penalty) -> list[tuple[str, str]]:
    try:
        resolve(penalty.rule, penalty.options)
    except BadRule as error:
        return [("rule", str(error))]
    except ValidationError as error:
        return [("options", refused(f"rule {penalty.rule!r}", error))]
    return []
