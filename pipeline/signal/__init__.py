"""From finished sequences to advantages: pure functions over metadata."""
