"""Where the time of ModernBERT's steps goes on one GPU, and what other settings of its kernels would take.

`benchmarks.long --part kernels` times the kernels of one layer: attention within a window and to all tokens with every
candidate of block sizes, warps and stages, beside PyTorch's own attention; the kernels between two products; and the
products. `--part profile` sums the kernels of a training step and of a prediction by kind. Every variant that fails
prints its error, and the next one follows.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.kernel_kinds import kernel_times, kind_of
from benchmarks.peer_forms import DEVICE, free_memory
from benchmarks.record import keep
from bertsmith.model.config import EncoderConfig, Reach
from bertsmith.model.cost import token_pairs
from bertsmith.model.fused import gate, long_attention, rows
from bertsmith.model.rotary import Rotation

DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
REPEATS = 10  # launches in one CUDA graph, so that the time of a launch does not count
Work = Callable[[], object]
Launch = tuple[int, int, int, int]  # own block, other block, warps, stages
FORWARD: tuple[Launch, ...] = (
    (64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 4, 3), (128, 128, 8, 2), (64, 128, 4, 2),
)  # fmt: skip
QUERY_SIDE: tuple[Launch, ...] = (
    (128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2), (128, 32, 8, 3), (128, 128, 8, 2),
)  # fmt: skip
KEY_SIDE: tuple[Launch, ...] = (
    (128, 32, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 3), (64, 64, 4, 2), (64, 32, 4, 3), (64, 128, 4, 2),
)  # fmt: skip
ONE_PASS: tuple[Launch, ...] = (
    (128, 64, 8, 2), (128, 32, 8, 3), (128, 64, 8, 1), (64, 64, 4, 2), (128, 32, 4, 2), (64, 128, 8, 2),
)  # fmt: skip
LOCAL_FORWARD: tuple[Launch, ...] = ((64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 3), (128, 64, 8, 2), (64, 64, 4, 1))
LOCAL_QUERY_SIDE: tuple[Launch, ...] = ((64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 3), (128, 64, 8, 3), (64, 64, 4, 1))
LOCAL_KEY_SIDE: tuple[Launch, ...] = ((64, 64, 4, 2), (64, 32, 4, 3), (64, 64, 4, 1), (128, 32, 4, 3), (64, 64, 4, 3))


class Variant(NamedTuple):
    """One measurement: the work that `make` prepares, and its operations or its bytes."""

    name: str
    make: Callable[[], Work]
    operations: float = 0.0
    moved: float = 0.0


class Inputs(NamedTuple):
    """What the attention of one layer reads, with the angles of rotary positions."""

    qkv: Tensor
    grad: Tensor
    starts: Tensor
    angles: Rotation
    length: int
    heads: int

    @classmethod
    def draw(cls, length: int, tokens: int, heads: int, size: int) -> Inputs:
        torch.manual_seed(0)
        qkv, grad = (torch.randn(tokens, n * heads * size, device=DEVICE).to(DTYPE) for n in (3, 1))
        angles = torch.rand(tokens, size // 2, device=DEVICE)
        starts = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=DEVICE)
        return cls(qkv, grad, starts, Rotation(angles.cos(), angles.sin()), length, heads)

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (T, A, D), in the memory of their product."""
        q, k, v = self.qkv.view(len(self.qkv), 3, self.heads, -1).unbind(1)
        return q, k, v


def microseconds(work: Work) -> float:
    """The time of one call, the fastest of three; on a GPU of calls that a CUDA graph holds."""
    work()
    if DEVICE.type != "cuda":
        began = time.perf_counter()
        work()
        return (time.perf_counter() - began) * 1e6
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            work()
    graph.replay()
    times = []
    for _ in range(3):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) * 1000 / REPEATS)
    return min(times)


def our_forward(given: Inputs, reach: Reach) -> tuple[Tensor, Tensor]:
    return long_attention.long_attention_forward(given.qkv, given.starts, None, given.length, given.heads, reach, 0.0)


def our_backward(given: Inputs, reach: Reach) -> Work:
    out, sums = our_forward(given, reach)
    first = given.grad, out, sums, given.qkv, given.starts, None, given.angles, False
    return lambda: long_attention.long_attention_backward(*first, given.length, given.heads, reach, 0.0)


def with_launch(
    names: tuple[str, ...], launches: tuple[Launch, ...], prepare: Callable[[], Work]
) -> Callable[[], Work]:
    """Work under other settings of `long_attention`, which stay set while it is measured."""

    def make() -> Work:
        for name, launch in zip(names, launches, strict=True):
            setattr(long_attention, name, (launch, getattr(long_attention, name)[1]))
        return prepare()

    return make


def our_attention(given: Inputs, reach: Reach, operations: float) -> Iterator[Variant]:
    """Our kernels: every candidate of a kernel with the first candidates of the others."""
    local = reach != Reach(None, None)
    prefix = "LOCAL_" if local else ""
    sides = (LOCAL_QUERY_SIDE, LOCAL_KEY_SIDE) if local else (QUERY_SIDE, KEY_SIDE)
    for launch in LOCAL_FORWARD if local else FORWARD:
        prepare = with_launch((prefix + "FORWARD",), (launch,), lambda: lambda: our_forward(given, reach))
        yield Variant(f"forward {launch}", prepare, operations)
    pairs = [(launch, sides[1][0]) for launch in sides[0]] + [(sides[0][0], launch) for launch in sides[1][1:]]
    for pair in pairs:
        names = (prefix + "QUERY_SIDE", prefix + "KEY_SIDE")
        prepare = with_launch(names, pair, lambda: our_backward(given, reach))
        yield Variant(f"backward {pair[0]} {pair[1]}", prepare, 2.5 * operations)


def in_one_pass(given: Inputs, operations: float) -> Iterator[Variant]:
    """The backward pass to all tokens with one kernel."""

    def make(launch: Launch) -> Work:
        work = our_backward(given, Reach(None, None))

        def one_pass() -> None:
            before, long_attention.ONE_PASS_LENGTH = long_attention.ONE_PASS_LENGTH, 0
            long_attention.ONE_PASS = launch
            try:
                work()
            finally:
                long_attention.ONE_PASS_LENGTH = before

        return one_pass

    for launch in ONE_PASS:
        yield Variant(f"backward in one pass {launch}", lambda launch=launch: make(launch), 2.5 * operations)  # type: ignore[misc]


def window_of(reach: Reach) -> dict[str, int]:
    return {"window_size_left": reach.before or -1, "window_size_right": reach.after or -1}


def flash_forward(given: Inputs, reach: Reach) -> tuple[Any, ...]:
    ends = given.starts, given.starts, given.length, given.length
    return torch.ops.aten._flash_attention_forward(*given.parts(), *ends, 0.0, False, False, **window_of(reach))  # type: ignore[no-any-return]


def flash_backward(given: Inputs, reach: Reach) -> Work:
    out, sums, *_ = flash_forward(given, reach)
    ends = given.starts, given.starts, given.length, given.length
    state = torch.zeros(2, dtype=torch.uint64, device=DEVICE), torch.empty(0, device=DEVICE)  # of dropout
    first = given.grad.view_as(out), *given.parts(), out, sums, *ends, 0.0, False, *state
    return lambda: torch.ops.aten._flash_attention_backward(*first, **window_of(reach))


def cudnn(given: Inputs, backward: bool) -> Work:
    """cuDNN's attention (B, A, L, D) of sequences that all have one length."""
    split = (-1, given.length)
    q, k, v = (p.unflatten(0, split).transpose(1, 2).detach().requires_grad_(backward) for p in given.parts())
    grad = given.grad.unflatten(1, (given.heads, -1)).unflatten(0, split).transpose(1, 2)

    def work() -> None:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v)
        if backward:
            torch.autograd.grad(out, (q, k, v), grad)

    return work


def their_attention(given: Inputs, reach: Reach, operations: float) -> Iterator[Variant]:
    """PyTorch's: FlashAttention-2 on packed sequences, cuDNN on sequences of one length, which has no window."""
    yield Variant("forward, FlashAttention-2", lambda: lambda: flash_forward(given, reach), operations)
    yield Variant("backward, FlashAttention-2", lambda: flash_backward(given, reach), 2.5 * operations)
    if reach.before is None:
        yield Variant("forward, cuDNN", lambda: cudnn(given, False), operations)
        yield Variant("forward and backward, cuDNN", lambda: cudnn(given, True), 3.5 * operations)


def attention(config: EncoderConfig, length: int, tokens: int) -> Iterator[Variant]:
    """Attention within the window and to all tokens of sequences of one length."""
    given = Inputs.draw(length, tokens, config.num_heads, config.head_size)
    for name, reach in (("global", Reach(None, None)), ("local", config.layers[1].reach)):
        operations = 4.0 * config.hidden_size * token_pairs(length, reach) * (tokens // length)
        ours = (*our_attention(given, reach, operations), *(in_one_pass(given, operations) if name == "global" else ()))
        for variant in (*ours, *their_attention(given, reach, operations)):
            yield variant._replace(name=f"{name} {length}: {variant.name}")


def set_and(module: Any, values: dict[str, Any], work: Work) -> Callable[[], Work]:
    """Work under other settings of a module."""

    def make() -> Work:
        for name, value in values.items():
            setattr(module, name, value)
        return work

    return make


def between_products(config: EncoderConfig, tokens: int) -> Iterator[Variant]:
    """The kernels between two products; all of them are bound by memory."""
    hidden, inner, size = config.hidden_size, config.intermediate_size, DTYPE.itemsize
    x, grad, residual = (torch.randn(tokens, hidden, device=DEVICE).to(DTYPE) for _ in range(3))
    scale, copy = torch.ones(hidden, device=DEVICE), torch.empty_like(x)
    wide, narrow = torch.randn(tokens, 2 * inner, device=DEVICE).to(DTYPE), grad.new_ones(tokens, inner)
    given = Inputs.draw(tokens, tokens, config.num_heads, config.head_size)
    _, mean, rstd = rows.add_norm_forward(x, None, None, scale, None, None, 0.0, 1e-5)
    state, gated = tokens * hidden * size, tokens * inner * size
    yield Variant("copy", lambda: lambda: copy.copy_(x), moved=2 * state)
    for warps in (1, 2, 4):
        change = {"NORM_WARPS": (warps, 2)}
        plain = set_and(rows, change, lambda: rows.add_norm_forward(x, None, None, scale, None, None, 0.0, 1e-5))
        yield Variant(f"norm, {warps} warps", plain, moved=2 * state)
        copying = set_and(
            rows, change, lambda: rows.add_norm_forward(x, None, None, scale, None, None, 0.0, 1e-5, copy)
        )
        yield Variant(f"norm and copy, {warps} warps", copying, moved=3 * state)
        for programs in (528, 1056, 2112):
            back = set_and(
                rows, {**change, "NORM_PROGRAMS": (programs, 1584)},
                lambda: rows.add_norm_backward(grad, x, None, None, scale, None, None, mean, rstd, 0.0, residual),
            )  # fmt: skip
            yield Variant(f"norm backward, {warps} warps, {programs} programs", back, moved=4 * state)
    yield from _gates(wide, narrow, gated)
    for height in (16, 8, 4):
        for warps in (4, 8):
            turn = set_and(
                gate, {"ROTATED_ROWS": height, "ROTATED_WARPS": warps},
                lambda: gate.rotate_in_place(given.qkv, given.angles, config.num_heads),
            )  # fmt: skip
            yield Variant(f"rotation, {height} rows, {warps} warps", turn, moved=4 * state)


def _gates(wide: Tensor, narrow: Tensor, gated: float) -> Iterator[Variant]:
    for elements in ((2048, 1024), (4096, 2048), (1024, 512)):
        change = {"ELEMENTS": elements}
        forward = set_and(gate, change, lambda: gate.gate_forward(wide, None, "gelu"))
        yield Variant(f"gate, {elements[0]} elements", forward, moved=3 * gated)
        for warps in (4, 8):
            back = set_and(
                gate, {**change, "ACTIVATION_WARPS": warps}, lambda: gate.gate_backward(narrow, wide, None, "gelu")
            )
            yield Variant(f"gate backward, {elements[1]} elements, {warps} warps", back, moved=5 * gated)


def products(config: EncoderConfig, tokens: int) -> Iterator[Variant]:
    """The products of a layer of ModernBERT and of BERT: forward, the gradient of the input, that of the weights."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = {"qkv": (3 * hidden, hidden), "output": (hidden, hidden), "inner": (2 * inner, hidden)}
    shapes |= {"outer": (hidden, inner), "BERT's inner": (4 * hidden, hidden), "BERT's outer": (hidden, 4 * hidden)}
    for name, (out, into) in shapes.items():
        x, grad = (torch.randn(tokens, n, device=DEVICE).to(DTYPE) for n in (into, out))
        weight, total = (
            torch.randn(out, into, device=DEVICE).to(DTYPE),
            torch.zeros(tokens, out, device=DEVICE).to(DTYPE),
        )
        yield from _products_of(name, x, grad, weight, total)


def _products_of(name: str, x: Tensor, grad: Tensor, weight: Tensor, total: Tensor) -> Iterator[Variant]:
    from bertsmith.model.fused.operations import matmul_float32

    operations = 2.0 * len(x) * weight.numel()
    yield Variant(f"{name}, forward", lambda: lambda: x @ weight.t(), operations)
    if "out" in name:
        yield Variant(f"{name}, added in place", lambda: lambda: total.addmm_(x, weight.t()), operations)
    yield Variant(f"{name}, gradient of the input", lambda: lambda: grad @ weight, operations)
    yield Variant(f"{name}, of the weights", lambda: lambda: matmul_float32(grad.t(), x), operations)
    yield Variant(f"{name}, of the weights, transposed", lambda: lambda: matmul_float32(x.t(), grad), operations)
    yield Variant(f"{name}, of the weights, in bfloat16", lambda: lambda: grad.t() @ x, operations)


def variants(arguments: argparse.Namespace, config: EncoderConfig) -> Iterator[Variant]:
    longest, shortest = max(arguments.lengths), min(arguments.lengths)
    yield from attention(config, longest, arguments.tokens)
    yield from products(config, arguments.tokens)
    yield from between_products(config, arguments.tokens)
    if shortest < longest:
        yield from attention(config, shortest, arguments.tokens)


def compile_share(arguments: argparse.Namespace, config: EncoderConfig, share: int, shares: int) -> None:
    """Run every variant of a share of them once, so that its kernels are in Triton's cache on disk."""
    for number, variant in enumerate(variants(arguments, config)):
        if number % shares == share:
            try:
                variant.make()()
            except Exception:  # the measurement says what is wrong with it
                continue


def compile_together(arguments: argparse.Namespace, config: EncoderConfig) -> None:
    """Compile the kernels of all variants in several processes; what is not compiled in time is compiled later."""
    spawn, began = multiprocessing.get_context("spawn"), time.monotonic()
    given = [(arguments, config, share, arguments.workers) for share in range(arguments.workers)]
    started = [spawn.Process(target=compile_share, args=each, daemon=True) for each in given]
    for process in started:
        process.start()
    for process in started:
        process.join(max(0.0, began + arguments.seconds / 2 - time.monotonic()))
    for process in started:
        process.terminate()
    print(f"kernels compiled in {time.monotonic() - began:.0f} s", flush=True)


def kernels(arguments: argparse.Namespace, config: EncoderConfig) -> None:
    """Print a line for each variant, and keep all of them."""
    end = time.monotonic() + arguments.seconds
    if arguments.workers:
        try:
            compile_together(arguments, config)
        except Exception as error:  # they are then compiled one by one
            print(f"not compiled together: {error!r}", flush=True)
    found: dict[str, Any] = {}
    for variant in variants(arguments, config):
        if time.monotonic() > end:
            print("the rest is left out, the time is over", flush=True)
            break
        try:
            spent = microseconds(variant.make())
        except Exception as error:  # a variant that fails must not end the others
            lines = str(error).strip().splitlines() or [""]
            print(f"{variant.name:60} failed: {type(error).__name__}: {lines[0][:160]}", flush=True)
            free_memory()
            continue
        rate = (variant.operations or variant.moved) / spent / (1e6 if variant.operations else 1e3)
        unit = "TFLOP/s" if variant.operations else "GB/s"
        print(f"{variant.name:60} {spent:10.1f} us {rate:8.0f} {unit}", flush=True)
        found[variant.name] = {"us": round(spent, 1), unit: round(rate)}
    keep("long", arguments.results, "kernels", f"{arguments.size}, {arguments.tokens} tokens", found)


def profile(name: str, step: Work, tokens: int) -> dict[str, Any]:
    """Print the kernels of a step by name and by kind, in nanoseconds for each token."""
    for _ in range(4):
        step()
    times = kernel_times(step)
    kinds: dict[str, float] = {}
    for kernel, (milliseconds, _) in times.items():
        kinds[kind_of(kernel)] = kinds.get(kind_of(kernel), 0.0) + milliseconds
    total = sum(kinds.values())
    print(f"\n{name}: {total:.2f} ms, {total * 1e6 / tokens:.0f} ns a token", flush=True)
    for kind, milliseconds in sorted(kinds.items(), key=lambda pair: -pair[1]):
        print(f"  {kind:24} {milliseconds:8.2f} ms {milliseconds * 1e6 / tokens:8.1f} ns a token", flush=True)
    largest = sorted(times.items(), key=lambda pair: -pair[1][0])[:32]
    for kernel, (milliseconds, calls) in largest:
        print(f"    {milliseconds:8.3f} ms {calls:6.0f} calls  {kernel[:110]}", flush=True)
    rounded = {kind: round(milliseconds, 3) for kind, milliseconds in kinds.items()}
    return {"ms": round(total, 2), "kinds": rounded, "kernels": {k[:110]: round(ms, 3) for k, (ms, _) in largest}}
