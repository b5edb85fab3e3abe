"""The passes of a step and its update: what `fit` does again and again."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bertsmith import draws
from bertsmith.batch import Batch
from bertsmith.errors import UserError
from bertsmith.training import distributed
from bertsmith.training.cuda_graphs import GraphRunner
from bertsmith.training.parts import train_mode
from bertsmith.training.settings import TrainConfig, autocast_dtype

DROPOUT = 103  # a stream of draws
RIGHT = "_accuracy"  # a model's outputs with this end count right answers; they have no gradient


def gradients(
    model: nn.Module,
    micro_batches: list[Batch],
    counts: Mapping[str, float],
    config: TrainConfig,
    step: int,
    recorder: GraphRunner | None = None,
) -> tuple[dict[str, float], float]:
    """Forward and backward passes of a step, clipped; the means of all outputs and the gradient's norm."""
    train_mode(distributed.unwrap(model))
    device = next(model.parameters()).device
    one_pass = lambda batch, scales: _pass(model, batch, scales, config)  # noqa: E731
    total: Tensor | None = None
    for number, batch in enumerate(micro_batches):
        seed_dropout(config, step, number)
        scales = output_scales(batch, counts)
        if recorder is not None:
            names, values = recorder.run(one_pass, batch, scales)
        else:
            with distributed.no_sync(model, last=number == len(micro_batches) - 1):
                names, values = one_pass(batch.to(device), scales)
        total = values if total is None else total + values
    assert total is not None
    if recorder is not None:
        norm = recorder.clip()
    else:
        norm = distributed.full_tensor(nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm or math.inf))
    summed = distributed.all_reduce_tensor(total)
    *means, length = torch.cat([summed, norm.detach().reshape(1).float()]).tolist()  # one wait for the device
    return dict(zip(names, means, strict=True)), length


def _pass(
    model: nn.Module, batch: Batch, scales: Mapping[str, float | Tensor], config: TrainConfig
) -> tuple[list[str], Tensor]:
    """Forward and backward of one batch; the names of its outputs, and their parts of the step's means."""
    means = output_means(model, batch, scales, config)
    losses = [value for name, value in means.items() if not name.endswith(RIGHT)]
    # Gradients are averaged over the processes, and are meant to be added.
    (torch.stack(losses).sum() * distributed.world_size()).backward()
    return list(means), torch.stack([value.detach().float() for value in means.values()])


def output_scales(batch: Batch, counts: Mapping[str, float]) -> dict[str, float]:
    """What turns each sum of a batch into its part of the step's mean: nothing where the batch is idle."""
    return {name: bool(batch.counts[name]) / max(1.0, count) for name, count in counts.items()}


def output_means(
    model: nn.Module, batch: Batch, scales: Mapping[str, float | Tensor], config: TrainConfig
) -> dict[str, Tensor]:
    """A model's outputs on a batch, each as its part of the step's mean."""
    device = batch.tokens.device
    dtype = autocast_dtype(config.precision, device)
    try:
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            sums = model(batch)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"the device's memory is full with {len(batch.tokens)} tokens at once; lower train.micro_batch_size (the "
            "mathematics stays the same) or set train.gradient_checkpointing=true"
        ) from error
    return {name: value * scales[name.removesuffix(RIGHT)] for name, value in sums.items()}


def seed_dropout(config: TrainConfig, step: int, number: int) -> None:
    """Make dropout a function of the micro-batch's place in the step's list, whichever process has it."""
    place = number * distributed.world_size() + distributed.rank()
    torch.manual_seed(draws.seed(config.seed, step, place, DROPOUT))


def step_loss(
    model: nn.Module,
    micro_batches: list[Batch],
    number: int,
    counts: Mapping[str, float],
    config: TrainConfig,
    step: int,
) -> Tensor:
    """The loss of one micro-batch once more, as `gradients` took it."""
    seed_dropout(config, step, number)
    batch = micro_batches[number].to(next(model.parameters()).device)
    means = output_means(model, batch, output_scales(batch, counts), config)
    return torch.stack([value for name, value in means.items() if not name.endswith(RIGHT)]).sum()


def update(optimizers: list[torch.optim.Optimizer], share: float, recorder: GraphRunner | None = None) -> None:
    """A step of the optimisers at a share of their rates."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = group["rate"] * share
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
    if recorder is not None:
        recorder.update()
        return
    for optimizer in optimizers:
        optimizer.step()
