"""Small pre-training runs, in this process or in several, and copies of runs as a kill would have left them."""

import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import TINY

from bertsmith.config import override
from bertsmith.objectives.settings import DistillationConfig
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.recipes import recipe
from bertsmith.training import checkpoint
from bertsmith.training.schedule import Budget
from bertsmith.training.speed import Meter

ROOT = Path(__file__).parent.parent
SMALL = [*TINY, "train.batch_size=8", "data.max_length=32", "train.learning_rate=1e-3", "train.warmup=0.1"]


def settings(*changes: str):
    return override(recipe("bert-tiny"), [*SMALL, *changes])


def shrunk(name: str, *changes: str) -> PretrainConfig:
    """A recipe with a tiny encoder and two short steps; its objective, data policy, optimiser and schedule stay."""
    config = recipe(name)
    sizes = [*TINY, "model.max_positions=48", "data.max_length=32", "train.batch_size=4"]
    sizes += ["model.embedding_size=16"] if config.model.embedding_size is not None else []
    if config.model.layer_type == "lstm":
        sizes = [size for size in sizes if "num_heads" not in size] + ["model.character_filters=[[1,4],[2,8],[3,8]]"]
    sizes += ["model.intermediate_size=128"] if config.model.family == "openai-gpt" else []  # 4 times the width
    sizes += ["model.relative_buckets=16"] if config.model.relative_buckets is not None else []
    sizes += ["data.long_length=48"] if config.data.long_length is not None else []
    config = replace(config, train=replace(config.train, hours=None, epochs=None, steps=2))
    return override(config, [*sizes, *changes])


def needs_teacher(config: PretrainConfig) -> bool:
    return isinstance(config.objective, DistillationConfig)


def weights(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


def cut(whole: Path, to: Path, step: int) -> Path:
    """A copy of a run as a kill after the step would have left it."""
    shutil.copytree(whole, to)
    shutil.rmtree(to / "model")
    for path in checkpoint.checkpoints(to):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    assert checkpoint.checkpoints(to)[-1].name == f"step-{step:08}"
    return to


def command(world: Path, out: Path, settings: list[str], *more: str) -> list[str]:
    flags = [part for setting in settings for part in ("--set", setting)]
    return [
        "pretrain",
        "bert-tiny",
        "--data",
        str(world / "shards"),
        "--out",
        str(out),
        "--device",
        "cpu",
        *flags,
        *more,
    ]


def torchrun(
    arguments: list[str],
    *,
    processes: int = 2,
    store: torch.distributed.TCPStore | None = None,
    program: tuple[str, ...] = ("-m", "bertsmith"),
    **options: str,
) -> subprocess.Popen[str]:
    agent = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    agent += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    if store is None:
        agent += ["--standalone"]  # binds a free port and keeps it
    else:
        agent += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{store.port}", "--rdzv-conf=is_host=0"]
    agent += ["--local-addr=127.0.0.1", *program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*agent, *arguments], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def on_ranks(function: Callable[..., None], *arguments: object, processes: int = 2) -> None:
    """Call a function of a test file in several ranks, as `torchrun` does.

    The ranks are forked from a server that has imported the package once: the imports of `torchrun` and of its
    processes take several times as long as a test.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.run", "bertsmith.pretraining.run", "bertsmith.finetuning.run"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(processes)}
    shared = {name: os.environ[name] for name in ("BERTSMITH_CACHE", "OMP_NUM_THREADS")}
    ranks = [{**place, **shared, "RANK": str(number), "LOCAL_RANK": str(number)} for number in range(processes)]
    started = [context.Process(target=_call, args=(rank, function, arguments)) for rank in ranks]
    for process in started:
        process.start()
    for process in started:
        process.join(300)
    assert [process.exitcode for process in started] == [0] * processes


def _call(environment: dict[str, str], function: Callable[..., None], arguments: tuple[object, ...]) -> None:
    from bertsmith.training.distributed import process_group

    os.environ.update(environment)
    torch.set_num_threads(1)
    with process_group(torch.device("cpu")):
        function(*arguments)


def finish(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors


def step_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every step of training take a tenth of a second, however busy the machine is."""

    def elapsed(budget: Budget) -> float:
        first = budget.__dict__.setdefault("first", budget.step)  # the first step of this process
        return budget.before + (budget.step - first) / 10

    monkeypatch.setattr(Budget, "elapsed", property(elapsed))
    monkeypatch.setattr(Meter, "seconds", property(lambda meter: meter.steps / 10))
