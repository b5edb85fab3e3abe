"""Several runs at a time on one machine, each in its own process: a small model leaves most of a GPU idle."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from bertsmith import progress
from bertsmith.errors import Interrupted, UserError
from bertsmith.training.settings import pick_device
from bertsmith.training.stopping import SIGNALS, on_signals

POLL = 0.3  # seconds between two checks of whether to stop
MPS = "nvidia-cuda-mps-control"  # NVIDIA's Multi-Process Service
STOPPED = "stopped; runs that had begun are saved"
_stopping: Event  # in a worker: set when no further call is to be started
_broken: Event  # in a worker: set when another worker was killed, after which no call can be handed out
_calling = False  # in a worker: whether a signal interrupts it


def side_by_side(
    jobs: int,
    title: str,
    function: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    *,
    device: str | None = None,
) -> list[Any]:
    """Call a function with each of some arguments, at most `jobs` at a time, in silent processes; return the results.

    `device` is the one that all of them run on. After an error in one of them, Ctrl-C or SIGTERM, the others stop as
    after a signal; the error is raised when they have stopped.
    """
    if min(jobs, len(calls)) > 1 and pick_device(device).type == "cuda" and (note := sharing_note()):
        progress.say(note)
    context, threads = get_context("spawn"), max(1, torch.get_num_threads() // jobs)
    stopping, broken = context.Event(), context.Event()
    pool = ProcessPoolExecutor(jobs, context, _start_worker, (stopping, broken, os.getpid(), threads))
    with on_signals(_interrupted, _exit), pool, progress.progress_bar(title, len(calls)) as advance:
        waiting = [pool.submit(_call, function, call) for call in calls]
        try:
            for number, done in enumerate(as_completed(waiting), 1):
                done.result()
                advance(number, f"{number} of {len(calls)}")
        except KeyboardInterrupt:  # a signal that only a worker has received
            raise Interrupted(STOPPED, 128 + signal.SIGINT) from None
        except BrokenProcessPool:
            broken.set()
            raise UserError(
                f"one of {jobs} runs side by side was killed from outside, perhaps because they take more memory than "
                "there is: allow fewer at a time (--jobs). What the others had finished is kept"
            ) from None
        finally:
            stopping.set()
        return [done.result() for done in waiting]


def sharing_note() -> str:
    """What to start so that processes share a GPU; empty if that runs, or is not installed."""
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    if (pipes / "control").exists() or not shutil.which(MPS):
        return ""
    return (
        "note: runs side by side take turns on the GPU. Under NVIDIA's MPS they share it and finish sooner: start it "
        f"with `{MPS} -d` before this command, and end it afterwards with `echo quit | {MPS}`"
    )


def _interrupted(number: int) -> None:
    raise Interrupted(STOPPED, 128 + number)


def _exit(number: int) -> None:
    """End this process, and then its workers; an exception would break the end of the pool."""
    os._exit(128 + number)


def _start_worker(stopping: Event, broken: Event, parent: int, threads: int) -> None:
    global _stopping, _broken
    _stopping, _broken = stopping, broken
    progress.quiet(True)
    torch.set_num_threads(threads)
    for number in SIGNALS:  # a cluster sends SIGTERM to every process
        signal.signal(number, _interrupt)
    threading.Thread(target=_follow_parent, args=(parent,), daemon=True).start()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Interrupt a call once: another exception, raised while the pool takes the first one, would end the worker."""
    global _calling
    if _calling:
        _calling = False
        raise KeyboardInterrupt


def _call(function: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    global _calling
    if _stopping.is_set():
        raise CancelledError
    try:
        _calling = True
        return function(*given)
    except (Interrupted, KeyboardInterrupt):  # a signal that reached this process first
        _stopping.set()
        raise
    finally:
        _calling = False


def _follow_parent(parent: int) -> None:
    """Stop when the other runs stop, and exit if the parent was killed, since its runs may be resumed."""
    asked = False
    while os.getppid() == parent and (_calling or not _broken.is_set()):
        if _stopping.is_set() and not asked:
            asked = True
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(POLL)
    os._exit(1)
