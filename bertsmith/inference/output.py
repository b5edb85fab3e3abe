"""Files of answers: made under another name, resumed after a kill, and written as JSON lines, CSV or parquet.

Answers to a large file are written as JSON lines into a folder `OUT.partial`, a window of rows at a time, and become
the file that was asked for at the end. A killed run is continued at the last whole window whose checksum is right: the
windows decide which texts share a batch, so that the answers are the same to the bit as without the kill.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from bertsmith.config import read_json
from bertsmith.errors import UserError
from bertsmith.folders import file_hash, new_file, sync
from bertsmith.formats.hub import FILES
from bertsmith.inference import predictor as predicting
from bertsmith.inference.predictor import Predictor
from bertsmith.progress import say
from bertsmith.rows.columns import Columns
from bertsmith.rows.records import STDIN

FACTS, ANSWERS, SUMS = "facts.json", "answers.jsonl", "checksums.txt"
KINDS = (".jsonl", ".csv", ".parquet")
ROWS_AT_ONCE = 4096  # of a finished file


def partial_folder(out: Path) -> Path:
    """Where the answers are until all are there."""
    return out.with_name(f"{out.name}.partial")


def check_out(out: Path, data: str | Path, kinds: Sequence[str], *, resume: bool = False, force: bool = False) -> None:
    """Refuse an output that is none of these kinds, is the input, or is there already and was not to be overwritten."""
    if out.suffix.lower() not in kinds:
        raise UserError(f"--out {out}: unknown kind of file {out.suffix!r}; give a file: {', '.join(kinds)}")
    if out.is_dir():
        raise UserError(f"--out {out} is a folder; give a file: {', '.join(kinds)}")
    if out.resolve() == Path(data).resolve():
        raise UserError(f"--out {out} is the input; give another file")
    if force:
        return
    work = partial_folder(out)
    if work.exists() and not resume:
        raise UserError(f"{work} is of a run that was stopped; add --resume to continue it, or --force to begin anew")
    if out.exists() and not work.exists():
        raise UserError(f"--out {out} is there already; add --force to overwrite it, or choose another --out")


def facts_of(predictor: Predictor, data: str | Path, columns: Columns, keep: Sequence[str]) -> dict[str, Any]:
    """What the answers depend on: the model, the input, and what is read of it."""
    digest = hashlib.sha256()
    folders = [Path(folder) for folder in predictor.folders]
    kinds = (*FILES, "**/*.onnx")
    for path in (path for folder in folders for path in sorted(p for kind in kinds for p in folder.glob(kind))):
        digest.update(path.name.encode() + bytes.fromhex(file_hash(path)))
    digest.update(b"nbest" if predictor.members else b"")
    found = Path(data).stat() if str(data) != STDIN and Path(data).is_file() else None
    read = {"text": columns.text, "pair": columns.pair, "keep": list(keep)}
    written = [found.st_size, found.st_mtime_ns] if found else []
    engines = [repr(member.engine) for member in predictor.members or (predictor,)]
    facts = {"model": digest.hexdigest(), "engine": engines, "input": str(data), "input_file": written}
    return {**facts, **read, "window": predicting.WINDOW}


class Journal:
    """Answers as JSON lines, with a checksum after every window, so that a resumed run knows what it can trust."""

    def __init__(self, folder: Path) -> None:
        """Open the answers that are there after their last trusted window; `windows` counts those before it."""
        self.folder, self.windows, self.size, self.digest = folder, 0, 0, hashlib.sha256()
        listed = self._trust() if (folder / SUMS).exists() and (folder / ANSWERS).exists() else []
        if len(listed) > self.windows:
            say(f"note: {folder / ANSWERS} is damaged after byte {self.size:,}; what follows is answered again")
        (folder / ANSWERS).touch()
        os.truncate(folder / ANSWERS, self.size)
        with new_file(folder / SUMS) as work:
            work.write_text("".join(f"{line}\n" for line in listed[: self.windows]), encoding="ascii")
        self.answers, self.sums = (folder / ANSWERS).open("ab"), (folder / SUMS).open("a", encoding="ascii")

    def _trust(self) -> list[str]:
        """Compare the windows with their checksums, up to the first that differs; all checksums."""
        listed = (self.folder / SUMS).read_text(encoding="ascii", errors="replace").splitlines()
        with (self.folder / ANSWERS).open("rb") as file:
            for line in listed:
                size, _, expected = line.partition(" ")
                if not size.isdecimal() or int(size) < self.size:
                    break
                digest = self.digest.copy()
                digest.update(file.read(int(size) - self.size))
                if digest.hexdigest() != expected:
                    break
                self.windows, self.size, self.digest = self.windows + 1, int(size), digest
        return listed

    def write(self, text: str) -> None:
        """Add a line."""
        data = text.encode()
        self.answers.write(data)
        self.digest.update(data)
        self.size += len(data)

    def flush(self) -> None:
        """Close a window."""
        self.answers.flush()
        self.sums.write(f"{self.size} {self.digest.hexdigest()}\n")
        self.sums.flush()

    def close(self) -> None:
        """Write out what is left."""
        self.answers.close()
        self.sums.close()


def begin(work: Path, facts: dict[str, Any]) -> Journal:
    """The journal of a run that begins, or of one that was stopped and had the same facts."""
    if (work / FACTS).exists():
        saved = read_json(work / FACTS)
        if changed := [name for name, value in facts.items() if saved.get(name) != value]:
            raise UserError(f"{work} was begun with another {', '.join(changed)}; add --force to begin anew")
        journal = Journal(work)
        say(f"going on after {journal.windows * predicting.WINDOW:,} rows")
        return journal
    work.mkdir(parents=True, exist_ok=True)
    with new_file(work / FACTS) as file:
        file.write_text(json.dumps(facts), encoding="utf-8")
    return Journal(work)


def keep_or_remove(work: Path) -> None:
    """Say how to continue what is there; a folder without an answer is of no use to anyone."""
    if (work / ANSWERS).exists() and (work / ANSWERS).stat().st_size:
        say(f"note: what was answered is in {work}; --resume continues it")
    else:
        shutil.rmtree(work, ignore_errors=True)


def finish(answers: Path, out: Path) -> None:
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
