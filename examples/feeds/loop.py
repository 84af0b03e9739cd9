"""A trainer of one's own, whole: one process, the tiny policy, a run with `trainer.kind = "external"` and one rank.

    python -m examples.feeds.loop .packtrain/runs/RUN/config.toml

It takes each step once: killed at any moment and started again, it goes on after the last step that it reported, with that
step's weights and optimizer. With several ranks, sum the gradients and agree on the revision between the loop over
micro-batches and the optimizer; only rank 0 reports. The engine loads the weights that it reports: a safetensors file of the policy.
"""

import io
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from pipeline.engines.policies import policy_dir
from pipeline.engines.tiny.model import Llama, load_model, weights_from_bytes, weights_to_bytes
from pipeline.feed.feed import Feed, open_feed
from pipeline.feed.reporting import BlockingReports, Reports
from schemas.config import RunConfig
from services.cli.reach import read_record
from services.trainer.model import label_logprobs


def backward(policy: Llama, feed: Feed, step: int) -> tuple[float, float, int]:
    """Gradients of a step's loss, its KL and its loss tokens."""
    revision = 0
    while True:
        policy.zero_grad()
        sums, given = torch.zeros(3), set[int]()
        for micro_batch in feed.batch(step, revision):
            given.add(micro_batch.revision)
            sums += _micro_batch(policy, micro_batch.torch())
        revision = max(given)
        if given == {revision}:
            loss, kl, tokens = sums.tolist()
            return loss, kl / max(tokens, 1), int(tokens)
        # It was planned anew meanwhile, without a sequence whose object is damaged: all of a step is of one plan.


def _micro_batch(policy: Llama, window: dict[str, Tensor]) -> Tensor:
    """Sums of the loss, the KL and the tokens; PPO's objective (arXiv:1707.06347, eq. 7), each token with its weight."""
    logprobs = label_logprobs(policy, window["tokens"], window["labels"], window["cu_seqlens_padded"])
    ratio_log = (logprobs - window["logprobs"]) * window["loss_mask"]
    ratio, advantages = ratio_log.exp(), window["advantages"]
    gained = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    loss = -(window["loss_weights"] * gained).sum()
    loss.backward()
    return torch.stack([loss.detach(), -ratio_log.detach().sum(), window["loss_mask"].sum()])


def saved(state: dict[str, object]) -> bytes:
    written = io.BytesIO()
    torch.save(state, written)
    return written.getvalue()


def check_alone(config: RunConfig) -> None:
    """Raises SystemExit on a run of several ranks: one alone would train a part of each batch."""
    if (count := config.batch.sizes.ranks) != 1:
        raise SystemExit(
            f"dp * cp * tp * pp is {count} ranks, and this trainer is one: set dp, cp, tp and pp of batch to 1"
        )


def train(config: RunConfig, rank: int = 0, timeout_s: float | None = None) -> None:
    policy = load_model(policy_dir(config.engine.policy))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.trainer.lr)
    with BlockingReports(Reports.of(config)) as reports, open_feed(config, rank, timeout_s=timeout_s) as feed:
        if reports.last is not None:
            policy.load_state_dict(weights_from_bytes(reports.fetch(reports.last.weights)))
            optimizer.load_state_dict(torch.load(io.BytesIO(reports.fetch(reports.last.optimizer))))
        for step in range(reports.last.step + 1 if reports.last else 1, config.steps + 1):
            began = time.monotonic()
            loss, kl, tokens = backward(policy, feed, step)
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), config.trainer.max_grad_norm)
            optimizer.step()
            reports.trained(
                step,
                weights=weights_to_bytes(policy.state_dict()),
                optimizer=saved(optimizer.state_dict()),
                loss=loss,
                grad_norm=float(norm),
                kl=kl,
                loss_tokens=tokens,
                seconds=time.monotonic() - began,
            )
            print(f"step {step}: loss {loss:.4f}, {tokens} tokens", flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    read = read_record(Path(sys.argv[1]))
    check_alone(read)
    train(read)
