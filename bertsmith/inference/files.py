"""The verbs of a trained model on files: `predict`, `evaluate`, `fill`."""

from __future__ import annotations

import json
import shutil
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from bertsmith.errors import UserError
from bertsmith.folders import new_folder, refuse_existing, writes
from bertsmith.inference import predictor as predicting
from bertsmith.inference.engines import EngineName, Precision
from bertsmith.inference.output import (
    ANSWERS,
    KINDS,
    Journal,
    begin,
    check_out,
    facts_of,
    finish,
    keep_or_remove,
    partial_folder,
)
from bertsmith.inference.predictor import Combine, Names, Predictor
from bertsmith.progress import progress_bar, say
from bertsmith.rows.columns import Columns, Row
from bertsmith.rows.records import STDIN
from bertsmith.rows.tables import as_source
from bertsmith.tasks.by_class import by_class
from bertsmith.tasks.prediction_files import write_answers as write_official
from bertsmith.tasks.reading import in_folder, read_task
from bertsmith.text.unknown import Unknowns


def fill(model: str | Path, text: str, *, top: int = 5, device: str | None = None) -> list[list[dict[str, Any]]]:
    """The likeliest words for each `[MASK]` of a text.

    >>> import bertsmith
    >>> bertsmith.fill("bert-base-uncased", "A [MASK] of items.", top=2)
    [[{'token': ..., 'probability': ...}, {'token': ..., 'probability': ...}]]
    """
    return Predictor.load(model, device).fill(text, top)


def evaluate(
    model: Names,
    data: Any,
    *,
    device: str | None = None,
    engine: EngineName | None = None,
    threads: int | None = None,
    precision: Precision | None = None,
    combine: Combine | None = None,
) -> dict[str, Any]:
    """Score a fine-tuned model, or several that answer together, on a labelled file or on rows, as `finetune` takes.

    Scores are from 0 to 100; `per_class` has precision, recall and F1 of every class.
    """
    predictor = Predictor.load(model, device, engine=engine, threads=threads, precision=precision, combine=combine)
    rows = list(read_task(predictor.task, as_source(data), predictor.columns, labelled=True))
    with progress_bar("evaluating", len(rows)) as advance:
        answers = predictor.answer_all(rows, advance, labelled=True)
    say_shortened(predictor.shortened, predictor.max_length)
    say_unknown(predictor.unknowns)
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
    n_best: int | None = None,
    resume: bool = False,
    force: bool = False,
    device: str | None = None,
    engine: EngineName | None = None,
    threads: int | None = None,
    precision: Precision | None = None,
    combine: Combine | None = None,
) -> int:
    """Answer every row of a file or of standard input (`-`), in order; gives the number of rows.

    Several models answer together, see `together` of `bertsmith.predictor`. An output that is there already is refused,
    or overwritten with `force`. `n_best` is how many labels or answers are listed with their scores.
    `out` is a `.jsonl`, `.csv` or `.parquet` file, or `-` for JSON lines on standard output. `keep` names columns of
    the input to write beside the answers, `text` and `pair` its columns where they are not those of the training data.
    Where `data` is the folder of a data set, `out` becomes a folder with the files that its server or script takes.
    """
    _check_n_best(n_best)
    if Path(data).is_dir():
        refuse_existing(Path(out), hint="choose another --out")
        if resume or force or keep or text or pair or n_best:
            given = "--resume, --force, --keep, --text, --pair and --n-best"
            raise UserError(f"{data} is the folder of a data set; {given} are for files")
    elif str(out) != STDIN:
        check_out(Path(out), data, KINDS, resume=resume, force=force)
    elif resume or force:
        raise UserError("--resume and --force are for files; --out - has none")
    predictor = Predictor.load(model, device, engine=engine, threads=threads, precision=precision, combine=combine)
    columns = replace(predictor.columns, **{k: v for k, v in (("text", text), ("pair", pair)) if v})
    if Path(data).is_dir():
        count = predict_data_set(predictor, Path(data), Path(out))
    elif str(out) == STDIN:
        count = write_answers(predictor, data, columns, keep, sys.stdout, n_best=n_best)
        sys.stdout.flush()
    else:
        if force and not resume:
            shutil.rmtree(partial_folder(Path(out)), ignore_errors=True)
        count = predict_file(predictor, data, Path(out), columns, keep, n_best)
    say_shortened(predictor.shortened, predictor.max_length)
    say_unknown(predictor.unknowns)
    return count


def predict_text(
    model: Names,
    text: str,
    pair: str = "",
    *,
    n_best: int | None = None,
    device: str | None = None,
    engine: EngineName | None = None,
    threads: int | None = None,
    precision: Precision | None = None,
    combine: Combine | None = None,
) -> dict[str, Any]:
    """The answer to one text, or to a text and a second one; `n_best` is how many labels or answers it lists."""
    _check_n_best(n_best)
    predictor = Predictor.load(model, device, engine=engine, threads=threads, precision=precision, combine=combine)
    (answer,) = predictor.predict([(text, pair) if pair else text])
    say_shortened(predictor.shortened, predictor.max_length)
    say_unknown(predictor.unknowns)
    return trimmed(answer, n_best)


def _check_n_best(n_best: int | None) -> None:
    if n_best is not None and n_best < 1:
        raise UserError(f"--n-best {n_best} must be at least 1")


def trimmed(answer: dict[str, Any], n_best: int | None) -> dict[str, Any]:
    """An answer with so many of its likeliest labels or answers; None: all there are."""
    if n_best is None:
        return answer
    cut = dict(answer)
    if isinstance(answer.get("scores"), dict):
        cut["scores"] = dict(sorted(answer["scores"].items(), key=lambda entry: -entry[1])[:n_best])
    if "nbest" in answer:
        cut["nbest"] = answer["nbest"][:n_best]
    return cut


def say_shortened(count: int, limit: int) -> None:
    """Tell people that texts were cut."""
    if count:
        say(f"note: {count} text(s) were cut to {limit} tokens")


def say_unknown(unknowns: Unknowns) -> None:
    """Warn where the vocabulary does not know the texts, with the likely cause."""
    if line := unknowns.warning("the texts"):
        say(f"warning: {line}")


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
    predictor: Predictor,
    data: str | Path,
    out: Path,
    columns: Columns,
    keep: Sequence[str],
    n_best: int | None = None,
) -> int:
    """Answers into a file, through a folder beside it that a killed run leaves and a resumed one continues."""
    work = partial_folder(out)
    journal = begin(work, {**facts_of(predictor, data, columns, keep), "n_best": n_best})
    before = journal.windows * predicting.WINDOW
    try:
        count = before + write_answers(predictor, data, columns, keep, journal, before, n_best)
        journal.close()
    except BaseException:
        journal.close()
        keep_or_remove(work)
        raise
    finish(work / ANSWERS, out)
    shutil.rmtree(work)
    return count


def write_answers(
    predictor: Predictor,
    data: str | Path,
    columns: Columns,
    keep: Sequence[str],
    file: IO[str] | Journal,
    skip: int = 0,
    n_best: int | None = None,
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
            file.write(json.dumps({**kept, **trimmed(answer, n_best)}, ensure_ascii=False, default=_plain) + "\n")
            count += 1
            if not count % predicting.WINDOW:
                file.flush()
            advance(done, f"{skip + count:,} rows")
    return count


def _plain(value: Any) -> str:
    """What a parquet file may hold and JSON may not, as people write it: dates, decimals."""
    if isinstance(value, bytes):
        raise UserError("a column that is kept holds bytes, which have no place in JSON lines; keep others")
    return str(value)
