"""How the scripts of a task folder are run: by /bin/bash, which no folder of PATH can take the place of."""

from __future__ import annotations

from pathlib import Path


def bash(script: Path, target: str) -> list[str]:
    """argv that runs `script` of the host, which lies at `target` in the workspace: by bash, with the options of its first
    line. Raises ValueError when that line asks for another interpreter than a shell."""
    with script.open("rb") as file:
        line = file.readline(512).decode(errors="replace")
    words = line[2:].split() if line.startswith("#!") else ["bash"]
    if words and words[0].endswith("/env"):
        words = [word for word in words[1:] if word != "-S"]
    if not words or words[0].rpartition("/")[2] not in {"bash", "sh", "dash"}:
        raise ValueError(f"{script}: its first line asks for {' '.join(words)!r}, and bash runs it")
    return ["/bin/bash", *words[1:], target]
