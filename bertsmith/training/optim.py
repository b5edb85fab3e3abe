"""The optimisers. Each parameter group has a `rate`, its learning rate before the schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bertsmith.training.distributed import full_tensor, world_size
from bertsmith.training.muon import Muon
from bertsmith.training.parts import layer_stacks
from bertsmith.training.settings import TrainConfig


def make_optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """The optimisers of a model: one, or Muon and AdamW. Biases and norms have no weight decay."""
    parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    factors = learning_rate_factors(model, config.layer_decay)
    if config.optimizer == "muon":
        inner = [p for p in _inner_matrices(model) if p.requires_grad]  # a list: all ranks need the same order
        others = [p for p in parameters if not any(p is q for q in inner)]
        rest = _adamw(others, config, config.rest_learning_rate or config.learning_rate, factors)
        groups = _on_device(_by_rate(inner, config.learning_rate, factors))
        return [Muon(groups, config.learning_rate, config.weight_decay, config.momentum), rest] if groups else [rest]
    if config.optimizer == "lamb":
        return [Lamb(_on_device(_groups(parameters, config, config.learning_rate, factors)), config)]
    return [_adamw(parameters, config, config.learning_rate, factors)]


def learning_rate_factors(model: nn.Module, layer_decay: float) -> dict[Tensor, float]:
    """The factor on each parameter's learning rate: multiplied by `layer_decay` for each layer below the top one.

    The parameters of an encoder that come before its layers (embeddings) have the lowest rate, all others that of the
    top layer.
    """
    factors: dict[Tensor, float] = dict.fromkeys(model.parameters(), 1.0)
    for encoder, layers in layer_stacks(model):
        above = {p: len(layers) - 1 - number for number, layer in enumerate(layers) for p in layer.parameters()}
        distance = len(layers)  # to the top layer: that of the embeddings, which come first
        for parameter in encoder.parameters():
            after = 0 if distance < len(layers) else distance
            distance = above.get(parameter, after)
            factors[parameter] = layer_decay**distance
    return factors


def _inner_matrices(model: nn.Module) -> list[Tensor]:
    """The matrices of the layers, without embeddings and output layers, whose rows are tokens or classes."""
    layers = [layer for _, layers in layer_stacks(model) for layer in layers]
    return list(dict.fromkeys(p for layer in layers for p in layer.parameters() if p.dim() == 2))


def _by_rate(parameters: Iterable[Tensor], rate: float, factors: Mapping[Tensor, float]) -> list[dict[str, Any]]:
    """A parameter group for each learning rate."""
    groups: dict[float, list[Tensor]] = {}
    for parameter in parameters:
        groups.setdefault(factors[parameter], []).append(parameter)
    return [{"params": group, "rate": rate * factor} for factor, group in groups.items()]


def _groups(
    parameters: Iterable[Tensor], config: TrainConfig, rate: float, factors: Mapping[Tensor, float]
) -> list[dict[str, Any]]:
    parameters = list(parameters)
    decaying = _by_rate([p for p in parameters if p.dim() > 1], rate, factors)
    others = _by_rate([p for p in parameters if p.dim() <= 1], rate, factors)
    return [
        *({**group, "weight_decay": config.weight_decay} for group in decaying),
        *({**group, "weight_decay": 0.0} for group in others),
    ]


def _adamw(
    parameters: list[Tensor], config: TrainConfig, rate: float, factors: Mapping[Tensor, float]
) -> torch.optim.Optimizer:
    """AdamW with bias correction, and decoupled weight decay on matrices and embeddings."""
    fused = all(p.device.type in ("cuda", "cpu") for p in parameters)
    betas, groups = (config.beta1, config.beta2), _on_device(_groups(parameters, config, rate, factors))
    capturable = any(isinstance(group.get("lr"), Tensor) for group in groups)
    return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=config.adam_eps, fused=fused, capturable=capturable)


def _on_device(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups with their learning rates as tensors on the GPU, if steps can be captured as CUDA graphs."""
    for group in groups:
        if world_size() == 1 and group["params"] and group["params"][0].is_cuda:
            group["lr"] = torch.tensor(group["rate"], device=group["params"][0].device)
    return groups


class Lamb(torch.optim.Optimizer):
    """Adam whose update of each tensor is scaled to the tensor's norm (You et al. 2020), for large batches.

    Tensors without weight decay (biases and norms) take the unscaled update, as in the authors' code.
    """

    def __init__(self, groups: list[dict[str, Any]], config: TrainConfig) -> None:
        betas, eps = (config.beta1, config.beta2), config.adam_eps
        capturable = any(isinstance(group.get("lr"), Tensor) for group in groups)
        super().__init__(groups, {"lr": config.learning_rate, "betas": betas, "eps": eps, "capturable": capturable})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        on_device = group["capturable"]  # a CUDA graph can neither read a number nor keep one on the host
        if not state:
            state["step"] = torch.tensor(0.0, device=parameter.device if on_device else "cpu")
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        (beta1, beta2), mean, square = group["betas"], state["exp_avg"], state["exp_avg_sq"]
        state["step"] += 1
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        count = state["step"].double() if on_device else float(state["step"])
        update = (mean / (1 - beta1**count)) / ((square / (1 - beta2**count)).sqrt() + group["eps"])
        rate: float | Tensor = group["lr"]
        if group["weight_decay"]:
            update = update.add_(parameter, alpha=group["weight_decay"])
            size, length = full_tensor(parameter.norm()), full_tensor(update.norm())
            rate = group["lr"] * torch.where((size > 0) & (length > 0), size / length, torch.ones_like(size))
        parameter.sub_(update * rate)
