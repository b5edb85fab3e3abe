"""Counters of the server in the form of Prometheus."""

from __future__ import annotations

import os

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector

from bertsmith.serve.batching import Batcher, Lane
from bertsmith.serve.settings import SHARED_FOLDER

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
SIZES = tuple(2**power for power in range(0, 18, 2))
CONTENT_TYPE = CONTENT_TYPE_LATEST


class Metrics:
    """The counters of one server process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "bertsmith_requests", "Requests by route and status", ["route", "status"], registry=registry
        )
        self.seconds = Histogram(
            "bertsmith_request_seconds", "Time from request to response", ["route"], buckets=SECONDS, registry=registry
        )
        self.batch_seconds = Histogram(
            "bertsmith_batch_seconds",
            "Time of one batch in the engine",
            ["model", "operation"],
            buckets=SECONDS,
            registry=registry,
        )
        self.batch_tokens = Histogram("bertsmith_batch_tokens", "Tokens of a batch", buckets=SIZES, registry=registry)
        self.batch_items = Histogram("bertsmith_batch_items", "Texts of a batch", buckets=SIZES, registry=registry)
        self.tokens = Counter("bertsmith_tokens", "Tokens computed", ["model"], registry=registry)
        mode = "livesum" if SHARED_FOLDER in os.environ else "all"
        self.waiting = Gauge("bertsmith_queue_tokens", "Tokens that wait", registry=registry, multiprocess_mode=mode)  # type: ignore[arg-type]
        self.left = Gauge(
            "bertsmith_dropped_requests",
            "Requests whose client left before they were computed",
            registry=registry,
            multiprocess_mode=mode,  # type: ignore[arg-type]
        )

    def batch(self, lane: Lane, items: int, tokens: int, seconds: float) -> None:
        """Count a batch of the engine."""
        self.batch_seconds.labels(lane.model, lane.operation).observe(seconds)
        self.batch_tokens.observe(tokens)
        self.batch_items.observe(items)
        self.tokens.labels(lane.model).inc(tokens)

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count a response."""
        self.requests.labels(route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)

    def page(self, batcher: Batcher) -> bytes:
        """Return all counters as text."""
        self.waiting.set(batcher.tokens)
        self.left.set(batcher.dropped)
        if SHARED_FOLDER not in os.environ:
            return generate_latest(self.registry)
        shared = CollectorRegistry()
        MultiProcessCollector(shared)
        return generate_latest(shared)
