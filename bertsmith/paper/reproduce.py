"""`reproduce`: run what a table of the paper needs and show our scores beside the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertsmith.config import write_json
from bertsmith.errors import Interrupted, UserError, suggestion
from bertsmith.finetuning.protocols import figures_of
from bertsmith.folders import locked, new_file
from bertsmith.formats.hub import find_model
from bertsmith.paper.findings import judged
from bertsmith.paper.pages import write_table
from bertsmith.paper.plan import estimate, row_lengths
from bertsmith.paper.scales import find_scale
from bertsmith.paper.tables import TABLES, Column, Row, Table, only_of
from bertsmith.paper.work import SCORES, Data, Work
from bertsmith.pretraining.checks import unlearnt_positions
from bertsmith.rows.columns import Columns
from bertsmith.tasks.glue_average import paper_average
from bertsmith.tasks.reading import find_splits, read_task
from bertsmith.tasks.task import find_task
from bertsmith.training.run import is_finished
from bertsmith.training.side_by_side import side_by_side

Cell = dict[str, Any]


def reproduce(
    names: Sequence[str],
    out: str | Path,
    *,
    scale: str | None = None,
    data: str | Path | None = None,
    corpus: str | Path | None = None,
    seeds: int = 1,
    device: str | None = None,
    jobs: int = 1,
    dry_run: bool = False,
    pretraining: Sequence[str] = (),
    finetuning: Sequence[str] = (),
    models: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Run tables of the paper, or plan them; return the results, which `OUT/SCALE/NAME.json` and `.html` hold too.

    `data` holds the folders of the tasks; `corpus` is a corpus folder (by default at scale tiny, the demo's text).
    Finished runs are reused; `jobs` runs execute at the same time. `pretraining` and `finetuning` are settings for all
    runs of that kind. `models` (`bert-base=MODEL`) replace pre-training: nothing is pre-trained, and rows that start
    from other models are not run. The default scale is tiny, or paper if models are given.
    """
    for option, value in (("--seeds", seeds), ("--jobs", jobs)):
        if value < 1:
            raise UserError(f"{option} must be at least 1, not {value}")
    tables = find_tables(names)
    chosen = find_scale(scale or ("paper" if models else "tiny"))
    if corpus is None and chosen.name != "tiny" and not models and not dry_run:
        raise UserError(f"--scale {chosen.name} needs text: give a corpus folder with --corpus")
    given = _find_models(models, tables, pretraining)
    tables = [only_of(table, given) for table in tables] if given else tables
    work = Work(
        Path(out), chosen, Path(corpus) if corpus is not None else None,
        Path(data) if data is not None else None, device, tuple(pretraining), tuple(finetuning), given, dry_run,
    )  # fmt: skip
    _check_settings(work, tables)
    if dry_run:
        return [estimate(work, table, seeds) for table in tables]
    try:
        with locked(out):
            _check_rows(work, tables)
            if jobs > 1:
                _run_side_by_side(work, tables, seeds, jobs)
            return [run_table(work, table, seeds) for table in tables]
    except Interrupted as stop:
        stop.advice = "The same command resumes it"
        raise


def find_tables(names: Sequence[str]) -> list[Table]:
    """Return tables by name; `all` stands for every table."""
    for name in names:
        if name not in (*TABLES, "all"):
            near = suggestion(name, [*TABLES, "all"]) or "; one of: " + ", ".join([*TABLES, "all"])
            raise UserError(f"unknown table {name!r}{near}")
    chosen = TABLES if "all" in names else dict.fromkeys(names)
    return [TABLES[name]() for name in chosen]


def _find_models(models: Sequence[str], tables: Sequence[Table], pretraining: Sequence[str]) -> dict[str, Path]:
    """Return the folders of the given models by the recipes that they replace."""
    if models and pretraining:
        raise UserError(f"--set {pretraining[0]} changes pre-training, and with --model there is none")
    starts = [start for table in tables for row in table.rows for start in (row.start, row.beside) if start is not None]
    known, found = list(dict.fromkeys(start.recipe for start in starts)), {}
    for text in models:
        name, equals, model = text.partition("=")
        if not equals or not model:
            raise UserError(
                f"--model {text!r}: write the recipe that it replaces before it, as in --model bert-base={text}"
            )
        if name not in known:
            near = suggestion(name, known) or "; one of: " + ", ".join(known)
            raise UserError(f"--model {text!r}: no row starts from {name!r}{near}")
        found[name] = find_model(model)
    return found


def _check_settings(work: Work, tables: Sequence[Table]) -> None:
    """Refuse a setting that a run of these tables would refuse, before time is spent on the others."""
    for table in tables:
        for row in table.rows:
            if row.start is None:
                continue
            train = work.config(row.start).train
            if row.share < 1.0 and (train.steps is None or train.hours is not None):
                raise UserError(
                    f"{table.name} evaluates checkpoints by their steps: set train.steps, not another length"
                )
            for column in (column for column in table.columns if column.task):
                work.settings(row, column)


def _check_rows(work: Work, tables: Sequence[Table]) -> None:
    """Refuse files whose rows cannot be read, before time is spent on pre-training."""
    for name in dict.fromkeys(column.task for table in tables for column in table.columns if column.task):
        if isinstance(data := work.find(name), Data):
            task = find_task(name)
            row_lengths(name, data)  # reads the training rows
            for paths in find_splits(task, data.train, data.dev).dev.values():
                for _ in read_task(task, paths, Columns(), labelled=True):
                    pass


def run_table(work: Work, table: Table, seeds: int) -> dict[str, Any]:
    """Run the rows of a table and write its page; tasks without data are listed as absent."""
    found = {column.task: work.find(column.task) for column in table.columns if column.task}
    absent, rows, partial, is_measured = work.absent(table), [], dict[str, list[str]](), work.has_data(table)
    missed: dict[str, str] = {}
    for row in table.rows:
        result: dict[str, Any] = {"name": row.name, "paper": _named(table, row.paper), "ours": {}}
        rows.append(result)
        if row.start is None or not is_measured:
            result["not_run"] = row.why_not if row.start is None else "no column has data"
            continue
        facts = work.pretrained(row.start)
        result |= {**work.seen(row), "series": row.series}
        if facts and (words := unlearnt_positions(work.config(row.start).data, facts)):
            missed[row.start.recipe] = f"{row.start.recipe}: {words}."
        for column in table.columns:
            data = found.get(column.task)
            if isinstance(data, Data):
                cell = _cell(work, row, column, data, seeds, partial)
            elif not column.task and column.key in facts:
                cell = figures_of([facts[column.key]])
            else:
                continue
            if cell["seeds"]:
                result["ours"][column.name] = cell
            else:
                absent.setdefault(column.name, f"no run of {column.run} gave {column.key}")
        if table.average:
            _add_average(table, result)
    if table.average and not any(table.columns[-1].name in row["ours"] for row in rows):
        absent[table.columns[-1].name] = "it is the mean of all columns"
    facts = {"table": table.name, "title": table.title, "scale": work.scale.name, "seeds": seeds}
    names = [column.name for column in table.columns]
    given = [("--set", work.pretraining), ("--tune", work.finetuning)]
    settings: dict[str, Any] = {"settings": [f"{option} {value}" for option, values in given for value in values]}
    settings |= {"models": {name: str(path) for name, path in work.models.items()}}
    settings |= {"corpus": str(work.text()) if work.starts(table) else ""}
    result = {**facts, **settings, "columns": names, "rows": rows, "absent": absent, "partial": partial}
    result["findings"] = judged(table, rows)
    scale = f"Scale {work.scale.name}: {work.scale.what}."
    result["notes"] = [
        f"Fine-tuned as at scale {work.scale.name}." if work.models else scale,
        *table.notes,
        *missed.values(),
    ]
    folder = work.folder / work.scale.name
    result["page"] = str(folder / f"{table.name}.html")
    with new_file(folder / f"{table.name}.json") as file:
        write_json(file, result)
    write_table(folder / f"{table.name}.html", result)
    return result


def _run_side_by_side(work: Work, tables: Sequence[Table], seeds: int, jobs: int) -> None:
    """Pre-train the models of all tables, then run all fine-tunings, several at a time.

    The longest run first, so that no long run is left over at the end.
    """
    plans = [estimate(work, table, seeds) for table in tables]
    hours = {work.folder / run["run"]: run["hours"] for plan in plans for run in plan["runs"]}

    def longest_first(runs: Mapping[Path, tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        return [runs[run] for run in sorted(runs, key=lambda run: -hours[run])]

    starts = {work.run_of(start): (start,) for table in tables for start in work.starts(table)}
    to_train = {run: given for run, given in starts.items() if not is_finished(run)}
    for run, (start,) in starts.items():
        if run not in to_train:
            work.pretrained(start)  # refuses a finished run with other settings before time is spent
    if len(to_train) > 1 and not work.scale.fills_a_device:
        work.text()  # prepared once
        side_by_side(jobs, "pre-training", work.pretrained, longest_first(to_train))
    else:
        for (start,) in to_train.values():
            work.pretrained(start)
    # Several columns may show scores of the same run.
    tuned = {run: given for table in tables for run, given in work.finetunings(table, seeds)}
    to_tune = {run: given for run, given in tuned.items() if not (run / SCORES).exists()}
    if to_tune:
        side_by_side(jobs, "fine-tuning", work.scores, longest_first(to_tune))


def _named(table: Table, values: Sequence[float | None]) -> dict[str, float]:
    pairs = zip(table.columns, values, strict=True)
    return {column.name: value for column, value in pairs if value is not None}


def _cell(work: Work, row: Row, column: Column, data: Data, seeds: int, partial: dict[str, list[str]]) -> Cell:
    """Return the scores of a row in a column, for the setting with the best mean."""
    best: Cell = figures_of([])
    for config in work.settings(row, column):
        runs = [work.scores(row, column, config, seed, data) for seed in range(1, seeds + 1)]
        values = [run["scores"][column.key] for run in runs if column.key in run["scores"]]
        remarks = dict.fromkeys(remark for run in runs for remark in run["remarks"])
        if remarks:
            partial[column.name] = list(dict.fromkeys([*partial.get(column.name, []), *remarks]))
        cell = {**figures_of(values), "values": values, "learning_rate": config.train.learning_rate}
        failed = sum("failed" in run for run in runs)
        cell |= {"failed": failed} if failed else {}
        if values and (not best["seeds"] or cell["mean"] > best["mean"]):
            best = cell
    return best


def _add_average(table: Table, result: dict[str, Any]) -> None:
    """Add the mean of all columns if a row has all of them."""
    *columns, last = table.columns
    means = {(c.task, c.key): result["ours"][c.name]["mean"] for c in columns if c.name in result["ours"]}
    if (average := paper_average(lambda task, key: means.get((task, key)))) is not None:
        result["ours"][last.name] = {"mean": average, "deviation": None, "seeds": 1}
