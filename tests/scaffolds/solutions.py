"""The policy of a scaffold that solves a task: it runs a script by the scaffold's own shell tool, and ends."""

from __future__ import annotations

import base64
import json

from tests.scaffolds.plays import in_turn
from tests.scaffolds.policy import Play, Scene, call


def solving(name: str, script: str) -> Play:
    # A terminal types what it is given: no newline, no quote.
    command = f"echo {base64.b64encode(script.encode()).decode()} | base64 -d | bash"
    match name:
        case "terminus":
            return _typing(command)
        case "claude-code":
            return in_turn(call("Bash", command=command), "Done.")
        case "codex":
            return in_turn(call("exec_command", cmd=command), "Done.")
        case "openhands":
            return in_turn(call("terminal", command=command), call("finish", message="Done."))
        case "mini-swe-agent":
            submit = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
            return in_turn(call("bash", command=command), call("bash", command=submit))
        case "qwen":
            return in_turn(call("run_shell_command", command=command, is_background=False), "Done.")
        case "opencode":
            return in_turn(call("bash", command=command, description="Solve it"), "Done.")
        case _:
            return in_turn(call("bash", command=command), "Done.")


def _typing(command: str) -> Play:
    """Terminus has no tools: keystrokes as JSON, and to end is to say so twice."""

    def turn(*typed: str, done: bool = False) -> str:
        commands = [{"keystrokes": f"{text}\n", "duration": 5.0} for text in typed]
        return json.dumps(
            {"analysis": "I see.", "plan": "Go on.", "commands": commands, "task_complete": done}
        )

    def play(scene: Scene) -> str:
        return turn(command) if scene.said == 0 else turn(done=True)

    return play
