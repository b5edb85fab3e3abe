"""CUDA graphs without a GPU: replaying a graph does not overwrite the results of another."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from labels import of_task
from torch import nn

from bertsmith.batch import Batch, Example, collate
from bertsmith.training import cuda_graphs
from bertsmith.training.cuda_graphs import GraphRunner
from bertsmith.training.settings import TrainConfig

memory = torch.zeros(1)  # the memory pool that all graphs share, as on a GPU


class Graph:
    """A CUDA graph whose kernels add 1 to the memory that all graphs share."""

    def replay(self) -> None:
        memory.add_(1)


def batch(*lengths: int) -> Batch:
    rows = [Example(torch.arange(n).numpy(), torch.zeros(n, dtype=int).numpy(), of_task(1)) for n in lengths]  # type: ignore[call-overload]
    return collate(rows, packed=True)


def test_replaying_a_graph_keeps_the_results_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1))
    monkeypatch.setattr(cuda_graphs, "capturing", lambda graph, pool: nullcontext())
    memory.zero_()
    runner = GraphRunner(nn.Linear(1, 1), [], TrainConfig(steps=1), capturable=True)

    def forward_backward(given: Batch, scales: Any) -> tuple[list[str], torch.Tensor]:
        return ["loss"], memory

    for given in (batch(3), batch(4, 2)):  # the first batch of each shape runs without a graph
        runner.run(forward_backward, given, {"loss": 1.0})
    (_, first), (_, second) = (runner.run(forward_backward, given, {"loss": 1.0}) for given in (batch(3), batch(4, 2)))
    assert (first.item(), second.item()) == (1.0, 2.0)
