"""Several runs at a time on one machine, each in its own process: a small model leaves most of a GPU idle."""

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

POLL = 0.3  # seconds between two checks of whether to stop
STOPPED = "stopped; runs that had begun are saved"
_stopping: Event  # in a worker: set when no further call is to be started


def side_by_side(jobs: int, title: str, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Call a function with each of some arguments, at most `jobs` at a time, in silent processes; return the results.

    After an error in one of them, Ctrl-C or SIGTERM, the others stop as after a signal; the error is raised when they
    have stopped.
    """
    context, threads = get_context("spawn"), max(1, torch.get_num_threads() // jobs)
    stopping = context.Event()
    pool = ProcessPoolExecutor(jobs, context, _start_worker, (stopping, os.getpid(), threads))
    with pool, _sigterm_interrupts(), progress.progress_bar(title, len(calls)) as advance:
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
def _sigterm_interrupts() -> Iterator[None]:
    """Turn the first SIGTERM into `Interrupted`; a second one ends this process, and then its workers, at once."""
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


def _start_worker(stopping: Event, parent: int, threads: int) -> None:
    global _stopping
    _stopping = stopping
    progress.quiet(True)
    torch.set_num_threads(threads)
    _handle_signals(signal.SIG_IGN)  # while there is no run to stop
    threading.Thread(target=_follow_parent, args=(parent,), daemon=True).start()


def _call(function: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    if _stopping.is_set():
        raise CancelledError
    _handle_signals(signal.default_int_handler)
    try:
        return function(*given)
    except (Interrupted, KeyboardInterrupt):  # a signal that reached this process first
        _stopping.set()
        raise
    finally:
        _handle_signals(signal.SIG_IGN)


def _handle_signals(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # a cluster sends SIGTERM to every process
        signal.signal(number, handler)


def _follow_parent(parent: int) -> None:
    """Stop when the other runs stop, and exit if the parent was killed, since its runs may be resumed."""
    asked = False
    while os.getppid() == parent:
        if _stopping.is_set() and not asked:
            asked = True
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(POLL)
    os._exit(1)
