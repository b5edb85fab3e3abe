"""A run in its own process that is killed or signalled and then resumed ends with identical bytes."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import TINY
from runs import ROOT, command, finish, torchrun, weights
from safetensors.torch import load_file, save_file
from test_safety import only_plain_files

from bertsmith import verify
from bertsmith.config import override
from bertsmith.pretraining.run import pretrain
from bertsmith.recipes import recipe
from bertsmith.training import runlog
from bertsmith.training.checkpoint import checkpoints, latest_checkpoint

# Two phases, dropout on, a checkpoint every other step.
SETTINGS = [
    *TINY,
    "train.steps=60",
    "train.batch_size=16",
    "train.learning_rate=1e-3",
    "train.save_every=2",
    "data.max_length=32",
    "data.long_length=64",
    "data.long_share=0.4",
]


def alone(world: Path, out: Path, settings: list[str]) -> Path:
    """An uninterrupted run in this process."""
    pretrain(override(recipe("bert-tiny"), settings), world / "shards", out, device="cpu")
    return out


def start(world: Path, out: Path, settings: list[str], *more: str) -> subprocess.Popen[str]:
    program = [sys.executable, "-m", "bertsmith", *command(world, out, settings, *more)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(program, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment)


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.001)


def last_step(run: Path) -> int:
    return max((r["step"] for r in runlog.read(run)), default=0)


def half_saved(run: Path) -> list[Path]:
    return list(run.glob("checkpoints/.step-*.partial"))


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "seed"), [("adamw", 7), ("lamb", 8)])
def test_killed_and_resumed_run_gives_identical_bytes(optimizer: str, seed: int, world: Path, tmp_path: Path) -> None:
    """Five kills per run: at random steps, in the middle of saves, and during start-up."""
    settings = [*SETTINGS, f"train.optimizer={optimizer}"]
    whole, run, dice = alone(world, tmp_path / "whole", settings), tmp_path / "cut", random.Random(seed)
    in_saves = kills = 0
    for step in sorted(dice.sample(range(3, 58), 5)):
        process = start(world, run, settings, "--resume")
        if kills == 2:  # during start-up
            time.sleep(dice.uniform(0, 3))
        else:
            wait_until(lambda step=step: last_step(run) >= step, process)
            time.sleep(dice.uniform(0, 0.03))
        if kills % 2:
            wait_until(lambda: half_saved(run), process)
        process.kill()
        assert process.wait(60) == -signal.SIGKILL
        in_saves += bool(half_saved(run))
        kills += 1
    assert kills == 5
    assert in_saves >= 1
    process = start(world, run, settings, "--resume")
    assert process.wait(120) == 0, process.communicate()[1]
    assert weights(run) == weights(whole)
    assert not list(run.rglob("*.partial"))
    records = [[(r["step"], r.get("loss")) for r in runlog.read(path)] for path in (whole, run)]
    assert records[0] == records[1]  # every step is logged exactly once


@pytest.mark.slow
def test_signalled_and_resumed_run_gives_identical_bytes(world: Path, tmp_path: Path) -> None:
    settings = [*SETTINGS, "train.save_every=0"]  # only the signal triggers a save
    whole, run = alone(world, tmp_path / "whole", settings), tmp_path / "cut"
    for number, step in ((signal.SIGTERM, 10), (signal.SIGINT, 40)):
        process = start(world, run, settings, "--resume")
        wait_until(lambda step=step: last_step(run) >= step, process)
        process.send_signal(number)
        stderr = process.communicate(timeout=60)[1]
        assert process.returncode == 128 + number
        found = latest_checkpoint(run)
        assert found is not None
        assert found[1].step >= step
        assert f"saved {found[0]}. The same command with --resume goes on" in stderr
        assert "Traceback" not in stderr
    process = start(world, run, settings, "--resume")
    assert process.wait(120) == 0, process.communicate()[1]
    assert weights(run) == weights(whole)


@pytest.mark.slow
def test_second_signal_stops_at_once(world: Path, tmp_path: Path) -> None:
    run, settings = tmp_path / "run", [*SETTINGS, "train.steps=2", "train.batch_size=1200", "train.save_every=0"]
    process = start(world, run, [*settings, "model.num_layers=12", "model.hidden_size=256"])
    wait_until((run / "run.json").exists, process)
    time.sleep(3)  # it is then in its first step, which is long
    process.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM
    assert time.monotonic() - began < 5
    assert "once more stops at once" in process.communicate()[1]
    assert not checkpoints(run)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_all_ranks_stop_after_the_same_step_and_resume(parallel: str, world: Path, tmp_path: Path) -> None:
    """SIGTERM goes to the launcher and to its processes, as a cluster sends it; the run also evaluates."""
    settings = [*SETTINGS, "train.save_every=1000", "train.evaluate_every=20", "train.micro_batch_size=4"]
    whole, run = alone(world, tmp_path / "whole", settings), tmp_path / "two"
    agent = torchrun(command(world, run, [*settings, f"train.parallel={parallel}"]))
    wait_until(lambda: last_step(run) >= 25, agent)
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")  # on Linux
    processes = [int(number) for number in children.read_text().split()] if children.exists() else []
    assert len(processes) in (0, 2)
    for process in processes:
        os.kill(process, signal.SIGTERM)
    agent.send_signal(signal.SIGTERM)
    stderr = agent.communicate(timeout=60)[1]
    assert agent.returncode != 0
    found = latest_checkpoint(run)
    assert found is not None
    assert len(checkpoints(run)) == 1
    assert found[1].step >= 25
    assert stderr.count(f"saved {found[0]}. The same command with --resume goes on") == 1
    only_plain_files(run)  # checkpoints of two ranks hold no pickle either
    finish(torchrun(command(world, run, [*settings, f"train.parallel={parallel}"], "--resume")))
    one, two = ([r["loss"] for r in runlog.read(path) if "loss" in r] for path in (whole, run))
    assert torch.allclose(torch.tensor(one), torch.tensor(two), atol=1e-5)


@pytest.mark.slow
def test_error_on_rank_zero_ends_all_ranks(world: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "something").write_text("of the user")
    agent = torchrun(command(world, tmp_path / "run", SETTINGS))
    stderr = agent.communicate(timeout=60)[1]
    assert agent.returncode != 0
    assert "error: --out" in stderr
    assert "is there already and not empty" in stderr
    assert "Connection" not in stderr  # the other rank ends without a connection error


@pytest.mark.slow
def test_killed_rank_is_reported_in_one_line(world: Path, tmp_path: Path) -> None:
    agent = torchrun(command(world, tmp_path / "run", [*SETTINGS, "train.steps=100000"]))
    wait_until(lambda: checkpoints(tmp_path / "run"), agent)
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
    if not children.exists():
        agent.kill()
        pytest.skip("Linux lists the children of a process")
    os.kill(int(children.read_text().split()[1]), signal.SIGKILL)
    stderr = agent.communicate(timeout=120)[1]
    assert agent.returncode != 0
    assert stderr.count("error: process 0 lost the connection to another process of the run") == 1
    assert f"{ROOT}/bertsmith" not in stderr  # no traceback through the package


@pytest.mark.slow
def test_parallel_runs_are_saved_on_sigterm(world: Path, tmp_path: Path) -> None:
    """As on Ctrl-C, runs that have started are saved, and the same command resumes them."""
    flags = ["train.steps=4000", "train.batch_size=8", "data.max_length=16"]
    program = [sys.executable, "-m", "bertsmith", "finetune", "classify", "--model", str(world / "run")]
    program += ["--data", str(world / "train.csv"), "--dev", str(world / "dev.csv"), "--out", str(tmp_path / "out")]
    program += ["--device", "cpu", "--seeds", "2", "--jobs", "2", *(p for flag in flags for p in ("--set", flag))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(program, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment)
    runs = [tmp_path / "out" / f"seed-{seed}" for seed in (1, 2)]
    wait_until(lambda: all(last_step(run) for run in runs), process, 180)
    process.send_signal(signal.SIGTERM)
    stderr = process.communicate(timeout=120)[1]
    assert process.returncode == 143
    assert stderr.splitlines()[-1] == "stopped; runs that had begun are saved. The same command with --resume goes on"
    assert "leaked" not in stderr
    assert "Traceback" not in stderr
    assert all(latest_checkpoint(run) for run in runs)


POISONED = """
import os
from bertsmith.cli import main
from bertsmith.model.encoder import Encoder
if os.environ["RANK"] == "1":
    forward = Encoder.forward
    Encoder.forward = lambda self, *a, **k: forward(self, *a, **k) * float("nan")
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_divergence_on_one_of_two_ranks_is_diagnosed(parallel: str, world: Path, tmp_path: Path) -> None:
    (tmp_path / "poisoned.py").write_text(POISONED)
    settings = [*SETTINGS, "train.micro_batch_size=8", f"train.parallel={parallel}"]
    agent = torchrun(command(world, tmp_path / "run", settings), program=(str(tmp_path / "poisoned.py"),))
    stderr = agent.communicate(timeout=60)[1]
    assert agent.returncode != 0
    found = re.search(
        r"error: the loss was bad in 5 steps in a row.*first bad tensor: output of encoder, in the.*", stderr
    )
    assert found, stderr  # it names samples of rank 1


@pytest.mark.slow
def test_time_budget_includes_the_time_before_a_resume(world: Path, tmp_path: Path) -> None:
    run, settings = tmp_path / "run", [*SETTINGS, "train.hours=0.003"]  # 10.8 s
    process = start(world, run, settings)
    wait_until(lambda: runlog.read(run)[-1:] and runlog.read(run)[-1]["seconds"] > 4, process)
    process.send_signal(signal.SIGTERM)
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 143
    assert "not identical to the bit" in stderr
    process = start(world, run, settings, "--resume")
    assert process.wait(120) == 0, process.communicate()[1]
    records = [r for r in runlog.read(run) if "loss" in r]
    assert 10.0 < records[-1]["seconds"] < 12.8
    assert records[-1]["learning_rate"] < 0.1e-3
    assert next(r["seconds"] for r in records if r["max_length"] > 32) == pytest.approx(0.6 * 10.8, abs=1.5)


# --- `bertsmith verify resume`


@pytest.mark.slow
def test_verify_resume_command_reports_identical_weights(world: Path) -> None:
    flags = [part for setting in TINY for part in ("--set", setting)]
    program = [sys.executable, "-m", "bertsmith", "verify", "resume", "bert-tiny", "--data", str(world / "shards")]
    program += ["--device", "cpu", "--steps", "24", "--kills", "2", "--json", *flags, "--set", "train.batch_size=8"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(program, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["identical"] is True
    assert found["largest_difference"] == 0
    assert found["kills"] == 2
    assert max(found["resumed_after_steps"]) > 0


@pytest.mark.parametrize(
    ("difference", "noise", "wanted"), [(0.0, 0.0, 0), (1e-3, 0.0, 1), (1e-3, 9e-4, 0), (1e-2, 1e-3, 1)]
)
def test_verify_resume_fails_on_a_difference_above_the_noise(
    difference: float, noise: float, wanted: int, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import typer

    from bertsmith.commands.train import verify_resume

    def finish(program: list[str]) -> None:
        model = Path(program[program.index("--out") + 1]) / "model"
        model.mkdir(parents=True)
        tensors = load_file(world / "run" / "model" / "model.safetensors")
        name = next(iter(tensors))
        tensors[name] += {"cut": difference, "again": noise}.get(model.parent.name, 0.0)
        save_file(tensors, model / "model.safetensors")

    monkeypatch.setattr(verify, "_finish", finish)
    monkeypatch.setattr(verify, "_kill", lambda *a: [4])
    code = 0
    try:
        verify_resume("bert-tiny", world / "shards", device="cpu")
    except typer.Exit as end:
        code = end.exit_code
    assert code == wanted
