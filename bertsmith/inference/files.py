"""`predict`, `evaluate` and `fill`: a trained model on files of any size, and on single texts."""

from __future__ import annotations

import shutil
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from bertsmith.errors import BadRow, UserError
from bertsmith.folders import new_folder, refuse_existing, writes
from bertsmith.inference import predictor as predicting
from bertsmith.inference.engines import EngineName, Precision
from bertsmith.inference.journal import LINES, Journal
from bertsmith.inference.output import (
    ReadShare,
    RowPredictor,
    check_out,
    kept_for_resume,
    open_partial,
    output_facts,
    partial_folder,
    say_shortened,
)
from bertsmith.inference.predictor import Combine, Names, Predictor
from bertsmith.inference.writers import PREDICTION_FILES, convert_lines, json_line
from bertsmith.progress import progress_bar, say
from bertsmith.rows.columns import Columns, Row
from bertsmith.rows.records import STDIN, Source, Table
from bertsmith.rows.tables import as_source
from bertsmith.tasks.description import Task
from bertsmith.tasks.kinds import KINDS
from bertsmith.tasks.prediction_files import write_predictions as write_official
from bertsmith.tasks.reading import columns_of_other_rows, dev_files, in_folder, read_task


def fill(model: str | Path | None, text: str, *, top: int = 5, device: str | None = None) -> list[list[dict[str, Any]]]:
    """Return the likeliest words for each `[MASK]` of a text.

    If `model` is None, it is the one in BERTSMITH_MODEL or the default model of the package.

    >>> import bertsmith
    >>> bertsmith.fill("bert-base-uncased", "A [MASK] of items.", top=2)
    [[{'token': ..., 'probability': ...}, {'token': ..., 'probability': ...}]]
    """
    return Predictor.load(model, device).fill(text, top)


def evaluate(
    model: Names,
    data: Any,
    *,
    text: str = "",
    pair: str = "",
    label: str = "",
    device: str | None = None,
    engine: EngineName | None = None,
    threads: int | None = None,
    precision: Precision | None = None,
    combine: Combine | None = None,
) -> dict[str, Any]:
    """Score a fine-tuned model, or an ensemble of several, on a labelled file or on the rows that `finetune` takes.

    Of a data set's folder, the first dev file is read. `text`, `pair` and `label` name the columns where they differ
    from those of the training data; those that are neither named nor there are guessed. Scores are from 0 to 100;
    `per_class` holds precision, recall and F1 of every class.
    """
    predictor = Predictor.load(model, device, engine=engine, threads=threads, precision=precision, combine=combine)
    source = _labelled(predictor.task, data)
    given = {role: name for role, name in (("text", text), ("pair", pair), ("label", label)) if name}
    columns = _columns(predictor, source, given)
    try:
        rows = list(read_task(predictor.task, source, columns, labelled=True))
    except BadRow as error:
        raise UserError(f"{error}; mend the row or remove it: all rows are scored") from None
    with progress_bar("evaluating", len(rows)) as advance:
        predictions = predictor.predict_all(rows, advance, labelled=True)
    _say_notes(predictor)
    found = {"task": predictor.task.name, "rows": len(rows), **predictor.score(rows, predictions)}
    classes = KINDS[predictor.head.kind].by_class(predictor.head, rows, predictions)
    return {**found, "per_class": classes} if classes else found


def _columns(predictor: Predictor, source: Source | Sequence[Source], given: dict[str, str]) -> Columns:
    """The columns of labelled rows: the given ones, else those of the training data, else guessed."""
    if not isinstance(source, (str, Path, Table)):
        return replace(predictor.columns, **given)
    command = f"bertsmith evaluate {' '.join(map(str, predictor.folders))} --data {source}"
    return columns_of_other_rows(predictor.task, source, predictor.columns, given, command)


def _labelled(task: Task, data: Any) -> Source | Sequence[Source]:
    """The labelled rows of what `evaluate` gets: of a data set's folder, those of its dev file."""
    if task.own or not isinstance(data, (str, Path)) or not Path(data).is_dir():
        return as_source(data)
    files = next(iter(dev_files(task, Path(data)).values()))
    say(f"evaluating on {', '.join(map(str, files))}")
    return files


@writes()
def predict(
    model: Names | RowPredictor,
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
    """Write a prediction for every row of a file or of standard input (`-`), in order; return the number of rows.

    The model is a folder, a run, a hub name, or anything that predicts rows, such as the model of a server.
    Several models predict as an ensemble, see `together` of `bertsmith.inference.predictor`. An existing output is
    refused, or overwritten with `force`. `n_best` is the number of labels or answers that are listed with their scores.
    `out` is a `.jsonl`, `.csv` or `.parquet` file, or `-` for JSON lines on standard output. `keep` names columns of
    the input that are written beside the predictions; `text` and `pair` name the input's columns where they differ from
    those of the training data. Where `data` is the folder of a data set, `out` becomes a folder with the files that the
    data set's server or script takes.
    """
    _check_n_best(n_best)
    is_data_set, is_stream = Path(data).is_dir(), str(out) == STDIN
    if is_data_set:
        refuse_existing(Path(out), hint="choose another --out")
        _refuse_file_options(data, resume or force or keep or text or pair or n_best)
    elif not is_stream:
        check_out(Path(out), data, PREDICTION_FILES, resume=resume, force=force)
    elif resume or force:
        raise UserError("--resume and --force are for files; --out - has none")
    predictor: Predictor | RowPredictor
    if isinstance(model, (str, Path, Sequence)):
        predictor = Predictor.load(model, device, engine=engine, threads=threads, precision=precision, combine=combine)
    else:
        predictor = model
    columns = replace(predictor.columns, **{k: v for k, v in (("text", text), ("pair", pair)) if v})
    if is_data_set:
        if not isinstance(predictor, Predictor):
            raise UserError(f"{data} is the folder of a data set, which a model on this machine predicts; give a file")
        count = predict_data_set(predictor, Path(data), Path(out))
    elif is_stream:
        count = write_predictions(predictor, data, columns, keep, sys.stdout, n_best=n_best)
        sys.stdout.flush()
    else:
        if force and not resume:
            shutil.rmtree(partial_folder(Path(out)), ignore_errors=True)
        count = predict_file(predictor, data, Path(out), columns, keep, n_best)
    if isinstance(predictor, Predictor):
        _say_notes(predictor)
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
    """Return the prediction for one text or pair; `n_best` is the number of labels or answers that it lists."""
    _check_n_best(n_best)
    predictor = Predictor.load(model, device, engine=engine, threads=threads, precision=precision, combine=combine)
    if predictor.columns.pair and not pair and predictor.head.is_of_sequence:
        say("note: the model was trained on pairs of texts, and this is one text; --pair gives the second one")
    (prediction,) = predictor.predict([(text, pair) if pair else text])
    _say_notes(predictor)
    return trimmed(prediction, n_best)


def _refuse_file_options(data: str | Path, given: object) -> None:
    if given:
        options = "--resume, --force, --keep, --text, --pair and --n-best"
        raise UserError(f"{data} is the folder of a data set; {options} are for files")


def _check_n_best(n_best: int | None) -> None:
    if n_best is not None and n_best < 1:
        raise UserError(f"--n-best {n_best} must be at least 1")


def trimmed(prediction: dict[str, Any], n_best: int | None) -> dict[str, Any]:
    """Return a prediction with its `n_best` likeliest labels or answers; None keeps all."""
    if n_best is None:
        return prediction
    cut = dict(prediction)
    if isinstance(prediction.get("scores"), dict):
        cut["scores"] = dict(sorted(prediction["scores"].items(), key=lambda entry: -entry[1])[:n_best])
    if "nbest" in prediction:
        cut["nbest"] = prediction["nbest"][:n_best]
    return cut


def _say_notes(predictor: Predictor) -> None:
    """Report how many texts were cut, and warn with the likely cause where the vocabulary does not fit the texts."""
    say_shortened(predictor.shortened, predictor.max_length)
    if line := predictor.unknowns.warning("the texts"):
        say(f"warning: {line}")


def predict_data_set(predictor: Predictor, data: Path, out: Path) -> int:
    """Predict the test files in a data set's folder, for SQuAD the dev file; return the number of rows."""
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
                write_official(task, folder, name, rows, predictor.predict_all(rows, advance))
            count += len(rows)
    return count


def predict_file(
    predictor: Predictor | RowPredictor,
    data: str | Path,
    out: Path,
    columns: Columns,
    keep: Sequence[str],
    n_best: int | None = None,
) -> int:
    """Write predictions into a file by way of a partial folder, from which a killed run is resumed."""
    work = partial_folder(out)
    resumed = open_partial(
        work, {**output_facts(predictor, data, columns, keep), "n_best": n_best}, "add --force to start again"
    )
    journal = Journal(work)
    before = journal.windows * predicting.WINDOW
    if resumed:
        say(f"resuming after {before:,} rows")
    with kept_for_resume(work, work / LINES):
        try:
            count = before + write_predictions(predictor, data, columns, keep, journal, before, n_best)
        finally:
            journal.close()
    convert_lines(work / LINES, out)
    shutil.rmtree(work)
    return count


def write_predictions(
    predictor: Predictor | RowPredictor,
    data: str | Path,
    columns: Columns,
    keep: Sequence[str],
    file: IO[str] | Journal,
    skip: int = 0,
    n_best: int | None = None,
) -> int:
    """Write predictions as JSON lines, in the order of the rows after the first `skip`; flush after every window."""
    waiting: deque[tuple[dict[str, Any], float]] = deque()
    share, count = ReadShare(), 0

    def rows() -> Iterator[Row]:
        for number, row in enumerate(
            read_task(predictor.task, data, columns, labelled=False, keep=keep, on_progress=share)
        ):
            if number >= skip:
                waiting.append((row.kept, share.value))
                yield row

    with progress_bar("predicting", 1.0) as advance:
        for prediction in predictor.predict_rows(rows()):
            kept, done = waiting.popleft()
            if clash := kept.keys() & prediction.keys():
                raise UserError(f"--keep {min(clash)}: the predictions have a field of this name; rename the column")
            file.write(json_line(kept, trimmed(prediction, n_best)))
            count += 1
            if not count % predicting.WINDOW:
                file.flush()
            advance(done, f"{skip + count:,} rows")
    return count
