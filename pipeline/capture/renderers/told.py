"""What a policy is told of a message's content, whatever its family."""

from __future__ import annotations

from pipeline.capture.messages import Image, Message

ERROR = "Error:"


def told(message: Message) -> tuple[str | Image, ...]:
    """The content's parts in order. A tool's result that is an error says so: templates have no place for the flag."""
    content = message.content
    parts = (content,) if isinstance(content, str) else content
    if not message.is_error or message.text.lstrip().startswith(ERROR):
        return parts
    if parts and isinstance(parts[0], str):
        return (f"{ERROR}\n{parts[0]}" if parts[0] else ERROR, *parts[1:])
    return (f"{ERROR}\n", *parts)
