"""`reproduce`: run what a table of the paper needs and show our scores beside the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from bertsmith.config import write_json
from bertsmith.errors import Interrupted, UserError, nearest_or_all
from bertsmith.finetuning.protocols import figures_of
from bertsmith.finetuning.scored import SCORES
from bertsmith.finetuning.task_data import Data
from bertsmith.folders import locked, new_file
from bertsmith.formats.hub import find_model
from bertsmith.paper.findings import judged, standard_error
from bertsmith.paper.pages import write_table
from bertsmith.paper.plan import estimate, row_lengths
from bertsmith.paper.scales import find_scale
from bertsmith.paper.tables import TABLES, Column, Row, Table, is_chosen, only_of, run_name
from bertsmith.paper.work import Work
from bertsmith.pretraining.checks import unlearnt_positions
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.rows.columns import Columns
from bertsmith.tasks.glue_average import paper_average
from bertsmith.tasks.reading import read_task
from bertsmith.tasks.task import find_task
from bertsmith.training.run import is_finished
from bertsmith.training.side_by_side import side_by_side
from bertsmith.training.speed import release_memory

Cell = dict[str, Any]


def reproduce(
    names: Sequence[str],
    out: str | Path,
    *,
    scale: str | None = None,
    data: str | Path | None = None,
    corpus: str | Path | Sequence[str | Path] | None = None,
    seeds: int = 1,
    pretraining_seeds: Sequence[int] = (1,),
    rows: Sequence[str] = (),
    minutes: float | None = None,
    device: str | None = None,
    jobs: int = 1,
    dry_run: bool = False,
    show: bool = False,
    pretraining: Sequence[str] = (),
    finetuning: Sequence[str] = (),
    models: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Run tables of the paper, or plan them; return the results, which `OUT/SCALE/NAME.json` and `.html` hold too.

    `data` holds the folders of the tasks; `corpus` is a corpus folder (by default at scale tiny, the demo's text), or
    several, of which those for single recipes are written `gpt=FOLDER`. Finished runs are reused; `jobs` runs execute
    at the same time. Only `rows` are run, named as in the table or by their recipes, and none with `show`; of the
    others, scores that are there are shown. `minutes` is the time of every pre-training run, `pretraining_seeds` are
    its seeds. `pretraining` and `finetuning` are settings for all runs of that kind. `models` (`bert-base=MODEL`)
    replace pre-training: nothing is pre-trained, and rows that start from other models are not run. The default scale
    is tiny, or paper if models are given.
    """
    seeds_given = [("--pretraining-seed", seed) for seed in pretraining_seeds]
    for option, value in (("--seeds", seeds), ("--jobs", jobs), *seeds_given):
        if value < 1:
            raise UserError(f"{option} must be at least 1, not {value}")
    if minutes is not None and minutes <= 0:
        raise UserError(f"--minutes must be more than 0, not {minutes:g}")
    tables, clock = find_tables(names), [] if minutes is None else [f"train.hours={minutes / 60:g}"]
    given = _find_models(models, tables, [*clock, *pretraining, *(f"seed {s}" for s in pretraining_seeds if s > 1)])
    tables = [only_of(table, given) for table in tables] if given else tables
    work = Work(
        Path(out), find_scale(scale or ("paper" if models else "tiny")), _find_corpora(corpus),
        Path(data) if data is not None else None, device, (*clock, *pretraining), tuple(finetuning), given, dry_run,
        tuple(dict.fromkeys(pretraining_seeds)), frozenset() if show else _find_rows(rows, tables),
    )  # fmt: skip
    _check_settings(work, tables)
    if dry_run:
        return [estimate(work, table, seeds, jobs) for table in tables]
    _check_corpora(work, tables)
    try:
        with locked(out):
            _check_rows(work, tables)
            if jobs > 1:
                _run_side_by_side(work, tables, seeds, jobs)
            return [run_table(work, table, seeds) for table in tables]
    except Interrupted as stop:
        stop.advice = "The same command resumes it"
        raise


def _find_corpora(given: str | Path | Sequence[str | Path] | None) -> dict[str, Path]:
    """Return corpus folders by the recipes that they are for; that of all others has an empty name."""
    listed = [] if given is None else [given] if isinstance(given, str | Path) else given
    found: dict[str, Path] = {}
    for text in map(str, listed):
        name, equals, folder = text.partition("=")
        name, folder = (name, folder) if equals and not Path(text).exists() else ("", text)
        if name in found:
            raise UserError(f"--corpus {text}: {found[name]} is given for {name or 'all recipes'} already")
        found[name] = Path(folder)
    return found


def _find_rows(rows: Sequence[str], tables: Sequence[Table]) -> frozenset[str] | None:
    """Return the chosen rows and recipes, None for all rows; a name that no table has is an error."""
    ours = [row for table in tables for row in table.rows if row.start is not None]
    recipes = {start.recipe for row in ours for start in row.starts}
    known = dict.fromkeys([*(row.name for row in ours), *sorted(recipes)])
    for name in rows:
        if name.lower() not in {each.lower() for each in known}:
            raise UserError(
                f"--row {name!r}: no row of these tables has this name or recipe{nearest_or_all(name, known)}"
            )
    chosen = frozenset(name.lower() for name in rows)
    if chosen and not any(is_chosen(row, chosen) for row in ours):
        raise UserError(f"--row {rows[0]!r}: every row with it needs another recipe as well; give that one, too")
    return chosen or None


def _check_corpora(work: Work, tables: Sequence[Table]) -> None:
    """Refuse a scale without text if anything is to be pre-trained, and a chosen row without its vocabulary."""
    for row in (row for table in tables for row in table.rows if is_chosen(row, work.chosen or ())):
        if why := work.why_no_text(row):
            raise UserError(f"--row {row.name!r}: {why}")
    for start in (start for table in tables for start in work.starts(table)):
        if not (work.run_of(start) / SCORES).exists() and work.scale.name != "tiny":
            work.text(start)


def find_tables(names: Sequence[str]) -> list[Table]:
    """Return tables by name; `all` stands for every table."""
    for name in names:
        if name not in (*TABLES, "all"):
            raise UserError(f"unknown table {name!r}{nearest_or_all(name, [*TABLES, 'all'])}")
    chosen = TABLES if "all" in names else dict.fromkeys(names)
    return [TABLES[name]() for name in chosen]


def _find_models(models: Sequence[str], tables: Sequence[Table], pretraining: Sequence[str]) -> dict[str, Path]:
    """Return the folders of the given models by the recipes that they replace."""
    if models and pretraining:
        raise UserError(f"--set {pretraining[0]} changes pre-training, and with --model there is none")
    starts = [start for table in tables for row in table.rows for start in row.starts]
    known, found = list(dict.fromkeys(start.recipe for start in starts)), {}
    for text in models:
        name, equals, model = text.partition("=")
        if not equals or not model:
            raise UserError(
                f"--model {text!r}: write the recipe that it replaces before it, as in --model bert-base={text}"
            )
        if name not in known:
            raise UserError(f"--model {text!r}: no row starts from {name!r}{nearest_or_all(name, known)}")
        found[name] = find_model(model)
    return found


def _check_settings(work: Work, tables: Sequence[Table]) -> None:
    """Refuse a setting that a run of these tables would refuse, before time is spent on the others."""
    for table in tables:
        for row in table.rows:
            if row.start is None or not work.runs(row):
                continue
            train = work.config(row.start).train
            if row.share < 1.0 and train.steps is None and train.hours is None:
                raise UserError(
                    f"{table.name} evaluates checkpoints by their steps: set train.steps or train.hours, not epochs"
                )
            for column in (column for column in table.columns if column.task):
                work.settings(row, column)


def _check_rows(work: Work, tables: Sequence[Table]) -> None:
    """Refuse files whose rows cannot be read, before time is spent on pre-training."""
    for name in dict.fromkeys(column.task for table in tables for column in table.columns if column.task):
        if isinstance(data := work.find(name), Data):
            row_lengths(name, data)  # reads the training rows
            for paths in data.splits(name).dev.values():
                for _ in read_task(find_task(name), paths, Columns(), labelled=True):
                    pass


@dataclass
class _Facts:
    """What stands beside a table: columns without scores, partial data, notes on models, and the pre-training runs."""

    absent: dict[str, str]
    partial: dict[str, list[str]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    runs: dict[str, Any] = field(default_factory=dict)


def run_table(work: Work, table: Table, seeds: int) -> dict[str, Any]:
    """Run the rows of a table and write its page; tasks without data are listed as absent."""
    beside = _Facts(work.absent(table))
    absent, partial = beside.absent, beside.partial
    rows = [_run_row(work, table, row, seeds, beside) for row in table.rows]
    if table.average and not any(table.columns[-1].name in row["ours"] for row in rows):
        absent[table.columns[-1].name] = "it is the mean of all columns"
    facts = {"table": table.name, "title": table.title, "scale": work.scale.name, "seeds": seeds}
    facts |= {"pretraining_seeds": list(work.seeds)}
    names = [column.name for column in table.columns]
    given = [("--set", work.pretraining), ("--tune", work.finetuning)]
    settings: dict[str, Any] = {"settings": [f"{option} {value}" for option, values in given for value in values]}
    settings |= {"models": {name: str(path) for name, path in work.models.items()}}
    settings |= {"corpus": ", ".join(dict.fromkeys(_corpus_name(work, start) for start in work.starts(table)))}
    result = {**facts, **settings, "columns": names, "rows": rows, "absent": absent, "partial": partial}
    result["pretraining"] = beside.runs
    result["findings"] = judged(table, rows)
    scale = f"Scale {work.scale.name}: {work.scale.what}."
    result["notes"] = [
        f"Fine-tuned as at scale {work.scale.name}." if work.models else scale,
        *table.notes,
        *beside.notes.values(),
    ]
    folder = work.folder / work.scale.name
    result["page"] = str(folder / f"{table.name}.html")
    with new_file(folder / f"{table.name}.json") as file:
        write_json(file, result)
    write_table(folder / f"{table.name}.html", result)
    return result


def _corpus_name(work: Work, start: PretrainConfig) -> str:
    """Return the corpus folder of a run, or a remark if the run was made elsewhere."""
    has_text = work.corpus_of(start) is not None or work.scale.name == "tiny"
    return str(work.text(start)) if has_text else "that of the runs' own machine"


def _run_row(work: Work, table: Table, row: Row, seeds: int, beside: _Facts) -> dict[str, Any]:
    """Run a row with each seed of pre-training, and add to what stands beside the table."""
    result: dict[str, Any] = {"name": row.name, "paper": _named(table, row.paper), "ours": {}}
    if row.start is None or not work.has_data(table):
        return {**result, "not_run": row.why_not if row.start is None else "no column has data"}
    runs = work.runs(row)
    ready = work.rows(row) if runs else [each for each in work.rows(row) if work.is_pretrained(each)]
    why = work.why_no_text(row) or "it was not asked for, and its scores are not there"
    absent = {**result, "not_run": why}
    if not ready:
        return absent
    facts = [work.pretrained(each.start) for each in ready if each.start is not None]
    result |= {**_seen(work, ready), "series": row.series, "runs": len(ready)}
    if facts[0]:
        starts = [start for each in ready for start in each.starts]
        beside.runs |= {run_name(start): _pretraining_facts(work.pretrained(start)) for start in starts}
        if words := unlearnt_positions(work.config(row.start).data, facts[0]["scores"]):
            beside.notes[row.start.recipe] = f"{row.start.recipe}: {words}."
    for column in table.columns:
        data = work.find(column.task) if column.task else None
        if isinstance(data, Data):
            known = ready if runs else [each for each in ready if work.is_known(each, column, seeds)]
            cell = _cell(work, known, column, data, seeds, beside.partial)
        elif not column.task and facts[0] and column.key in facts[0]["scores"]:
            cell = figures_of([found["scores"][column.key] for found in facts])
        else:
            continue
        if cell["seeds"]:
            result["ours"][column.name] = cell
        elif runs:
            beside.absent.setdefault(column.name, f"no run of {column.run} gave {column.key}")
    if table.average:
        _add_average(table, result)
    return result if runs or result["ours"] else absent


def _seen(work: Work, rows: Sequence[Row]) -> dict[str, int]:
    """Return the steps and tokens of a row's pre-training, their means over the seeds."""
    seen = [work.seen(row) for row in rows]
    return {name: round(mean(each[name] for each in seen)) for name in seen[0]}


def _pretraining_facts(done: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a pre-training run has seen and learnt, for the table's data."""
    speeds = [record["tokens_per_second"] for record in done["curve"] if "tokens_per_second" in record]
    facts = {name: done[name] for name in ("tokens", "seconds", "scores")}
    return {**facts, "tokens_per_second": round(median(speeds)) if speeds else None}


def _run_side_by_side(work: Work, tables: Sequence[Table], seeds: int, jobs: int) -> None:
    """Pre-train the models of all tables, then run all fine-tunings, several at a time.

    The longest run first, so that no long run is left over at the end.
    """
    plans = [estimate(work, table, seeds, jobs) for table in tables]
    hours = {work.folder / run["run"]: run["hours"] for plan in plans for run in plan["runs"]}

    def longest_first(runs: Mapping[Path, tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        return [runs[run] for run in sorted(runs, key=lambda run: -hours[run])]

    starts = {work.run_of(start): (start,) for table in tables for start in work.starts(table)}
    to_train = {r: given for r, given in starts.items() if not (is_finished(r) or (r / SCORES).exists())}
    for run, (start,) in starts.items():
        if run not in to_train:
            work.pretrained(start)  # refuses a finished run with other settings before time is spent
    if len(to_train) > 1 and not work.scale.trains_alone:
        for (start,) in to_train.values():
            work.text(start)  # prepared once
        side_by_side(jobs, "pre-training", work.pretrained, longest_first(to_train), device=work.device)
    else:
        for (start,) in to_train.values():
            work.pretrained(start)
        release_memory()  # of this process, for those that fine-tune
    # Several columns may show scores of the same run.
    tuned = {run: given for table in tables for run, given in work.finetunings(table, seeds)}
    to_tune = {run: given for run, given in tuned.items() if not (run / SCORES).exists()}
    if to_tune:
        side_by_side(jobs, "fine-tuning", work.scores, longest_first(to_tune), device=work.device)


def _named(table: Table, values: Sequence[float | None]) -> dict[str, float]:
    pairs = zip(table.columns, values, strict=True)
    return {column.name: value for column, value in pairs if value is not None}


def _cell(
    work: Work, rows: Sequence[Row], column: Column, data: Data, seeds: int, partial: dict[str, list[str]]
) -> Cell:
    """Return the scores of a row, given once for each seed of pre-training, for the setting with the best mean."""
    best: Cell = figures_of([])
    for config in work.settings(rows[0], column) if rows else ():
        groups = [[work.scores(row, column, config, s, data) for s in range(1, seeds + 1)] for row in rows]
        values = [[run["scores"][column.key] for run in runs if column.key in run["scores"]] for runs in groups]
        every = [run for runs in groups for run in runs]
        remarks = dict.fromkeys(remark for run in every for remark in run["remarks"])
        if remarks:
            partial[column.name] = list(dict.fromkeys([*partial.get(column.name, []), *remarks]))
        flat = [value for of_one in values for value in of_one]
        cell = {**figures_of(flat), "values": flat, "learning_rate": config.train.learning_rate}
        cell |= {"by_pretraining": values, "error": standard_error(values)} if len(rows) > 1 else {}
        failed = sum("failed" in run for run in every)
        cell |= {"failed": failed} if failed else {}
        if flat and (not best["seeds"] or cell["mean"] > best["mean"]):
            best = cell
    return best


def _add_average(table: Table, result: dict[str, Any]) -> None:
    """Add the mean of all columns if a row has all of them."""
    *columns, last = table.columns
    means = {(c.task, c.key): result["ours"][c.name]["mean"] for c in columns if c.name in result["ours"]}
    if (average := paper_average(lambda task, key: means.get((task, key)))) is not None:
        result["ours"][last.name] = {"mean": average, "deviation": None, "seeds": 1}
