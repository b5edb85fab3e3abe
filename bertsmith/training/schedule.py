"""The length of a run, in steps or by the clock, how much of it is done, and the schedule of the learning rate."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from bertsmith.training.settings import TrainConfig


@dataclass
class Budget:
    """The length of a run: `steps`, or `seconds` by the clock, which include the time before it was resumed.

    `done` and `total` are in the unit of the budget. A run by the clock ends on time, evaluations and checkpoints
    included, whatever the speed of the machine; the time until its first batch and that of compiling do not count.
    """

    steps: int | None
    seconds: float
    step: int = 0
    before: float = 0.0  # seconds of this run before it was resumed
    compiling: float = 0.0  # seconds since then in which kernels were compiled and CUDA graphs captured
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, config: TrainConfig, steps: int | None) -> Budget:
        return cls(steps, 3600.0 * (config.hours or 0.0))

    @property
    def elapsed(self) -> float:
        return self.before + time.monotonic() - self.began - self.compiling

    @property
    def total(self) -> float:
        return self.steps if self.steps is not None else self.seconds

    @property
    def by_clock(self) -> bool:
        return self.steps is None

    def start(self) -> None:
        """Start the clock."""
        self.began = time.monotonic()

    def done(self) -> float:
        return min(self.elapsed, self.seconds) if self.by_clock else self.step


def learning_rate_factor(config: TrainConfig, done: float, total: float) -> float:
    """The factor of the learning rate after `done` of `total` steps (or seconds)."""
    warmup = config.warmup * total
    warmup = round(warmup) if isinstance(total, int) else warmup
    if done < warmup:
        return min(1.0, (done + 1) / warmup)
    left = (total - done) / max(1e-9, total - warmup)  # 1 at the end of the warm-up, 0 at the end
    if config.schedule == "linear":
        return left
    if config.schedule == "cosine":
        return (1 - math.cos(math.pi * left)) / 2
    if config.schedule == "stable":
        return min(1.0, (total - done) / max(1e-9, config.decay * total))
    return 1.0
