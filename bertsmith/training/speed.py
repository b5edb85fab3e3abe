"""Figures of a run: means since the last record, tokens per second, the share of the peak FLOPS, and memory."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from statistics import fmean

import torch

from bertsmith.batch import Batch
from bertsmith.progress import short
from bertsmith.training import distributed
from bertsmith.training.runlog import is_score

SHOWN = 20  # steps whose mean the progress shows: the loss of a single one depends on its rows


class Meter:
    """Means over the steps since the last record; for the progress, of the losses over the last steps."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype | None, flops: Callable[[Batch], float] | None = None
    ) -> None:
        self.device, self.dtype, self.flops = device, dtype, flops
        self.last: dict[str, float] = {}
        self.shown: deque[dict[str, float]] = deque(maxlen=SHOWN)
        self._reset()

    def _reset(self) -> None:
        self.began = time.monotonic()
        self.steps = self.tokens = 0
        self.work = self.loss = self.waited = 0.0
        self.sums: Counter[str] = Counter()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time of the block as training time."""
        began = time.monotonic()
        yield
        self.began += time.monotonic() - began

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as waiting for data."""
        began = time.monotonic()
        yield
        self.waited += time.monotonic() - began

    def add(self, means: dict[str, float], loss: float, micro_batches: list[Batch], tokens: int) -> None:
        """Add a step that was not skipped: its outputs, its micro-batches on this rank, its tokens on all ranks."""
        self.steps += 1
        self.tokens += tokens
        self.loss += loss
        self.sums.update(means)
        self.shown.append({"loss": loss, **{name: value for name, value in means.items() if is_score(name)}})
        if self.flops is not None:
            self.work += sum(self.flops(b) for b in micro_batches)

    def means(self) -> dict[str, float]:
        if not self.steps:
            return {}
        seconds = max(self.seconds, 1e-9)
        outputs = {name: total / self.steps for name, total in self.sums.items()}
        named = {n if is_score(n) else f"{n}_loss": 100.0 * v if is_score(n) else v for n, v in outputs.items()}
        means = {"loss": self.loss / self.steps, **named, "tokens_per_second": self.tokens / seconds}
        means["waiting_share"] = self.waited / seconds
        if self.work:
            means["flop_share"] = self.work / seconds / matrix_ceiling(self.device, self.dtype)
        return means

    def close(self) -> dict[str, float]:
        """Return the means and the peak memory, and reset them."""
        self.last = {**self.means(), "memory_gb": round(peak_memory(self.device) / 1e9, 3)}
        self._reset()
        return self.last

    def summary(self) -> str:
        """A line for the progress bar."""
        means = self.means() or self.last
        if "loss" not in means:
            return ""
        shown = {name: fmean(each[name] for each in self.shown if name in each) for name in self.shown[-1]}
        parts = [f"loss {short(shown.pop('loss'))}"]
        parts += [f"{name.split('_')[0]} {100 * value:.1f} %" for name, value in shown.items()]
        parts += [f"{means['tokens_per_second']:,.0f} tokens/s"]
        if "flop_share" in means:
            parts += [f"{100 * means['flop_share']:.0f} % of the machine"]
        return ", ".join([*parts, f"{peak_memory(self.device) / 1e9:.1f} GB"])


@lru_cache
def matrix_ceiling(device: torch.device, dtype: torch.dtype | None) -> float:
    """Floating-point operations per second of a large matrix product on this device, the upper bound for a model."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype or torch.float32) for _ in range(2))
    times = []
    for _ in range(4):
        synchronise(device)
        began = time.perf_counter()
        a @ b
        synchronise(device)
        times.append(time.perf_counter() - began)
    return 2 * size**3 / min(times)


def synchronise(device: torch.device) -> None:
    """Synchronise with the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device: torch.device) -> float:
    """The peak memory of this process in bytes, on the GPU or, for a CPU, in all."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def release_memory() -> None:
    """Give the memory of a finished run back to the GPU, for other processes; this one would keep it for itself."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def free_memory(device: torch.device) -> float:
    """The bytes that this process may use, infinite if unknown; the ranks of a machine share the memory of its CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    try:
        room = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):
        return float("inf")
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container
    if limit.exists() and (text := limit.read_text().strip()).isdecimal():
        room = min(room, float(text))
    return room / int(os.environ.get("LOCAL_WORLD_SIZE", distributed.world_size()))
