"""What a plan may not say."""

from __future__ import annotations

import pytest

from tests.window_parts import Change, changes_of, context, plan_of, sequence

CHECKED = plan_of(
    [
        sequence("s-0", [context(0, [0, 1, 1, 0, 1])]),
        sequence("s-1", [context(0, [0, 1, 1, 1])], sidecar=True),
    ],
    [(0, 0, 0, 0, 1, 1), (1, 0, 1, 0, 1, 1)],
    [(0, 1, 2, 0.5, 0, True), (0, 2, 3, 1, 0, False), (0, 4, 5, 1, 0, True), (1, 1, 3, 1, -1, True)],
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([(0, 1, 2, 1, 0, True), (2, 1, 2, 1, 0, True)], "a change is of row 2, after row 0 of 2"),
        ([(-1, 1, 2, 1, 0, True)], "a change is of row -1"),
        ([(1, 1, 2, 1, 0, True), (0, 1, 2, 1, 0, True)], "a change is of row 0, after row 1"),
        (
            [(0, 1, 3, 1, 0, True), (0, 2, 3, 1, 0, True)],
            r"\[2, 3\) of row 0, of 5 tokens, are empty, outside, or not after token 3",
        ),
        ([(0, 2, 2, 1, 0, True)], "are empty"),
        ([(0, 4, 6, 1, 0, True)], "outside"),
        ([(0, 1, 5, 1, 0, True)], r"token 3 of row 0 is changed in \[1, 5\), and carries no loss"),
        ([(1, 0, 2, 1, 0, True)], "token 0 of row 1"),
        ([(1, 3, 4, 1, 0, False)], "its rows have 5 trained tokens, loss_tokens is 6"),
    ],
)
def test_changes_that_no_plan_may_have(changes: list[Change], said: str) -> None:
    whole = CHECKED.model_copy(update={"changes": None, "loss_tokens": 6})
    with pytest.raises(ValueError, match=said):
        whole.model_copy(update={"changes": changes_of(changes)}).check()


def test_a_plan_that_contradicts_itself_is_refused() -> None:
    def refused(said: str, **update: object) -> None:
        with pytest.raises(ValueError, match=said):
            CHECKED.model_copy(update=update).check()

    assert CHECKED.changes is not None
    refused(
        "columns of changes of unequal length", changes=CHECKED.changes.model_copy(update={"add": (0.0,)})
    )
    refused("columns of unequal length", rows=CHECKED.rows.model_copy(update={"scale": (1.0,)}))
    refused(
        r"weights of its 5 trained tokens sum to 1\.5",
        rows=CHECKED.rows.model_copy(update={"loss_weight": (0.3, 0.3)}),
    )
    longer = CHECKED.sequences[1].model_copy(update={"contexts": (context(0, [0, 1, 1, 1, 1]),)})
    refused(
        r"s-1-a1\.advantages\.0\.safetensors of sequence s-1, which has 4 loss tokens, must have the column advantages",
        sequences=(CHECKED.sequences[0], longer),
    )
