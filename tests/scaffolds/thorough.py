"""The mark of tests that say of a scaffold that starts slowly what another scaffold's tests have said."""

from __future__ import annotations

import os

import pytest

THOROUGH = pytest.mark.skipif(
    not os.environ.get("PACKTRAIN_SCAFFOLDS"),
    reason="five seconds for each start of the agent: run `make scaffolds`",
)
