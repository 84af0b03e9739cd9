"""Products, sums and differences of integers, to be computed with a `calculator` tool.

Promises: the tool and the verifier run in the sandbox, as programs of their own that import nothing of ours; the
reward is 1.0 when the final answer is right and the tool was used, 0.0 otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeline.capture.messages import Tool
from pipeline.harnesses.environments.base import EnvironmentBroken, Outcome, Task, ToolUse
from pipeline.harnesses.sandbox import Limits, Sandbox

TOOL = Tool(
    name="calculator",
    description="Evaluates an arithmetic expression.",
    parameters={
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
)
_PROGRAMS = Path(__file__).parent / "programs"
_LIMITS = Limits(wall_s=10.0, cpu_s=2, memory_bytes=256 << 20, output_bytes=64 << 10)


class Options(BaseModel):
    """The range of the operands, both ends included."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    low: int = Field(100, ge=0, le=10**9)
    high: int = Field(999, ge=0, le=10**9)

    @model_validator(mode="after")
    def _ordered(self) -> Options:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is over high {self.high}")
        return self


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    expression: str = Field(max_length=1000)


class _Verdict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    reward: float


class Calculator:
    def __init__(self, seed: int, options: Mapping[str, Any], sandbox: Sandbox | None = None) -> None:
        self._seed = seed
        self._options = Options.model_validate(dict(options))
        self._sandbox = sandbox or Sandbox()
        self._tool = (_PROGRAMS / "calculate.py").read_text()
        self._verifier = (_PROGRAMS / "verify_calculator.py").read_text()

    @property
    def tools(self) -> tuple[Tool, ...]:
        return (TOOL,)

    def task(self, index: int) -> Task:
        if index < 0:
            raise IndexError(f"task index {index} is negative")
        # A string seeds Random by its SHA-512, so that no two (seed, index) pairs are neighbours.
        random = Random(f"calculator/{self._seed}/{index}")  # noqa: S311  # tasks are to be repeatable, not secret
        a, b = (random.randint(self._options.low, self._options.high) for _ in range(2))
        operator = random.choice("+-*")
        value = {"+": a + b, "-": a - b, "*": a * b}[operator]
        return Task(index, f"Use the calculator to compute {a} {operator} {b}.", str(value))

    def call(self, task: Task, name: str, arguments: str) -> ToolUse:
        if name != TOOL.name:
            return ToolUse(
                name, arguments, f"error: there is no tool {name!r}; the tool is {TOOL.name!r}", ok=False
            )
        try:
            given = _Arguments.model_validate_json(arguments)
        except ValidationError as error:
            return ToolUse(name, arguments, f"error: bad arguments: {error.errors()[0]['msg']}", ok=False)
        done = self._sandbox.run_python(self._tool, given.expression.encode(errors="surrogatepass"), _LIMITS)
        if done.returncode == 0:
            return ToolUse(name, arguments, done.stdout.decode(errors="replace").strip(), ok=True)
        if done.returncode == 2:
            return ToolUse(
                name, arguments, "error: " + done.stdout.decode(errors="replace").strip(), ok=False
            )
        raise EnvironmentBroken(f"the calculator program {done.describe()}")

    def verify(self, task: Task, outcome: Outcome) -> float:
        uses = [
            {"name": use.name, "arguments": use.arguments, "output": use.output, "ok": use.ok}
            for use in outcome.uses
        ]
        given = json.dumps({"answer": outcome.answer, "expected": task.expected, "uses": uses})
        done = self._sandbox.run_python(self._verifier, given.encode(), _LIMITS)
        if done.returncode != 0:
            raise EnvironmentBroken(f"the verifier program {done.describe()}")
        try:
            return _Verdict.model_validate_json(done.stdout).reward
        except ValidationError as error:
            raise EnvironmentBroken(f"the verifier printed no verdict: {done.stdout[:200]!r}") from error
