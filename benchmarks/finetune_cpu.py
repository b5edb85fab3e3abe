"""Fine-tuning on a CPU beside `transformers` with dynamic padding: SST-2 in batches of 32, whole steps, in turns.

    python -m benchmarks.finetune_cpu --data DATA --model MODEL [--steps 300]

Both sides take the same batches from the same start through forward, backward, clipping and AdamW, in float32 and,
where the processor has products in it, in bfloat16. The steps go in turns of ten, so that the machine's moods fall on
all alike. DATA is as for `finetune_results`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.finetune_data import TABLE, unpacked
from benchmarks.finetune_peer import Peer, open_start, start_folder
from benchmarks.record import RESULTS, keep
from bertsmith.finetuning.batches import micro_batches
from bertsmith.formats.hf import load_folder
from bertsmith.rows.columns import Columns
from bertsmith.tasks.description import Limits
from bertsmith.tasks.examples import Examples
from bertsmith.tasks.kinds import KINDS
from bertsmith.tasks.reading import training_rows
from bertsmith.tasks.task import find_task
from bertsmith.training.optim import make_optimizers
from bertsmith.training.settings import Precision, TrainConfig, has_bfloat16
from bertsmith.training.steps import gradients, update

TURN, LENGTH = 10, 128
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")
Step = Callable[[int], None]


def our_step(model: torch.nn.Module, examples: Examples, config: TrainConfig) -> Step:
    """A step as `fit` takes it."""
    optimizers = make_optimizers(model, config)

    def step(number: int) -> None:
        batches = micro_batches(examples, number, config, LENGTH)
        gradients(model, batches, {"task": float(sum(b.counts["task"] for b in batches))}, config, number)
        update(optimizers, 1.0)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)

    return step


def in_turns(sides: dict[str, Step], steps: int) -> dict[str, float]:
    """Steps a second of each side: the median over its turns, the first of which warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for first in range(0, steps, TURN):
        for name, step in sides.items():
            began = time.perf_counter()
            for number in range(first, first + TURN):
                step(number)
            seconds[name].append(time.perf_counter() - began)
    return {name: TURN / statistics.median(values[1:] or values) for name, values in seconds.items()}


def measure(arguments: argparse.Namespace, work: Path) -> None:
    """Steps a second of both sides, in float32 and in bfloat16."""
    task = find_task("sst2")
    rows, _ = training_rows(task, [unpacked(arguments.data, work) / TABLE["sst2"].train[0]], Columns())
    head = KINDS[task.head].head_for(task, rows)
    start_folder(arguments.model, head, rows, 1, work / "start")
    sides: dict[str, Step] = {}
    for precision in PRECISIONS if has_bfloat16() else PRECISIONS[:1]:
        loaded = load_folder(work / "start")
        examples = KINDS[head.kind].encode(rows, loaded.tokenizer, Limits(LENGTH), head, labelled=True).examples
        config = TrainConfig(
            steps=arguments.steps, batch_size=32, learning_rate=5e-5, warmup=0.1, seed=1, precision=precision
        )
        peer = Peer(open_start(work / "start", head.kind, torch.device("cpu")), head.kind, examples, config)
        peer.model.train()
        sides |= {f"bertsmith {precision}": our_step(loaded.model, examples, config)}
        sides |= {f"transformers {precision}": peer.step}
    speed = in_turns(sides, arguments.steps)
    slowest = speed["transformers float32"]
    found = {name: {"steps_per_second": round(v, 3), "ratio": round(v / slowest, 2)} for name, v in speed.items()}
    facts = {"steps": arguments.steps, "threads": torch.get_num_threads()}
    keep("finetune_cpu", arguments.results, "speed", arguments.model.name, {**facts, **found})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        measure(arguments, Path(made))


if __name__ == "__main__":
    main()
