"""Whether the fused kernels run: on CUDA, with bfloat16 products, on packed batches; all else takes plain code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

from bertsmith.batch import Layout, Packed
from bertsmith.model.config import EncoderConfig
from bertsmith.progress import say

HEAD_SIZES = (16, 32, 64, 128)  # that the attention kernels have tiles for
_allowed = True


def is_fast(config: EncoderConfig, device: torch.device, layout: Layout) -> bool:
    """Whether a forward pass on this device, with this layout and the present autocast, takes the fused kernels."""
    if device.type != "cuda" or not isinstance(layout, Packed) or not torch.is_autocast_enabled("cuda"):
        return False
    return can_fuse(config, device, torch.get_autocast_dtype("cuda"))


def can_fuse(config: EncoderConfig, device: torch.device, dtype: torch.dtype | None) -> bool:
    """Whether this encoder takes the fused kernels for packed batches when products are of this type."""
    return (
        _allowed
        and config.head_size in HEAD_SIZES
        and device.type == "cuda"
        and dtype == torch.bfloat16
        and _can_run(device)
    )


@lru_cache
def _can_run(device: torch.device) -> bool:
    """Whether the kernels can be compiled for a device; said once where they cannot."""
    try:
        import triton  # noqa: F401
    except ImportError:
        say("note: Triton is not installed; training on this GPU takes plain kernels: pip install triton")
        return False
    if torch.cuda.get_device_capability(device) < (8, 0):
        say(f"note: {torch.cuda.get_device_name(device)} is too old for the fused kernels; it takes plain ones")
        return False
    return True


@contextmanager
def plain_kernels() -> Iterator[None]:
    """In the block every forward pass takes plain code: what the fused kernels are compared with."""
    global _allowed
    before, _allowed = _allowed, False
    try:
        yield
    finally:
        _allowed = before


def compiled_kernels() -> int:
    """How many kernels have been compiled so far in this process: it must not grow after a run's first steps."""
    from bertsmith.model.fused import attention, long_attention, lookup, rows

    parts = (rows, attention, long_attention, lookup)
    kernels = {k for part in parts for k in vars(part).values() if hasattr(k, "device_caches")}
    return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())
