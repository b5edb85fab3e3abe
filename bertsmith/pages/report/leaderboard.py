"""The leaderboard: fine-tuning runs, task by task, beside the paper's figures."""

from __future__ import annotations

import html
from collections.abc import Sequence

from bertsmith.pages import page
from bertsmith.pages.page import Html
from bertsmith.pages.report.groups import Group, group_runs, scores_of, text_of_mean
from bertsmith.pages.report.runs import Run, lower_is_better
from bertsmith.tasks.glue_average import paper_average
from bertsmith.tasks.published import AVERAGES, NONE, PaperScore

ABSENT = "–"
MARKS = "†‡§¶#"
PAPER_COLUMNS = ("Base, dev", "Large, dev", "Base, test", "Large, test")


def leaderboard(runs: Sequence[Run]) -> str:
    """Return a table of tasks by starting model: the best configuration of each, beside the paper's figures."""
    groups = [group for group in group_runs(runs) if group.goal]
    if not groups:
        return ""
    tasks, systems = (list(dict.fromkeys(names)) for names in ([g.data for g in groups], [g.system for g in groups]))
    notes: dict[str, str] = {}
    rows = []
    for task in tasks:
        of_task = [group for group in groups if group.data == task]
        best = [best_of([g for g in of_task if g.system == system]) for system in systems]
        for score in scores_of(of_task):
            rows.append(
                [
                    task,
                    Html(f"<span class=guess>{html.escape(score.name)}</span>"),
                    *_cells(best, score, notes),
                    *_paper(score),
                ]
            )
    rows += _average(groups, systems)
    has_paper = any(cell != ABSENT for row in rows for cell in row[-4:])
    header = ["task", "score", *systems, *([Html(f"paper<br>{name}") for name in PAPER_COLUMNS] if has_paper else [])]
    shown = rows if has_paper else [row[:-4] for row in rows]
    parts = [page.section("Tasks"), page.table(header, shown), _explained(groups, has_paper)]
    parts += [page.paragraph(f"{mark} {text}.", "note") for text, mark in notes.items()]
    return "".join([*parts, configurations(groups)])


def summary(runs: Sequence[Run]) -> dict[str, str]:
    """Return the scores of each task and starting model, for the output of the command."""
    groups = [group for group in group_runs(runs) if group.goal]
    found = {}
    for task, system in dict.fromkeys((group.data, group.system) for group in groups):
        group = best_of([g for g in groups if (g.data, g.system) == (task, system)])
        for score in scores_of([group]) if group is not None else []:
            text, spread = text_of_mean(group.values(score.key))  # type: ignore[union-attr]
            found[f"{task}, {score.name}, from {system}"] = f"{text} {spread}".strip()
    return found


def best_of(groups: Sequence[Group]) -> Group | None:
    """Return the group with the best mean; the paper, too, chooses the learning rate on the dev set."""
    scored = [group for group in groups if group.mean(group.goal) is not None]
    sign = -1.0 if scored and lower_is_better(scored[0].goal) else 1.0
    return max(scored, key=lambda group: sign * (group.mean(group.goal) or 0.0), default=None)


def _cells(best: Sequence[Group | None], score: PaperScore, notes: dict[str, str]) -> list[str]:
    means = [group.mean(score.key) if group is not None else None for group in best]
    there = [value for value in means if value is not None]
    top = (min if lower_is_better(score.key) else max)(there, default=None) if len(there) > 1 else None
    cells: list[str] = []
    for group, value in zip(best, means, strict=True):
        if group is None or value is None:
            cells.append(ABSENT)
            continue
        text, spread = text_of_mean(group.values(score.key))
        marks = "".join(_mark(remark, notes) for remark in group.remarks)
        strong = f"<span class=right>{text}</span>" if value == top else text
        small = f" <small>{html.escape(spread)}</small>" if spread else ""
        cells.append(Html(f"{strong}{marks}{small}"))
    return cells


def _mark(remark: str, notes: dict[str, str]) -> str:
    """Return the footnote mark of a remark."""
    number = len(notes)
    sign = MARKS[number % len(MARKS)] * (1 + number // len(MARKS))
    return notes.setdefault(remark[:1].upper() + remark[1:], sign)


def _paper(score: PaperScore) -> list[str]:
    """Return the paper's figures; those of the test server are marked."""
    dev = [f"{value:.1f}" if value is not None else ABSENT for value in score.dev]
    test = [Html(f"<i>{value:.1f}*</i>") if value is not None else ABSENT for value in score.test]
    return [*dev, *test]


def _average(groups: Sequence[Group], systems: Sequence[str]) -> list[list[str]]:
    """The average over GLUE, where a system has all of it."""
    values = [_average_of([group for group in groups if group.system == system]) for system in systems]
    cells = [ABSENT if value is None else f"{value:.1f}" for value in values]
    score = PaperScore("", "", NONE, AVERAGES)
    return [["GLUE", "average without WNLI", *cells, *_paper(score)]] if set(cells) != {ABSENT} else []


def _average_of(groups: Sequence[Group]) -> float | None:
    """The paper's average over the best configuration of each task."""

    def score(task: str, key: str) -> float | None:
        best = best_of([group for group in groups if group.task == task])
        return None if best is None else best.mean(key)

    return paper_average(score)


def _explained(groups: Sequence[Group], has_paper: bool) -> str:
    words = ["Last dev scores in per cent"]
    if any(len(group.runs) > 1 for group in groups):
        words[0] += "; of several seeds the mean ± the standard deviation"
    pairs = {(group.data, group.system) for group in groups}
    if len(pairs) < len(groups):
        words.append("Where there are several configurations, the one with the best mean is shown")
    if has_paper:
        words.append(
            "* The paper's test figures are the test server's (CoNLL-2003: its test file): other rows than dev, not to "
            "be compared to the point. Its dev figures are of tables 2 to 7"
        )
    return page.paragraph(". ".join(words) + ".", "note")


def configurations(groups: Sequence[Group]) -> str:
    """Return a table of all groups with the settings in which they differ from others of their task."""
    if len(groups) == 1 and len(groups[0].runs) == 1:
        return ""
    rows = []
    for group in groups:
        of_task = [other for other in groups if other.data == group.data]
        first = scores_of(of_task)[0]
        differing = [n for n in group.settings if len({g.settings.get(n) for g in of_task}) > 1]
        settings = ", ".join(f"{name.split('.')[-1]} {group.settings[name]}" for name in differing) or ABSENT
        values = group.values(first.key)
        text, _ = text_of_mean(values) if values else (ABSENT, "")
        each = ", ".join(f"{value:.1f}" for value in values)
        trained = group.runs[0].fact("rows")
        rows.append(
            [group.data, group.system, settings, f"{trained:,}" if isinstance(trained, int) else ABSENT]
            + [", ".join(run.label for run in group.runs), first.name, text, each if len(values) > 1 else ""]
        )
    header = ["task", "started from", "settings of its own", "rows", "runs", "score", "mean", "each run"]
    return page.folded(f"The {sum(len(g.runs) for g in groups)} runs behind the table", page.table(header, rows))
