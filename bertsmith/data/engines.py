"""The same function on many blocks, in order: on this machine's cores, or on a Ray cluster."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Literal, TypeVar

from bertsmith.errors import UserError

Engine = Literal["local", "ray"]
Item = TypeVar("Item")
Result = TypeVar("Result")


def run_in_order(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    workers: int,
    engine: Engine = "local",
    address: str | None = None,
) -> Iterator[Result]:
    """The results in the order of the items, with never more than two items a worker on their way."""
    if engine == "ray":
        yield from _on_ray(function, items, workers, address)
    elif workers == 1:
        yield from map(function, items)
    else:
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            yield from _windowed(lambda item: pool.submit(function, item), lambda f: f.result(), items, 2 * workers)


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
) -> Iterator[Result]:
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
