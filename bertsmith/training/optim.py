"""The optimiser and the learning rate's course."""

from __future__ import annotations

import torch
from torch import nn

from bertsmith.training.settings import TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW with decoupled decay on matrices and embeddings, none on biases and norms."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    fused = all(p.device.type in ("cuda", "cpu") for p in parameters)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.adam_eps, fused=fused)


def learning_rate(config: TrainConfig, step: int, steps: int) -> float:
    """The rate of a step (the first is 0): up in a line during the warm-up, then down to zero or constant."""
    warmup = round(config.warmup * steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    if config.schedule == "constant":
        return config.learning_rate
    return config.learning_rate * (steps - step) / max(1, steps - warmup)
