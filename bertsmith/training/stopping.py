"""Ctrl-C and SIGTERM: the step is finished, the run is saved, and a message says how to resume it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from bertsmith.progress import console

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ECHO = 1.0  # seconds: a cluster signals the launcher and its processes, and the launcher signals the processes again


@dataclass
class Request:
    """The signal that asked the run to stop, 0 if there was none."""

    signal: int = 0


@contextmanager
def on_signals(first: Callable[[int], None], later: Callable[[int], None] | None = None) -> Iterator[None]:
    """Call `first` with the first signal, and `later` with one that comes a second later or more.

    Without `later`, that one has its usual effect.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield
        return
    usual, began = {number: signal.getsignal(number) for number in SIGNALS}, 0.0

    def restore() -> None:
        for number, handler in usual.items():
            signal.signal(number, handler)

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal began
        if not began:
            began = time.monotonic()
            first(number)
        elif time.monotonic() - began < ECHO:
            return
        elif later is not None:
            later(number)
        else:
            restore()
            signal.raise_signal(number)

    for number in SIGNALS:
        signal.signal(number, handle)
    try:
        yield
    finally:
        restore()


@contextmanager
def stop_requests() -> Iterator[Request]:
    """Record the first signal instead of exiting; one that comes a second later or more has its usual effect."""
    request = Request()

    def note(number: int) -> None:
        request.signal = number
        if not console.quiet:  # not through the console, whose output the signal may have interrupted
            text = f"{signal.Signals(number).name}: saving after this step; once more stops at once, without saving\n"
            os.write(2, text.encode())

    with on_signals(note):
        yield request
