"""Losses that are not numbers or explode: the step is skipped and counted; after several in a row, a diagnosis."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bertsmith.batch import Batch
from bertsmith.errors import UserError
from bertsmith.training.distributed import gather_texts, whole

LIMIT = 5  # skipped steps in a row that end a run
EXPLOSION = 10.0  # times the first loss


@dataclass
class Guard:
    """Decides which steps count. A loss is bad when it or the gradient is not finite, or far above the first one."""

    first: float | None = None
    skipped: int = 0
    in_a_row: int = 0

    def accepts(self, loss: float, norm: float) -> bool:
        """Whether this step may change the weights."""
        limit = EXPLOSION * max(1.0, self.first) if self.first is not None else math.inf
        good = math.isfinite(loss) and math.isfinite(norm) and loss <= limit
        if good and self.first is None:
            self.first = loss
        self.in_a_row = 0 if good else self.in_a_row + 1
        self.skipped += not good
        return good

    @property
    def gives_up(self) -> bool:
        return self.in_a_row >= LIMIT


def give_up(
    model: nn.Module, micro_batches: list[Batch], loss_of: Callable[[Batch], Tensor], loss: float, step: int
) -> None:
    """Stop a run whose losses stay bad: run the step once more and say where it first goes wrong, and on what."""
    found = ""
    for batch in micro_batches:
        where = first_bad_tensor(model, batch, loss_of)
        if where and not found:
            found = f"{where}, {_samples(batch)}"
    found = next(
        (text for text in gather_texts(found) if text), "no single tensor: the sum of all losses grew too large"
    )
    raise UserError(
        f"the loss was bad in {LIMIT} steps in a row, the last time {loss:g} in step {step + 1}; first bad tensor: "
        f"{found}. The weights are those before the first bad step. Lower train.learning_rate, raise train.warmup, or "
        "look at the samples"
    )


def first_bad_tensor(model: nn.Module, batch: Batch, loss_of: Callable[[Batch], Tensor]) -> str:
    """The first parameter, output or gradient that is not finite; the largest output where all are finite."""
    for name, parameter in model.named_parameters():
        if not _finite(parameter):
            return f"parameter {name}"
    seen: list[tuple[str, float]] = []
    with _watched(model, seen):
        loss = loss_of(batch)
        loss.backward()
    bad = next((name for name, largest in seen if not math.isfinite(largest)), None)
    if bad is not None:
        bad = f"output of {bad}"
    elif not _finite(loss):
        bad = "the loss itself"
    else:  # gradients arise from the last layer to the first
        named = reversed(list(model.named_parameters()))
        bad = next((f"gradient of {n}" for n, p in named if p.grad is not None and not _finite(p.grad)), None)
    model.zero_grad(set_to_none=True)
    if bad is None and seen:
        name, largest = max(seen, key=lambda entry: entry[1])
        bad = f"all are finite; the largest is the output of {name}, up to {largest:.3g}"
    return bad or ""


@contextmanager
def _watched(model: nn.Module, seen: list[tuple[str, float]]) -> Iterator[None]:
    """Notes the largest magnitude of every module's output while the block runs."""

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point() and output.numel():
                seen.append((name, float(output.detach().abs().amax())))

        return hook

    handles = [part.register_forward_hook(watch(name)) for name, part in model.named_modules() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(whole(tensor.detach())).all())


def _samples(batch: Batch) -> str:
    """Which samples a batch holds."""
    if batch.indices is None:
        return f"{batch.num_tokens} tokens"
    shown = ", ".join(str(int(i)) for i in batch.indices[:64])
    return f"in the batch of samples {shown}{', …' if len(batch.indices) > 64 else ''}"
