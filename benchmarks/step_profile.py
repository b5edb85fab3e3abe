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
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.kernel_kinds import KINDS, kind_of
from bertsmith.config import override
from bertsmith.finetuning.benchmark import protocol
from bertsmith.finetuning.run import finetune
from bertsmith.finetuning.task_data import find_data
from bertsmith.pretraining.run import pretrain
from bertsmith.recipes import recipe
from bertsmith.training import fit
from bertsmith.training.speed import synchronise

TIMED, SEEN, LONGEST = 20, 5, 25  # steps by the clock, steps whose kernels are counted, kernels that are printed


class Watch:
    """Times the last steps of a run but a few, and counts the kernels of these."""

    def __init__(self, steps: int) -> None:
        self.first, self.number, self.began = steps - TIMED - SEEN, 0, 0.0
        self.profiler: Any = None
        self.lines: list[str] = []

    def before(self, device: torch.device) -> None:
        if self.number == self.first:
            synchronise(device)
            self.began = time.perf_counter()
        if self.number == self.first + TIMED:
            synchronise(device)
            seconds = (time.perf_counter() - self.began) / TIMED
            self.lines.append(f"{1000 * seconds:.2f} ms a step, {1 / seconds:.1f} steps a second")
            on_gpu = torch.cuda.is_available()
            self.profiler = profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])
            self.profiler.__enter__()
        self.number += 1

    def end(self, device: torch.device) -> None:
        synchronise(device)
        self.profiler.__exit__(None, None, None)
        times: defaultdict[str, float] = defaultdict(float)
        counts: defaultdict[str, int] = defaultdict(int)
        for event in self.profiler.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:  # type: ignore[attr-defined]
                times[event.name] += event.device_time / 1000 / SEEN
                counts[event.name] += 1
        kinds: defaultdict[str, float] = defaultdict(float)
        for name, milliseconds in times.items():
            kinds[kind_of(name)] += milliseconds
        total = sum(counts.values()) / SEEN
        self.lines.append(f"{sum(times.values()):.2f} ms of kernels a step, {total:.0f} of them")
        self.lines.append("  ".join(f"{kind} {kinds[kind]:.2f}" for kind in [*KINDS, "other"]))
        for name in sorted(times, key=lambda name: -times[name])[:LONGEST]:
            self.lines.append(f"{times[name]:8.3f} ms {counts[name] / SEEN:7.1f} x {name[:110]}")


def watched(steps: int, run: Any) -> list[str]:
    """What a run of so many steps shows."""
    watch, once, device = Watch(steps), fit._Loop._step, torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def step(loop: Any, *given: Any) -> None:
        watch.before(device)
        once(loop, *given)
        if watch.number == steps:
            watch.end(device)

    with patch.object(fit._Loop, "_step", step):
        run()
    return watch.lines


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
