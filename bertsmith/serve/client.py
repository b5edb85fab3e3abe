"""`Client`: the heads of a server's models from Python, with retries; it needs only the standard library and numpy."""

from __future__ import annotations

import base64
import http.client
import json
import os
import random
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from bertsmith.errors import UserError, nearest_or_all
from bertsmith.serve.settings import KEY_VARIABLE, characters

BUSY = 429
LONGEST_WAIT = 60.0  # seconds
AT_ONCE = 64  # texts of a request
CHARACTERS = 2**16  # of a request with several texts
IN_FLIGHT = 4  # requests


class Client:
    """A client of `bertsmith serve`.

    The methods take and return what `Predictor`, `Embedder` and `fill` do. `model` is the name of a model on the
    server; by default each request goes to the first one that can answer it. A server that is busy (429), fails (5xx)
    or is unreachable is asked again, at most `retries` times; the API key is that of the environment variable
    BERTSMITH_API_KEY unless it is given. One client may be used by several threads.

    >>> import bertsmith
    >>> client = bertsmith.Client("http://localhost:8000")  # doctest: +SKIP
    >>> client.predict(["I love phone 7.", "The battery died."])  # doctest: +SKIP
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        model: str | None = None,
        api_key: str | None = None,
        retries: int = 6,
        timeout: float = 120.0,
    ) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{url!r} is not the address of a server; write http://HOST:PORT")
        self.url, self.model, self.retries, self.timeout = url, model, retries, timeout
        try:
            self._address = parts.scheme, parts.hostname, parts.port
        except ValueError:
            raise UserError(f"{url!r} has no valid port; write http://HOST:PORT") from None
        self._prefix = parts.path.rstrip("/")
        self._key = os.environ.get(KEY_VARIABLE, "").strip() if api_key is None else api_key
        self._connections = threading.local()
        self._models: list[dict[str, Any]] | None = None

    def __repr__(self) -> str:
        return f"<Client of {self.url}{f', model {self.model}' if self.model else ''}>"

    def models(self) -> list[dict[str, Any]]:
        """Return the models of the server: name, routes, labels, length."""
        if self._models is None:
            self._models = self.get("/models")
        return self._models

    def predict(self, texts: str | Iterable[Any]) -> Any:
        """Return the prediction for a text, or a list of predictions; the items are those of `Predictor.predict`."""
        if isinstance(texts, str):
            return self._predict(self.head, [texts])[0]
        listed = list(texts)
        return list(self.predict_each(listed)) if len(listed) > 1 else self._predict(self.head, listed)

    def predict_each(self, items: Iterable[Any]) -> Iterator[dict[str, Any]]:
        """Yield predictions in the order of items; some requests are under way at a time."""
        head = self.head
        waiting = deque[Future[list[dict[str, Any]]]]()
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            for chunk in _chunks(items):
                waiting.append(pool.submit(self._predict, head, chunk))
                if len(waiting) > IN_FLIGHT:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()

    @property
    def head(self) -> dict[str, Any]:
        """The description of the model that predicts: the one that was named, or the first with a head for a task."""
        names = [model["name"] for model in self.models()]
        if self.model is not None and self.model not in names:
            raise UserError(f"no model {self.model!r} on {self.url}{nearest_or_all(self.model, names)}")
        for model in self.models():
            if "head" in model and self.model in (None, model["name"]):
                return model
        which = f"the model {self.model!r}" if self.model else "no model"
        raise UserError(f"{which} on {self.url} has {'no' if self.model else 'an'} output layer for a task")

    def _predict(self, head: dict[str, Any], items: list[Any]) -> list[dict[str, Any]]:
        """Predict items with one request for each route that they need."""
        found: list[Any] = [None] * len(items)
        by_route: dict[str, list[int]] = {}
        for number, item in enumerate(items):
            by_route.setdefault(_route(head["head"], item), []).append(number)
        for route, numbers in by_route.items():
            inputs = [_input(head["head"], items[i]) for i in numbers]
            answers = self.post(f"/{route}", {"inputs": inputs, "model": head["name"]})
            for i, answer in zip(numbers, answers, strict=True):
                found[i] = answer
        return found

    def fill(self, text: str, top: int = 5) -> list[list[dict[str, Any]]]:
        """Return the likeliest words for each mask of a text."""
        return self.post("/fill-mask", {"inputs": text, "top": top, "model": self.model})

    def embed(self, texts: str | Sequence[str], *, normalize: bool | None = True) -> NDArray[np.float32]:
        """Return the vector of a text (H,), or a row for each text (n, H); normalize=None is as the folder says."""
        listed = [texts] if isinstance(texts, str) else list(texts)
        rows: list[Any] = []
        for chunk in _chunks(listed):
            body = {"inputs": chunk, "normalize": normalize, "model": self.model}
            rows += self.post("/embed", body | {"encoding_format": "base64"})
        vectors = np.array([np.frombuffer(base64.b64decode(row), "<f4") for row in rows], dtype=np.float32)
        return vectors[0] if isinstance(texts, str) else vectors

    def rerank(self, query: str, texts: Sequence[str]) -> list[dict[str, Any]]:
        """Return the numbers of texts with scores, the best fit to the query first."""
        return self.post("/rerank", {"query": query, "texts": list(texts), "model": self.model})

    def features(self, text: str | Sequence[str], layers: str = "-1", align: str = "first") -> dict[str, Any]:
        """Return the words of a text, their offsets and their hidden states (layers, words, H)."""
        inputs = text if isinstance(text, str) else [list(text)]
        found = self.post("/features", {"inputs": inputs, "layers": layers, "align": align, "model": self.model})
        entry = found if isinstance(text, str) else found[0]
        return {**entry, "vectors": np.array(entry["vectors"], dtype=np.float32)}

    def get(self, path: str) -> Any:
        """Return the JSON of a route."""
        return self._call("GET", path, None)

    def post(self, path: str, body: Any) -> Any:
        """Return the JSON with which a route answers a body."""
        return self._call("POST", path, json.dumps(body).encode())

    def _call(self, method: str, path: str, body: bytes | None) -> Any:
        """Send a request until it is answered, at most `retries` times again; a bad request is a UserError at once."""
        for attempt in range(self.retries + 1):
            wait = min(LONGEST_WAIT, 0.2 * 2**attempt) * random.uniform(0.75, 1.25)
            try:
                status, headers, content = self._send(method, path, body)
            except (OSError, http.client.HTTPException) as error:
                self._disconnect()
                failed = (
                    f"cannot reach {self.url}: {error or type(error).__name__}; is `bertsmith serve` running there?"
                )
            else:
                if status == 200:
                    return _json(content, self.url)
                if status != BUSY and status < 500:
                    raise UserError(f"{self.url}{path}: {_message(content, status)}")
                failed = f"{self.url}: {_message(content, status)}"
                wait = max(wait, _seconds(headers.get("Retry-After")))
            if attempt < self.retries:
                time.sleep(wait)
        raise UserError(failed)

    def _send(self, method: str, path: str, body: bytes | None) -> tuple[int, Any, bytes]:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        connection = self._connection()
        connection.request(method, self._prefix + path, body, headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()

    def _connection(self) -> http.client.HTTPConnection:
        """Return this thread's connection, which stays open between requests."""
        found = getattr(self._connections, "value", None)
        if found is None:
            scheme, host, port = self._address
            kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
            found = self._connections.value = kind(host, port, timeout=self.timeout)
        return found

    def _disconnect(self) -> None:
        connection = self._connection()
        connection.close()
        self._connections.value = None


def _route(head: str, item: Any) -> str:
    """Return the route for an item, by the kind of the model's head."""
    if head in ("single", "multi", "regression"):
        return "classify" if isinstance(item, str) else "pair"
    return {"tags": "tag", "span": "answer", "choice": "choose"}[head]


def _chunks(items: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield items in lists that are small enough for one request."""
    chunk: list[Any] = []
    size = 0
    for item in items:
        length = characters(item)
        if chunk and (len(chunk) == AT_ONCE or size + length > CHARACTERS):
            yield chunk
            chunk, size = [], 0
        chunk.append(item)
        size += length
    if chunk:
        yield chunk


def _input(head: str, item: Any) -> Any:
    """Return an item as its route takes it."""
    if head in ("span", "choice"):
        names = ("question", "context") if head == "span" else ("context", "endings")
        if not isinstance(item, (list, tuple)) or len(item) != 2:
            raise UserError(f"cannot answer {str(item)[:80]!r}; each item has to be a tuple ({', '.join(names)})")
        return dict(zip(names, item, strict=True))
    return item if isinstance(item, (str, dict)) else list(item)


def _json(content: bytes, url: str) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        raise UserError(f"{url} does not answer as `bertsmith serve` does; check the address") from None


def _message(content: bytes, status: int) -> str:
    """Return the message of an error, in either form that the server has."""
    try:
        error = json.loads(content)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return f"status {status}"


def _seconds(value: str | None) -> float:
    """Return the seconds of a Retry-After header."""
    return min(LONGEST_WAIT, float(value)) if value and value.isdigit() else 0.0
