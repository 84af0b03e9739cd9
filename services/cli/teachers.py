"""The teachers of a configuration: whether they can score, what a run keeps of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.engines.policies import BESIDE_WEIGHTS, PolicyMissing, policy_dir
from pipeline.secret_file import SecretUnreadable, read_secret
from schemas.config import Engine, RunConfig, Teacher
from services.cli.embedded import BadInput
from services.cli.policy import check_policy, resolve_policy

_SCORES = {"name", "kind", "policy", "top_k", "max_context", "overlap"}
"""What scores depend on. Where a teacher answers, and how many it takes at once, may change."""


def resolved(teachers: tuple[Teacher, ...], directory: Path) -> tuple[Teacher, ...]:
    """As a run's own configuration has them: policies as `resolve_policy` gives them, absolute paths. Raises BadInput."""
    found: list[Teacher] = []
    for teacher in teachers:
        update: dict[str, str] = {}
        if teacher.kind == "tiny":
            update["policy"] = resolve_policy(teacher.policy, directory)
        if teacher.token_file:
            update["token_file"] = str(Path(teacher.token_file).absolute())
        found.append(teacher.model_copy(update=update))
    return tuple(found)


def scoring(config: RunConfig) -> list[dict[str, Any]]:
    """What the scores of a run depend on: of an unfinished one it must stay."""
    return [teacher.model_dump(include=_SCORES) for teacher in config.teachers]


def check_token_file(teacher: Teacher) -> None:
    """Refuses a token that cannot be read; raises BadInput."""
    try:
        if teacher.token_file:
            read_secret(teacher.token_file, f"teachers.{teacher.name}.token_file")
    except SecretUnreadable as error:
        raise BadInput(str(error)) from error


def check_tiny(teacher: Teacher, engine: Engine, directory: Path) -> None:
    """Refuses a tiny teacher that could not score what the engine samples; raises BadInput.

    What cannot be known yet, as the launcher makes it first, is not asked.
    """
    check_policy(teacher.policy, directory)
    try:
        policy = policy_dir(teacher.policy)
    except PolicyMissing:
        return
    try:
        model = json.loads((policy / "config.json").read_text())
        positions, tokens = int(model["max_position_embeddings"]), int(model["vocab_size"])
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"policy {teacher.policy!r}: its config.json is of no tiny engine: {error!r}"
        ) from error
    if min(teacher.max_context - 1, engine.max_context) > positions:
        raise BadInput(
            f"policy {teacher.policy!r} has {positions} positions, fewer than a request may have: set max_context to at most {positions + 1} and overlap below it"
        )
    if teacher.top_k > tokens:
        raise BadInput(
            f"policy {teacher.policy!r} has {tokens} tokens, fewer than top_k {teacher.top_k}: lower top_k"
        )
    try:
        sampled = policy_dir(engine.policy, BESIDE_WEIGHTS)
    except PolicyMissing:
        return
    if _vocabulary(policy) != _vocabulary(sampled):
        raise BadInput(
            f"policy {teacher.policy!r} has another vocabulary than engine.policy {engine.policy!r}: its scores would be of other text; "
            "name a teacher of the same tokenizer"
        )


def _vocabulary(policy: Path) -> object:
    tokenizer = json.loads((policy / "tokenizer.json").read_text())
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
    return tokenizer["model"]["vocab"], added
