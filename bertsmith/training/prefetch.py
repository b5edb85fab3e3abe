"""Micro-batches prefetched by worker processes, so that a GPU does not wait for them."""

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

Key = tuple[int, float]  # a step, and the share of the run that is done before it


class _Steps(Dataset[Any]):
    """Maps a key to the micro-batches of its step, or to the error in its data."""

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
    """The micro-batches of each key, in order. Workers prefetch a few steps, so `keys` is iterated early."""
    count = default_workers(device) if workers is None else workers
    loader = DataLoader(
        _Steps(make),
        batch_size=None,
        sampler=keys,
        num_workers=count,
        collate_fn=_unchanged,
        pin_memory=device.type == "cuda",
        worker_init_fn=_start_worker,
        multiprocessing_context="fork" if count else None,
    )
    for made in loader:
        if isinstance(made, UserError):
            raise made
        yield cast(list[Batch], made)


def default_workers(device: torch.device) -> int:
    """The number of workers: none for training on a CPU, where they would compete with the model."""
    if device.type != "cuda" or not hasattr(os, "fork"):
        return 0
    return max(1, min(4, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1))


def _unchanged(made: Any) -> Any:
    return made


def _start_worker(worker: int) -> None:
    """Ignore signals in a worker: Ctrl-C reaches every process of a terminal, and the main process handles it.

    The objects of the main process are not collected in the worker: a CUDA graph would need the GPU and warn.
    """
    gc.freeze()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
