"""The verbs of a trained model on files: `predict`, `evaluate`, `fill`.

Answers to a large file are written as JSON lines into a folder `OUT.partial`, a window of rows at a time, and become
the file that was asked for at the end. A killed run goes on at the last whole window: the windows decide which texts
share a batch, so that the answers are the same to the bit as without the kill.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shutil
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

from bertsmith import predictor as predicting
from bertsmith.config import read_json
from bertsmith.engines import EngineName, Precision
from bertsmith.errors import UserError
from bertsmith.folders import file_hash, new_file, new_folder, refuse_existing, sync, writes
from bertsmith.formats.hub import FILES
from bertsmith.predictor import Combine, Names, Predictor
from bertsmith.progress import progress_bar, say
from bertsmith.tasks.by_class import by_class
from bertsmith.tasks.files import write_answers as write_official
from bertsmith.tasks.reading import in_folder, read_task
from bertsmith.tasks.records import STDIN
from bertsmith.tasks.rows import Columns, Row

FACTS, ANSWERS = "facts.json", "answers.jsonl"
KINDS = (".jsonl", ".csv", ".parquet")
ROWS_AT_ONCE = 4096  # of a finished file


def fill(model: str | Path, text: str, *, top: int = 5, device: str | None = None) -> list[list[dict[str, Any]]]:
    """The likeliest words for each `[MASK]` of a text."""
    return Predictor.load(model, device).fill(text, top)


def evaluate(
    model: Names,
    data: str | Path,
    *,
    device: str | None = None,
    engine: EngineName | None = None,
    threads: int | None = None,
    precision: Precision | None = None,
    combine: Combine | None = None,
) -> dict[str, Any]:
    """Score a fine-tuned model, or several that answer together, on a labelled file.

    Scores are from 0 to 100; `per_class` has precision, recall and F1 of every class.
    """
    predictor = Predictor.load(model, device, engine=engine, threads=threads, precision=precision, combine=combine)
    rows = list(read_task(predictor.task, data, predictor.columns, labelled=True))
    with progress_bar("evaluating", len(rows)) as advance:
        answers = predictor.answer_all(rows, advance, labelled=True)
    say_shortened(predictor.shortened, predictor.max_length)
    found = {"task": predictor.task.name, "rows": len(rows), **predictor.score(rows, answers)}
    classes = by_class(predictor.head, rows, answers)
    return {**found, "per_class": classes} if classes else found


@writes()
def predict(
    model: Names,
    data: str | Path,
    out: str | Path,
    *,
    keep: Sequence[str] = (),
    text: str = "",
    pair: str = "",
    resume: bool = False,
    device: str | None = None,
    engine: EngineName | None = None,
    threads: int | None = None,
    precision: Precision | None = None,
    combine: Combine | None = None,
) -> int:
    """Answer every row of a file or of standard input (`-`), in order; gives the number of rows.

    Several models answer together, see `together` of `bertsmith.predictor`.
    `out` is a `.jsonl`, `.csv` or `.parquet` file, or `-` for JSON lines on standard output. `keep` names columns of
    the input to write beside the answers, `text` and `pair` its columns where they are not those of the training data.
    Where `data` is the folder of a data set, `out` becomes a folder with the files that its server or script takes.
    """
    if Path(data).is_dir():
        refuse_existing(Path(out), hint="choose another --out")
        if resume or keep or text or pair:
            raise UserError(f"{data} is the folder of a data set; --resume, --keep, --text and --pair are for files")
    elif str(out) != STDIN:
        _check_out(Path(out), data, resume)
    elif resume:
        raise UserError("--resume goes on with a file; --out - has none")
    predictor = Predictor.load(model, device, engine=engine, threads=threads, precision=precision, combine=combine)
    columns = replace(predictor.columns, **{k: v for k, v in (("text", text), ("pair", pair)) if v})
    if Path(data).is_dir():
        count = predict_data_set(predictor, Path(data), Path(out))
    elif str(out) == STDIN:
        count = write_answers(predictor, data, columns, keep, sys.stdout)
        sys.stdout.flush()
    else:
        count = predict_file(predictor, data, Path(out), columns, keep, resume=resume)
    say_shortened(predictor.shortened, predictor.max_length)
    return count


def say_shortened(count: int, limit: int) -> None:
    """Tell people that texts were cut."""
    if count:
        say(f"note: {count} text(s) were cut to {limit} tokens")


def predict_data_set(predictor: Predictor, data: Path, out: Path) -> int:
    """Answers to the test files in a data set's folder, of SQuAD to the dev file; gives the number of rows."""
    task, count = predictor.task, 0
    if task.own:
        raise UserError(f"{data} is a folder, and the model was trained on rows of your own; give a file")
    files = in_folder(task, data).official(task)
    if not files:
        raise UserError(
            f"{data} has no file of {task.name} that its {'script' if task.head == 'span' else 'server'} asks for"
        )
    with new_folder(out) as folder:
        for name, paths in files.items():
            rows = list(read_task(task, paths, predictor.columns, labelled=False))
            with progress_bar(f"predicting {name}", len(rows)) as advance:
                write_official(task, folder, name, rows, predictor.answer_all(rows, advance))
            count += len(rows)
    return count


def predict_file(
    predictor: Predictor, data: str | Path, out: Path, columns: Columns, keep: Sequence[str], *, resume: bool
) -> int:
    """Answers into a file, through a folder beside it that a killed run leaves and a resumed one goes on with."""
    work = partial_folder(out)
    facts = facts_of(predictor, data, columns, keep)
    begin = _begin(work, facts) if resume and work.exists() else 0
    work.mkdir(parents=True, exist_ok=True)
    with new_file(work / FACTS) as file_of_facts:
        file_of_facts.write_text(json.dumps(facts), encoding="utf-8")
    try:
        with (work / ANSWERS).open("a", encoding="utf-8", newline="\n") as file:
            count = begin + write_answers(predictor, data, columns, keep, file, skip=begin)
    except BaseException:
        _keep_or_remove(work)
        raise
    _finish(work / ANSWERS, out)
    shutil.rmtree(work)
    return count


def write_answers(
    predictor: Predictor,
    data: str | Path,
    columns: Columns,
    keep: Sequence[str],
    file: IO[str],
    skip: int = 0,
) -> int:
    """Answers as JSON lines, in the order of the rows; a window is on its way to the disk when the next one begins."""
    waiting: deque[tuple[dict[str, Any], float]] = deque()
    share, count = 0.0, 0

    def told(now: float) -> None:
        nonlocal share
        share = now

    def rows() -> Iterator[Row]:
        for number, row in enumerate(read_task(predictor.task, data, columns, labelled=False, keep=keep, told=told)):
            if number >= skip:
                waiting.append((row.kept, share))
                yield row

    with progress_bar("predicting", 1.0) as advance:
        for answer in predictor.predict_rows(rows()):
            kept, done = waiting.popleft()
            if clash := kept.keys() & answer.keys():
                raise UserError(f"--keep {min(clash)}: the answers have a field of this name; rename the column")
            file.write(json.dumps({**kept, **answer}, ensure_ascii=False, default=_plain) + "\n")
            count += 1
            if not count % predicting.WINDOW:
                file.flush()
            advance(done, f"{skip + count:,} rows")
    return count


def partial_folder(out: Path) -> Path:
    """Where the answers are until all are there."""
    return out.with_name(f"{out.name}.partial")


def _check_out(out: Path, data: str | Path, resume: bool) -> None:
    if out.suffix.lower() not in KINDS:
        raise UserError(f"--out {out}: unknown kind of file {out.suffix!r}; {', '.join(KINDS)}, or - for JSON lines")
    if out.is_dir():
        raise UserError(f"--out {out} is a folder; give a file: {', '.join(KINDS)}")
    if out.resolve() == Path(data).resolve():
        raise UserError(f"--out {out} is the input; give another file")
    work = partial_folder(out)
    if work.exists() and not resume:
        raise UserError(f"{work} is there from a run that was stopped; add --resume to go on with it, or remove it")


def facts_of(predictor: Predictor, data: str | Path, columns: Columns, keep: Sequence[str]) -> dict[str, Any]:
    """What the answers depend on: the model, the input, and what is read of it."""
    digest = hashlib.sha256()
    folders = [Path(folder) for folder in predictor.folders]
    for path in (path for folder in folders for path in sorted(p for name in FILES for p in folder.glob(name))):
        digest.update(path.name.encode() + bytes.fromhex(file_hash(path)))
    digest.update(b"nbest" if predictor.members else b"")
    found = Path(data).stat() if str(data) != STDIN and Path(data).is_file() else None
    read = {"text": columns.text, "pair": columns.pair, "keep": list(keep)}
    written = [found.st_size, found.st_mtime_ns] if found else []
    return {"model": digest.hexdigest(), "input": str(data), "written": written, **read, "window": predicting.WINDOW}


def _begin(work: Path, facts: dict[str, Any]) -> int:
    """The number of rows that need not be answered again; the file is cut after them."""
    if not (work / FACTS).exists() or not (work / ANSWERS).exists():
        return 0
    saved = read_json(work / FACTS)
    if changed := [name for name, value in facts.items() if saved.get(name) != value]:
        raise UserError(f"{work} was begun with another {', '.join(changed)}; remove it to begin anew")
    rows = end = 0
    with (work / ANSWERS).open("r+b") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            if not number % predicting.WINDOW:
                rows, end = number, file.tell()
        file.truncate(end)
    say(f"going on after {rows:,} rows")
    return rows


def _keep_or_remove(work: Path) -> None:
    """Say how to go on with what is there; a folder without an answer is no use to anyone."""
    if (work / ANSWERS).exists() and (work / ANSWERS).stat().st_size:
        say(f"note: what was answered is in {work}; --resume goes on with it")
    else:
        shutil.rmtree(work, ignore_errors=True)


def _finish(answers: Path, out: Path) -> None:
    """Turn JSON lines into the file that was asked for, which is there whole or not at all."""
    if out.suffix.lower() == ".jsonl":
        sync(answers)
        os.replace(answers, out)
        sync(out.parent)
        return
    with new_file(out) as made:
        (_write_csv if out.suffix.lower() == ".csv" else _write_parquet)(answers, made)


def _chunks(answers: Path) -> Iterator[list[dict[str, Any]]]:
    with answers.open(encoding="utf-8", newline="\n") as file:
        while lines := list(islice(file, ROWS_AT_ONCE)):
            yield [json.loads(line) for line in lines]


def _write_csv(answers: Path, out: Path) -> None:
    """A column a field, a column a label of `scores`, and JSON where a field holds more."""
    names = dict.fromkeys(name for chunk in _chunks(answers) for row in chunk for name in _flat(row))
    with out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(names), lineterminator="\n")
        writer.writeheader()
        for chunk in _chunks(answers):
            writer.writerows(map(_flat, chunk))


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat.update({f"{name}.{key}": entry for key, entry in value.items()})
        else:
            flat[name] = value
    return {
        name: json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else value
        for name, value in flat.items()
    }


def _write_parquet(answers: Path, out: Path) -> None:
    """One type a field for all rows, found in a first pass: a column may begin with thousands of empty rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pa.schema([])
        for chunk in _chunks(answers):
            names = dict.fromkeys(name for row in chunk for name in row)
            found = pa.table({name: [row.get(name) for row in chunk] for name in names}).schema
            schema = pa.unify_schemas([schema, found], promote_options="permissive")
        with pq.ParquetWriter(out, schema) as writer:
            for chunk in _chunks(answers):
                writer.write_table(pa.Table.from_pylist(chunk, schema=schema))
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise UserError(f"a column that is kept has values of several types: {error}; --out a .jsonl file") from None


def _plain(value: Any) -> str:
    """What a parquet file may hold and JSON may not, as people write it: dates, decimals."""
    if isinstance(value, bytes):
        raise UserError("a column that is kept holds bytes, which have no place in JSON lines; keep others")
    return str(value)
