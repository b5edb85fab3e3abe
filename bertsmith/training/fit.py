"""`fit`: the one training loop.

A step is a list of micro-batches, a pure function of its number. Every loss is a sum with a count of its own (masked
words, pairs, rows); the counts of the whole step are known before the first backward pass, so dividing the work into
micro-batches of unequal size never changes the mathematics.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn

from bertsmith import draws
from bertsmith.batch import Batch
from bertsmith.errors import UserError
from bertsmith.progress import progress_bar
from bertsmith.training import checkpoint, runlog
from bertsmith.training.optim import learning_rate, make_optimizer
from bertsmith.training.settings import TrainConfig, autocast_dtype

MicroBatches = Callable[[int], list[Batch]]
DROPOUT = 103  # a stream of draws


def fit(
    model: nn.Module,
    batches: MicroBatches,
    config: TrainConfig,
    steps: int,
    run: Path,
    *,
    save: Callable[[Path], None],
    evaluate: Callable[[], dict[str, float]] | None = None,
    resume: tuple[Path, int] | None = None,
    title: str = "training",
) -> dict[str, float]:
    """Train a model and give the last evaluation.

    `batches(step)` gives the micro-batches of a step, `save(folder)` writes the model, `evaluate()` scores it, and
    `resume` is a checkpoint of this run with its step: the model has been loaded from it, the optimiser is here.
    """
    optimizer = make_optimizer(model, config)
    start = 0
    if resume is not None:
        start = resume[1]
        checkpoint.load_optimizer(resume[0], model, optimizer)
        runlog.rewind(run, start)
    scores: dict[str, float] = {}
    window = _Window()
    with progress_bar(title, steps, start) as advance:
        for step, micro_batches in _ahead(batches, range(start, steps)):
            losses, norm = train_step(model, optimizer, micro_batches, config, step, steps)
            done = step + 1
            window.add(losses, sum(b.num_tokens for b in micro_batches))
            if done % max(1, steps // 200) == 0 or done == steps:
                record = window.close()
                rate = learning_rate(config, step, steps)
                runlog.append(run, {"step": done, **record, "learning_rate": rate, "gradient_norm": norm})
                _refuse_nan(record, done)
            advance(done, window.words())
            if evaluate is not None and _due(done, config.evaluate_every, steps):
                scores = evaluate()
                runlog.append(run, {"step": done, **{f"dev_{k}": v for k, v in scores.items()}})
            if config.save_every and _due(done, config.save_every, steps) and done < steps:
                checkpoint.save_checkpoint(run, done, model, optimizer, save, config.keep)
    return scores


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: list[Batch],
    config: TrainConfig,
    step: int,
    steps: int,
) -> tuple[dict[str, float], float]:
    """Forward, backward, clip, update; gives the mean of each loss and the gradient's norm."""
    device = next(model.parameters()).device
    dtype = autocast_dtype(config.precision, device)
    counts = sum((Counter(b.counts) for b in micro_batches), Counter[str]())
    totals: dict[str, torch.Tensor] = {}
    model.train()
    for number, batch in enumerate(micro_batches):
        torch.manual_seed(draws.seed(config.seed, step, number, DROPOUT))
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            sums = model(batch.to(device))
        means = {name: value / counts[name] for name, value in sums.items()}
        torch.stack(list(means.values())).sum().backward()
        for name, value in means.items():
            totals[name] = totals.get(name, torch.zeros((), device=device)) + value.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm or math.inf)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, step, steps)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {name: value.item() for name, value in totals.items()}, norm.item()


def _ahead(batches: MicroBatches, steps: range) -> Iterator[tuple[int, list[Batch]]]:
    """The steps' micro-batches, the next one being made while the last one is used."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(batches, steps.start) if len(steps) else None
        for step in steps:
            assert waiting is not None
            ready = waiting.result()
            waiting = pool.submit(batches, step + 1) if step + 1 < steps.stop else None
            yield step, ready


class _Window:
    """Means over the steps since the last record."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.steps = self.tokens = 0
        self.sums: Counter[str] = Counter()
        self.last: dict[str, float] = {}

    def add(self, losses: dict[str, float], tokens: int) -> None:
        self.steps += 1
        self.tokens += tokens
        self.sums.update(losses)

    def means(self) -> dict[str, float]:
        if not self.steps:
            return self.last
        speed = self.tokens / max(time.monotonic() - self.began, 1e-9)
        parts = {f"{name}_loss": value / self.steps for name, value in self.sums.items()}
        return {"loss": sum(parts.values()), **parts, "tokens_per_second": speed}

    def close(self) -> dict[str, float]:
        """The means, and a new beginning."""
        means = self.means()
        self.__init__()  # type: ignore[misc]
        self.last = means
        return means

    def words(self) -> str:
        means = self.means()
        return f"loss {means['loss']:.3f}, {means['tokens_per_second']:,.0f} tokens/s"


def _due(done: int, every: int, steps: int) -> bool:
    return done == steps or bool(every and done % every == 0)


def _refuse_nan(record: dict[str, float], step: int) -> None:
    if not math.isfinite(record["loss"]):
        raise UserError(f"the loss is {record['loss']} at step {step}; lower train.learning_rate or raise train.warmup")
