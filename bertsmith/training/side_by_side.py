"""Runs side by side on one machine: a small model leaves most of a GPU idle."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from types import FrameType
from typing import Any

import torch

from bertsmith import progress
from bertsmith.errors import Interrupted

WATCH = 0.3  # seconds between two looks at what the others do
STOPPED = "stopped; runs that had begun are saved"
_stopping: Event  # in a process of its own: whether no further call is to be begun


def side_by_side(jobs: int, title: str, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What a function gives for each of some calls, made at most `jobs` at a time, in processes that say nothing.

    An error of one of them, Ctrl-C or SIGTERM asks the others to stop as a signal does, and comes out when they have.
    """
    context, threads = get_context("spawn"), max(1, torch.get_num_threads() // jobs)
    stopping = context.Event()
    pool = ProcessPoolExecutor(jobs, context, _begin, (stopping, os.getpid(), threads))
    with pool, _terminable(), progress.progress_bar(title, len(calls)) as advance:
        waiting = [pool.submit(_call, function, call) for call in calls]
        try:
            for number, done in enumerate(as_completed(waiting), 1):
                done.result()
                advance(number, f"{number} of {len(calls)}")
        except KeyboardInterrupt:
            stopping.set()
            raise Interrupted(STOPPED, 128 + signal.SIGINT) from None
        except BaseException:
            stopping.set()
            raise
        return [done.result() for done in waiting]


@contextmanager
def _terminable() -> Iterator[None]:
    """Turn a first SIGTERM into `Interrupted`; a second one ends this process at once, and with it the others."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = signal.getsignal(signal.SIGTERM)

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, usual)
        raise Interrupted(STOPPED, 128 + number)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, usual)


def _begin(stopping: Event, parent: int, threads: int) -> None:
    global _stopping
    _stopping = stopping
    progress.quiet(True)
    torch.set_num_threads(threads)
    _heed(signal.SIG_IGN)  # while there is nothing to stop
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _call(function: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    if _stopping.is_set():
        raise CancelledError
    _heed(signal.default_int_handler)
    try:
        return function(*given)
    except (Interrupted, KeyboardInterrupt):  # a signal that came to this process first
        _stopping.set()
        raise
    finally:
        _heed(signal.SIG_IGN)


def _heed(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # a cluster sends the second one to every process
        signal.signal(number, handler)


def _watch(parent: int) -> None:
    """Stop when the others do, and end when the process that waits for us is killed: who goes on must be alone."""
    asked = False
    while os.getppid() == parent:
        if _stopping.is_set() and not asked:
            asked = True
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(WATCH)
    os._exit(1)
