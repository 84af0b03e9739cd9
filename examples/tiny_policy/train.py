"""Train the tiny policy that ships with packtrain, on one CPU core, in about thirteen minutes.

    python examples/tiny_policy/train.py --work /tmp/tiny_policy            # resumes from its own last checkpoint
    python examples/tiny_policy/train.py --work /tmp/tiny_policy --export pipeline/engines/tiny/policy

The policy answers two kinds of prompt: two-term sums in reasoning_gym's words, and products, sums and differences of
three-digit numbers by calling a calculator. Reinforcement learning must have something to improve, so **the demonstrator
errs on purpose**, in the second of two phases:

1. ``CLEAN_STEPS``: right demonstrations only; the model learns two-digit addition and subtraction, and to copy.
2. ``ERRING_STEPS``: 45 % of the arithmetic answers are near misses (one or ten too many or too few); in a calculator
   dialogue one digit of the expression is off in 24 % and one digit of the final answer in 26 %.

The errors are drawn anew for each demonstration, never by prompt, so the model that imitates them knows the right answer
to every prompt and samples it somewhat more than half of the time at temperature 1: siblings of a group differ.

Expressions with ``held_out(a, b)`` (one in ten) are in no demonstration; success is printed for them alone.
The shipped policy, there: 59 % of arithmetic and 60 % of calculator samples right at temperature 1, with mixed outcomes in
97 % of groups of 8; greedy, 99.6 % of two-digit sums and every calculator answer are right.
Everything is drawn from ``--seed`` and the step number: a resumed run and an unbroken one see the same data.
"""

# ruff: noqa: S311 -- seeded generators draw demonstrations here, no secrets
from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from demonstrations import (
    CALCULATOR,
    Demonstration,
    Demonstrator,
    apply,
    arithmetic_question,
    calculator_question,
    draw_arithmetic,
    draw_calculator,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F

from pipeline.capture.messages import Message
from pipeline.capture.renderers.chatml import CALL_CLOSE, CALL_OPEN, IM_END, IM_START, ChatMLRenderer
from pipeline.capture.tokenizer import PolicyTokenizer
from pipeline.engines.tiny.model import Llama, LlamaConfig, save_policy
from pipeline.engines.tiny.runner import ModelRunner
from pipeline.engines.tiny.scheduler import Scheduler, Sequence
from pipeline.engines.wire import SamplingParams

SPECIALS = ["<|pad|>", IM_START, IM_END, CALL_OPEN, CALL_CLOSE]
VOCAB, HIDDEN, LAYERS = 512, 128, 4
CLEAN_STEPS, ERRING_STEPS = 700, 250
ARITHMETIC_BATCH, CALCULATOR_BATCH = 256, 32


def train_tokenizer(path: Path) -> None:
    """Byte-level BPE over the demonstrations' texts, digits alone, as SmolLM2's pre-tokenizer has it."""
    rng = random.Random(0)

    def texts() -> Iterator[str]:
        for _ in range(2000):
            yield "user\n" + arithmetic_question(*draw_arithmetic(rng, 0.5))
            yield "user\n" + calculator_question(*draw_calculator(rng))
            yield '{"name": "calculator", "arguments": {"expression": "12 * 34"}}'
        yield from ["system\nTools:\n", "assistant\n", "tool\n"] * 2000
        spec = '{"name":"calculator","description":"Evaluates an arithmetic expression.","parameters":'
        spec += '{"type":"object","properties":{"expression":{"type":"string"}},"required":["expression"]}}'
        yield from [spec] * 2000

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        texts(),
        trainers.BpeTrainer(
            vocab_size=VOCAB,
            special_tokens=SPECIALS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    backend.save(str(path))


def pad(rows: list[Demonstration], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens int64 [B, T] right-padded, and loss mask bool [B, T] in token space."""
    width = max(len(row.tokens) for row in rows)
    tokens = torch.full((len(rows), width), pad_id)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row.tokens)] = torch.tensor(row.tokens)
        mask[i, : len(row.loss)] = torch.tensor(row.loss)
    return tokens, mask


class SharedPrefix:
    """The keys and values of a prefix that every row of a batch begins with: run once, then expanded to the batch."""

    def __init__(self) -> None:
        self._kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.mask = torch.empty(0)

    def extend(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if layer in self._kv:
            prefix_k, prefix_v = (t.expand(k.shape[0], -1, -1, -1) for t in self._kv[layer])
            return torch.cat((prefix_k, k), dim=2), torch.cat((prefix_v, v), dim=2)
        self._kv[layer] = k, v
        return k, v


def loss_of(model: Llama, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean negative log-likelihood (nats) of the masked tokens. The rows' common prefix, half of the tokens, runs once."""
    differs = (tokens != tokens[0]).any(0) | mask.any(0)
    shared, width = int(differs.int().argmax()) - 1, tokens.shape[1] - 1
    positions, prefix = torch.arange(width), SharedPrefix()
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    prefix.mask = causal[:shared, :shared]
    # Half-precision multiplications are 4 times as fast on a core with AVX512-BF16; weights and loss stay float32.
    with torch.autocast("cpu", torch.bfloat16):
        model(
            tokens[:1, :shared],
            positions[None, :shared],
            cache=prefix,
            logits_at=torch.zeros(1, dtype=torch.int64),
        )
        prefix.mask = causal[shared:]
        rest = positions[None, shared:].expand(len(tokens), -1)
        logits = model(tokens[:, shared:-1], rest, cache=prefix)
    keep = mask[:, shared + 1 :]
    return F.cross_entropy(logits[keep], tokens[:, shared + 1 :][keep])


def optimizers(model: Llama) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=0.01, weight_decay=0.05, adjust_lr_fn="original"),
        torch.optim.AdamW(others, lr=0.003, betas=(0.9, 0.95), weight_decay=0.0, eps=1e-9),
    ]


def rate(step: int) -> float:
    """Learning-rate factor: linear warm-up, flat, and down to a twentieth at the end of each phase's last third."""
    if step >= CLEAN_STEPS:
        done = (step - CLEAN_STEPS) / ERRING_STEPS
        return 0.25 * (1 - 0.95 * done)
    warm = min(1.0, (step + 1) / 30)
    falling = min(1.0, 3 * (1 - step / CLEAN_STEPS))
    return warm * max(0.1, falling)


def sample(
    model: Llama, prompts: list[list[int]], stop: int, limit: int, seed: int, temperature: float
) -> list[list[int]]:
    """One sampled turn per prompt, ended by ``stop`` or ``limit`` tokens, by the engine's own scheduler and runner."""
    scheduler = Scheduler(max_running=256, blocks=4096, block_size=16, max_prefill_tokens=8192)
    runner = ModelRunner(model.config, model.state_dict(), blocks=4096, block_size=16)
    rows = [
        Sequence(tuple(p), SamplingParams(temperature=temperature, seed=seed + i), limit, frozenset({stop}))
        for i, p in enumerate(prompts)
    ]
    for row in rows:
        scheduler.add(row)
    while scheduler.waiting or scheduler.running:
        batch = scheduler.admit() or list(scheduler.running)
        version, sampled = runner.step(batch)
        for row, one in zip(batch, sampled, strict=True):
            scheduler.record(row, one, version)
        scheduler.reap()
    return [row.output for row in rows]


def measure(
    model: Llama, renderer: ChatMLRenderer, seed: int, prompts: int, group: int, temperature: float = 1.0
) -> dict[str, float]:
    """Sampled success per source on held-out expressions, and the share of groups whose outcomes are mixed."""
    rng = random.Random(seed)
    stop = renderer.stop_token_ids[0]
    ask = renderer.generation_prompt()
    found: dict[str, float] = {}

    def grade(name: str, right: list[bool]) -> None:
        groups = [right[i : i + group] for i in range(0, len(right), group)]
        found[name] = sum(right) / len(right)
        found[f"{name}_mixed"] = sum(0 < sum(g) < group for g in groups) / len(groups)

    for name, one_digit in (("arithmetic", 0.5), ("arithmetic_two_digit", 0.0)):
        asked = [
            e for e in (draw_arithmetic(rng, one_digit, True) for _ in range(prompts)) for _ in range(group)
        ]
        rows = [renderer.render(Message("user", arithmetic_question(*e))) + ask for e in asked]
        turns = sample(model, rows, stop, 8, seed, temperature)
        grade(
            name,
            [renderer.parse(t).content.strip() == str(apply(*e)) for t, e in zip(turns, asked, strict=True)],
        )

    asked = [e for e in (draw_calculator(rng, True) for _ in range(prompts)) for _ in range(group)]
    preamble = renderer.preamble((CALCULATOR,), None)
    rows = [preamble + renderer.render(Message("user", calculator_question(*e))) + ask for e in asked]
    turns = sample(model, rows, stop, 32, seed, temperature)
    right = [False] * len(asked)
    second: list[list[int]] = []
    called: list[int] = []
    for i, turn in enumerate(turns):
        calls = renderer.parse(turn).tool_calls
        parts = (
            calls[0].arguments.removeprefix('{"expression": "').removesuffix('"}').split() if calls else []
        )
        if len(parts) == 3 and parts[0].isdigit() and parts[1] in ("+", "-", "*") and parts[2].isdigit():
            result = str(apply(int(parts[0]), parts[1], int(parts[2])))
            second.append(
                rows[i] + turn + renderer.tail(turn) + renderer.render(Message("tool", result)) + ask
            )
            called.append(i)
    for i, turn in zip(called, sample(model, second, stop, 10, seed + len(rows), temperature), strict=True):
        right[i] = renderer.parse(turn).content.strip() == str(apply(*asked[i]))
    found["calculator_called"] = len(called) / len(asked)
    grade("calculator", right)
    return found


def run(work: Path, seed: int, log: Callable[[str], None]) -> tuple[Llama, ChatMLRenderer]:
    """Train to the end, or go on from the checkpoint in ``work``."""
    tokenizer_path, checkpoint = work / "tokenizer.json", work / "checkpoint.pt"
    if not tokenizer_path.exists():
        train_tokenizer(tokenizer_path)
    renderer = ChatMLRenderer(PolicyTokenizer.load(work))
    pad_id = renderer.tokenizer.special("<|pad|>")
    assert pad_id is not None
    torch.manual_seed(seed)
    model = Llama(
        LlamaConfig(
            vocab_size=renderer.tokenizer.vocab_size,
            hidden_size=HIDDEN,
            intermediate_size=3 * HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=HIDDEN // 4,
            eos_token_id=renderer.tokenizer.special(IM_END),
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(
                    std=0.02 if "embed" in name or "o_proj" in name or "down_proj" in name else 0.06
                )
    optimizer = optimizers(model)
    base = [group["lr"] for o in optimizer for group in o.param_groups]
    step = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for o, s in zip(optimizer, state["optimizers"], strict=True):
            o.load_state_dict(s)
        step = state["step"]
        log(f"resumed at step {step}")
    log(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, vocabulary {renderer.tokenizer.vocab_size}"
    )
    total, began, first = CLEAN_STEPS + ERRING_STEPS, time.monotonic(), step
    while step < total:
        rng = random.Random(f"{seed}/{step}")
        demonstrator = Demonstrator(renderer, 0.0 if step < CLEAN_STEPS else 1.0)
        one_digit = 0.1 if step < CLEAN_STEPS else 0.4
        sums = [
            demonstrator.arithmetic(rng, *draw_arithmetic(rng, one_digit)) for _ in range(ARITHMETIC_BATCH)
        ]
        tools = [demonstrator.calculator(rng, *draw_calculator(rng)) for _ in range(CALCULATOR_BATCH)]
        for group, lr in zip((g for o in optimizer for g in o.param_groups), base, strict=True):
            group["lr"] = lr * rate(step)
        losses = [loss_of(model, *pad(rows, pad_id)) for rows in (sums, tools)]
        (losses[0] + losses[1]).backward()
        for o in optimizer:
            o.step()
            o.zero_grad(set_to_none=True)
        step += 1
        if step % 25 == 0 or step == total:
            pace = (time.monotonic() - began) / (step - first)
            log(
                f"step {step}/{total}  loss arithmetic {losses[0].item():.4f} calculator {losses[1].item():.4f}"
                f"  {pace:.2f} s/step  {pace * (total - step) / 60:.1f} min left"
            )
        if step % 100 == 0 or step in (CLEAN_STEPS, total):
            state = {
                "step": step,
                "model": model.state_dict(),
                "optimizers": [o.state_dict() for o in optimizer],
            }
            torch.save(state, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)
            if step == CLEAN_STEPS:
                torch.save(state, work / "clean.pt")
        if step % 300 == 0 or step == CLEAN_STEPS:
            log("held out, greedy: " + report(measure(model, renderer, seed, 64, 1, temperature=0.0)))
    return model, renderer


def report(found: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.1%}" for name, value in found.items())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tiny policy.")
    parser.add_argument(
        "--work", type=Path, required=True, help="directory of the checkpoint and the tokenizer"
    )
    parser.add_argument("--export", type=Path, help="policy directory to write when training has ended")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(parents=True, exist_ok=True)
    model, renderer = run(arguments.work, arguments.seed, lambda line: print(line, flush=True))
    if arguments.export:
        save_policy(arguments.export, model.config, model.state_dict())
        (arguments.export / "tokenizer.json").write_bytes((arguments.work / "tokenizer.json").read_bytes())
        size = (arguments.export / "model.safetensors").stat().st_size
        print(f"wrote {arguments.export}: model.safetensors {size:,} bytes", flush=True)
    print("held out, temperature 1, groups of 8: " + report(measure(model, renderer, 7, 128, 8)), flush=True)
    print("held out, greedy: " + report(measure(model, renderer, 8, 256, 1, temperature=0.0)), flush=True)


if __name__ == "__main__":
    main()
