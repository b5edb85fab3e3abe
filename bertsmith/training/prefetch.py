"""Micro-batches made ahead of their step, by worker processes where there is a GPU to keep busy."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Generator, Iterable
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset

from bertsmith.batch import Batch
from bertsmith.errors import UserError

Key = tuple[int, float]  # a step and the share of the run that lies behind it


class _Steps(Dataset[Any]):
    """The micro-batches of a step, or what is wrong with its data."""

    def __init__(self, make: Callable[[int, float], list[Batch]]) -> None:
        self.make = make

    def __getitem__(self, key: Key) -> list[Batch] | UserError:  # type: ignore[override]
        try:
            return self.make(*key)
        except UserError as error:
            return error


def prefetch(
    make: Callable[[int, float], list[Batch]], keys: Iterable[Key], device: torch.device, workers: int | None
) -> Generator[list[Batch]]:
    """The micro-batches of each key, in order. Workers run a few steps ahead, so `keys` is asked early."""
    count = default_workers(device) if workers is None else workers
    loader = DataLoader(
        _Steps(make),
        batch_size=None,
        sampler=keys,
        num_workers=count,
        collate_fn=_as_it_is,
        pin_memory=device.type == "cuda",
        worker_init_fn=_begin_work,
        multiprocessing_context="fork" if count else None,
    )
    for made in loader:
        if isinstance(made, UserError):
            raise made
        yield cast(list[Batch], made)


def default_workers(device: torch.device) -> int:
    """Processes that make batches: none for a CPU, which they would only take from the model."""
    if device.type != "cuda" or not hasattr(os, "fork"):
        return 0
    return max(1, min(4, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1))


def _as_it_is(made: Any) -> Any:
    return made


def _begin_work(worker: int) -> None:
    """Ctrl-C reaches every process of a terminal; the first one decides what happens.

    And what the first one holds is not the worker's to tidy up: a recorded step would ask for a GPU, and warn.
    """
    gc.freeze()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
