"""A request from its texts to its response: encoded, computed in a batch with others, decoded, written as JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from fastapi import Request, Response
from numpy.typing import NDArray

from bertsmith.errors import UserError
from bertsmith.serve.batching import Batcher, Lane, TooLarge
from bertsmith.serve.memory import MemoryReturn
from bertsmith.serve.metrics import Metrics
from bertsmith.serve.models import Models, ServedModel, Work
from bertsmith.serve.settings import ServeConfig, characters

SMALL = 8192  # characters or tokens that are encoded and decoded at once; more is done in another thread
SMALL_NUMBERS = 16384  # of vectors


class Service:
    """The models, their queue and the limits of requests."""

    def __init__(self, models: Models, config: ServeConfig) -> None:
        self.models, self.config, self.metrics = models, config, Metrics()
        limits = config.max_batch_tokens, config.wait_ms, config.queue_tokens
        self._threads = config.threads or torch.get_num_threads()
        self._memory = MemoryReturn()
        self.batcher = Batcher(*limits, self._after_batch, config.engines, self._share_threads)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="bertsmith-text")

    def _share_threads(self, computing: int) -> None:
        """Give the batch of this engine its share of the threads: all of them while no other batch is computed."""
        torch.set_num_threads(max(1, self._threads // computing))

    def _after_batch(self, lane: Lane, items: int, tokens: int, seconds: float) -> None:
        self.metrics.batch(lane, items, tokens, seconds)
        self._memory.has_freed.set()

    async def run(self, model: ServedModel, texts: Sequence[Any], make: Callable[[], Work]) -> tuple[Any, int]:
        """Return the values of a request and the number of its tokens; `texts` is what its size is measured by."""
        if len(texts) > self.config.max_texts:
            raise TooLarge(f"{len(texts):,} texts in one request; send at most {self.config.max_texts:,} at a time")
        size = characters(texts)
        if size > self.config.max_characters:
            raise TooLarge(f"the texts have {size:,} characters; send at most {self.config.max_characters:,} at a time")
        try:
            work = await self.call(make, size)
            results = await self.batcher.compute(work.lane, work.items, work.sizes)
            tokens = sum(work.sizes)
            return await self.call(lambda: work.decode(results), tokens), tokens
        except UserError as error:
            raise type(error)(model.public(str(error))) from None

    async def call(self, function: Callable[[], Any], size: int, small: int = SMALL) -> Any:
        """Call a function at once, or in another thread where it would keep other requests waiting."""
        if size <= small:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    async def vectors(self, vectors: Sequence[Any], write: Callable[[], bytes]) -> Response:
        """Return a response that holds vectors."""
        numbers = sum(np.size(vector) for vector in vectors)
        if numbers > self.config.max_numbers:
            limit = f"{self.config.max_numbers:,}"
            raise TooLarge(f"the vectors have {numbers:,} numbers, more than {limit}; send fewer texts at a time")
        return Response(await self.call(write, numbers, SMALL_NUMBERS), media_type="application/json")

    def close(self) -> None:
        """Compute what waits, and end the threads."""
        self.batcher.close()
        self._pool.shutdown()
        self._memory.close()


def service_of(request: Request) -> Service:
    """Return the service of the application that a request has reached."""
    found: Service = request.app.state.service
    return found


def json_response(value: Any) -> Response:
    """Return plain values as a response."""
    return Response(to_json(value), media_type="application/json")


def to_json(value: Any) -> bytes:
    """Return plain values as JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def vectors_to_json(vectors: NDArray[Any]) -> bytes:
    """Return an array of vectors as lists in a list; other threads run between two vectors."""
    if vectors.ndim == 1:
        return vector_to_json(vectors)
    return b"[" + b",".join(map(vectors_to_json, vectors)) + b"]"


def vector_to_json(vector: NDArray[Any]) -> bytes:
    """Return a vector as a list of numbers with nine digits, which give back every float32 exactly."""
    return (_list_of_numbers(len(vector)) % tuple(vector.tolist())).encode()


@lru_cache(32)
def _list_of_numbers(count: int) -> str:
    return f"[{','.join(['%.9g'] * count)}]"
