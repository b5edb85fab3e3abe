"""How far a run has come, counted in steps or by the clock, and the learning rate that belongs to it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from bertsmith.training.settings import TrainConfig


@dataclass
class Course:
    """The course of a run of `steps` steps, or of `seconds` by the clock, the time before a resume included.

    `done` counts in the course's own unit. A schedule by the clock ends when the time does, evaluations and saves
    included, whatever the machine's speed.
    """

    steps: int | None
    seconds: float
    step: int = 0
    before: float = 0.0  # seconds that earlier processes spent on this run
    began: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        return self.before + time.monotonic() - self.began

    @property
    def total(self) -> float:
        return self.steps if self.steps is not None else self.seconds

    @property
    def by_clock(self) -> bool:
        return self.steps is None

    def done(self) -> float:
        return min(self.elapsed, self.seconds) if self.by_clock else self.step


def course_of(config: TrainConfig, steps: int | None) -> Course:
    """The course that a configuration asks for."""
    return Course(steps, 3600.0 * (config.hours or 0.0))


def rate_share(config: TrainConfig, done: float, total: float) -> float:
    """The share of the full learning rate when `done` of `total` steps (or seconds) lie behind."""
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
