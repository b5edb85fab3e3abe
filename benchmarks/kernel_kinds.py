"""Where a step's time on the GPU goes, by kind of kernel."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

KINDS = {  # the first that fits a kernel's name
    "attention": r"attention|flash|fmha|sdpa|cudnn_generated",
    "head and loss": r"cross_entropy|nll_loss|softmax|argmax|ArgMax",
    "norm": r"norm|GammaBeta|lookup",
    "activation": r"gelu|Gelu|tanh",
    "optimiser": r"FusedOptimizer|multi_tensor|lerp|addcmul|addcdiv",
    "matrix": r"nvjet|gemm|cutlass|cublas|splitK|xmma|wgmma",
}


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "other")


def by_kind(step: Callable[[], None], steps: int = 3) -> tuple[dict[str, float], list[tuple[str, float]]]:
    """Milliseconds of a step by kind, and the twenty kernels that take the most."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    kinds, kernels = kernels_in(seen, steps)
    return kinds, [(name, ms) for name, ms, _ in kernels[:20]]


def kernels_in(seen: profile, steps: int) -> tuple[dict[str, float], list[tuple[str, float, float]]]:
    """Milliseconds of a step by kind, and of all kernels, the longest first, with how often a step launches them."""
    times: defaultdict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for event in seen.events():  # type: ignore[union-attr]
        if event.device_type == torch.autograd.DeviceType.CUDA:  # type: ignore[attr-defined]
            times[event.name] += event.device_time / 1000 / steps
            counts[event.name] += 1
    kinds: defaultdict[str, float] = defaultdict(float)
    for name, milliseconds in times.items():
        kinds[kind_of(name)] += milliseconds
    found = {kind: round(kinds[kind], 2) for kind in [*KINDS, "other"]}
    found["all"] = round(sum(kinds.values()), 2)
    longest = sorted(times.items(), key=lambda item: -item[1])
    return found, [(name[:120], round(ms, 3), counts[name] / steps) for name, ms in longest]
