"""Memory that batches have freed goes back to the system.

The C library of Linux keeps it, and since no two batches have the same sizes, what it keeps grows with every new peak.
"""

from __future__ import annotations

import ctypes
import sys
import threading

SECONDS = 5.0  # between two returns; each takes some milliseconds, and as many until the memory is in use again


def return_memory() -> None:
    """Return free memory to the system, where the C library has a function for it (glibc)."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


class MemoryReturn:
    """A thread that returns memory every few seconds while batches are computed, and once after the last one."""

    def __init__(self) -> None:
        self.has_freed = threading.Event()  # set after a batch
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="bertsmith-memory", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._closed.wait(SECONDS):
            if self.has_freed.is_set():
                self.has_freed.clear()
                return_memory()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()
