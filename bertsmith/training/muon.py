"""Muon (Jordan 2024): momentum that is orthogonalised before it is added to the weights.

The updates are those of `torch.optim.Muon`, but all matrices of one shape are iterated together, and the ranks divide
them among themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from bertsmith.training import distributed

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration, as published
ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Orthogonalised Nesterov momentum with decoupled weight decay."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, weight_decay: float, momentum: float) -> None:
        values = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "capturable": True}
        super().__init__(groups, values)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for parameters in by_shape.values():
                self._update(parameters, group)

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Update all matrices of one shape."""
        (rows, columns), device = parameters[0].shape, parameters[0].device
        gradients, moments = [p.grad for p in parameters if p.grad is not None], [self._moment(p) for p in parameters]
        steps = torch.empty(len(parameters), rows, columns, dtype=iteration_dtype(device), device=device)
        kernels = fused_kernels(parameters[0], group["lr"])
        factor = math.sqrt(max(1.0, rows / columns))
        if kernels is not None:
            for gradient, moment, step in zip(gradients, moments, steps, strict=True):
                kernels.momentum(gradient, moment, step, group["momentum"])
            for parameter, step in zip(parameters, orthogonalise(steps, kernels.product), strict=True):
                kernels.change(parameter, step, group["lr"], group["weight_decay"], factor)
            return
        torch._foreach_lerp_(moments, gradients, 1 - group["momentum"])
        nesterov = torch._foreach_lerp(gradients, moments, group["momentum"])
        torch._foreach_copy_(list(steps.unbind(0)), [distributed.full_tensor(step) for step in nesterov])
        changes = orthogonalise_together(steps) * (group["lr"] * -factor)
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        for parameter, change in zip(parameters, changes, strict=True):
            parameter.add_(distributed.shard_like(change, parameter))

    def _moment(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


def iteration_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on accelerators; CPUs without bfloat16 matrix products would be two hundred times slower."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def orthogonalise_together(matrices: Tensor) -> Tensor:
    """Orthogonalise a stack of matrices that every rank has; each rank computes its part."""
    world_size, rank = distributed.world_size(), distributed.rank()
    if world_size == 1:
        return orthogonalise(matrices)
    share = -(-len(matrices) // world_size)
    mine = matrices[rank * share : (rank + 1) * share]
    done = matrices.new_zeros(share, *matrices.shape[1:])
    if len(mine):
        done[: len(mine)] = orthogonalise(mine)
    return distributed.all_gather(done)[: len(matrices)]


def product(
    a: Tensor, b: Tensor, c: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0, *, symmetric: bool = False
) -> Tensor:
    """alpha · a b + beta · c for every matrix of the stacks."""
    return a @ b if c is None else torch.baddbmm(c, a, b, beta=beta, alpha=alpha)


def orthogonalise(matrices: Tensor, product: Callable[..., Tensor] = product) -> Tensor:
    """Bring the singular values of matrices (N, rows, columns) near 1, by the Newton–Schulz iteration."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = product(x.mT, x, symmetric=True) if tall else product(x, x.mT, symmetric=True)  # the smaller Gram matrix
        factor = product(gram, gram, gram, c, b, symmetric=True)
        x = product(x, factor, x, 1.0, a) if tall else product(factor, x, x, 1.0, a)
    return x


def fused_kernels(parameter: Tensor, rate: float | Tensor) -> Any:
    """The kernels of `muon_kernels.py` if one rank has all matrices on a GPU, else None."""
    one_gpu = parameter.is_cuda and isinstance(rate, Tensor) and distributed.world_size() == 1
    return _kernels() if one_gpu else None


@lru_cache
def _kernels() -> Any:
    try:
        from bertsmith.training import muon_kernels
    except ImportError:  # no Triton
        return None
    return muon_kernels
