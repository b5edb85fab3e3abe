"""The page on one run or on several runs: key figures, curves, filled masks, settings."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bertsmith.errors import UserError
from bertsmith.pages import page
from bertsmith.pages.page import Html, colour_of
from bertsmith.pages.report.chosen import chosen, collapsed
from bertsmith.pages.report.curves import group_of, headlines, learning, optimiser, speed
from bertsmith.pages.report.groups import Group, group_runs, model_path, text_of_mean
from bertsmith.pages.report.leaderboard import best_of, leaderboard, summary
from bertsmith.pages.report.masks import filled_masks
from bertsmith.pages.report.mistakes import mistakes
from bertsmith.pages.report.runs import (
    DEV,
    Measure,
    Run,
    best_loss,
    duration,
    flatten,
    inside,
    is_number,
    keys,
    lower_is_better,
    measures,
    name_of,
    read_runs,
    resources,
    score_text,
)

ABSENT = "–"
MOST_BESIDE = 5  # runs that a table shows side by side
MOST_OPEN = 3  # tasks whose details are unfolded when the page opens


def report(runs: Sequence[str | Path], out: str | Path) -> dict[str, Any]:
    """Write a page on runs, finished or not; return its path, the runs' labels, best held-out losses and dev scores."""
    if Path(out).suffix not in (".html", ".htm"):
        raise UserError(f"--out {out}: the page is one HTML file; give a name that ends in .html")
    found = read_runs(runs)
    is_board = len(found) > 1 and all(run.is_finetuning for run in found)
    title, lead = _one(found[0]) if len(found) == 1 else (_board_title if is_board else _several)(found)
    parts = board(found) if is_board else _parts(found)
    page.write_page(out, title, lead, [part for part in [*_unfinished_runs(found), *parts] if part])
    best = {run.label: loss[0] if (loss := best_loss(run)) else None for run in found if not run.is_finetuning}
    scores = summary(found)
    return {
        "page": str(out),
        "runs": [run.label for run in found],
        **({"best_held_out_loss": best} if best else {}),
        **({"scores": scores} if scores else {}),
    }


def _parts(runs: Sequence[Run]) -> list[str]:
    single = len(runs) == 1
    legend = page.legend((run.label, colour_of(i), group_of(i)) for i, run in enumerate(runs))
    return [
        page.cards((m.name, m.text, m.words) for m in measures(runs[0])) if single else _key_figures(runs) + legend,
        leaderboard(runs),
        chosen(runs),
        collapsed(runs),
        learning(runs),
        filled_masks(runs),
        details(runs),
        optimiser(runs),
        _beside("Speed and memory", runs, [[*resources(run), *_facts(run, "machine")] for run in runs], speed(runs)),
        _beside("Data and model", runs, [[*_facts(run, *_other_facts(run))] for run in runs]),
        _settings(runs),
    ]


def board(runs: Sequence[Run]) -> list[str]:
    """Return the parts of a page on several fine-tuning runs: the tasks first, then mistakes and curves."""
    tasks = list(dict.fromkeys(run.name for run in runs))
    curves = [
        _curves_of([run for run in runs if run.name == task], task, is_open=len(tasks) <= MOST_OPEN) for task in tasks
    ]
    parts = [leaderboard(runs), chosen(runs), collapsed(runs), details(runs), page.section("Curves"), *curves]
    if len(runs) > MOST_BESIDE:
        return parts
    speeds = [[*resources(run), *_facts(run, "machine")] for run in runs]
    return [*parts, _beside("Speed and memory", runs, speeds), _settings(runs)]


def _curves_of(runs: Sequence[Run], task: str, *, is_open: bool) -> str:
    names = "".join(
        f"<span class=key>{page.dot(colour_of(i))}{html.escape(run.label)}</span>" for i, run in enumerate(runs)
    )
    return page.folded(task, f"<p>{names}</p>{learning(runs)}{optimiser(runs)}", is_open=is_open)


def details(runs: Sequence[Run]) -> str:
    """Return the mistakes of the best configuration for each task and starting model."""
    groups = [group for group in group_runs(runs) if group.goal]
    pairs = dict.fromkeys((group.data, group.system) for group in groups)
    best = [best_of([g for g in groups if (g.data, g.system) == pair]) for pair in pairs]
    shown = [(group, content) for group in best if group is not None and (content := mistakes(group))]
    if len(shown) <= 1:
        return "".join(page.section("Mistakes") + content for _, content in shown)
    titles = [
        f"{g.data}, from {g.system}" if len({s for t, s in pairs if t == g.data}) > 1 else g.data for g, _ in shown
    ]
    folds = [
        page.folded(f"{title}: {_score(group)}", content, is_open=number < MOST_OPEN)
        for number, (title, (group, content)) in enumerate(zip(titles, shown, strict=True))
    ]
    return page.section("Mistakes, task by task") + "".join(folds)


def _score(group: Group) -> str:
    """Return the main score of a group as text."""
    text, spread = text_of_mean(group.values(group.goal))
    return f"{inside(group.goal)} {text} {spread}".strip()


# The title and the summary


def _unfinished_runs(runs: Sequence[Run]) -> list[str]:
    return [page.paragraph(_unfinished(run), "banner") for run in runs if not run.finished]


def _work(run: Run) -> str:
    return "fine-tuning" if run.is_finetuning else "pre-training"


def _one(run: Run) -> tuple[str, str]:
    """Return the title and a summary: what was trained, on what, for how long, and the scores."""
    sentence = f"{_subject(run)}{_length(run)}."
    scores = [f"{inside(k)} {score_text(k, run.last(DEV + k) or 0.0)}" for k in keys([run], dev=True)]
    where = "rows" if run.is_finetuning else "text"
    result = f" On held-out {where}: {', '.join(scores)}." if scores else ""
    return f"{run.label}: {_work(run)} {run.name}", sentence + result


def _several(runs: Sequence[Run]) -> tuple[str, str]:
    """Return the title and the runs in the order of their first held-out score."""
    sentences = []
    for key in headlines(runs):
        scored = [(score, run.label) for run in runs if (score := run.last(DEV + key)) is not None]
        scored.sort(reverse=not lower_is_better(key), key=lambda pair: pair[0])
        order = ", then ".join(f"{label} ({score_text(key, score)})" for score, label in scored)
        sentences.append(f"{name_of(key)} on held-out data{', the best first' if len(scored) > 1 else ''}: {order}.")
    kinds = {_work(run) for run in runs}
    title = f"{len(runs)} {f'{min(kinds)} ' if len(kinds) == 1 else ''}runs compared"
    return title, " ".join(sentences) or "No run has been evaluated on held-out data yet."


def _board_title(runs: Sequence[Run]) -> tuple[str, str]:
    """Return the title and a summary of fine-tuning runs."""
    groups = group_runs(runs)
    tasks, systems = (list(dict.fromkeys(names)) for names in ([g.task for g in groups], [g.system for g in groups]))
    start = f"started from {systems[0]}" if len(systems) == 1 else f"started from {len(systems)} models"
    several = f" in {len(groups)} configurations" if 1 < len(groups) < len(runs) else ""
    seeds = " of one configuration" if len(groups) == 1 else several
    names = f"{', '.join(tasks[:-1])} and {tasks[-1]}" if len(tasks) > 1 else tasks[0]
    return f"Fine-tuning: {names}", f"{len(runs)} runs{seeds}, {start}, scored on held-out rows."


def _subject(run: Run) -> str:
    """Return the model and its data as the beginning of a sentence."""
    start = f", starting from {model_path(str(run.fact('start'))).name}" if run.fact("start") else ""
    if run.is_finetuning:
        labels = run.fact("labels")
        kinds = f" with {len(labels)} labels" if isinstance(labels, list) and labels else ""
        rows = _counts((run.fact("rows"), "rows")) or "labelled rows"
        return f"A model learned the task {run.name} from {rows}{kinds}{start}"
    sizes = (run.setting("model", "num_layers"), "layers"), (run.setting("model", "hidden_size"), "wide")
    size = _counts(*sizes, (run.fact("model", "parameters"), "parameters"))
    documents, tokens = (_counts((run.fact("corpus", name), name)) for name in ("documents", "tokens"))
    text = f"{documents} ({tokens})" if documents and tokens else documents or tokens or "a corpus"
    pairs = " and to predict whether sentences follow each other" if run.setting("objective", "next_sentence") else ""
    words = "the next word" if run.setting("objective", "kind") == "causal-lm" else "masked words"
    learned = f"learned to predict {words}{pairs} from {text}"
    return f"{run.name}{f' ({size})' if size else ''} {learned}{start}"


def _length(run: Run) -> str:
    steps, planned, seconds = run.last("step"), _planned(run), run.last("seconds")
    if steps is None:
        return "; no step is logged yet"
    aim = f" of {planned:,}" if not run.finished and is_number(planned) else ""
    device = run.fact("machine", "device")
    return (
        f", in {steps:,.0f}{aim} steps"
        + (f" ({run.last('tokens'):,.0f} tokens seen)" if run.last("tokens") else "")
        + (f" and {duration(seconds)} of training" if seconds else "")
        + (f" on {device}" if device else "")
    )


def _planned(run: Run) -> Any:
    """Return the planned number of steps; None if the run ends by the clock."""
    return None if run.setting("train", "hours") else run.setting("train", "steps")


def _counts(*pairs: tuple[Any, str]) -> str:
    return ", ".join(f"{count:,} {name}" for count, name in pairs if is_number(count))


def _unfinished(run: Run) -> str:
    steps, planned = run.last("step"), _planned(run)
    if steps is None:
        return f"{run.label} is not finished: it has logged nothing yet."
    aim = f" of {planned:,}" if is_number(planned) else ""
    return f"{run.label} is not finished: its log ends at step {steps:,.0f}{aim}."


# Tables


def _key_figures(runs: Sequence[Run]) -> str:
    """Return the key figures of several runs as a table, with the best values marked."""
    found = [{m.name: m for m in measures(run)} for run in runs]
    rows = []
    for name in dict.fromkeys(name for of_run in found for name in of_run):
        rows.append((name, *_marked([of_run.get(name) for of_run in found])))
    best = [(f"{loss[0]:.4g} at step {loss[1]:,.0f}" if (loss := best_loss(run)) else ABSENT) for run in runs]
    rows += [("Lowest held-out loss", *best)] if set(best) != {ABSENT} else []
    if not rows:
        return ""
    note = "The scores are the last ones on held-out data; the best of each is marked."
    return page.section("Key figures") + page.table(["", *_names(runs)], rows) + page.paragraph(note, "note")


def _marked(measures: Sequence[Measure | None]) -> list[Html]:
    there = [m for m in measures if m is not None]
    better = there[0].better
    best = (min if better == "lower" else max)(m.value for m in there)
    cells = []
    for m in measures:
        mark = m is not None and better != "neither" and m.value == best and len(there) > 1
        text = html.escape(m.text) if m is not None else ABSENT
        cells.append(Html(f"<span class=right>{text}</span>" if mark else text))
    return cells


def _names(runs: Sequence[Run]) -> list[Html]:
    """Return the labels of runs with their colours, as column headers."""
    return [Html(page.dot(colour_of(i)) + html.escape(run.label)) for i, run in enumerate(runs)]


def _beside(title: str, runs: Sequence[Run], rows: Sequence[Iterable[tuple[str, str]]], before: str = "") -> str:
    """Return a table of named values with a column for each run."""
    found = [dict(of_run) for of_run in rows]
    names = list(dict.fromkeys(name for of_run in found for name in of_run))
    if not names and not before:
        return ""
    header = ["", ""] if len(runs) == 1 else ["", *_names(runs)]
    body = [(name.replace("_", " "), *(of_run.get(name, ABSENT) for of_run in found)) for name in names]
    return page.section(title) + before + (page.table(header, body) if names else "")


def _facts(run: Run, *names: str) -> list[tuple[str, str]]:
    """Return parts of `run.json` as named values."""
    chosen = {name: run.facts[name] for name in names if name in run.facts}
    return [
        (name.replace(".", " "), text or ("random weights" if name == "start" else ABSENT))
        for name, text in flatten(chosen)
    ]


def _other_facts(run: Run) -> list[str]:
    return [name for name in run.facts if name != "machine"]


def _settings(runs: Sequence[Run]) -> str:
    """Return all settings, folded; the settings in which several runs differ are shown above."""
    found = [dict(flatten(run.config)) for run in runs]
    names = list(dict.fromkeys(name for of_run in found for name in of_run))
    header = ["setting", *(["value"] if len(runs) == 1 else _names(runs))]
    rows = [(name, *(of_run.get(name, ABSENT) for of_run in found)) for name in names]
    parts = [page.section("Settings")]
    if len(runs) > 1:
        differing = [row for row in rows if len(set(row[1:])) > 1]
        same = page.paragraph("The runs have the same settings.")
        parts += [page.paragraph("Where the runs differ:"), page.table(header, differing)] if differing else [same]
    return "".join([*parts, page.folded(f"All {len(names)} settings", page.table(header, rows))])
