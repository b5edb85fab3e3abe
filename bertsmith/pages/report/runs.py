"""The contents of a run folder that a report shows; whatever a run has not written yet is left out without an error."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np

from bertsmith.config import read_json
from bertsmith.errors import UserError
from bertsmith.pages.page import short
from bertsmith.pretraining.held_out import LONG
from bertsmith.pretraining.settings import upgrade
from bertsmith.training import runlog
from bertsmith.training.run import CONFIG, FACTS, is_finished

Record = dict[str, Any]
DEV = "dev_"
SAMPLES = "dev_samples"
NAMES = {
    "loss": "Loss",
    "mlm_loss": "Loss of the masked words",
    "lm_loss": "Loss of the next words",
    "lm_perplexity": "Perplexity of the next words",
    "lm_accuracy": "Accuracy of the next words",
    "nsp_loss": "Loss of the sentence pairs",
    "task_loss": "Loss of the task",
    "mlm_perplexity": "Perplexity of the masked words",
    "mlm_accuracy": "Accuracy of the masked words",
    "nsp_accuracy": "Accuracy of the sentence pairs",
    "detection_loss": "Loss of the detection of replaced tokens",
    "detection_accuracy": "Accuracy of the detection, of all tokens",
    "detection_recall": "Share of the replaced tokens that were found",
    "detection_precision": "Share of the found tokens that were replaced",
    "fill_loss": "Loss of the discriminator's masked words",
    "fill_accuracy": "Accuracy of the discriminator's masked words",
    "soft_loss": "Divergence from the teacher's probabilities",
    "cosine_loss": "1 - cosine with the teacher's hidden states",
    "exact_match": "Exact match",
    "HasAns_f1": "F1 of questions with an answer",
    "NoAns_f1": "F1 of questions without one",
}
# Scores of SQuAD's script that are not shown.
LEFT_OUT = {"exact", "total", "best_exact", "best_exact_thresh", "best_f1", "best_f1_thresh"} | {
    f"{kind}_{name}" for kind in ("HasAns", "NoAns") for name in ("exact", "total")
}
FEW = 40  # values; a shorter curve is not smoothed
FIRST = tuple(NAMES)  # the order of the scores; others follow


@dataclass(frozen=True)
class Run:
    """A run folder, which may be unfinished."""

    folder: Path
    label: str
    config: dict[str, Any]
    facts: dict[str, Any]
    records: list[Record]
    finished: bool

    @property
    def is_finetuning(self) -> bool:
        return "task" in self.config

    @property
    def name(self) -> str:
        """The task or the recipe of the run."""
        return str(self.config.get("task" if self.is_finetuning else "recipe") or "an encoder")

    def points(self, key: str, x: str = "step") -> tuple[list[float], list[float]]:
        """Return the values of a key over steps, tokens or seconds."""
        found = [(r[x], r[key]) for r in self.records if is_number(r.get(x)) and is_number(r.get(key))]
        return [place for place, _ in found], [value for _, value in found]

    def values(self, key: str) -> list[float]:
        return [r[key] for r in self.records if is_number(r.get(key))]

    def last(self, key: str) -> float | None:
        values = self.values(key)
        return values[-1] if values else None

    def fact(self, *path: str) -> Any:
        """A value of `run.json`, or None."""
        return _value_at(self.facts, path)

    def setting(self, *path: str) -> Any:
        """A value of `config.json`, or None."""
        return _value_at(self.config, path)


def _value_at(values: Any, path: Sequence[str]) -> Any:
    for name in path:
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


@dataclass(frozen=True)
class Measure:
    """A key figure of a run, as a number and as text."""

    name: str
    value: float
    text: str
    words: str = ""
    better: Literal["higher", "lower", "neither"] = "neither"


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Return the runs in these folders, or in the folders inside them, without duplicates and with distinct labels."""
    given = [Path(os.path.abspath(folder)) for folder in folders]
    paths = list(dict.fromkeys(path for folder in given for path in runs_in(folder) or [folder]))
    if not paths:
        raise UserError("no run is given; name one or more run folders, as `bertsmith pretrain` writes them")
    return [_read(path, label) for path, label in zip(paths, labels_of_paths(paths), strict=True)]


def runs_in(folder: Path, depth: int = 3) -> list[Path]:
    """Return a run folder itself, or the runs inside a folder (seeds, a grid), `seed-2` before `seed-10`."""
    if not folder.is_dir():
        return []
    if _is_run(folder) and not any(_is_run(path) for path in folder.glob("seed-*")):
        return [folder]
    if depth == 0:
        return []
    inside = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    inside.sort(key=lambda path: [p.zfill(12) if p.isdecimal() else p for p in re.split(r"(\d+)", path.name)])
    return [run for path in inside for run in runs_in(path, depth - 1)]


def _read(folder: Path, label: str) -> Run:
    if not _is_run(folder):
        what = "is not a run" if folder.exists() else "does not exist"
        near = f"; did you mean {folder.parent}?" if _is_run(folder.parent) else ""
        raise UserError(
            f"{folder} {what}: a run is a folder that `bertsmith pretrain` or `bertsmith finetune` wrote, "
            f"with {CONFIG} and {runlog.FILE} in it{near}"
        )
    facts = read_json(folder / FACTS) if (folder / FACTS).is_file() else {}
    records = [r for r in runlog.read(folder) if isinstance(r, dict)]
    return Run(folder, label, dict(upgrade(read_json(folder / CONFIG))), facts, records, is_finished(folder))


def _is_run(folder: Path) -> bool:
    """Return whether a folder is a run; a model folder has a `config.json`, too, but no log and no `run.json`."""
    return (folder / CONFIG).is_file() and any((folder / name).is_file() for name in (FACTS, runlog.FILE))


def labels_of_paths(paths: Sequence[Path]) -> list[str]:
    """Return the last part of each path, with as many parts before it as make the labels distinct."""
    labels = []
    for path in paths:
        others = [other.parts for other in paths if other != path]
        length = 1
        while any(other[-length:] == path.parts[-length:] for other in others) and length < len(path.parts):
            length += 1
        labels.append("/".join(path.parts[-length:]))
    return labels


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number, which can be drawn."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def keys(runs: Sequence[Run], *, dev: bool) -> list[str]:
    """Return the keys of the log for training data, or for held-out data without `dev_`; losses come first."""
    found: dict[str, None] = {}
    for run in runs:
        for record in run.records:
            found |= {k.removeprefix(DEV): None for k, v in record.items() if k.startswith(DEV) == dev and is_number(v)}
    found = {key: None for key in found if key not in LEFT_OUT}
    known = [key for key in FIRST if key in found]
    return known + [key for key in found if key not in known]


def name_of(key: str) -> str:
    """Return the name of a logged key."""
    if key.startswith(LONG):
        return f"{name_of(key.removeprefix(LONG))}, long sequences"
    return NAMES.get(key) or key.replace("_", " ").capitalize().replace("f1", "F1")


def inside(key: str) -> str:
    """Return the name of a logged key inside a sentence or a table."""
    name = name_of(key)
    return name if name.startswith(("F1", "Pearson", "Spearman", "Matthews")) else name[:1].lower() + name[1:]


def is_share(key: str) -> bool:
    """Return whether a key is shown in percent."""
    return key.endswith(("accuracy", "_share"))


def percent(key: str, value: float) -> float:
    """Return a value in percent: shares are logged from 0 to 1, scores from 0 to 100."""
    return 100 * value if key.endswith("_share") else value


def lower_is_better(key: str) -> bool:
    return key.endswith(("loss", "perplexity", "error"))


def score_text(key: str, value: float) -> str:
    """Format a logged value."""
    if is_share(key):
        return f"{percent(key, value):.1f} %"
    return f"{value:,.1f}" if runlog.is_score(key) or abs(value) >= 100 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Format seconds with their two largest units: 45 s, 2 min 5 s, 3 h 20 min, 2 d 4 h."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    left = round(seconds)
    parts: list[str] = []
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def smooth(values: Sequence[float]) -> list[float]:
    """Return the running median over a twentieth of the values, slightly smoothed; outliers do not change it."""
    from scipy.ndimage import median_filter

    count, reach = len(values), len(values) // 40
    if count < FEW:
        return list(values)
    # The beginning is steep, so it stays where it is; the end is flat and noisy, so it is mirrored.
    padded = np.pad(np.asarray(values, float), (0, reach), mode="symmetric")
    total = np.cumsum([0.0, *median_filter(padded, 2 * reach + 1, mode="nearest")[:count]])
    places = np.arange(count)
    low = places - np.minimum(places, reach // 2)
    high = np.minimum(2 * places - low + 1, count)
    return ((total[high] - total[low]) / (high - low)).tolist()


def best_loss(run: Run) -> tuple[float, float] | None:
    """Return the lowest held-out loss with its step: that of the masked words, or the first that is logged."""
    losses = [key for key in keys([run], dev=True) if key.endswith("loss")]
    steps, values = run.points(DEV + losses[0]) if losses else ([], [])
    return min(zip(values, steps, strict=True)) if values else None


def measures(run: Run) -> list[Measure]:
    """Return the key figures of a run: its last scores, then steps, tokens, time and speed."""
    found = [_score(run, key) for key in keys([run], dev=True)]
    losses = [key for key in keys([run], dev=False) if key == "loss" or key.endswith("_loss")]
    if not found and losses:
        value = smooth(run.values(losses[0]))[-1]
        found.append(Measure(f"{name_of(losses[0])}, training", value, score_text("", value), better="lower"))
    for name, key in (("Steps", "step"), ("Tokens seen", "tokens")):
        if (count := run.last(key)) is not None:
            whole = f"{count:,.0f}"
            found.append(Measure(name, count, whole if count < 1e6 else short(count), whole if count >= 1e6 else ""))
    if (seconds := run.last("seconds")) is not None:
        found.append(Measure("Time", seconds, duration(seconds)))
    if speeds := run.values("tokens_per_second"):
        found.append(Measure("Tokens per second", median(speeds), f"{median(speeds):,.0f}", "median"))
    return found


def _score(run: Run, key: str) -> Measure:
    """Return the last value of a held-out score, with the best one if it differs."""
    steps, values = run.points(DEV + key)
    values = values or run.values(DEV + key)
    lower = lower_is_better(key)
    best = (min if lower else max)(values)
    first = values.index(best)
    words = "held out"
    if best != values[-1] and steps:
        words += f"; best {score_text(key, best)} at step {steps[first]:,.0f}"
    return Measure(name_of(key), values[-1], score_text(key, values[-1]), words, "lower" if lower else "higher")


def resources(run: Run) -> list[tuple[str, str]]:
    """Return the speed and memory of a run, and its skipped steps."""
    found = []
    if speeds := run.values("tokens_per_second"):
        found.append(("tokens per second", f"{median(speeds):,.0f} (median), {max(speeds):,.0f} (best)"))
    if shares := run.values("flop_share"):
        text = f"{100 * median(shares):.1f} % of what a large matrix product reaches (median)"
        found.append(("model FLOPs", text))
    if memory := run.values("memory_gb"):
        found.append(("memory", f"{max(memory):.1f} GB"))
    if (seconds := run.last("seconds")) is not None:
        found.append(("training time", duration(seconds)))
    if compiling := run.last("compile_seconds"):
        found.append(("compiling kernels", duration(compiling)))
    if (skipped := run.last("skipped")) is not None:
        found.append(("skipped steps", f"{skipped:,.0f}"))
    return found


def phases(run: Run) -> list[tuple[Record, float]]:
    """Return the records where the sequence length of pre-training changes, with the new length."""
    if run.is_finetuning:
        return []
    lengths = [r for r in run.records if is_number(r.get("max_length"))]
    return [(now, now["max_length"]) for old, now in pairwise(lengths) if now["max_length"] != old["max_length"]]


def skips(run: Run) -> list[Record]:
    """Return the records before which steps were skipped."""
    found, before = [], 0.0
    for record in run.records:
        if is_number(record.get("skipped")):
            if record["skipped"] > before:
                found.append(record)
            before = record["skipped"]
    return found


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested values as dotted names with their text."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, text_of(value)


def text_of(value: Any) -> str:
    """Format a setting or a fact."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"
    if isinstance(value, list):
        return ", ".join(map(text_of, value[:30])) + (f", … ({len(value):,} in all)" if len(value) > 30 else "")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
