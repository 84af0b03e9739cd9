"""Tests against a real vLLM on CPU; `make vllm` installs it into `.venv-vllm` and runs them, `make test` skips them."""
