"""CUDA graphs: the kernels of a step are captured once and launched together afterwards.

With small batches or models the CPU takes longer to launch a kernel than the GPU to run it, and between two steps the
GPU waits for the launches of the optimiser. The forward and backward passes are captured for each bucket of batch sizes
when it occurs for the second time; clipping and the update at their second call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bertsmith.batch import Batch, Packed
from bertsmith.training import distributed
from bertsmith.training.settings import TrainConfig

MAX_GRAPHS = 24  # of forward and backward passes; more buckets would occur too rarely
# Adds to the gradients; returns the names of the outputs, and their values in one tensor.
Pass = Callable[[Batch, Mapping[str, float | Tensor]], tuple[list[str], Tensor]]


def can_capture(device: torch.device, optimizers: list[torch.optim.Optimizer]) -> bool:
    """Whether steps can be captured as CUDA graphs: one rank, CUDA, and optimisers that never synchronise."""
    on_one_gpu = device.type == "cuda" and distributed.world_size() == 1
    return on_one_gpu and all(optimizer.defaults.get("capturable") for optimizer in optimizers)


class GraphRunner:
    """Runs the passes and updates of a model, as CUDA graphs where possible; batches have to be bucketed.

    `capturable` says whether the forward and backward passes can be captured: the fused kernels never synchronise with
    the device. Gradients keep their memory from step to step, and are zero after an update.
    """

    def __init__(
        self, model: nn.Module, optimizers: list[torch.optim.Optimizer], config: TrainConfig, capturable: bool
    ) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizers = optimizers
        self.limit = config.clip_norm or float("inf")
        self.captures_passes = capturable and not config.gradient_checkpointing
        self.pool = torch.cuda.graph_pool_handle()
        torch.cuda.reset_peak_memory_stats()  # so that the peak is that of this run
        self.passes: dict[Any, _PassGraph | None] = {}  # by size; None: it has occurred once
        self.seconds = 0.0  # of compiling and capturing
        self.clipping, self.updating = _CapturedCall(), _CapturedCall()
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)

    def run(self, function: Pass, batch: Batch, scales: Mapping[str, float]) -> tuple[list[str], Tensor]:
        """Return the result of `function` for this batch; it adds to the gradients."""
        device = self.parameters[0].device
        if not self.captures_passes or not isinstance(batch.layout, Packed):
            return function(batch.to(device), scales)
        key = batch.layout.max_length, batch.layout.num_padding, *((t.shape, t.dtype) for t in batch.tensors())
        if key not in self.passes:
            self.passes[key] = None
            with self._timed():
                return function(batch.to(device), scales)
        graph = self.passes[key]
        if graph is None and not self._has_room():
            return function(batch.to(device), scales)
        if graph is None:
            with self._timed():
                graph = self.passes[key] = _PassGraph(self, function, batch.to(device), scales)
        return graph.replay(batch, scales)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds += time.monotonic() - began

    def _has_room(self) -> bool:
        """Whether another graph is allowed, by the number of graphs and the memory left beside the passes."""
        most = torch.cuda.max_memory_allocated()
        few = sum(graph is not None for graph in self.passes.values()) < MAX_GRAPHS
        return few and 2 * most < 0.9 * torch.cuda.get_device_properties(self.parameters[0].device).total_memory

    def clip(self) -> Tensor:
        """Clip the gradients; return their norm before that."""
        return self._captured(self.clipping, self._clip)  # type: ignore[no-any-return]

    def _clip(self) -> Tensor:
        return nn.utils.clip_grad_norm_(self.parameters, self.limit)

    def update(self) -> None:
        """Step the optimisers, whose learning rates have been set, and zero the gradients."""
        self._captured(self.updating, self._update)

    def _captured(self, call: _CapturedCall, function: Callable[[], Any]) -> Any:
        if call.graph is not None:
            return call.run(function)
        with self._timed():
            return call.run(function)

    def _update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.zero()

    def zero(self) -> None:
        torch._foreach_zero_([p.grad for p in self.parameters if p.grad is not None])


def capturing(graph: torch.cuda.CUDAGraph, pool: Any = None) -> AbstractContextManager[None]:
    """Capture the kernels launched in the block; another thread may pin the memory of the next batches meanwhile."""
    return torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")


class _CapturedCall:
    """A function without arguments, captured at its second call.

    It does not keep the function, a method of the runner: in a reference cycle, the memory of a finished run would stay
    allocated in a process that starts another one.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: Any = None

    def run(self, function: Callable[[], Any]) -> Any:
        self.calls += 1
        if self.calls == 1:
            return function()
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with capturing(self.graph):
                self.result = function()
        self.graph.replay()
        return self.result


class _PassGraph:
    """The graph of the forward and backward passes of one size."""

    def __init__(self, runner: GraphRunner, function: Pass, batch: Batch, scales: Mapping[str, float]) -> None:
        self.batch = batch
        self.scales = {name: torch.tensor(s, device=batch.tokens.device) for name, s in scales.items()}
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()
        with capturing(self.graph, runner.pool):
            self.names, self.values = function(batch, self.scales)

    def replay(self, batch: Batch, scales: Mapping[str, float]) -> tuple[list[str], Tensor]:
        for own, given in zip(self.batch.tensors(), batch.tensors(), strict=True):
            own.copy_(given, non_blocking=True)
        for name, scale in scales.items():
            self.scales[name].fill_(scale)
        self.graph.replay()
        return self.names, self.values.clone()  # the next graph may overwrite this memory
