"""Connections with time limits: a client that is slow, by accident or on purpose, keeps no connection for long.

uvicorn limits the time between two requests, and the guard the time of a body. What is left is the head of a request
that never ends (the attack called Slowloris), a response that is never read, and the number of connections.
"""

from __future__ import annotations

import asyncio
import sys
import time

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

FILES = 256  # open files beside the connections


class Connection(HttpToolsProtocol):
    """A connection that is closed if a head does not arrive, or a response is not read, in time.

    Beyond `most` connections, the one that has waited longest for a request is closed for the new one, so clients that
    send requests are served, however many connections others hold open.
    """

    head_seconds = 10.0  # for the first line and the headers of a request
    read_seconds = 60.0  # in which a client reads nothing of its response
    most = 4096

    idle_since = 0.0
    _head: asyncio.TimerHandle | None = None
    _reader: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.idle_since = time.monotonic()  # the loop's time stands still while it accepts several connections
        if len(self.connections) > self.most:
            idle = [each for each in self.connections if isinstance(each, Connection) and each.is_idle]
            oldest = min(idle, key=lambda each: each.idle_since)
            self.connections.discard(oldest)
            oldest.transport.abort()
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._head = _stopped(self._head)
        elif self.is_idle and not self.transport.is_closing():
            self._expect_head()  # a part of a head, or the rest of a body that was refused

    def on_response_complete(self) -> None:
        self.idle_since = time.monotonic()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head, self._reader = _stopped(self._head), _stopped(self._reader)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(sys.maxsize)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reader = _stopped(self._reader)

    def _expect_head(self) -> None:
        """Start the time of a head, unless it has started."""
        if self._head is None:
            self._head = self.loop.call_later(self.head_seconds, self.transport.close)

    def _watch_reader(self, unread: int) -> None:
        """Look from time to time whether the client has read some of what it had not read."""
        left = self.transport.get_write_buffer_size()
        if left >= unread:
            self.transport.abort()
            return
        self._reader = self.loop.call_later(self.read_seconds, self._watch_reader, left)


def _stopped(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    if timer is not None:
        timer.cancel()
    return None


def allow_connections() -> None:
    """Raise the limit on open files to what the connections need, or lower their number to what the system allows."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = Connection.most + FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        Connection.most = max(1, soft - FILES)
