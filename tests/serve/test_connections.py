"""Slow clients over raw sockets: connections that send or read nothing are closed, and others are served on."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn

from bertsmith.serve.connections import Connection
from bertsmith.serve.run import QUIET

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
LARGE = 2**23  # bytes


class Impatient(Connection):
    head_seconds, read_seconds, most = 0.4, 0.3, 8


async def application(scope, receive, send) -> None:
    """Answer a short text, or a long one."""
    assert scope["type"] == "http"
    body = b"x" * LARGE if scope["path"] == "/large" else b"ok"
    length = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": length})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The port of a server whose limits are short, and whose kernel keeps little of a response for it."""
    settings = {**QUIET, "http": Impatient, "lifespan": "off"}
    server = uvicorn.Server(uvicorn.Config(application, **settings))
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


@pytest.fixture
def connect(port):
    """Open connections, which are closed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))


def is_served(connection: socket.socket) -> bool:
    connection.sendall(GET)
    return connection.recv(4096).startswith(b"HTTP/1.1 200")


def seconds_until_closed(connection: socket.socket, trickled: bytes = b"") -> float:
    """Send a byte from time to time until the server closes the connection without an answer."""
    start = time.monotonic()
    connection.settimeout(0.05)
    for number in range(200):
        try:
            if number < len(trickled):
                connection.sendall(trickled[number : number + 1])
            assert connection.recv(1) == b""
        except TimeoutError:
            continue
        except OSError:
            pass
        return time.monotonic() - start
    raise AssertionError("the connection was not closed")


@pytest.mark.parametrize("sent", [b"", GET[:-2], b"GET / HTTP/1.1\r\n" + b"X-A: b\r\n" * 50, b"\r\n" * 100])
def test_a_head_that_does_not_end_is_closed(connect, sent) -> None:
    assert 0.3 < seconds_until_closed(connect(), sent) < 2


def test_a_second_request_has_a_limit_of_its_own(connect) -> None:
    connection = connect()
    for _ in range(4):
        assert is_served(connection)
        time.sleep(0.2)  # longer than the limit together
    assert 0.3 < seconds_until_closed(connection, GET[:-2] * 3) < 2


def test_others_are_served_beside_more_slow_connections_than_are_allowed(connect) -> None:
    good = connect()
    assert is_served(good)
    slow = [connect() for _ in range(40)]
    for connection in slow:
        with contextlib.suppress(OSError):
            connection.sendall(GET[:-2])
    assert is_served(connect())
    closed = 0
    for connection in slow:
        connection.settimeout(0.01)
        with contextlib.suppress(TimeoutError):
            try:
                closed += connection.recv(1) == b""
            except ConnectionError:
                closed += 1
    assert closed >= len(slow) - Impatient.most


def received(connection: socket.socket, first: float, then: float) -> int:
    """Ask for a long response; the bytes that arrive if the client waits before it reads, and between two parts."""
    connection.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
    time.sleep(first)
    size = 0
    with contextlib.suppress(ConnectionError):
        while size < LARGE and (chunk := connection.recv(2**18)):
            size += len(chunk)
            time.sleep(then)
    return size


def test_a_response_that_is_not_read_is_dropped_and_one_that_is_read_slowly_is_not(connect) -> None:
    assert received(connect(), 0, 0.02) > LARGE
    assert received(connect(), 1.5, 0) < LARGE
    assert is_served(connect())
