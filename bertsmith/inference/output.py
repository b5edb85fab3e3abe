"""Output paths and partial output: what `predict`, `embed` and `features` check before they write, and how they resume.

A command that can be resumed collects its output in a folder `OUT.partial`, next to `facts.json`: what the output
depends on. A run that was stopped leaves the folder behind, and `--resume` continues it if the facts are the same.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bertsmith.config import read_json, write_json
from bertsmith.errors import UserError
from bertsmith.folders import file_hash, new_file
from bertsmith.formats.hub import FILES
from bertsmith.inference import predictor as predicting
from bertsmith.inference.predictor import Predictor
from bertsmith.progress import say
from bertsmith.rows.columns import Columns, Row
from bertsmith.rows.records import STDIN
from bertsmith.tasks.description import Task

FACTS = "facts.json"


@dataclass
class ReadShare:
    """The share of the input that has been read, from 0 to 1; the reader of the rows calls it."""

    value: float = 0.0

    def __call__(self, share: float) -> None:
        self.value = share


def say_shortened(count: int, limit: int) -> None:
    """Report how many texts were cut to the model's length."""
    if count:
        say(f"note: {count} text(s) were cut to {limit} tokens")


def partial_folder(out: Path) -> Path:
    """The folder that holds the output until it is complete."""
    return out.with_name(f"{out.name}.partial")


def check_out(out: Path, data: str | Path, kinds: Sequence[str], *, resume: bool = False, force: bool = False) -> None:
    """Refuse an output file of an unknown kind, the input itself, and an existing file unless `force` is given."""
    if out.suffix.lower() not in kinds:
        raise UserError(f"--out {out}: unknown kind of file {out.suffix!r}; give a file: {', '.join(kinds)}")
    if out.is_dir():
        raise UserError(f"--out {out} is a folder; give a file: {', '.join(kinds)}")
    if out.resolve() == Path(data).resolve():
        raise UserError(f"--out {out} is the input; give another file")
    if force:
        return
    check_partial(out, resume, "--force to start again")
    if out.exists() and not partial_folder(out).exists():
        raise UserError(f"--out {out} is there already; add --force to overwrite it, or choose another --out")


def check_partial(out: Path, resume: bool, otherwise: str) -> None:
    """Refuse to start where a stopped run has left partial output, unless it is to be resumed."""
    if partial_folder(out).exists() and not resume:
        raise UserError(f"{partial_folder(out)} is left of a stopped run; add --resume to continue it, or {otherwise}")


class RowPredictor(Protocol):
    """What predicts rows in the place of a `Predictor`: the model of a server, for example."""

    @property
    def task(self) -> Task:
        """The task, which says how files are read."""

    @property
    def columns(self) -> Columns:
        """The names of the columns."""

    @property
    def facts(self) -> dict[str, Any]:
        """What the predictions depend on."""

    def predict_rows(self, rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
        """Yield predictions for rows, in order."""


def output_facts(
    predictor: Predictor | RowPredictor, data: str | Path, columns: Columns, keep: Sequence[str]
) -> dict[str, Any]:
    """Return what the output depends on: the model's files, the engine, the input and the columns that are read."""
    found = Path(data).stat() if str(data) != STDIN and Path(data).is_file() else None
    read = {"text": columns.text, "pair": columns.pair, "keep": list(keep)}
    written = [found.st_size, found.st_mtime_ns] if found else []
    facts = _model_facts(predictor) if isinstance(predictor, Predictor) else predictor.facts
    return {**facts, "input": str(data), "input_file": written, **read, "window": predicting.WINDOW}


def _model_facts(predictor: Predictor) -> dict[str, Any]:
    digest = hashlib.sha256()
    folders = [Path(folder) for folder in predictor.folders]
    kinds = (*FILES, "**/*.onnx")
    for path in (path for folder in folders for path in sorted(p for kind in kinds for p in folder.glob(kind))):
        digest.update(path.name.encode() + bytes.fromhex(file_hash(path)))
    digest.update(b"nbest" if predictor.members else b"")
    engines = [repr(member.engine) for member in predictor.members or (predictor,)]
    return {"model": digest.hexdigest(), "engine": engines}


def open_partial(work: Path, facts: dict[str, Any], otherwise: str) -> bool:
    """Create a partial folder, or check that an existing one has the same facts; return whether it is resumed."""
    if not (work / FACTS).exists():
        with new_file(work / FACTS) as file:
            write_json(file, facts)
        return False
    saved = read_json(work / FACTS)
    if changed := [name for name, value in facts.items() if saved.get(name) != value]:
        raise UserError(f"{work} was begun with another {', '.join(changed)}; {otherwise}")
    return True


@contextmanager
def kept_for_resume(work: Path, first: Path) -> Iterator[None]:
    """When the block fails, keep a partial folder whose `first` file holds something, and remove an empty one."""
    try:
        yield
    except BaseException:
        if first.exists() and first.stat().st_size:
            say(f"note: the output so far is in {work}; --resume continues the run")
        else:
            shutil.rmtree(work, ignore_errors=True)
        raise
