"""The plan and the tables of the speedrun's experiments, for the terminal and for docs/experiments.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.family_pages import NAMES, Rows, print_tables, put_tables
from benchmarks.speedrun_table import BASE, CORPORA, EXPERIMENTS, ROWS, WORDPIECE, lacking
from benchmarks.speedrun_variants import JUDGED, VARIANTS, VERDICTS

PAGE = Path(__file__).parent.parent / "docs" / "experiments.md"
START = 0.25  # minutes that a run takes beside its own: the start, the last evaluation, saving
RUN_SECONDS = 3.0  # of a fine-tuning, all of them side by side on an H200, until it is measured
HEADER = ["question", "command", "result", "verdict"]
Results = dict[str, Any]


def run_seconds(results: Results) -> float:
    """The seconds that a fine-tuning has taken, or is assumed to take."""
    timed = [tuned for tuned in results.get("tuning", {}).values() if "runs_of_all" in tuned]
    found = [tuned["seconds_of_all"] / tuned["runs_of_all"] for tuned in timed]
    return median(found) if found else RUN_SECONDS


def minutes_of(minutes: float, seeds: int, results: Results) -> float:
    """The minutes of an experiment with five tasks."""
    return minutes + START + len(NAMES) * seeds * run_seconds(results) / 60


def show_plan(names: Sequence[str], minutes: float, seeds: int, results: Results) -> None:
    """Print the experiments with the minutes of each, and what some of them need first."""
    rows, total = [["experiment", "asks", "beside", "minutes", "needs"]], 0.0
    for name in names:
        experiment, needs = EXPERIMENTS[name], lacking(name)
        taken = 0.0 if needs else minutes_of(minutes, seeds, results)
        total += taken
        needs = needs or (f"the corpus {experiment.corpus}" if experiment.corpus != WORDPIECE else "")
        rows.append([name, experiment.asks, experiment.base, f"{taken:.1f}" if taken else "–", needs])
    print_tables({"plan": [*rows, ["", "in all", "", f"{total:.0f}", ""]]}, width=170)


def tuned_by(results: Results, key: str, variant: str = "protocol") -> Results:
    """The scores of a run; empty if it is not fine-tuned in this way."""
    found: Results = results.get("tuning", {}).get(f"{key}: {variant}", {})
    return found


def base_key(run: Results) -> str:
    """The key of the run that a run is compared with: of the base, or without the changes that a call has added."""
    name, minutes = run["experiment"], f"{run['minutes']:g} min"
    if run["changed"]:
        return f"{name} {minutes}"
    return f"{EXPERIMENTS[name].base} {minutes}"


def result_of(key: str, results: Results) -> str:
    """What a run has seen and learnt, and its scores, in words; differences are those from its base."""
    run = results["pretraining"][key]
    other = results["pretraining"].get(base_key(run), {})
    parts = [f"{run['tokens'] / 1e6:,.0f} M tokens ({run['tokens_per_second'] / 1000:,.0f} k/s)"]
    parts += [f"{run['side_by_side']} runs at a time"] if "side_by_side" in run else []
    words, beside = run["masked_words"] or {}, other.get("masked_words") or {}
    if words:
        name = "bits_per_byte" if other and other["corpus_name"] != run["corpus_name"] else "loss"
        compared = beside.get(name) if other and same_text(run, other) else None
        text = f"{name.replace('_', ' ')} {words[name]:.3f}" + _difference(words[name], compared, 3)
        parts.append(text + (" of the generator" if words["of"] == "the generator" else ""))
    detected, before = (each.get("held_out", {}).get("detection_loss") for each in (run, other))
    if detected is not None:
        parts.append(f"of the detector {detected:.4f}" + _difference(detected, before, 4))
    tuned = tuned_by(results, key)
    return ", ".join(parts) + (f"; {scores_text(tuned, tuned_by(results, base_key(run)))}" if tuned else "")


def same_text(run: Results, other: Results) -> bool:
    """Whether two runs have the same documents, so that the same ones are held out."""
    first, second = (replace(CORPORA[each["corpus_name"]], tokenizer="") for each in (run, other))
    return first == second


def scores_text(tuned: Results, other: Results) -> str:
    """The scores of a way of fine-tuning: medians over the seeds, with the differences from another."""
    parts = []
    if "glue5" in tuned:
        parts.append(f"**GLUE-5 {tuned['glue5']:.1f}**" + _difference(tuned["glue5"], other.get("glue5"), 1))
    order = [*NAMES, *tuned["tasks"]]
    for task, found in sorted(tuned["tasks"].items(), key=lambda each: order.index(each[0])):
        beside = other.get("tasks", {}).get(task, {}).get("median")
        text = f"{NAMES.get(task, task)} {found['median']:.1f}" + _difference(found["median"], beside, 1)
        parts.append(text + (f" ({found['failed']} diverged)" if found["failed"] else ""))
    return ", ".join(parts)


def _difference(value: float, other: float | None, digits: int) -> str:
    return "" if other is None else f" ({value - other:+.{digits}f})".replace("-", "−")


def experiment_rows(results: Results) -> Rows:
    """A line for each run, in the order of the experiments and of the minutes."""
    runs, order = results.get("pretraining", {}), list(EXPERIMENTS)
    rows = [HEADER]
    for key in sorted(runs, key=lambda key: (runs[key]["minutes"], order.index(runs[key]["experiment"]))):
        run = runs[key]
        experiment = EXPERIMENTS[run["experiment"]]
        changes = [*experiment.changes, *run["changed"]]
        changes += [f"corpus {experiment.corpus}"] if experiment.corpus != WORDPIECE else []
        asks = experiment.asks + (f" ({_code(changes)})" if changes else "")
        asks += f", beside `{experiment.base}`" if experiment.base not in ("", BASE) else ""
        rows.append([asks, f"`run {run['experiment']} {options_of(run)}`", result_of(key, results), experiment.verdict])
    return rows


def options_of(run: Results) -> str:
    """The options that a run was called with."""
    return " ".join([f"--minutes {run['minutes']:g}", *(f"--set {change}" for change in run["changed"])])


def tuning_rows(results: Results) -> Rows:
    """A line for each way of fine-tuning beside the protocol, in the order of the variants."""
    order, rows = list(VARIANTS), [HEADER]
    found = [t for key, t in results.get("tuning", {}).items() if key != f"{t['run']}: protocol"]
    for tuned in sorted(found, key=lambda t: (t["run"], order.index(t["variant"]))):
        variant = VARIANTS[tuned["variant"]]
        asks = variant.asks + (f" ({_code(variant.settings)})" if variant.settings else "")
        text = scores_text(tuned, tuned_by(results, tuned["run"]))
        run = results.get("pretraining", {}).get(tuned["run"])
        where, options = (run["experiment"], f" {options_of(run)}") if run else (tuned["run"], "")
        options += f" --rows {tuned['rows']}" if tuned["rows"] != ROWS else ""
        verdict = variant.verdict if where == JUDGED else VERDICTS.get((where, tuned["variant"]), "")
        rows.append([asks, f"`tune {where} {tuned['variant']}{options}`", text, verdict])
    return rows


def _code(changes: Sequence[str]) -> str:
    """Settings as they are given; of one that is given twice, the last, which counts."""
    changes = list({change.partition("=")[0]: change for change in changes}.values())
    return ", ".join(f"`{change}`" for change in changes)


def tables(results: Results) -> dict[str, Rows]:
    return {"experiments": experiment_rows(results), "fine-tuning": tuning_rows(results)}


def show(results: Results) -> None:
    """Print both tables."""
    print_tables(tables(results), width=190)


def write_page(results: Results, page: Path = PAGE) -> None:
    """Put the tables into the page."""
    put_tables(page, tables(results))
