"""Apply a function to many blocks in parallel, with results in order: on local processes, or on a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from types import FrameType
from typing import Any, Literal, TypeVar

from bertsmith.errors import Interrupted, UserError

Engine = Literal["local", "ray"]
WATCH = 0.3  # seconds between two checks of the main process
Item = TypeVar("Item")
Result = TypeVar("Result")


def run_in_order(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    workers: int,
    engine: Engine = "local",
    address: str | None = None,
) -> Generator[Result, None, None]:
    """Yield the results in the order of the items, with at most two items per worker in flight."""
    if engine == "ray":
        yield from _on_ray(function, items, workers, address)
    elif workers == 1:
        yield from map(function, items)
    else:
        yield from _on_this_machine(function, items, workers)


def _on_this_machine(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Generator[Result, None, None]:
    """Yield the results of worker processes, which end at once when the main process stops or is killed."""
    context = multiprocessing.get_context("spawn")
    stopping = context.Event()
    pool = ProcessPoolExecutor(workers, context, _begin, (stopping, os.getpid()))
    try:
        yield from _windowed(lambda item: pool.submit(function, item), lambda f: f.result(), items, 2 * workers)
    except BrokenProcessPool:
        stopping.set()
        raise UserError("a worker was killed, perhaps because memory ran out; try fewer --workers") from None
    except BaseException:
        stopping.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(stopping: Event, parent: int) -> None:
    """Prepare a worker: it ignores Ctrl-C, which the main process handles by stopping all workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_watch, args=(stopping, parent), daemon=True).start()


def _watch(stopping: Event, parent: int) -> None:
    """End this worker when the main process requests it or has ended."""
    while os.getppid() == parent and not stopping.wait(WATCH):
        pass
    os._exit(1)


@contextmanager
def stopped_by_signals(message: str) -> Iterator[None]:
    """Raise an exception on SIGTERM and SIGHUP, so that workers end and partial files are removed."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Interrupted(f"stopped; {message}", 128 + number)

    usual = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in usual.items():
        if handler is signal.SIG_DFL:  # nohup ignores SIGHUP, and so do we
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def _windowed(
    submit: Callable[[Item], Any], wait: Callable[[Any], Result], items: Iterable[Item], size: int
) -> Iterator[Result]:
    waiting: deque[Any] = deque()
    for item in items:
        waiting.append(submit(item))
        if len(waiting) >= size:
            yield wait(waiting.popleft())
    while waiting:
        yield wait(waiting.popleft())


def _on_ray(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int, address: str | None
) -> Generator[Result, None, None]:
    try:
        import ray
    except ImportError:
        raise UserError("--engine ray needs Ray: pip install 'bertsmith[ray]'") from None
    started = not ray.is_initialized()
    if started:
        try:
            options = {"address": address} if address else {"num_cpus": workers}
            ray.init(**options, log_to_driver=False, include_dashboard=False if not address else None)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UserError(f"--address {address}: no Ray cluster there: {error}") from None
    try:
        remote = ray.remote(function)
        size = 2 * max(workers, int(ray.cluster_resources().get("CPU", workers)))
        yield from _windowed(remote.remote, ray.get, items, size)
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, UserError) else error from None
    finally:
        if started:
            ray.shutdown()
