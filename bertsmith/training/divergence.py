"""Losses that are not numbers or explode: the step is skipped and counted; after several in a row, a diagnosis."""

from __future__ import annotations

import json
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
    model: nn.Module, micro_batches: list[Batch], loss_of: Callable[[int], Tensor], loss: float, step: int
) -> None:
    """Stop a run whose losses stay bad: run the step once more and say where it first goes wrong, and on what.

    `loss_of(number)` is the loss of a micro-batch. All processes come here together and look at their own.
    """
    found = []
    for number, batch in enumerate(micro_batches):
        *badness, name = first_bad_tensor(model, lambda number=number: loss_of(number))  # type: ignore[misc]
        found.append([badness, f"{name}, {_samples(batch)}"])
    texts = all_gather_objects(json.dumps(max(found, key=itemgetter(0))))
    _, where = max(map(json.loads, texts), key=itemgetter(0))
    raise Diverged(
        f"the loss was bad in {LIMIT} steps in a row, the last time {loss:g} in step {step + 1}; first bad tensor: "
        f"{where}. Nothing was learnt from these steps. Lower train.learning_rate, raise train.warmup, or look at the "
        "samples; a new run can start from a checkpoint before the trouble with --model"
    )


def first_bad_tensor(model: nn.Module, loss_of: Callable[[], Tensor]) -> tuple[int, float, str]:
    """The first parameter, output or gradient that is not finite, or the largest where all are.

    Before its name stands how bad it is: 2 where it is not finite, 1 for a gradient, in which other processes may have
    a part, 0 where all are finite; and the magnitude of the largest.
    """
    seen = [(f"parameter {name}", _largest(full_tensor(p.detach()))) for name, p in model.named_parameters()]
    trained = len(seen)
    if all(math.isfinite(largest) for _, largest in seen):
        model.zero_grad(set_to_none=True)  # the step's own, which other batches have a part in
        with _watched(model, seen):
            loss = loss_of()
        loss.backward()
        seen.append(("the loss itself", float(loss.detach())))
        named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
        # From the last layer to the first, as they arise.
        seen += [(f"gradient of {name}", _largest(full_tensor(gradient))) for name, gradient in reversed(named)]
        model.zero_grad(set_to_none=True)
    for name, largest in seen:
        if not math.isfinite(largest):
            return 1 if name.startswith("gradient") else 2, 0.0, name
    name, largest = max(seen[trained:], key=lambda entry: entry[1])
    return 0, largest, f"all are finite, the largest is {name} with {largest:.3g}"


@contextmanager
def _watched(model: nn.Module, seen: list[tuple[str, float]]) -> Iterator[None]:
    """Notes the largest magnitude of every module's output while the block runs."""

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point() and output.numel():
                seen.append((f"output of {name}", _largest(output.detach())))

        return hook

    handles = [part.register_forward_hook(watch(name)) for name, part in model.named_modules() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().amax()) if tensor.numel() else 0.0


def _samples(batch: Batch) -> str:
    """Which samples a batch holds."""
    if batch.indices is None:
        return f"{batch.num_tokens} tokens"
    shown = ", ".join(str(int(i)) for i in batch.indices[:64])
    return f"in the batch of samples {shown}{', …' if len(batch.indices) > 64 else ''}"
