"""Batches across requests: engine threads take waiting texts of all clients, by tokens, and hand back results.

A request is a job with items of known sizes in tokens. Jobs whose items can be computed together share a lane (a model
and an operation). A batch takes one item of each job in turn, so that a short request does not wait for a long
one to be done. On a CPU, batches side by side with a core each are faster than one batch on all cores.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from bertsmith.errors import UserError

Compute = Callable[[list[Any]], Sequence[Any]]
logger = logging.getLogger(__name__)
LONGEST_RETRY = 60  # seconds


class QueueFull(Exception):
    """There is no room for a request; `retry_after` is the number of seconds until there should be."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"the server is busy; try again in {retry_after} s")
        self.retry_after = retry_after


class TooLarge(UserError):
    """A request that is larger than the server accepts, however idle it is."""


class Stopped(Exception):
    """The server is shutting down and takes no new requests."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down; try again on another one")


@dataclass(frozen=True)
class Lane:
    """Items that can be computed together: those of one operation of one model, with the same options."""

    model: str
    operation: str
    options: tuple[Any, ...] = ()
    in_order: bool = False  # an item may need those before it: no two batches are computed at a time
    compute: Compute = field(default=lambda items: items, compare=False, repr=False)


class Job:
    """The items of a request, and their results as far as they are known."""

    def __init__(self, items: Sequence[Any], sizes: Sequence[int]) -> None:
        self.items, self.sizes = items, sizes
        self.arrived = time.monotonic()
        self.results: list[Any] = [None] * len(items)
        self.taken = 0  # the items before this one are in a batch, or done
        self.left = len(items)
        self.future: Future[list[Any]] = Future()

    @property
    def waiting_tokens(self) -> int:
        return sum(self.sizes[self.taken :])


class Batcher:
    """A bounded queue and the thread that computes batches from it."""

    def __init__(
        self,
        max_batch_tokens: int,
        wait_ms: float,
        queue_tokens: int,
        observe: Callable[[Lane, int, int, float], None] = lambda lane, items, tokens, seconds: None,
        engines: int = 1,
        prepare: Callable[[int], None] = lambda computing: None,
    ) -> None:
        """`prepare` is called in an engine's thread before a batch, with the number of engines that then compute."""
        self.max_batch_tokens, self.wait, self.queue_tokens = max_batch_tokens, wait_ms / 1000, queue_tokens
        self.observe, self.prepare, self.engines = observe, prepare, engines
        self.tokens = 0  # that wait
        self.dropped = 0  # jobs whose clients left
        self.speed = float(max_batch_tokens)  # tokens per second, of the last batches
        self._lanes: dict[Lane, deque[Job]] = {}  # in the order in which they are served
        self._changed = threading.Condition()
        self._stopping = False
        self._computing = 0  # engines
        self._closed: set[Lane] = set()  # lanes in order, while a batch of theirs is computed
        self._threads = [
            threading.Thread(target=self._work, name=f"bertsmith-engine-{n}", daemon=True) for n in range(engines)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_running(self) -> bool:
        """Whether new jobs are accepted and computed."""
        return all(thread.is_alive() for thread in self._threads) and not self._stopping

    @property
    def jobs(self) -> int:
        """The number of requests that wait."""
        with self._changed:
            return sum(map(len, self._lanes.values()))

    def submit(self, lane: Lane, items: Sequence[Any], sizes: Sequence[int]) -> Future[list[Any]]:
        """Queue items and return a future of their results, in order; cancelling it drops them from the queue."""
        job, total = Job(items, sizes), sum(sizes)
        if not items:
            job.future.set_result([])
            return job.future
        if total > self.queue_tokens:
            raise TooLarge(
                f"the request has {total:,} tokens and the queue takes {self.queue_tokens:,}; send less at a time"
            )
        with self._changed:
            if self._stopping:
                raise Stopped
            if self.tokens + total > self.queue_tokens:
                raise QueueFull(self._retry_after())
            self._lanes.setdefault(lane, deque()).append(job)
            self.tokens += total
            self._changed.notify_all()
        job.future.add_done_callback(lambda future: self._drop(lane, job) if future.cancelled() else None)
        return job.future

    async def compute(self, lane: Lane, items: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
        """Wait for the results of items; a task that is cancelled drops its items from the queue."""
        return await asyncio.wrap_future(self.submit(lane, items, sizes))

    def _retry_after(self) -> int:
        return min(LONGEST_RETRY, max(1, round(self.tokens / self.speed)))

    def _drop(self, lane: Lane, job: Job) -> None:
        """Remove the items of a client that left."""
        with self._changed:
            self.dropped += 1
            jobs = self._lanes.get(lane, deque())
            if job in jobs:
                jobs.remove(job)
                self.tokens -= job.waiting_tokens
                if not jobs:
                    del self._lanes[lane]

    def close(self, timeout: float | None = None) -> None:
        """Refuse new jobs, compute those that wait, and end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout)

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._open_lane() is None and (self._lanes or not self._stopping):
                    self._changed.wait()
                if not self._lanes:
                    return
                lane = self._wait_for_batch()
                chosen = self._take(lane) if lane is not None else []
                if lane is None or not chosen:
                    continue
                self._computing += 1
                if lane.in_order:
                    self._closed.add(lane)
            try:
                self.prepare(self._computing)
                self._run(lane, chosen)
            finally:
                with self._changed:
                    self._computing -= 1
                    self._closed.discard(lane)
                    self._changed.notify_all()

    def _open_lane(self) -> Lane | None:
        """Return the lane whose turn it is."""
        return next((lane for lane in self._lanes if lane not in self._closed), None)

    def _wait_for_batch(self) -> Lane | None:
        """Wait until the next lane fills a batch, or its first job has waited long enough."""
        lane = self._open_lane()
        if lane is None:
            return None
        deadline = self._lanes[lane][0].arrived + self.wait
        while not self._stopping and self.tokens < self.max_batch_tokens:
            if (left := deadline - time.monotonic()) <= 0:
                break
            self._changed.wait(left)
            if lane not in self._lanes or lane in self._closed:  # its clients have left, or another engine took it
                return None
        return lane

    def _take(self, lane: Lane) -> list[tuple[Job, int]]:
        """Take one item of each job of a lane in turn, up to the tokens of a batch; the lane then goes to the end."""
        jobs = self._lanes.pop(lane)
        chosen: list[tuple[Job, int]] = []
        room, passed = self._room(), 0
        while jobs and passed < len(jobs):
            job = jobs.popleft()
            size = job.sizes[job.taken]
            if chosen and size > room:
                jobs.append(job)
                passed += 1
                continue
            chosen.append((job, job.taken))
            room, passed = room - size, 0
            self.tokens -= size
            job.taken += 1
            if job.taken < len(job.items):
                jobs.append(job)
        if jobs:
            self._lanes[lane] = deque(sorted(jobs, key=lambda job: job.arrived))
        return chosen

    def _room(self) -> int:
        """Return the tokens of the next batch: engines that have nothing to do get their share of what waits."""
        return min(self.max_batch_tokens, -(-self.tokens // (self.engines - self._computing)))

    def _run(self, lane: Lane, chosen: list[tuple[Job, int]]) -> None:
        """Compute a batch; if it fails, each job's items are computed alone, so that only the bad job fails."""
        chosen = [(job, i) for job, i in chosen if not job.future.done()]
        if not chosen:
            return
        start = time.monotonic()
        try:
            results = lane.compute([job.items[i] for job, i in chosen])
        except Exception as error:
            jobs = list(dict.fromkeys(job for job, _ in chosen))
            if len(jobs) > 1:
                for job in jobs:
                    self._run(lane, [(each, i) for each, i in chosen if each is job])
                return
            if not isinstance(error, UserError):
                logger.exception("a batch of %s failed", lane)
            with self._changed:  # another engine may fail with items of the same job
                if _is_wanted(jobs[0]):
                    jobs[0].future.set_exception(error)
            return
        seconds, tokens = time.monotonic() - start, sum(job.sizes[i] for job, i in chosen)
        self.observe(lane, len(chosen), tokens, seconds)
        with self._changed:
            self.speed += 0.1 * (self._computing * tokens / max(seconds, 1e-6) - self.speed)
            for (job, i), result in zip(chosen, results, strict=True):
                job.results[i] = result
                job.left -= 1
                if not job.left and _is_wanted(job):
                    job.future.set_result(job.results)


def _is_wanted(job: Job) -> bool:
    """Return whether the client of a job still waits; from now on it cannot cancel it."""
    return not job.future.done() and job.future.set_running_or_notify_cancel()
