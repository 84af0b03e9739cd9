"""Real agent scaffolds against capture, over a policy double: see `played.py`."""

import pytest

# Its assertions are every test's; they say what differs only when pytest rewrites them.
pytest.register_assert_rewrite("tests.scaffolds.played")
