"""What every request passes before its route: the API key, the type and the size of its body, and its time.

The guard also ends the work of a client that leaves: the task of its request is cancelled, which drops its texts from
the queue.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from bertsmith.serve.errors import error_response
from bertsmith.serve.metrics import Metrics
from bertsmith.serve.page import FILES
from bertsmith.serve.settings import ServeConfig

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
# Without a key; the files of the page say nothing about the models.
OPEN = frozenset({"/", "/health", "/ready", "/docs", "/openapi.json", *(f"/page/{name}" for name in FILES)})
BODIES = frozenset({"POST", "PUT", "PATCH"})


class Refused(Exception):
    """A request that the guard answers itself."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.headers = status, {name.replace("_", "-"): value for name, value in headers.items()}


class ClientLeft(Exception):
    """The client has closed its connection."""


class Guard:
    """An ASGI application around another one, which refuses bad requests before they cost anything."""

    def __init__(self, app: App, config: ServeConfig, metrics: Metrics) -> None:
        self.app, self.config, self.metrics = app, config, metrics
        self.held = 0  # bytes of bodies whose requests are not answered yet

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _http(self, scope: Message, receive: Receive, send: Send) -> None:
        start, status = time.perf_counter(), 499  # the client left

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        held = [0]
        try:
            await self._checked(scope, receive, watched, held)
        except Refused as refused:
            response = error_response(scope["path"], refused.status, str(refused), refused.headers)
            await response(scope, receive, watched)
        except ClientLeft:
            pass
        except Exception:
            status = 500
            raise
        finally:
            self.held -= held[0]
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.request(route, status, time.perf_counter() - start)

    async def _checked(self, scope: Message, receive: Receive, send: Send, held: list[int]) -> None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        self._check_key(scope, headers)
        if scope["method"] not in BODIES:
            await self.app(scope, receive, send)
            return
        self._check_head(headers)
        body = await self._body(receive, held)
        await self._run(scope, body, receive, send)

    def _check_key(self, scope: Message, headers: dict[bytes, bytes]) -> None:
        if not self.config.api_keys or scope["path"] in OPEN or scope["method"] == "OPTIONS":
            return
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        key = key.strip() if kind.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        if not self.config.accepts(key):
            fix = "send the header Authorization: Bearer KEY"
            raise Refused(401, f"the API key is {'wrong' if key else 'missing'}; {fix}", WWW_Authenticate="Bearer")

    def _check_head(self, headers: dict[bytes, bytes]) -> None:
        """Refuse a body by its headers, before it is read."""
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != b"application/json" and not kind.endswith(b"+json"):
            raise Refused(415, "the body has to be JSON: send the header Content-Type: application/json")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self.config.max_body_bytes:
            raise self._too_large()

    def _too_large(self) -> Refused:
        return Refused(413, f"the body has more than {self.config.max_body_bytes:,} bytes; send less at a time")

    async def _body(self, receive: Receive, held: list[int]) -> bytes:
        """Read the body, within the limits of size and time."""
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(self.config.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeft
                    part = message.get("body", b"")
                    parts.append(part)
                    held[0] += len(part)
                    self.held += len(part)
                    if held[0] > self.config.max_body_bytes:
                        raise self._too_large()
                    if self.held > self.config.max_held_bytes:
                        raise Refused(429, "the server is busy; try again in 1 s", Retry_After="1")
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            raise Refused(408, f"the body did not arrive within {self.config.body_seconds:g} s") from None

    async def _run(self, scope: Message, body: bytes, receive: Receive, send: Send) -> None:
        """Run the application on a body that has been read, until it is done or the client leaves."""
        unread = [{"type": "http.request", "body": body, "more_body": False}]
        gone = asyncio.Event()

        async def replay() -> Message:
            if unread:
                return unread.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()

        work, watcher = asyncio.ensure_future(self.app(scope, replay, send)), asyncio.create_task(watch())
        try:
            await asyncio.wait({work, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
            await work
        except asyncio.CancelledError:
            if not gone.is_set():
                raise
            raise ClientLeft from None
        finally:
            watcher.cancel()
            if not work.done():
                work.cancel()
