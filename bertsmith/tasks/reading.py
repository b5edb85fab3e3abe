"""The files of a task: found in a folder, and read as rows in all formats."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bertsmith.config import SHORT
from bertsmith.errors import BadRow, UserError
from bertsmith.model.heads import HeadConfig
from bertsmith.progress import say
from bertsmith.rows.columns import (
    Columns,
    Row,
    find_columns,
    first_records,
    has_column,
    join_names,
    near_column,
    read_rows,
    split_names,
)
from bertsmith.rows.conll import NAMES as CONLL
from bertsmith.rows.conll import is_conll, read_conll
from bertsmith.rows.records import STDIN, OnProgress, Record, Source, Table, class_names
from bertsmith.rows.tables import as_source
from bertsmith.tasks.description import DEV, Task
from bertsmith.tasks.guessing import SAMPLE, Guess, header_is_row, unread_text
from bertsmith.tasks.kinds import KINDS, Kind

ENDS = (".tsv", ".csv", ".jsonl", ".json", ".parquet", ".txt", ".conll", "")


@dataclass(frozen=True)
class Splits:
    """The files of a data set: training, dev by the prefix of their scores, test by the name of their predictions."""

    train: Sequence[Source] = ()
    dev: Mapping[str, Sequence[Source]] = field(default_factory=dict)
    test: Mapping[str, Sequence[Source]] = field(default_factory=dict)

    def official(self, task: Task) -> Mapping[str, Sequence[Source]]:
        """The files that a data set's server or script scores predictions of; the user's own files have none."""
        return {} if task.own else self.dev if KINDS[task.head].official_split == "dev" else self.test


def find_splits(task: Task, data: Any, dev: Any = None) -> Splits:
    """The files of `--data` and `--dev`: a file each, a folder as the data set or the hub has it, or rows in memory."""
    if isinstance(data, Splits):
        return data
    if isinstance(data, Mapping) and "train" in data:  # the splits of `datasets`, or a dict of splits
        held_out = next((data[name] for name in DEV if name in data), None)
        return find_splits(task, data["train"], held_out if dev is None else dev)
    splits = _training_files(task, Path(data)) if isinstance(data, (str, Path)) else Splits([as_source(data)])
    if dev is None:
        return splits
    return replace(splits, dev=dev_files(task, Path(dev)) if isinstance(dev, (str, Path)) else {"": [as_source(dev)]})


def _training_files(task: Task, data: Path) -> Splits:
    if not data.exists():
        raise UserError(f"no such file: {data}")
    splits = in_folder(task, data) if data.is_dir() else Splits([data])
    if not splits.train:
        there = ", ".join(sorted(path.name for path in data.iterdir())[:20]) or "nothing"
        raise UserError(f"{data} has no training file of {task.name} ({task.train[0]}.*); it holds: {there}")
    return splits


def dev_files(task: Task, dev: Path) -> Mapping[str, Sequence[Source]]:
    """The dev files of a data set's folder by their names in the scores, or the one file that is given."""
    if not dev.exists():
        raise UserError(f"no such file: {dev}; without --dev, a share of the training rows is held out")
    found = in_folder(task, dev).dev if dev.is_dir() else {"": [dev]}
    if not found:
        raise UserError(f"{dev} has no dev file of {task.name} ({next(iter(task.dev.values()))[0]}.*)")
    return found


def in_folder(task: Task, folder: Path) -> Splits:
    """The files of a data set that a folder holds."""
    dev = {name: _files(folder, stems) for name, stems in task.dev.items()}
    test = {name: _files(folder, stems) for name, stems in task.test.items()}
    return Splits(
        _files(folder, task.train),
        {name: files for name, files in dev.items() if files},
        {name: files for name, files in test.items() if files},
    )


def _files(folder: Path, stems: Sequence[str]) -> list[Path]:
    """The files of a split, by the first name that exists, or its numbered parts."""
    for stem in stems:
        each = [next((p for end in ENDS if (p := folder / f"{name}{end}").is_file()), None) for name in stem.split("+")]
        if found := [path for path in each if path is not None]:
            return found
        if parts := sorted([*folder.glob(f"{stem}-*-of-*.parquet"), *folder.glob(f"{stem}/*.parquet")]):
            return parts
    return []


def read_task(
    task: Task,
    paths: Source | Iterable[Source],
    columns: Columns,
    *,
    labelled: bool,
    skip_bad: bool = False,
    errors: list[str] | None = None,
    keep: Sequence[str] = (),
    on_progress: OnProgress = lambda share: None,
) -> Iterator[Row]:
    """The rows of a task's files; rows keep the columns in `keep`, `on_progress` gets the share of a file read so far.

    A bad row in the user's own files is refused unless `skip_bad` is set; of a data set, bad labelled rows are skipped.
    The errors of skipped rows are added to `errors` or, if that is None, printed as a note.
    """
    kind, count, unlabelled = KINDS[task.head], 0, list[str]()
    skipped: list[str] | None = [] if errors is None else errors
    if (task.own and not skip_bad) or not labelled:
        skipped = None
    for path in [paths] if isinstance(paths, (str, Path, Table)) else paths:
        if not isinstance(path, Table) and has_words(task, path, labelled=labelled):
            if keep:
                raise UserError(f"{path}: a file with a word a line has no column {keep[0]!r} to keep")
            yield from read_conll(path, labelled=labelled)
            continue
        names, literal = names_for(task, columns), not task.own
        settings: dict[str, Any] = {"names": names, "literal": literal, "header": task.header, "empty": not task.own}
        rows: Iterable[Row] = read_rows(
            path, columns, labelled=labelled, **settings, errors=skipped, keep=keep, on_progress=on_progress
        )
        if labelled:
            rows = _with_gold(rows, task, _class_names(task, path, columns), unlabelled)
        rows = kind.finish_rows(rows, task, labelled=labelled)
        for row in rows if skipped is None or not task.own else _without_bad(rows, kind, skipped):
            count += 1
            yield row
    if not count and (places := [*unlabelled, *(skipped or [])]):
        raise UserError(f"none of the {len(places)} rows has a label that can be used; the first: {places[0]}")
    if unlabelled:
        say(f"note: {len(unlabelled)} rows have no gold label and were left out; the first: {unlabelled[0]}")
    if skipped and errors is None:
        say(f"note: {_skipped_note(skipped)}")


def _without_bad(rows: Iterable[Row], kind: Kind, errors: list[str]) -> Iterator[Row]:
    """Rows whose label can be learnt."""
    for row in rows:
        try:
            kind.check(row)
        except UserError as error:
            errors.append(str(error))
        else:
            yield row


def has_words(task: Task, path: str | Path, *, labelled: bool) -> bool:
    """Whether a file of a task has one word per line; a labelled `.txt` file of a tagging task always has."""
    return KINDS[task.head].tags_words and ((labelled and Path(path).suffix.lower() in CONLL) or is_conll(path))


def _has_words(task: Task, source: Source) -> bool:
    """Whether labelled rows are a file with one word per line."""
    return not isinstance(source, Table) and has_words(task, source, labelled=True)


def _class_names(task: Task, path: Source, columns: Columns) -> tuple[str, ...]:
    """The names of the numbers in the label column of a parquet file, where they are labels of the task."""
    candidates = [columns.label] if columns.label else names_for(task, columns).get("label", ())
    found = class_names(path, candidates) if KINDS[task.head].has_classes else ()
    return found if not task.labels or set(found) <= set(task.labels) else ()


def _with_gold(rows: Iterable[Row], task: Task, names: tuple[str, ...], unlabelled: list[str]) -> Iterator[Row]:
    """Rows with the names of their labels; the places of rows without a gold label are added to `unlabelled`."""
    for row in rows:
        value = row.label
        is_hidden = value == -1 and (names or not task.own)  # as the hub does it
        if is_hidden or (task.unlabelled and value == task.unlabelled):
            unlabelled.append(row.place)
        elif names:
            yield replace(
                row, label=[_name(v, names) for v in value] if isinstance(value, list) else _name(value, names)
            )
        else:
            yield row


def _name(value: Any, names: tuple[str, ...]) -> Any:
    is_number = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names)
    return names[value] if is_number else value


def names_for(task: Task, columns: Columns) -> dict[str, tuple[str, ...]]:
    """The usual names of a task's columns; where the user has named a second text, it is required, too."""
    is_pair = task.own and columns.pair and "pair" not in task.names
    return {**task.names, "pair": (columns.pair,)} if is_pair else task.names


def guessed_columns(
    task: Task,
    source: Source,
    columns: Columns,
    command: str = "bertsmith finetune …",
    trained: Columns | None = None,
) -> Columns:
    """The columns of the user's own rows, guessed and printed where they are not set.

    Where a column cannot be guessed, the error has an example of the whole command, which begins with `command`.
    `trained` are the columns of the training rows, if these are other ones; then `command` may be empty, because no
    option names columns of other rows. A second text that could be read is noted where rows are trained on.
    """
    if not task.own or _has_words(task, source):
        return columns
    sample = first_records(source, SAMPLE)
    guess = Guess.start(columns, names_for(task, columns), sample)
    KINDS[task.head].guess(guess, task)
    found, reasons = replace(columns, **guess.found), guess.why
    if not isinstance(source, Table) and Path(source).suffix.lower() in (".csv", ".tsv") and header_is_row(guess):
        say(f"note: {_header_note(source, guess)}")
    try:
        if missing := [role for role in _roles(task, found) if not getattr(found, role)]:
            names = ", ".join(map(str, sample[0]))
            raise UserError(f"{source}: which column is the {' and the '.join(missing)}? The columns are: {names}")
        found = find_columns(found, names_for(task, found), sample[0], str(source), labelled=True)
    except UserError as error:
        if trained is not None and not command:
            names = join_names([getattr(trained, role) for role in _roles(task, trained)])
            raise UserError(f"{error}; name the columns as those of the training rows: {names}") from None
        raise UserError(f"{error}. For example: {_naming(task, found, sample, source, command)}") from None
    chosen = {role: name for role, name in asdict(found).items() if name and name != getattr(columns, role)}
    if chosen:
        words = (
            f"{role} = {name!r}" + (f" ({reasons[role]})" if role in reasons else "") for role, name in chosen.items()
        )
        say(f"columns{'' if trained is None else f' of {source}'}: " + ", ".join(words))
    is_alone = not columns.text and not found.pair and HeadConfig(task.head).is_of_sequence
    if trained is None and is_alone and (other := unread_text(guess)):
        options = (
            f"--pair {shlex.quote(other)} reads it beside {found.text!r}, --text {shlex.quote(other)} in its place"
        )
        say(f"note: the column {other!r} has texts, too, and is not read; {options}")
    return found


def columns_of_other_rows(
    task: Task, source: Source, trained: Columns, given: Mapping[str, str], command: str
) -> Columns:
    """The columns of labelled rows for a model that was trained on others, whose columns may have had other names.

    A column is the `given` one, else that of the training where these rows have it; the others are guessed.
    """
    if not task.own or str(source) == STDIN or _has_words(task, source):
        return replace(trained, **given)
    first = first_records(source, 1)[0]
    kept = {"separator": trained.separator} | {
        role: name
        for role, name in asdict(trained).items()
        if role != "separator" and all(has_column(first, each) for each in split_names(name))
    }
    if trained.pair and "pair" not in task.names:
        kept["pair"] = trained.pair  # a second text is not guessed where a task need not have one
    found = guessed_columns(task, source, Columns(**{**kept, **given}), command, trained)
    return replace(found, separator=trained.separator)


def _header_note(source: Source, guess: Guess) -> str:
    """That the first line of a file looks like a row, with a line that could stand above it."""
    roles = {name: role for role, name in guess.found.items() if name}
    names = [roles.get(column.name, f"other{number}") for number, column in enumerate(guess.columns, 1)]
    first = ", ".join(repr(column.name[:40]) for column in guess.columns)
    return (
        f"{source}, line 1: {first} look like a row, not like the names of the columns, so that this row is not read; "
        f"write the names above it, for example {','.join(names)}"
    )


def _roles(task: Task, columns: Columns) -> list[str]:
    """The columns that labelled rows must have."""
    return [role for role in names_for(task, columns) if role not in ("start", "key")]


def _naming(task: Task, found: Columns, sample: Sequence[Record], source: Source, command: str) -> str:
    """An example that sets all columns: those that were found, and for a missing label the one with few values."""
    roles = _roles(task, found)
    chosen = {role: getattr(found, role) for role in roles}
    is_there = {role: set(split_names(name)) <= set(sample[0]) for role, name in chosen.items()}
    chosen = {role: name if is_there[role] else near_column(name, sample[0]) for role, name in chosen.items()}
    chosen = {
        role: "" if name in list(chosen.values())[:place] else name for place, (role, name) in enumerate(chosen.items())
    }
    counts = {name: len({str(record.get(name)) for record in sample}) for name in sample[0]}
    rest = sorted(counts.keys() - set(chosen.values()), key=lambda name: (counts[name] == 1, counts[name], name))
    for role in roles:
        chosen[role] = chosen[role] or (rest.pop(0 if role == "label" else -1) if rest else "COLUMN")
    if isinstance(source, Table):
        return f"{command.split()[1]}(…, " + ", ".join(f"{role}={name!r}" for role, name in chosen.items()) + ")"
    options = (f"--{role} " if role in SHORT else f"--set data.columns.{role}=" for role in chosen)
    set_all = (option + shlex.quote(name) for option, name in zip(options, chosen.values(), strict=True))
    return f"{command} {' '.join(set_all)}"


def training_rows(
    task: Task, sources: Sequence[Source], columns: Columns, *, skip_bad: bool = False
) -> tuple[list[Row], list[str]]:
    """The rows to train on, and notes on what was corrected or skipped."""
    errors: list[str] = []
    try:
        rows = list(read_task(task, sources, columns, labelled=True, skip_bad=skip_bad, errors=errors))
    except BadRow as error:
        raise UserError(f"{error}; mend the row, or leave out all that cannot be used with --skip-bad") from None
    rows, note = KINDS[task.head].align(rows, None if task.own and not skip_bad else errors)
    if not rows:
        raise UserError(f"{sources[0]} holds no rows that can be used; the first that cannot: {errors[0]}")
    notes = [note] if note else []
    return rows, [*notes, _skipped_note(errors)] if errors else notes


def _skipped_note(errors: list[str]) -> str:
    return f"{len(errors)} rows were left out: they cannot be used; the first: {errors[0]}"
