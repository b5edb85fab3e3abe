"""The settings of a training run, and the device it runs on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch

from bertsmith.config import Bounds, check_bounds
from bertsmith.errors import UserError

Optimizer = Literal["adamw", "lamb", "muon"]
Schedule = Literal["linear", "cosine", "stable", "constant"]
Precision = Literal["auto", "float32", "bfloat16"]
Parallel = Literal["ddp", "fsdp"]
# Settings that may differ when a run is resumed: they change how the work is done, not what is computed.
MAY_CHANGE = frozenset(
    "train." + name
    for name in """micro_batch_size parallel gradient_checkpointing save_every save_minutes evaluate_every keep
    workers tensorboard""".split()
)


@dataclass(frozen=True)
class TrainConfig:
    """The settings of a training run. The defaults are those of the paper's pre-training (appendix A.2).

    The length of a run is given in `steps`, `epochs` or `hours`, in which case its schedule follows the clock, which
    does not count the compilation of kernels; if several are set (`--set`), the last one counts. `batch_size` is the
    number of sequences of a step; `micro_batch_size` is how many of them go through the model at once (unset: as many
    as fit into 8,192 tokens at the full length, at most 64, on a GPU more if there is memory).

    `optimizer` is adamw, lamb (You et al. 2020) or muon (Jordan 2024: the encoder's matrices by Muon at
    `learning_rate`, all other parameters by AdamW at `rest_learning_rate`). The learning rate rises during the warm-up,
    the share `warmup` of the run; then it falls linearly or as a cosine, is constant until the last share `decay`
    (`stable`), or is constant. Each layer has `layer_decay` times the rate of the layer above it; the embeddings have
    the lowest.

    A checkpoint is written every `save_minutes` and, if it is set, every `save_every`; the last `keep` of them are
    kept, and the best one of those written at an evaluation. `save_every` and `evaluate_every` are a number of steps
    or, under 1, a share of the run; with `evaluate_every` 0 a run is evaluated at its end only. A run stops early after
    `patience` evaluations without a better score; with `keep_best` its model is that of the best evaluation, the
    earliest of equally good ones. `workers` processes prefetch batches (unset: up to 4 for a GPU, none for a CPU). On
    several ranks (`torchrun`) the model is replicated (`parallel` ddp) or sharded (fsdp).
    """

    steps: int | None = None
    epochs: float | None = None
    hours: float | None = None
    batch_size: int = 256
    micro_batch_size: int | None = None
    optimizer: Optimizer = "adamw"
    learning_rate: float = 1e-4
    rest_learning_rate: float | None = None
    warmup: float = 0.01
    schedule: Schedule = "linear"
    decay: float = 0.2
    layer_decay: float = 1.0
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    adam_eps: float = 1e-6
    momentum: float = 0.95
    clip_norm: float = 1.0
    precision: Precision = "auto"
    gradient_checkpointing: bool = False
    parallel: Parallel = "ddp"
    workers: int | None = None
    save_every: float = 0
    save_minutes: float = 15.0
    evaluate_every: float = 0.0
    patience: int | None = None
    keep_best: bool = False
    keep: int = 2  # checkpoints, and the best one
    tensorboard: bool = False
    seed: int = 1
    ONE_OF = ("hours", "steps", "epochs")  # if several are set, the first of these counts
    BOUNDS = {
        "steps": Bounds(1, 10**12),
        "epochs": Bounds(0, 10**9, "(]"),
        "hours": Bounds(0, 10**6, "(]"),
        "batch_size": Bounds(1, 2**20),
        "micro_batch_size": Bounds(1, 2**20),
        "learning_rate": Bounds(0, 1000),
        "rest_learning_rate": Bounds(0, 1000, "(]"),
        "warmup": Bounds(0, 1),
        "decay": Bounds(0, 1),
        "layer_decay": Bounds(0, 1, "(]"),
        "weight_decay": Bounds(0, 1000),
        "beta1": Bounds(0, 1, "[)"),
        "beta2": Bounds(0, 1, "[)"),
        "adam_eps": Bounds(0, 1),
        "momentum": Bounds(0, 1, "[)"),
        "clip_norm": Bounds(0, 10**9),
        "workers": Bounds(0, 1024),
        "save_every": Bounds(0, 10**12),
        "save_minutes": Bounds(0, 10**9, "(]"),
        "evaluate_every": Bounds(0, 10**12),
        "patience": Bounds(1, 10**9),
        "keep": Bounds(1, 10**6),
        "seed": Bounds(0, 2**62),
    }

    def __post_init__(self) -> None:
        check_bounds(self, "train.")
        if (self.patience is not None or self.keep_best) and not self.evaluate_every:
            name = "keep_best" if self.keep_best else "patience"
            raise UserError(
                f"train.{name} compares evaluations: set train.evaluate_every, 0.1 for every tenth of the run"
            )
        if self.schedule == "stable" and self.warmup + self.decay > 1:
            raise UserError(f"train.warmup {self.warmup} and train.decay {self.decay} are together longer than the run")

    def refuse_without_scores(self, hint: str) -> None:
        """Raise an error if evaluations are to be compared and there is no held-out data."""
        for name in ("patience", "keep_best"):
            if getattr(self, name):
                raise UserError(f"train.{name} compares scores on held-out data, and there is none; {hint}")

    def micro_size(self, max_length: int) -> int:
        """How many sequences of this length go through the model at once."""
        return min(self.micro_batch_size or max(1, min(64, 8192 // max_length)), self.batch_size)

    def num_steps(self, num_samples: int) -> int | None:
        """The number of steps for this many samples; None if the run ends by the clock."""
        if self.hours is not None:
            return None
        if self.steps is not None:
            return self.steps
        if self.epochs is None:
            raise UserError("the run has no length: set train.steps, train.epochs or train.hours")
        return max(1, -(-int(self.epochs * num_samples) // self.batch_size))


def pick_device(name: str | None = None, precision: str = "auto") -> torch.device:
    """The named device, or the best available: CUDA (under `torchrun` the GPU of the local rank), mps, else the CPU.

    The device has to support the precision.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    kind = name.split(":")[0] if name is not None else next(kind for kind, found in available.items() if found)
    if not available.get(kind, False):
        found = ", ".join(k for k, v in available.items() if v)
        raise UserError(f"--device {name!r} is not available here; there is: {found}")
    own = kind == "cuda" and "LOCAL_RANK" in os.environ
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if own else torch.device(name or kind)
    check_precision(device, precision)
    return device


def check_precision(device: torch.device, precision: str) -> None:
    """Refuse bfloat16 on a CPU without it, where it would be hundreds of times slower than float32."""
    if precision == "bfloat16" and device.type == "cpu" and not has_bfloat16():
        raise UserError("this CPU has no products in bfloat16; choose float32, which is many times faster here")


def has_bfloat16() -> bool:
    """Whether the CPU has matrix products in bfloat16."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def autocast_dtype(precision: Precision, device: torch.device) -> torch.dtype | None:
    """The dtype for autocast: bfloat16 if the device supports it and float32 is not set, else None."""
    if precision == "float32":
        return None
    if precision == "bfloat16" or (device.type == "cuda" and torch.cuda.is_bf16_supported()):
        return torch.bfloat16
    return None
