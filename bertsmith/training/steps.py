"""A training step: forward and backward passes, clipping, and the update."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from bertsmith import draws
from bertsmith.batch import Batch
from bertsmith.errors import UserError
from bertsmith.training import distributed
from bertsmith.training.cuda_graphs import GraphRunner
from bertsmith.training.parts import loss_weights, train_mode
from bertsmith.training.settings import TrainConfig, autocast_dtype

DROPOUT = 103  # a stream of draws
Value = TypeVar("Value", float, Tensor)
ACCURACY = "_accuracy"  # outputs with this suffix count correct predictions; they have no gradient


def gradients(
    model: nn.Module,
    micro_batches: list[Batch],
    counts: Mapping[str, float],
    config: TrainConfig,
    step: int,
    graphs: GraphRunner | None = None,
) -> tuple[dict[str, float], float]:
    """Compute and clip the gradients of a step; return the means of all outputs and the norm of the gradients."""
    train_mode(distributed.unwrap(model))
    device = next(model.parameters()).device
    forward_backward = lambda batch, scales: _pass(model, batch, scales, config)  # noqa: E731
    total: Tensor | None = None
    for number, batch in enumerate(micro_batches):
        seed_dropout(config, step, number)
        scales = output_scales(batch, counts)
        if graphs is not None:
            names, values = graphs.run(forward_backward, batch, scales)
        else:
            with distributed.no_sync(model, last=number == len(micro_batches) - 1):
                names, values = forward_backward(batch.to(device), scales)
        total = values if total is None else total + values
    assert total is not None
    if graphs is not None:
        norm = graphs.clip()
    else:
        norm = distributed.full_tensor(nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm or math.inf))
    summed = distributed.all_reduce_tensor(total)
    *means, length = torch.cat([summed, norm.detach().reshape(1).float()]).tolist()  # one synchronisation
    return dict(zip(names, means, strict=True)), length


def _pass(
    model: nn.Module, batch: Batch, scales: Mapping[str, float | Tensor], config: TrainConfig
) -> tuple[list[str], Tensor]:
    """Run the passes of one batch; return the names of its outputs, and their parts of the step's means."""
    means = output_means(model, batch, scales, config)
    losses = weighted_losses(model, means)
    # DDP and FSDP average the gradients over the ranks; they are to be summed.
    (torch.stack(losses).sum() * distributed.world_size()).backward()
    return list(means), torch.stack([value.detach().float() for value in means.values()])


def weighted_losses(model: nn.Module, means: Mapping[str, Value]) -> list[Value]:
    """The losses among a model's outputs, each times its weight in the sum that is minimised."""
    weights = loss_weights(distributed.unwrap(model))
    losses = {name: value for name, value in means.items() if not name.endswith(ACCURACY)}
    return [value * weights[name] if name in weights else value for name, value in losses.items()]


def output_scales(batch: Batch, counts: Mapping[str, float]) -> dict[str, float]:
    """The factor that turns each sum of a batch into its part of the step's mean: 0 for a batch of zero weight."""
    return {name: bool(batch.counts[name]) / max(1.0, count) for name, count in counts.items()}


def output_means(
    model: nn.Module, batch: Batch, scales: Mapping[str, float | Tensor], config: TrainConfig
) -> dict[str, Tensor]:
    """The outputs of a model for a batch, each as its part of the step's mean."""
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
    return {name: value * scales[name.removesuffix(ACCURACY)] for name, value in sums.items()}


def seed_dropout(config: TrainConfig, step: int, number: int) -> None:
    """Seed dropout by the index of the micro-batch in the step's list, independently of its rank."""
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
    """The loss of one micro-batch, computed as `gradients` does."""
    seed_dropout(config, step, number)
    batch = micro_batches[number].to(next(model.parameters()).device)
    means = output_means(model, batch, output_scales(batch, counts), config)
    return torch.stack(weighted_losses(model, means)).sum()


def update(optimizers: list[torch.optim.Optimizer], factor: float, graphs: GraphRunner | None = None) -> None:
    """Step the optimisers with a factor on their learning rates."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = group["rate"] * factor
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
    if graphs is not None:
        graphs.update()
        return
    for optimizer in optimizers:
        optimizer.step()
