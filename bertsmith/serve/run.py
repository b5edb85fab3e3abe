"""`bertsmith serve`: open the models, listen, and serve until a signal; requests that were accepted are answered."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI

from bertsmith.errors import UserError
from bertsmith.inference.engines import TorchEngine, batch_tokens
from bertsmith.progress import say
from bertsmith.serve.app import create_app
from bertsmith.serve.connections import Connection, allow_connections
from bertsmith.serve.models import Models, open_models
from bertsmith.serve.settings import DRAIN_SECONDS, LOCAL, SHARED_FOLDER, ServeConfig, read_keys

OPTIONS = "BERTSMITH_SERVE"  # carries the options to the processes of several workers; it never holds a key
QUEUED_BATCHES = 64  # by default
MOST_ENGINES = 8  # batches that are computed at a time
# oneDNN keeps the kernels of 1,024 shapes, and nearly every batch has a new shape: memory would grow for minutes.
FEW_KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
BACKLOG = 2048
QUIET: dict[str, Any] = {
    "log_level": "warning",
    "access_log": False,
    "server_header": False,
    "timeout_graceful_shutdown": DRAIN_SECONDS,
    "http": Connection,
    "ws": "none",
}


def run(models: Sequence[str], host: str, port: int, workers: int = 1, **options: Any) -> None:
    """Serve models until SIGINT or SIGTERM; several workers are processes, each with its own copy of the models."""
    if not 1 <= workers <= 256:
        raise UserError(f"--workers {workers} is not between 1 and 256")
    if not 0 <= port <= 65535:
        raise UserError(f"--port {port} is not between 0 and 65535")
    given = {"models": list(models), **options}
    app = build(**given) if workers == 1 else None
    with listen(host, port) as listener:
        where = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        if host not in LOCAL and not read_keys(options.get("api_key_file")):
            say(f"note: everyone who reaches {host} may use the server; --api-key-file asks for a key")
        say(f"serving at {where} (a page to try the models; the routes are at {where}/docs); Ctrl-C stops")
        if app is not None:
            allow_connections()
            uvicorn.Server(uvicorn.Config(app, **QUIET)).run([listener])
            return
        _run_workers(given, workers, listener)


def build(
    models: Sequence[str],
    *,
    device: str | None = None,
    engine: str | None = None,
    threads: int | None = None,
    precision: str | None = None,
    max_batch_tokens: int | None = None,
    queue_tokens: int | None = None,
    wait_ms: float = ServeConfig.wait_ms,
    max_body_mb: float = ServeConfig.max_body_bytes / 2**20,
    max_texts: int = ServeConfig.max_texts,
    api_key_file: str | None = None,
    cors: Sequence[str] = (),
) -> FastAPI:
    """Open the models and return the application that serves them."""
    config = ServeConfig(
        wait_ms=wait_ms,
        max_body_bytes=int(max_body_mb * 2**20),
        max_texts=max_texts,
        api_keys=read_keys(api_key_file),
        cors=tuple(cors),
    )
    os.environ |= {name: value for name, value in FEW_KERNELS.items() if name not in os.environ}
    opened = open_models(models, device, engine=engine, threads=threads, precision=precision)  # type: ignore[arg-type]
    tokens = max_batch_tokens if max_batch_tokens is not None else _batch_tokens(opened)
    queue = queue_tokens if queue_tokens is not None else QUEUED_BATCHES * tokens
    for model in opened.by_name.values():
        say(f"{model.name}: {', '.join(model.routes)} ({model.predictor.engine!r})")
    engines = _engines(opened, threads)
    config = replace(config, max_batch_tokens=tokens, queue_tokens=queue, engines=engines, threads=threads)
    return create_app(opened, config)


def _batch_tokens(models: Models) -> int:
    """Return the tokens of a batch that suit the device of the models."""
    engines = [model.predictor.engine for model in models.by_name.values()]
    return max(batch_tokens(e.device) if isinstance(e, TorchEngine) else ServeConfig.max_batch_tokens for e in engines)


def _engines(models: Models, threads: int | None) -> int:
    """Return how many batches are computed at a time: PyTorch on a CPU is fastest with a core for each of them.

    The batches then share the threads, which the models' own engines no longer set.
    """
    engines = [model.predictor.engine for model in models.by_name.values()]
    on_cpu = [engine for engine in engines if isinstance(engine, TorchEngine) and engine.device.type == "cpu"]
    if len(on_cpu) < len(engines):
        return 1
    for engine in on_cpu:
        engine.threads = None
    return min(MOST_ENGINES, threads or torch.get_num_threads())


def build_from_environment() -> FastAPI:
    """Return the application of one of several workers, which get their options through the environment."""
    allow_connections()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return build(**json.loads(os.environ[OPTIONS]))


def _end_with_parent() -> None:
    """End this worker when its parent process was killed: nothing else would ever end it, and it holds the port."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise UserError(f"cannot listen on {host} port {port}: {error.strerror or error}; try another --port") from None


def _run_workers(given: dict[str, Any], workers: int, listener: socket.socket) -> None:
    """Start several processes on one socket; they share the folder of their counters."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    given["threads"] = given.get("threads") or max(1, cores // workers)
    with tempfile.TemporaryDirectory(prefix="bertsmith-metrics-") as folder:
        os.environ |= {OPTIONS: json.dumps(given), SHARED_FOLDER: folder}
        factory = "bertsmith.serve.run:build_from_environment"
        uvicorn.run(factory, factory=True, workers=workers, fd=listener.fileno(), **QUIET)
