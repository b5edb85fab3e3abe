"""Losses that are not finite or explode: the step is skipped and counted; after several in a row, a diagnosis."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from torch import Tensor, nn

from bertsmith.batch import Batch
from bertsmith.errors import Diverged
from bertsmith.training.distributed import all_gather_objects, full_tensor

LIMIT = 5  # a run ends after this many skipped steps in a row
EXPLOSION = 10.0  # times the first loss


@dataclass
class Guard:
    """Decides which steps are skipped: those whose loss or gradient is not finite, or the loss far above the first."""

    first: float | None = None
    skipped: int = 0
    in_a_row: int = 0

    def accepts(self, loss: float, norm: float) -> bool:
        """Whether this step may update the weights."""
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


def raise_diverged(
    model: nn.Module, micro_batches: list[Batch], loss_of: Callable[[int], Tensor], loss: float, step: int
) -> None:
    """Stop a run that has diverged: run the step again, and name the first bad tensor and the samples of its batch.

    `loss_of(number)` computes the loss of a micro-batch. All ranks call this function, each with its own micro-batches.
    """
    found = []
    for number, batch in enumerate(micro_batches):
        *badness, name = first_bad_tensor(model, lambda number=number: loss_of(number))  # type: ignore[misc]
        found.append([badness, f"{name}, {_samples(batch)}"])
    worst = all_gather_objects(max(found, key=itemgetter(0)))
    _, where = max(worst, key=itemgetter(0))
    raise Diverged(
        f"the loss was bad in {LIMIT} steps in a row, the last time {loss:g} in step {step + 1}; first bad tensor: "
        f"{where}. Nothing was learnt from these steps. Lower train.learning_rate, raise train.warmup, or look at the "
        "samples; a new run can start from a checkpoint before the divergence with --model"
    )


def first_bad_tensor(model: nn.Module, loss_of: Callable[[], Tensor]) -> tuple[int, float, str]:
    """The first parameter, output or gradient that is not finite, or the largest if all are finite.

    Return a severity (2 for a parameter, output or loss that is not finite; 1 for such a gradient, which may come from
    another rank; 0 if all are finite), the magnitude of the largest tensor, and the name.
    """
    seen = [(f"parameter {name}", _largest(full_tensor(p.detach()))) for name, p in model.named_parameters()]
    trained = len(seen)
    if all(math.isfinite(largest) for _, largest in seen):
        model.zero_grad(set_to_none=True)  # gradients of the step, to which other batches have been added
        with _outputs_of(model, seen):
            loss = loss_of()
        loss.backward()
        seen.append(("the loss itself", float(loss.detach())))
        named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
        # From the last layer to the first, the order of the backward pass.
        seen += [(f"gradient of {name}", _largest(full_tensor(gradient))) for name, gradient in reversed(named)]
        model.zero_grad(set_to_none=True)
    for name, largest in seen:
        if not math.isfinite(largest):
            return 1 if name.startswith("gradient") else 2, 0.0, name
    name, largest = max(seen[trained:], key=lambda entry: entry[1])
    return 0, largest, f"all are finite, the largest is {name} with {largest:.3g}"


@contextmanager
def _outputs_of(model: nn.Module, seen: list[tuple[str, float]]) -> Iterator[None]:
    """Append the largest magnitude of every module's output while the block runs."""

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point() and output.numel():
                seen.append((f"output of {name}", _largest(output.detach())))

        return hook

    handles = [part.register_forward_hook(record(name)) for name, part in model.named_modules() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().amax()) if tensor.numel() else 0.0


def _samples(batch: Batch) -> str:
    """The numbers of the samples of a batch, as text."""
    if batch.indices is None:
        return f"{batch.num_tokens} tokens"
    shown = ", ".join(str(int(i)) for i in batch.indices[:64])
    return f"in the batch of samples {shown}{', …' if len(batch.indices) > 64 else ''}"
