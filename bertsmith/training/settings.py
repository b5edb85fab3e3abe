"""The settings of a training run, and the device it runs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from bertsmith.errors import UserError

Schedule = Literal["linear", "constant"]
Precision = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True)
class TrainConfig:
    """How long, how large, how fast. Defaults are the paper's pre-training (appendix A.2).

    A run is `steps` long or, where that is not set, `epochs` times through the data. `batch_size` counts the
    sequences of a step; `micro_batch_size` how many of them go through the model at once (unset: all, up to 64).
    `warmup` is the share of the steps in which the rate rises. `save_every` and `evaluate_every` count steps; 0 does
    it at the end alone. `keep` checkpoints stay on the disk.
    """

    steps: int | None = None
    epochs: float | None = None
    batch_size: int = 256
    micro_batch_size: int | None = None
    learning_rate: float = 1e-4
    warmup: float = 0.01
    schedule: Schedule = "linear"
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    adam_eps: float = 1e-6
    clip_norm: float = 1.0
    precision: Precision = "auto"
    gradient_checkpointing: bool = False
    save_every: int = 0
    evaluate_every: int = 0
    keep: int = 2
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "micro_batch_size", "keep"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"train.{name} must be at least 1, not {value}")
        for name in ("save_every", "evaluate_every", "learning_rate", "weight_decay", "clip_norm", "warmup", "seed"):
            if getattr(self, name) < 0:
                raise UserError(f"train.{name} must not be negative: {getattr(self, name)}")
        if self.epochs is not None and self.epochs <= 0:
            raise UserError(f"train.epochs must be above 0, not {self.epochs}")
        if self.warmup > 1:
            raise UserError(f"train.warmup is a share of the steps, from 0 to 1, not {self.warmup}")

    @property
    def micro_size(self) -> int:
        return min(self.micro_batch_size or 64, self.batch_size)

    def num_steps(self, num_samples: int) -> int:
        """The length of the run on this many samples."""
        if self.steps is not None:
            return self.steps
        if self.epochs is None:
            raise UserError("the run has no length: set train.steps or train.epochs")
        return max(1, -(-int(self.epochs * num_samples) // self.batch_size))


def pick_device(name: str | None = None) -> torch.device:
    """The named device, or the best there is: CUDA, Apple's mps, else the CPU."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name is None:
        return torch.device(next(kind for kind, there in available.items() if there))
    kind = name.split(":")[0]
    if not available.get(kind, False):
        there = ", ".join(k for k, v in available.items() if v)
        raise UserError(f"--device {name!r} is not available here; there is: {there}")
    return torch.device(name)


def autocast_dtype(precision: Precision, device: torch.device) -> torch.dtype | None:
    """The type of the matrix products: bfloat16 where the device has it, unless float32 is asked for."""
    if precision == "float32":
        return None
    if precision == "bfloat16" or (device.type == "cuda" and torch.cuda.is_bf16_supported()):
        return torch.bfloat16
    return None
