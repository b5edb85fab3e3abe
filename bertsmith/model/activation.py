"""The activation functions that a configuration may name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bertsmith.model.config import Activation, PoolerActivation

FUNCTIONS: dict[Activation | PoolerActivation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


def activate(x: Tensor, name: Activation | PoolerActivation) -> Tensor:
    """Apply the activation function of this name."""
    return FUNCTIONS[name](x)
