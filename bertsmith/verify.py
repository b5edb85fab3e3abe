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
from bertsmith.training import runlog
from bertsmith.training.checkpoint import checkpoints
from bertsmith.training.run import MODEL

PATIENCE = 0.005  # seconds between two looks at a run


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

    On a CPU the weights are to be identical to the bit. Some of a GPU's kernels add in an order that changes: where the
    weights differ, a second undisturbed run shows by how much they do without any kill. `exact` says that the killed
    run is identical, or no further away than that.
    """
    if steps <= kills or kills < 1:
        raise UserError(f"--kills {kills} and --steps {steps}: there must be a kill, and more steps than kills")
    every = max(1, steps // 8)
    train = replace(config.train, steps=steps, hours=None, epochs=None, save_every=every, evaluate_every=0.0)
    folder, dice = Path(tempfile.mkdtemp(prefix="bertsmith-verify-")), random.Random(seed)
    try:
        written = folder / "config.json"
        written.write_text(json.dumps(to_dict(replace(config, train=train))))
        command = [sys.executable, "-m", "bertsmith", "pretrain", str(written), "--data", str(data)]
        command += ["--device", device] if device else []
        with progress_bar("verifying", kills + 2.0) as advance:
            _finish([*command, "--out", str(folder / "whole")])
            cut, resumed = [*command, "--out", str(folder / "cut"), "--resume"], list[int]()
            for step in sorted(dice.sample(range(1, steps), kills)):
                advance(len(resumed) + 1.0, f"{len(resumed)} kills of {kills}")
                resumed += _kill(cut, folder / "cut", step, dice)
            _finish(cut)
            advance(kills + 2.0, "")
            worst, identical = _difference(folder / "whole", folder / "cut")
            if not identical:
                _finish([*command, "--out", str(folder / "again")])
                noise, _ = _difference(folder / "whole", folder / "again")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not resumed:
        raise UserError("the run was over before it could be killed; give it more --steps")
    found = {"recipe": config.recipe, "steps": steps, "kills": len(resumed), "resumed_after_steps": resumed}
    found |= {"identical": identical, "largest_difference": worst}
    return {**found, "exact": True} if identical else {**found, "without_kills": noise, "exact": worst <= 2 * noise}


def _finish(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=_environment())
    if done.returncode:
        raise UserError(
            f"the run failed: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'no message'}"
        )


def _kill(command: list[str], run: Path, step: int, dice: random.Random) -> list[int]:
    """Start or resume a run and kill it at a random moment after a step.

    Gives the step of the checkpoint that it will go on from; nothing where the run was over before the kill.
    """
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_environment())
    try:
        while process.poll() is None and not any(r["step"] >= step for r in runlog.read(run)[-1:]):
            time.sleep(PATIENCE)
        time.sleep(dice.uniform(0, 10 * PATIENCE))
    finally:
        process.kill()
        process.wait()
    if process.returncode > 0:
        raise UserError("the resumed run failed; `bertsmith pretrain` with --resume and the same settings says why")
    found = checkpoints(run)
    return [int(found[-1].name.split("-")[1]) if found else 0] if process.returncode else []


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
