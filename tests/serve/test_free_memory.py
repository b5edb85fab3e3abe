"""Memory that batches have freed goes back to the system."""

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from bertsmith.serve import memory
from bertsmith.serve.batching import Lane
from bertsmith.serve.memory import return_memory
from bertsmith.serve.models import Models
from bertsmith.serve.service import Service
from bertsmith.serve.settings import ServeConfig


def resident() -> float:
    """The memory of this process in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has a function that returns memory")
def test_free_memory_goes_back_to_the_system() -> None:
    return_memory()
    before = resident()
    blocks = [bytearray(100_000) for _ in range(2000)]
    for block in blocks:
        block[:] = b"x" * len(block)
    last = blocks[-1]  # above the others: without a call of ours they cannot go back
    del block, blocks
    assert resident() - before > 100
    return_memory()
    assert resident() - before < 20
    assert len(last) == 100_000


def test_memory_is_returned_after_batches_and_not_again(monkeypatch: pytest.MonkeyPatch) -> None:
    callers: list[threading.Thread] = []  # a service that another test has left open has a thread, too
    monkeypatch.setattr(memory, "SECONDS", 0.02)
    monkeypatch.setattr(memory, "return_memory", lambda: callers.append(threading.current_thread()))
    returning = memory.MemoryReturn()
    time.sleep(0.1)
    assert returning._thread not in callers
    returning.has_freed.set()
    time.sleep(0.2)
    assert callers.count(returning._thread) == 1
    returning.close()
    assert not returning._thread.is_alive()


def test_a_request_has_its_memory_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    called = threading.Event()
    monkeypatch.setattr(memory, "SECONDS", 0.02)
    monkeypatch.setattr(memory, "return_memory", called.set)
    service = Service(Models([]), ServeConfig())
    service.batcher.submit(Lane("model", "double", compute=lambda items: [2 * n for n in items]), [1], [1]).result(10)
    assert called.wait(10)
    service.close()
