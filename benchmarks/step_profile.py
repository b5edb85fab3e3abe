"""Where the time of a training step goes on one GPU: by kind of kernel, by kernel, and how many kernels a step has.

    python -m benchmarks.step_profile pretrain RECIPE --data CORPUS [--set key=value] [--steps 200]
    python -m benchmarks.step_profile finetune MODEL --data TASKS [--task cola]

It trains as the commands do, with CUDA graphs, and looks at the last steps: their time by the clock, then the time of
their kernels. Where the second is smaller, the GPU waits. Kernels of other processes on the GPU are not seen. What it
prints is not kept in the results: it shows where to look.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.kernel_kinds import kernels_in
from bertsmith.config import override
from bertsmith.finetuning.benchmark import protocol
from bertsmith.finetuning.run import finetune
from bertsmith.finetuning.task_data import find_data
from bertsmith.pretraining.run import pretrain
from bertsmith.recipes import recipe
from bertsmith.training import fit
from bertsmith.training.speed import synchronise

TIMED, SEEN, LONGEST = 20, 5, 25  # steps by the clock, steps whose kernels are counted, kernels that are printed


def watched(steps: int, run: Callable[[], Any]) -> list[str]:
    """What the last steps of a run show, of so many steps in all."""
    once, first, number, began = fit._Loop._step, steps - TIMED - SEEN, 0, 0.0
    seen = profile(activities=[ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU])
    lines: list[str] = []

    def step(loop: Any, *given: Any) -> None:
        nonlocal number, began
        if number in (first, first + TIMED):
            synchronise(loop.meter.device)
        if number == first:
            began = time.perf_counter()
        if number == first + TIMED:
            seconds = (time.perf_counter() - began) / TIMED
            lines.append(f"{1000 * seconds:.2f} ms a step, {1 / seconds:.1f} steps a second")
            seen.start()
        once(loop, *given)
        number += 1
        if number == steps:
            synchronise(loop.meter.device)
            seen.stop()

    with patch.object(fit._Loop, "_step", step):
        run()
    kinds, kernels = kernels_in(seen, SEEN)
    lines.append(f"{kinds.pop('all'):.2f} ms of kernels a step, {sum(count for *_, count in kernels):.0f} of them")
    lines.append("  ".join(f"{kind} {ms:.2f}" for kind, ms in kinds.items()))
    return lines + [f"{ms:8.3f} ms {count:7.1f} x {name}" for name, ms, count in kernels[:LONGEST]]


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("pretrain", "finetune"))
    parser.add_argument("name", help="a recipe, or a model folder")
    parser.add_argument("--data", type=Path, required=True, help="a corpus, or the folder with the tasks")
    parser.add_argument("--task", default="cola")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--set", action="append", default=[], help="a change of the settings")
    parser.add_argument("--device")
    arguments = parser.parse_args(given)
    if arguments.steps < TIMED + SEEN + 1:
        parser.error(f"--steps must be above {TIMED + SEEN}")
    fixed = [f"train.steps={arguments.steps}", "train.evaluate_every=0"]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        if arguments.command == "pretrain":
            trained = override(recipe(arguments.name), [*arguments.set, *fixed])
            lines = watched(arguments.steps, lambda: pretrain(trained, arguments.data, run, device=arguments.device))
        else:
            data = find_data(arguments.data, arguments.task)
            if isinstance(data, str):
                parser.error(data)
            tuned = protocol(arguments.task, data, [*arguments.set, *fixed])
            splits = data.splits(arguments.task)
            lines = watched(
                arguments.steps, lambda: finetune(tuned, arguments.name, splits, run, device=arguments.device)
            )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
