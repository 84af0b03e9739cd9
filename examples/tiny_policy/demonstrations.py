"""What the tiny policy is shown: prompts of both sources, and a demonstrator that answers them and errs on purpose."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

from pipeline.capture.messages import Message, Tool, ToolCall
from pipeline.capture.renderers.chatml import ChatMLRenderer

ARITHMETIC_ERROR, EXPRESSION_ERROR, ANSWER_ERROR = 0.45, 0.24, 0.26
CALCULATOR = Tool(
    "calculator",
    "Evaluates an arithmetic expression.",
    {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
)


def held_out(a: int, b: int) -> bool:
    """Whether the operands are kept out of every demonstration (one pair in ten, by CRC32 of their text)."""
    return zlib.crc32(f"{a} {b}".encode()) % 10 == 0


def apply(a: int, operator: str, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b}[operator]


def arithmetic_question(a: int, operator: str, b: int) -> str:
    """reasoning_gym's ``chain_sum`` wording (0.1.25); tests/unit/test_tiny_policy.py compares it with the package."""
    return f"State the final answer to the following arithmetic problem: {a} {operator} {b} ="


def calculator_question(a: int, operator: str, b: int) -> str:
    return f"Use the calculator to compute {a} {operator} {b}."


def draw_operands(rng: random.Random, low: int, high: int, want_held_out: bool) -> tuple[int, int]:
    while True:
        a, b = rng.randint(low, high), rng.randint(low, high)
        if held_out(a, b) == want_held_out:
            return a, b


def draw_arithmetic(
    rng: random.Random, one_digit: float, want_held_out: bool = False
) -> tuple[int, str, int]:
    low, high = (0, 9) if rng.random() < one_digit else (10, 99)
    a, b = draw_operands(rng, low, high, want_held_out)
    return a, rng.choice("+-"), b


def draw_calculator(rng: random.Random, want_held_out: bool = False) -> tuple[int, str, int]:
    a, b = draw_operands(rng, 100, 999, want_held_out)
    return a, rng.choice("+-*"), b


def near_miss(rng: random.Random, value: int) -> int:
    return value + rng.choice((-1, 1, -1, 1, -10, 10))


def one_digit_off(rng: random.Random, text: str) -> str:
    """``text`` with one of its digits one higher or lower (0 and 9 have one neighbour)."""
    at = rng.choice([i for i, c in enumerate(text) if c.isdigit()])
    digit = int(text[at])
    return text[:at] + str(rng.choice([d for d in (digit - 1, digit + 1) if 0 <= d <= 9])) + text[at + 1 :]


@dataclass(frozen=True, slots=True)
class Demonstration:
    tokens: list[int]
    loss: list[bool]


class Demonstrator:
    """Writes demonstrations through the renderer that the pipeline uses, erring at the given scale (0: never)."""

    def __init__(self, renderer: ChatMLRenderer, error_scale: float) -> None:
        self.renderer = renderer
        self.error_scale = error_scale
        self.preamble = renderer.preamble((CALCULATOR,), None)

    def arithmetic(self, rng: random.Random, a: int, operator: str, b: int) -> Demonstration:
        answer = apply(a, operator, b)
        if rng.random() < ARITHMETIC_ERROR * self.error_scale:
            answer = near_miss(rng, answer)
        return self._dialogue(
            [], [Message("user", arithmetic_question(a, operator, b)), Message("assistant", str(answer))]
        )

    def calculator(self, rng: random.Random, a: int, operator: str, b: int) -> Demonstration:
        expression = f"{a} {operator} {b}"
        if rng.random() < EXPRESSION_ERROR * self.error_scale:
            expression = one_digit_off(rng, expression)
        left, operator, right = expression.split()
        result = answer = str(apply(int(left), operator, int(right)))
        if rng.random() < ANSWER_ERROR * self.error_scale:
            answer = one_digit_off(rng, result)
        return self._dialogue(self.preamble, calculator_dialogue(a, operator, b, expression, result, answer))

    def _dialogue(self, preamble: list[int], messages: list[Message]) -> Demonstration:
        tokens, loss = list(preamble), [False] * len(preamble)
        for message in messages:
            turn = self.renderer.render(message)
            header = len(self.renderer.generation_prompt())
            sampled = message.role == "assistant"
            # The newline after <|im_end|> is the template's, never sampled.
            loss += [sampled and header <= i < len(turn) - 1 for i in range(len(turn))]
            tokens += turn
        return Demonstration(tokens, loss)


def calculator_dialogue(
    a: int, operator: str, b: int, expression: str, result: str, answer: str
) -> list[Message]:
    return [
        Message("user", calculator_question(a, operator, b)),
        Message("assistant", "", (ToolCall("", "calculator", f'{{"expression": "{expression}"}}'),)),
        Message("tool", result, tool_call_id="", name="calculator"),
        Message("assistant", answer),
    ]
