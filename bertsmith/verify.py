"""Proofs on the user's own machine: that a run which was killed and resumed ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from bertsmith.config import to_dict
from bertsmith.errors import UserError
from bertsmith.pretrain import PretrainConfig
from bertsmith.progress import progress_bar
from bertsmith.training.checkpoint import checkpoints
from bertsmith.training.run import MODEL


def verify_resume(
    config: PretrainConfig,
    data: str | Path,
    *,
    steps: int = 30,
    kills: int = 3,
    device: str | None = None,
    seed: int | None = None,
) -> dict[str, Any]:
    """Run a recipe for some steps twice, once undisturbed, once killed at random moments and resumed, and compare.

    On a CPU the weights are to be identical to the bit; some of a GPU's kernels add in an order that changes, so
    there the largest difference is the finding.
    """
    train = replace(
        config.train, steps=steps, hours=None, epochs=None, save_every=max(1, steps // 8), evaluate_every=0.0
    )
    folder, dice = Path(tempfile.mkdtemp(prefix="bertsmith-verify-")), random.Random(seed)
    try:
        written = folder / "config.json"
        written.write_text(json.dumps(to_dict(replace(config, train=train))))
        command = [sys.executable, "-m", "bertsmith", "pretrain", str(written), "--data", str(data)]
        command += ["--device", device] if device else []
        with progress_bar("verifying", 2.0) as advance:
            began = time.monotonic()
            _finish([*command, "--out", str(folder / "whole")])
            length = time.monotonic() - began
            advance(1.0, "the undisturbed run is done")
            moments = _killed([*command, "--out", str(folder / "cut")], folder / "cut", kills, length, dice)
            _finish([*command, "--out", str(folder / "cut"), "--resume"])
            advance(2.0, "")
        worst, identical = _difference(folder / "whole", folder / "cut")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "recipe": config.recipe,
        "steps": steps,
        "kills": len(moments),
        "resumed_after_steps": moments,
        "identical": identical,
        "largest_difference": worst,
    }


def _finish(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=_environment())
    if done.returncode:
        raise UserError(
            f"the run failed: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'no message'}"
        )


def _killed(command: list[str], run: Path, kills: int, length: float, dice: random.Random) -> list[int]:
    """Start a run and kill it at random moments; gives the steps that it is resumed after."""
    moments: list[int] = []
    for _ in range(10 * kills):
        if len(moments) == kills:
            break
        process = subprocess.Popen(
            [*command, "--resume"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_environment()
        )
        try:
            process.wait(dice.uniform(0.3, 0.9) * length)
            if not (run / MODEL).is_dir():
                raise UserError(f"the run in {run} failed; `bertsmith pretrain` with the same settings says why")
            shutil.rmtree(run)  # it was faster than the kill: once more from the beginning
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            found = checkpoints(run)
            moments.append(int(found[-1].name.split("-")[1]) if found else 0)
    return moments


def _environment() -> dict[str, str]:
    """The package is found as it was here, and the processes that `torchrun` started are not joined."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), kept.get("PYTHONPATH", "")])}


def _difference(whole: Path, cut: Path) -> tuple[float, bool]:
    """The largest difference of two runs' weights, and whether their files are the same to the bit."""
    files = [run / MODEL / "model.safetensors" for run in (whole, cut)]
    first, second = (load_file(file) for file in files)
    worst = max(float((first[name] - second[name]).abs().max()) for name in first)
    return worst, files[0].read_bytes() == files[1].read_bytes()
