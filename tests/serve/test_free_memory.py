"""Memory that batches have freed goes back to the system."""

import os
import sys
import time
from pathlib import Path

import pytest

from bertsmith.serve.memory import MemoryKeeper, return_memory


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


def test_memory_is_returned_while_batches_are_computed_and_once_afterwards() -> None:
    calls: list[float] = []
    keeper = MemoryKeeper(0.02, lambda: calls.append(time.monotonic()))
    time.sleep(0.1)
    assert not calls
    keeper.used.set()
    time.sleep(0.2)
    assert len(calls) == 1
    keeper.close()
    assert not keeper._thread.is_alive()
