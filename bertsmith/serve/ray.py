"""Scale-out: the application of `bertsmith serve` as a Ray Serve deployment, with replicas and autoscaling.

`bertsmith serve MODEL… --ray` runs it; `bertsmith.serve.ray:app` is the builder that Ray's own commands take (`serve
run`, `serve deploy`). Ray asks for the builder's annotations, so this file does not postpone them.
"""

import logging
import os
import re
import signal
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from pydantic import BaseModel, ConfigDict, field_validator
from ray import serve

from bertsmith.errors import UserError
from bertsmith.progress import say
from bertsmith.serve.settings import DRAIN_SECONDS, KEY_VARIABLE, LOCAL, SHARED_FOLDER, ServeConfig, read_keys

NAME = "bertsmith"  # of the application and of its deployment
REPLICAS = re.compile(r"([1-9]\d{0,3})(?::([1-9]\d{0,3}))?")
ONGOING = 512  # requests that a replica holds: its own queue refuses with 429 long before
QUEUED = 4096  # requests that wait before the replicas; beyond, Ray answers 503
LOGGING = {"enable_access_log": False, "log_level": "WARNING"}


class Arguments(BaseModel):
    """The arguments of the builder: the options of `bertsmith serve`, and how many replicas there are.

    `replicas` is a number, or `least:most` for autoscaling, which aims at `target_requests` in each replica.
    `autoscaling` holds further fields of Ray's AutoscalingConfig. A key is never an argument, since Ray shows
    arguments: it is in `api_key_file`, a file on every node, or in the environment of Ray's processes.
    """

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True, protected_namespaces=())
    models: list[str]
    replicas: str = "1"
    target_requests: float = 32
    autoscaling: dict[str, Any] = {}
    cpus: float = 1
    gpus: float = 0
    device: str | None = None
    engine: str | None = None
    threads: int | None = None
    precision: str | None = None
    max_batch_tokens: int | None = None
    queue_tokens: int | None = None
    wait_ms: float = ServeConfig.wait_ms
    max_body_mb: float = ServeConfig.max_body_bytes / 2**20
    max_texts: int = ServeConfig.max_texts
    api_key_file: str | None = None
    needs_key: bool = False
    cors: list[str] = []

    @field_validator("models", "cors", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return value.split(",") if isinstance(value, str) else value

    @field_validator("replicas", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        if isinstance(value, int) and value > 60:
            raise ValueError("write replicas in quotes: YAML reads 1:4 as the number 64")
        return str(value) if isinstance(value, int) else value


def app(arguments: Arguments) -> Any:
    """Return the Ray Serve application of models."""
    least, most = bounds(arguments.replicas)
    options: dict[str, Any] = {"num_replicas": least}
    if most > least:
        scaling = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": arguments.target_requests}
        options = {"num_replicas": "auto", "autoscaling_config": scaling | arguments.autoscaling}
    given = arguments.model_dump(exclude={"replicas", "target_requests", "autoscaling", "cpus", "gpus", "needs_key"})
    given["threads"] = arguments.threads or max(1, int(arguments.cpus))
    given["models"] = [_absolute(model) for model in arguments.models]
    if arguments.api_key_file:
        given["api_key_file"] = str(Path(arguments.api_key_file).resolve())
    needs_key = arguments.needs_key

    def build_application() -> Any:
        return _replica(given, needs_key)

    @serve.ingress(build_application)
    class Replica:
        def check_health(self) -> None:
            if not self.app.state.service.batcher.is_running:  # type: ignore[attr-defined]
                raise RuntimeError("the engine does not run")

    deployment = serve.deployment(
        name=NAME,
        ray_actor_options={"num_cpus": arguments.cpus, "num_gpus": arguments.gpus},
        max_ongoing_requests=ONGOING,
        max_queued_requests=QUEUED,
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=5,
        max_constructor_retry_count=1,
        logging_config=LOGGING,
        **options,
    )
    return deployment(Replica).bind()


def _replica(given: dict[str, Any], needs_key: bool) -> Any:
    """Return the application of one replica; the replicas of a node add up their counters."""
    folder = Path(tempfile.gettempdir()) / f"bertsmith-metrics-{ray.get_runtime_context().get_node_id()[:16]}"
    folder.mkdir(exist_ok=True)
    os.environ.setdefault(SHARED_FOLDER, str(folder))  # read when prometheus_client is imported
    from bertsmith.serve.run import build

    if needs_key and not read_keys(given["api_key_file"]):
        raise UserError(f"a node has no API key: set {KEY_VARIABLE} where Ray starts, or name an --api-key-file")
    return build(**given)


def bounds(replicas: str) -> tuple[int, int]:
    """Return the least and the most replicas of `2` or `1:4`."""
    found = REPLICAS.fullmatch(replicas)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise UserError(f"--replicas {replicas} is not a number such as 2, or a range such as 1:4")
    return least, most


def run_on_ray(
    models: Sequence[str],
    host: str,
    port: int,
    replicas: str = "1",
    target_requests: float = 32,
    address: str | None = None,
    **options: Any,
) -> None:
    """Serve models on a Ray cluster until SIGINT or SIGTERM; without an address, on one that starts here."""
    _, most = bounds(replicas)
    if not target_requests > 0:
        raise UserError(f"--target-requests {target_requests} must be more than 0")
    key_file = options.pop("api_key_file", None)
    keys = read_keys(key_file)
    arguments = Arguments(
        models=list(models),
        replicas=replicas,
        target_requests=target_requests,
        api_key_file=key_file,
        needs_key=bool(keys),
        **_resources(most, options, address),
        **options,
    )
    from bertsmith.serve.run import listen

    with listen(host, port) as free:  # Ray listens in another process: a port that is taken is noticed here
        port = free.getsockname()[1]
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    _connect(address, most * arguments.cpus)
    try:
        serve.start(http_options={"host": host, "port": port}, logging_config=LOGGING)
        _deploy(app(arguments))
        if host not in LOCAL and not keys:
            say(f"note: everyone who reaches {host} may use the server; --api-key-file asks for a key")
        say(f"serving at http://{host}:{port} with {replicas} replicas on Ray; Ctrl-C stops")
        _wait_for_signal()
        serve.delete(NAME)  # waits until the replicas have answered what they accepted
    finally:
        if address is None:
            serve.shutdown()
        ray.shutdown()


def _absolute(model: str) -> str:
    """Return a model with the whole path of its folder, since replicas start in other folders."""
    name, equals, folder = model.partition("=")
    if Path(model).exists():
        return f"{Path(model).resolve().name}={Path(model).resolve()}"
    return f"{name}={Path(folder).resolve()}" if equals and Path(folder).exists() else model


def _resources(most: int, options: dict[str, Any], address: str | None) -> dict[str, Any]:
    """Return what each replica takes: on this machine a part of all cores and GPUs, elsewhere what is asked for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cpus = options.get("threads") or (max(1, cores // most) if address is None else 1)
    device = options.get("device")
    wants_gpu = device.startswith("cuda") if device else torch.cuda.is_available()
    available = torch.cuda.device_count() if address is None else most
    return {"cpus": cpus, "gpus": min(1.0, available / most) if wants_gpu else 0}


def _connect(address: str | None, cpus: float) -> None:
    try:
        if address is not None:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
            return
        cores = os.cpu_count() or 1
        ray.init(
            num_cpus=max(cores, int(cpus)), log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR
        )
    except ConnectionError as error:
        raise UserError(f"cannot reach Ray at {address}: {str(error).splitlines()[0]}") from None


def _deploy(application: Any) -> None:
    """Start the replicas; of an error in one of them, the line that tells its reason is shown."""
    try:
        serve.run(application, name=NAME, route_prefix="/")
    except RuntimeError as error:
        found = serve.status().applications.get(NAME)
        messages = [str(error), *(each.message for each in found.deployments.values())] if found else [str(error)]
        for line in "\n".join(messages).splitlines():
            if match := re.search(r"(?:\w+\.)*(?:UserError|NotFinite|FileNotFoundError): (.*)", line):
                raise UserError(match[1].replace("\\n", " ")) from None
        raise UserError(f"the replicas do not start: {messages[-1].strip().splitlines()[-1]}") from None


def _wait_for_signal() -> None:
    stop = threading.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: stop.set())
    stop.wait()
