"""Fine-tuning of real weights on real tasks, several seeds, beside the same fine-tuning with `transformers`.

    python -m benchmarks.finetune_results [TASK …] --data DATA --model MODEL [--minutes 9] [--dry-run]

DATA is a folder as `benchmarks.finetune_data` describes it, with CoNLL-2003 in `conll` (or `--conll`), or the archive
that it makes. Ours runs through `finetune` and `Predictor`; the peer is the loop of `finetune_peer.py`, with the same
start, batches, rate, epochs and seeds. Both sides' answers are scored by the same code. `sst2-epoch` compares the speed
of one epoch and runs first, alone; after it `--jobs` runs share the machine, which does not change what they learn.
Every run is written as soon as it is done; the next call goes on with what is missing. `--dry-run` shows what is left
and how long it takes. `--max-steps` and `--limit-rows` try everything out; such results go to the work folder.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.finetune_data import OURS, PADDED, PEER, TABLE, Measured, training_file, unpacked
from benchmarks.finetune_peer import Peer, open_start, start_folder
from benchmarks.record import RESULTS, read_results, record
from bertsmith.finetuning.protocols import figures_of, noise
from bertsmith.finetuning.row_cache import encode_once
from bertsmith.finetuning.run import finetune
from bertsmith.finetuning.settings import FinetuneConfig, FinetuneData
from bertsmith.formats.saved_config import config_in, read_config
from bertsmith.inference.predictor import Predictor
from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Columns, Row
from bertsmith.tasks.description import Encoded, Limits, Task
from bertsmith.tasks.kinds import KINDS
from bertsmith.tasks.reading import read_task, training_rows
from bertsmith.tasks.task import find_task
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training import runlog
from bertsmith.training.settings import TrainConfig, pick_device

NAME, SPEED = "finetune_results", "sst2-epoch"
NEEDED = {"sklearn": "scikit-learn", "scipy": "scipy", "transformers": "transformers"}
# Guesses before the first run of a kind has been timed: steps a second of short and long inputs, and what goes before.
RATES = {OURS: (200.0, 70.0), PEER: (50.0, 25.0), PADDED: (45.0, 25.0)}
BEFORE = {OURS: 12.0, PEER: 6.0, PADDED: 6.0}
Results = dict[str, Any]


@dataclass(frozen=True)
class Prepared:
    """A task in memory."""

    name: str
    measured: Measured
    path: Path
    rows: list[Row]
    notes: list[str]
    head: HeadConfig
    limits: Limits
    tokenizer: Tokenizer
    encoded: Encoded
    scored: dict[str, list[Row]]

    @property
    def task(self) -> Task:
        return find_task(self.measured.task)


def config_of(measured: Measured, seed: int, max_steps: int | None) -> FinetuneConfig:
    length: dict[str, Any] = {"epochs": measured.epochs} if max_steps is None else {"steps": max_steps}
    train = TrainConfig(
        **length, batch_size=measured.batch_size, learning_rate=measured.rate, warmup=0.1, weight_decay=0.01, seed=seed
    )
    return FinetuneConfig(measured.task, FinetuneData(partial=bool(measured.partial)), train, restarts=0)


def prepare(name: str, arguments: argparse.Namespace) -> Prepared:
    """Read and encode a task's rows, as `finetune` does."""
    measured, data = TABLE[name], arguments.data
    task, path = find_task(measured.task), training_file(measured, data, arguments.work)
    rows, notes = training_rows(task, [path], Columns())
    head, tokenizer = KINDS[task.head].head_for(task, rows), Tokenizer.load(arguments.model)
    positions = config_in(read_config(arguments.model), arguments.model).max_positions
    limits = Limits(min(task.max_length, positions))
    encoded = encode_once(rows, tokenizer, limits, head, labelled=True)
    unknown = float((encoded.examples.tokens == tokenizer.unknown_id).mean())
    if unknown > 0.01:
        notes.append(f"{unknown:.1%} of the tokens are [UNK]: the vocabulary does not hold the signs of their words")
    scored = {
        part: list(read_task(task, data / file, Columns(), labelled=True))[: arguments.limit_rows]
        for part, file in measured.scored.items()
    }
    said = [note.replace(str(arguments.work), "").replace(str(data), "") for note in notes]
    return Prepared(name, measured, path, rows, said, head, limits, tokenizer, encoded, scored)


def run_ours(prepared: Prepared, seed: int, arguments: argparse.Namespace) -> Results:
    """Our fine-tuning with one seed: its scores, and the seconds of its training loop."""
    config = config_of(prepared.measured, seed, arguments.max_steps)
    with scratch(arguments.work) as folder:
        finetune(config, arguments.model, prepared.path, folder / "run", device=arguments.device)
        last = runlog.read(folder / "run")[-1]
        predictor = Predictor.load(folder / "run", arguments.device)
    predictor.encode = encode_once
    scores = {name: predictor.evaluate(rows) for name, rows in prepared.scored.items()}
    return {"scores": scores, "steps": last["step"], "training_seconds": round(last["seconds"], 2)}


def run_peer(prepared: Prepared, seed: int, arguments: argparse.Namespace, pad_to: int) -> Results:
    """The same with `transformers`."""
    config, kind, limits = (
        config_of(prepared.measured, seed, arguments.max_steps).train,
        prepared.head.kind,
        prepared.limits,
    )
    with scratch(arguments.work) as folder:
        start_folder(arguments.model, prepared.head, prepared.rows, seed, folder)
        model = open_start(folder, kind, pick_device(arguments.device))
    peer = Peer(model, kind, prepared.encoded.examples, config, pad_to)
    seconds = peer.train()
    scores = {}
    for name, rows in prepared.scored.items():
        encoded = encode_once(rows, prepared.tokenizer, limits, prepared.head, labelled=False)
        answers = KINDS[kind].decode(rows, encoded, peer.scores(encoded.examples), prepared.head, limits)
        scores[name] = KINDS[kind].score(prepared.task, rows, answers, prepared.head, limits)
    return {"scores": scores, "steps": peer.steps, "training_seconds": round(seconds, 2)}


def run_side(side: str, prepared: Prepared, seed: int, arguments: argparse.Namespace) -> Results:
    if side == OURS:
        return run_ours(prepared, seed, arguments)
    return run_peer(prepared, seed, arguments, 128 if side == PADDED else 0)


@contextmanager
def scratch(work: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=work) as made:
        yield Path(made)


def described(prepared: Prepared, model: Path) -> Results:
    """What a task's scores are of."""
    measured = prepared.measured
    weights = hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()[:16]
    settings = {"learning_rate": measured.rate, "epochs": measured.epochs, "batch_size": measured.batch_size}
    settings |= {"max_length": prepared.limits.max_length, "warmup": 0.1, "weight_decay": 0.01, "clip_norm": 1.0}
    counts = {"train": len(prepared.rows), **{name: len(rows) for name, rows in prepared.scored.items()}}
    partial = {"partial": measured.partial} if measured.partial else {}
    remarks = [*measured.remarks, *prepared.notes]
    return {
        "task": measured.task,
        **partial,
        **({"remarks": remarks} if remarks else {}),
        "rows": counts,
        "settings": settings,
        "weights": f"sha256 {weights}…",
    }


def summary_of(name: str, runs: dict[str, dict[str, Results]]) -> Results:
    """Means and deviations of each side, and whether ours is lower than a peer beyond noise (two standard errors)."""
    task = find_task(TABLE[name].task)
    sides: dict[str, dict[str, list[float]]] = {}
    found: dict[str, Results] = {}
    for side, seeds in runs.items():
        values: dict[str, list[float]] = {}
        for run in seeds.values():
            for part, scores in run["scores"].items():
                for metric in (m for m in task.metrics if m in scores):
                    values.setdefault(f"{part} {metric}", []).append(scores[metric])
        sides[side] = values
        found[side] = {"seeds": len(seeds), **{key: _figures(v) for key, v in values.items()}}
        if name == SPEED:
            times = [run["training_seconds"] for run in seeds.values()]
            speed = round(next(iter(seeds.values()))["steps"] / median(times), 1)
            found[side] |= {"epoch_seconds": median(times), "first_epoch_seconds": times[0], "steps_per_second": speed}
    for peer in (side for side in sides if side != OURS and OURS in sides):
        beside: Results = {key: _beside(sides[OURS][key], sides[peer][key]) for key in sides[OURS]}
        if name == SPEED:
            beside["times_faster"] = round(found[peer]["epoch_seconds"] / found[OURS]["epoch_seconds"], 2)
        found[f"beside {peer}"] = beside
    return found


def _figures(values: list[float]) -> Results:
    return {"mean": round(mean(values), 4), "deviation": round(stdev(values), 4) if len(values) > 1 else None}


def _beside(ours: list[float], theirs: list[float]) -> Results:
    difference, spread = mean(ours) - mean(theirs), noise(figures_of(ours), figures_of(theirs))
    if spread is None:
        return {"difference": round(difference, 4)}
    return {"difference": round(difference, 4), "noise": round(spread, 4), "not_lower": difference >= -spread}


def merge(arguments: argparse.Namespace, name: str, facts: Results, side: str, seed: int, run: Results) -> None:
    """Add one run to the results; several processes may do so."""
    with (arguments.work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = read_results(NAME, arguments.results)
        runs = results.get(name, {}).get("runs", {})
        runs.setdefault(side, {})[str(seed)] = run
        order = [s for s in TABLE[name].sides if s in runs]
        runs = {s: dict(sorted(runs[s].items(), key=lambda entry: int(entry[0]))) for s in order}
        results[name] = {**facts, "summary": summary_of(name, runs), "runs": runs}
        record(NAME, {key: results[key] for key in TABLE if key in results}, arguments.results)


def missing_runs(name: str, arguments: argparse.Namespace) -> list[tuple[str, int]]:
    """The sides and seeds that have no result yet, sides in turns."""
    measured, done = TABLE[name], read_results(NAME, arguments.results).get(name, {}).get("runs", {})
    seeds = range(1, 1 + (arguments.seeds or measured.seeds))
    return [(side, seed) for seed in seeds for side in measured.sides if str(seed) not in done.get(side, {})]


def estimate(name: str, side: str, arguments: argparse.Namespace) -> float:
    """The seconds of a run: those of an earlier one, or a guess."""
    done = read_results(NAME, arguments.results).get(name, {}).get("runs", {}).get(side, {})
    if done:
        return list(done.values())[-1]["seconds"]
    measured = TABLE[name]
    long = find_task(measured.task).head in ("span", "tags")
    files = [arguments.data / file for file in measured.train]
    rows = sum(file.read_bytes().count(b'"question"' if file.suffix == ".json" else b"\n") for file in files)
    if measured.task == "conll2003":
        rows = files[0].read_bytes().count(b"\n\n")
    steps = arguments.max_steps or measured.epochs * rows / measured.batch_size
    return BEFORE[side] * (2 if long else 1) + steps / RATES[side][long]


def show_plan(names: list[str], arguments: argparse.Namespace) -> None:
    table, total = Table("task", "side", "runs left", "seconds each", "seconds"), 0.0
    for name in names:
        left = missing_runs(name, arguments)
        for side in TABLE[name].sides:
            count, each = sum(s == side for s, _ in left), estimate(name, side, arguments)
            total += count * each
            table.add_row(name, side, str(count), f"{each:.0f}", f"{count * each:.0f}")
    Console(width=110).print(table, f"{total / 60:.1f} minutes one after the other")


def show(results: Results) -> None:
    table = Table("task", "score", "bertsmith", "transformers", "difference", "noise", "times faster", "remark")
    for name, found in results.items():
        summary, remark = found["summary"], found.get("partial", "")
        peers = [side for side in found["runs"] if side != OURS] or [""]
        for peer in peers:
            beside = summary.get(f"beside {peer}", {})
            for key in (k for k in summary.get(OURS, summary.get(peer, {})) if " " in k):
                ours, theirs = (_words(summary.get(side, {}).get(key)) for side in (OURS, peer))
                pair = beside.get(key, {})
                numbers = (
                    str(pair.get("difference", "")),
                    str(pair.get("noise", "")),
                    str(beside.get("times_faster", "")),
                )
                table.add_row(name if peer != PADDED else f"{name} (to 128)", key, ours, theirs, *numbers, remark)
    Console(width=150).print(table)


def _words(figures: Results | None) -> str:
    if not figures:
        return ""
    return f"{figures['mean']:.4g}" + (f" ± {figures['deviation']:.2g}" if figures["deviation"] is not None else "")


def preflight() -> None:
    """Say at once what is not installed, not after an hour."""
    if lacking := [NEEDED[module] for module in sorted(NEEDED) if find_spec(module) is None]:
        raise SystemExit(f"not installed: {', '.join(lacking)}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="*", choices=[*TABLE, []], help=f"of {', '.join(TABLE)}; all without")
    parser.add_argument("--data", type=Path, help="the folder of the data, or its archive")
    parser.add_argument("--conll", type=Path, help="the folder of CoNLL-2003 where it is not DATA/conll")
    parser.add_argument("--model", type=Path, help="the model folder to start from")
    parser.add_argument("--device", default=None)
    parser.add_argument("--seeds", type=int, help="for every task; without, the table's own")
    parser.add_argument("--minutes", type=float, default=60.0, help="no run is begun that would end later")
    parser.add_argument("--jobs", type=int, default=4, help="runs side by side")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / NAME, help="folder for what is made")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--max-steps", type=int, help="try out: so many steps a run")
    parser.add_argument("--limit-rows", type=int, help="try out: so many rows to score on")
    parser.add_argument("--dry-run", action="store_true", help="show what is left")
    parser.add_argument("--show", action="store_true", help="show the results that are there")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    if arguments.max_steps or arguments.limit_rows:
        arguments.results = arguments.work
    if not arguments.show:
        if arguments.data is None or arguments.model is None:
            parser.error("--data and --model are needed")
        arguments.data = unpacked(arguments.data, arguments.work)
        if arguments.conll is not None:
            arguments.data = with_conll(arguments.data, arguments.conll, arguments.work)
        os.environ.setdefault("BERTSMITH_CACHE", str(arguments.work / "cache"))
    return arguments


def with_conll(data: Path, conll: Path, work: Path) -> Path:
    """The data with CoNLL-2003 beside the other tasks."""
    folder = work / "linked"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "tasks").symlink_to((data / "tasks").resolve())
    (folder / "conll").symlink_to(conll.resolve())
    return folder


def run_one(name: str, side: str, seed: int, deadline: float, arguments: argparse.Namespace) -> None:
    """A run that is missing, if time is left for it."""
    if time.time() + estimate(name, side, arguments) > deadline:
        print(f"{name}, {side}, seed {seed}: no time left", flush=True)
        return
    prepared, start = prepare(name, arguments), time.time()
    run = run_side(side, prepared, seed, arguments)
    run["seconds"] = round(time.time() - start, 1)
    merge(arguments, name, described(prepared, arguments.model), side, seed, run)
    print(name, side, seed, json.dumps(run), flush=True)


def main() -> None:
    began, arguments = time.time(), parse()
    names = arguments.tasks or list(TABLE)
    if arguments.show:
        show(read_results(NAME, arguments.results))
        return
    preflight()
    show_plan(names, arguments)
    if arguments.dry_run:
        return
    deadline = began + 60 * arguments.minutes
    jobs = [(name, side, seed) for name in names for side, seed in missing_runs(name, arguments)]
    for job in (j for j in jobs if j[0] == SPEED):
        run_one(*job, deadline, arguments)
    beside = [job for job in jobs if job[0] != SPEED]
    beside.sort(key=lambda job: -estimate(job[0], job[1], arguments))
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
        waiting = {pool.submit(run_one, *job, deadline, arguments): job for job in beside}
        for done in as_completed(waiting):
            if error := done.exception():  # the others are worth having
                print(*waiting[done], f"failed: {error!r}", flush=True)
    show(read_results(NAME, arguments.results))


if __name__ == "__main__":
    main()
