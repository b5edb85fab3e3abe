"""Where a step's time on the GPU goes, by kind of kernel."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

KINDS = {  # the first that fits a kernel's name
    "attention": r"attention|flash|fmha|sdpa|cudnn_generated",
    "head and loss": r"cross_entropy|nll_loss|softmax|argmax|ArgMax",
    "norm": r"norm|GammaBeta|lookup",
    "activation": r"gelu|Gelu|tanh|_activation_|_gate_",
    "rotation": r"_rotate",
    "optimiser": r"FusedOptimizer|multi_tensor|lerp|addcmul|addcdiv",
    "matrix": r"nvjet|gemm|cutlass|cublas|splitK|xmma|wgmma",
    "sums": r"reduce_kernel",
    "copies": r"copy|Copy|Memcpy|Memset|Fill",
}


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "other")


def kernel_times(step: Callable[[], object], steps: int = 3) -> dict[str, tuple[float, float]]:
    """Milliseconds and calls of every kernel in a step; without a GPU, of every operation."""
    on_gpu = torch.cuda.is_available()
    times, calls = Counter[str](), Counter[str]()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        for _ in range(steps):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    for event in seen.events():
        if not on_gpu or event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] += (event.device_time if on_gpu else event.self_cpu_time_total) / 1000 / steps
            calls[event.name] += 1
    return {name: (milliseconds, calls[name] / steps) for name, milliseconds in times.items()}


def by_kind(step: Callable[[], None], steps: int = 3) -> tuple[dict[str, float], list[tuple[str, float]]]:
    """Milliseconds of a step by kind, and the twenty kernels that take the most."""
    times = Counter({name: milliseconds for name, (milliseconds, _) in kernel_times(step, steps).items()})
    kinds: Counter[str] = Counter()
    for name, milliseconds in times.items():
        kinds[kind_of(name)] += milliseconds
    found = {kind: round(kinds[kind], 2) for kind in [*KINDS, "other"]}
    found["all"] = round(sum(kinds.values()), 2)
    return found, [(name[:120], round(ms, 3)) for name, ms in times.most_common(20)]
