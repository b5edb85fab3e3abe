"""CUDA graphs: the kernels of a step recorded once and launched together afterwards.

Launching a kernel takes the CPU longer than running it takes the GPU where batches or models are small; and between two
steps the GPU waits for the optimiser's launches. Forward and backward passes are recorded by the batch's size, rounded
up with filler, when a size comes for the second time; clipping and the update on their second turn.
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

MOST = 24  # recorded sizes; more differ too much to be worth it
# Adds to the gradients; gives the outputs' names, and their values in one tensor.
Pass = Callable[[Batch, Mapping[str, float | Tensor]], tuple[list[str], Tensor]]


def can_capture(device: torch.device, optimizers: list[torch.optim.Optimizer]) -> bool:
    """Whether steps can be captured as CUDA graphs: one rank, CUDA, and optimisers that never synchronise."""
    on_one_gpu = device.type == "cuda" and distributed.world_size() == 1
    return on_one_gpu and all(optimizer.defaults.get("capturable") for optimizer in optimizers)


class GraphRunner:
    """Runs the passes and the updates of a model, recorded where that is possible; batches come rounded.

    `capturable` says whether forward and backward can be recorded: fused kernels never ask the device for a value.
    Gradients stay where they are from step to step, and are zero after an update.
    """

    def __init__(
        self, model: nn.Module, optimizers: list[torch.optim.Optimizer], config: TrainConfig, capturable: bool
    ) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizers = optimizers
        self.limit = config.clip_norm or float("inf")
        self.captures_passes = capturable and not config.gradient_checkpointing
        self.pool = torch.cuda.graph_pool_handle()
        torch.cuda.reset_peak_memory_stats()  # what this process did before is no measure of this run's needs
        self.passes: dict[Any, _Pass | None] = {}  # None: seen once
        self.seconds = 0.0  # for compiling and recording
        self.clipping, self.updating = _Again(self._clip), _Again(self._update)
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)

    def run(self, function: Pass, batch: Batch, scales: Mapping[str, float]) -> tuple[list[str], Tensor]:
        """What `function` gives for this batch, which it adds to the gradients."""
        device = self.parameters[0].device
        if not self.captures_passes or not isinstance(batch.layout, Packed):
            return function(batch.to(device), scales)
        key = batch.layout.max_length, batch.layout.num_padding, *((t.shape, t.dtype) for t in batch.tensors())
        if key not in self.passes:
            self.passes[key] = None
            with self._timed():
                return function(batch.to(device), scales)
        recorded = self.passes[key]
        if recorded is None and not self._has_room():
            return function(batch.to(device), scales)
        if recorded is None:
            with self._timed():
                recorded = self.passes[key] = _Pass(self, function, batch.to(device), scales)
        return recorded.replay(batch, scales)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds += time.monotonic() - began

    def _has_room(self) -> bool:
        """Whether another recording is worth it, and would fit beside what the passes need without one."""
        most = torch.cuda.max_memory_allocated()
        few = sum(recorded is not None for recorded in self.passes.values()) < MOST
        return few and 2 * most < 0.9 * torch.cuda.get_device_properties(self.parameters[0].device).total_memory

    def clip(self) -> Tensor:
        """The gradient's norm; the gradient is clipped to the limit."""
        return self.clipping.run()  # type: ignore[no-any-return]

    def _clip(self) -> Tensor:
        return nn.utils.clip_grad_norm_(self.parameters, self.limit)

    def update(self) -> None:
        """A step of the optimisers, whose rates have been set; then the gradients are zero."""
        self.updating.run()

    def _update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.zero()

    def zero(self) -> None:
        torch._foreach_zero_([p.grad for p in self.parameters if p.grad is not None])


def recording(graph: torch.cuda.CUDAGraph, pool: Any = None) -> AbstractContextManager[None]:
    """Record what is launched in the block. Other threads may go on: one of them pins the next batches' memory."""
    return torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")


class _Again:
    """A function without arguments, recorded on its second call."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: Any = None

    def run(self) -> Any:
        self.calls += 1
        if self.calls == 1:
            return self.function()
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with recording(self.graph):
                self.result = self.function()
        self.graph.replay()
        return self.result


class _Pass:
    """Forward and backward passes of one size."""

    def __init__(self, recorder: GraphRunner, function: Pass, batch: Batch, scales: Mapping[str, float]) -> None:
        self.batch = batch
        self.scales = {name: torch.tensor(s, device=batch.tokens.device) for name, s in scales.items()}
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()
        with recording(self.graph, recorder.pool):
            self.names, self.values = function(batch, self.scales)

    def replay(self, batch: Batch, scales: Mapping[str, float]) -> tuple[list[str], Tensor]:
        for own, given in zip(self.batch.tensors(), batch.tensors(), strict=True):
            own.copy_(given, non_blocking=True)
        for name, scale in scales.items():
            self.scales[name].fill_(scale)
        self.graph.replay()
        return self.names, self.values.clone()  # the next recording, of whichever size, may write over its memory
