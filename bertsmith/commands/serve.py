"""The command `serve`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

import typer

from bertsmith.commands.options import UNNAMED, Device, Engine, Precision, Threads
from bertsmith.errors import UserError

NEEDED = ("fastapi", "uvicorn", "prometheus_client", "httptools")


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL…",
            help=f"Model folders, runs or hub names; NAME=FOLDER names one; {UNNAMED}",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="The address to listen on; 0.0.0.0 for all, with an API key")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="The port to listen on")] = 8000,
    workers: Annotated[
        int,
        typer.Option(
            "--workers", help="Processes, each with its own copy of the models; one is enough on most machines"
        ),
    ] = 1,
    max_batch_tokens: Annotated[
        int | None, typer.Option("--max-batch-tokens", help="Tokens of a batch; default: 2048 on a CPU, 16384 on CUDA")
    ] = None,
    wait_ms: Annotated[
        float, typer.Option("--wait-ms", help="Milliseconds that a text waits for others to fill its batch")
    ] = 2.0,
    queue: Annotated[
        int | None,
        typer.Option("--queue", help="Tokens that may wait; a request beyond gets 429. Default: 64 batches"),
    ] = None,
    max_body_mb: Annotated[float, typer.Option("--max-body-mb", help="The largest body of a request, in MiB")] = 4.0,
    max_texts: Annotated[int, typer.Option("--max-texts", help="The most texts of a request")] = 2048,
    api_key_file: Annotated[
        str | None,
        typer.Option("--api-key-file", help="A file with API keys, one per line; or set BERTSMITH_API_KEY to one"),
    ] = None,
    ray: Annotated[
        bool,
        typer.Option("--ray", help="Serve on Ray: replicas in processes of their own, on one machine or a cluster"),
    ] = False,
    replicas: Annotated[
        str | None,
        typer.Option("--replicas", help="With --ray: the number of replicas, or LEAST:MOST to scale by load"),
    ] = None,
    target_requests: Annotated[
        float, typer.Option("--target-requests", help="With --ray: the requests under way in each replica to scale for")
    ] = 32.0,
    ray_address: Annotated[
        str | None,
        typer.Option("--ray-address", help="With --ray: a running cluster, such as auto; default: a new one"),
    ] = None,
    cors: Annotated[
        list[str] | None, typer.Option("--cors", help="A web origin whose pages may call the server; repeatable")
    ] = None,
    engine: Engine = None,
    threads: Threads = None,
    precision: Precision = None,
    device: Device = None,
) -> None:
    """Serve models over HTTP: every head, embeddings as OpenAI's API, batches across requests.

    \b
    Example: bertsmith serve classifier
    The default model and a page to try it: bertsmith serve
    Ask it: curl localhost:8000/classify -H 'Content-Type: application/json' -d '{"inputs": "I was charged twice."}'
    Several models: bertsmith serve reviews=runs/reviews entities=runs/ner --port 9000
    With keys, for other machines: bertsmith serve classifier --host 0.0.0.0 --api-key-file keys.txt
    Replicas on Ray, by load: bertsmith serve classifier --ray --replicas 1:4
    """
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise UserError(f"bertsmith serve needs {', '.join(missing)}; install them with pip install 'bertsmith[serve]'")
    from bertsmith.formats.hub import usual_model
    from bertsmith.serve.run import run

    served = models or [usual_model()]
    options = {
        "max_batch_tokens": max_batch_tokens, "queue_tokens": queue, "wait_ms": wait_ms, "max_body_mb": max_body_mb,
        "max_texts": max_texts, "api_key_file": api_key_file, "cors": cors or [],
        "device": device, "engine": engine, "threads": threads, "precision": precision,
    }  # fmt: skip
    if not ray:
        if replicas or ray_address:
            raise UserError(f"{'--replicas' if replicas else '--ray-address'} is for --ray; --workers starts processes")
        run(served, host, port, workers, **options)
        return
    if workers != 1:
        raise UserError(f"--workers {workers} is for a server without --ray; write --replicas {workers}")
    if find_spec("ray") is None or find_spec("aiohttp") is None:
        raise UserError("--ray needs Ray Serve; install it with pip install 'bertsmith[serve,ray]'")
    from bertsmith.serve.ray import run_on_ray

    run_on_ray(served, host, port, replicas or "1", target_requests, ray_address, **options)
