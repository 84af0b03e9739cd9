"""The /models endpoints: one policy, in OpenAI's form or in Anthropic's. Pure."""

from __future__ import annotations

from typing import Any

MODEL = "policy"
"""The model's name in the list; requests may name any, and so any name is a model that there is."""
MAX_ID_CHARACTERS = 256
_EPOCH = "1970-01-01T00:00:00Z"


def openai_model(name: str, max_context: int) -> dict[str, Any]:
    """`max_context` in tokens; its field is vLLM's."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "packtrain",
        "max_model_len": max_context,
    }


def openai_models(max_context: int) -> dict[str, Any]:
    return {"object": "list", "data": [openai_model(MODEL, max_context)]}


def anthropic_model(name: str, max_context: int) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": _EPOCH,
        "lifecycle": "active",
        "max_input_tokens": max_context,
        "max_tokens": max_context,
    }


def anthropic_models(max_context: int) -> dict[str, Any]:
    return {
        "data": [anthropic_model(MODEL, max_context)],
        "has_more": False,
        "first_id": MODEL,
        "last_id": MODEL,
    }
