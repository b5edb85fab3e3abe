"""Which kernels run: the fused ones on CUDA, with bfloat16 products, on packed batches; plain code everywhere else.

`choose_now` decides at the start of a forward pass, `choose_for_run` at the start of a training run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch

from bertsmith.batch import Layout, Packed
from bertsmith.model.config import EncoderConfig, Reach
from bertsmith.progress import say

HEAD_SIZES = (16, 32, 64, 128)  # that the attention kernels have tiles for
OLDEST = (8, 0)  # the first compute capability with bfloat16 products
# What the fused kernels cannot compute: a test of the configuration, and the reason. A new feature gets a row here.
UNSUPPORTED: tuple[tuple[Callable[[EncoderConfig], bool], str], ...] = (
    (lambda c: c.layer_type == "lstm", "LSTM layers run on cuDNN"),
    (lambda c: c.head_size not in HEAD_SIZES, "head size {c.head_size} has no tile; 16, 32, 64 and 128 have"),
    (
        lambda c: c.relative_terms != "none" and any(layer.reach != Reach(None, None) for layer in c.layers),
        "attention has terms of distances and a limited reach",
    ),
    (lambda c: c.convolution is not None, "a convolution is beside the first layer"),
)
_allowed = True


@dataclass(frozen=True)
class Choice:
    """Whether the fused kernels run; if not, `reason` is the reason in words."""

    reason: str = ""

    @property
    def fused(self) -> bool:
        return not self.reason


def choose_now(config: EncoderConfig, device: torch.device, layout: Layout) -> Choice:
    """The kernels of a forward pass on this device, with this layout, under the current autocast."""
    autocast = device.type == "cuda" and torch.is_autocast_enabled("cuda")
    return choose(config, device, torch.get_autocast_dtype("cuda") if autocast else None, layout)


def choose_for_run(config: EncoderConfig, device: torch.device, dtype: torch.dtype | None) -> Choice:
    """The kernels of a run on packed batches; if a GPU has to use plain ones, a note is printed once."""
    choice = choose(config, device, dtype)
    if device.type == "cuda" and choice.reason:
        _note(choice.reason)
    return choice


def choose(
    config: EncoderConfig, device: torch.device, dtype: torch.dtype | None, layout: Layout | None = None
) -> Choice:
    """The kernels for matrix products of this type (None: no autocast), on batches of this layout (None: packed)."""
    if not _allowed:
        return Choice("plain kernels were asked for")
    if device.type != "cuda":
        return Choice(f"the device is {device.type}, not cuda")
    if dtype != torch.bfloat16:
        found = "not autocast" if dtype is None else str(dtype).removeprefix("torch.")
        return Choice(f"matrix products are {found}; the fused kernels take bfloat16")
    if layout is not None and not isinstance(layout, Packed):
        return Choice("the batch is padded")
    unsupported = (reason.format(c=config) for has, reason in UNSUPPORTED if has(config))
    return Choice(next(unsupported, "") or _device_reason(device))


@lru_cache
def _device_reason(device: torch.device) -> str:
    """The reason why the kernels cannot be compiled for a GPU; empty if they can."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return "Triton is not installed: pip install triton"
    if torch.cuda.get_device_capability(device) < OLDEST:
        return f"{torch.cuda.get_device_name(device)} is too old for the fused ones"
    return ""


@lru_cache
def _note(reason: str) -> None:
    say(f"note: training on this GPU takes plain kernels: {reason}")


@contextmanager
def plain_kernels() -> Iterator[None]:
    """A context in which every forward pass uses plain code, for comparison with the fused kernels."""
    global _allowed
    before, _allowed = _allowed, False
    try:
        yield
    finally:
        _allowed = before


def compiled_kernels() -> int:
    """The number of kernels compiled so far in this process; it must not grow after a run's first steps."""
    parts = [module for name, module in sys.modules.items() if name.startswith(f"{__package__}.fused.")]
    kernels = {k for part in parts for k in vars(part).values() if hasattr(k, "device_caches")}
    return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())
