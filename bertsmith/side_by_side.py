"""Runs side by side on one machine: a small model leaves most of a GPU idle."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import torch

from bertsmith import progress


def side_by_side(jobs: int, title: str, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> None:
    """Make all calls of a function, at most `jobs` at a time, in processes that say nothing.

    Where one fails, those that wait are not begun, and its error comes out here when the others have ended.
    """
    threads = max(1, torch.get_num_threads() // jobs)
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), _begin, (os.getpid(), threads))
    with pool, progress.progress_bar(title, len(calls)) as advance:
        waiting = [pool.submit(function, *call) for call in calls]
        try:
            for number, done in enumerate(as_completed(waiting), 1):
                done.result()
                advance(number, f"{number} of {len(calls)}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _begin(parent: int, threads: int) -> None:
    progress.quiet(True)
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """End when the process that waits for us is killed: a command that goes on with its work must be alone with it."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
