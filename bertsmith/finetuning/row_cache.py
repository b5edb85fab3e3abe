"""A cache of encoded rows on the disk, by their content: a second run on the same rows does not tokenise them again.

The cache is a folder of safetensors files; if it cannot be read or written, rows are encoded without it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from bertsmith.folders import new_file
from bertsmith.model.heads import HeadConfig
from bertsmith.progress import say
from bertsmith.rows.columns import Row
from bertsmith.tasks.description import Encoded, Limits
from bertsmith.tasks.examples import Examples, Spelling, joined, starts_of
from bertsmith.tasks.kinds import KINDS
from bertsmith.tasks.spans import Window
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training import distributed

FOLDER = "BERTSMITH_CACHE"  # the environment variable with the folder; empty: no cache
LARGEST = 4 << 30  # bytes of all files together
ABANDONED = 86400.0  # seconds after which a partial file is removed
Arrays = dict[str, NDArray[Any]]


def encode_once(
    rows: Sequence[Row], tokenizer: Tokenizer, limits: Limits, head: HeadConfig, *, labelled: bool
) -> Encoded:
    """Encode rows as the head's kind does, or read them from the cache if they were encoded before.

    Labelled rows are for training: they have no details, which only decoding needs. All ranks have to call this: the
    first rank of each machine encodes, and the other ranks read its file.
    """
    folder = cache_folder()
    if folder is None:
        return KINDS[head.kind].encode(rows, tokenizer, limits, head, labelled=labelled)
    path = folder / f"{digest(rows, tokenizer, limits, head, labelled)}.safetensors"
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if not first:
        distributed.barrier()
    try:
        if (found := _read(path)) is not None:
            if labelled and first:
                say(f"the {len(rows):,} training rows were tokenised before: taken from {folder}")
            return found
        encoded = KINDS[head.kind].encode(rows, tokenizer, limits, head, labelled=labelled)
        _write(path, encoded, with_details=not labelled)
        return encoded
    finally:  # also where rows are refused, so that the other ranks can refuse them too
        if first:
            distributed.barrier()


def cache_folder() -> Path | None:
    """The folder of the cache; None if there is none."""
    if (named := os.environ.get(FOLDER)) is not None:
        return Path(named).expanduser() / "rows" if named else None
    with suppress(RuntimeError):  # no home folder
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bertsmith" / "rows"
    return None


def digest(rows: Sequence[Row], tokenizer: Tokenizer, limits: Limits, head: HeadConfig, labelled: bool) -> str:
    """The key of encoded rows: a digest of everything that their encoding depends on, the code included."""
    found = hashlib.blake2b(digest_size=16)
    settings = [_code(), tokenizers.__version__, tokenizer.hash, head.kind, head.labels, head.sequences, labelled]
    settings += [limits.max_length, limits.stride, limits.max_query, len(rows), head.features is not None]
    settings += [tokenizer.spells, head.unit, limits.windows]
    found.update(json.dumps(settings).encode())
    _add_rows(found, rows, labelled)
    return found.hexdigest()


def rows_hash(rows: Iterable[Row]) -> str:
    """A digest of the texts and labels of rows, whatever file they were read from."""
    found = hashlib.blake2b(digest_size=16)
    _add_rows(found, list(rows), labelled=True)
    return found.hexdigest()


def _add_rows(found: hashlib.blake2b, rows: Sequence[Row], labelled: bool) -> None:
    documents = {id(row.document): row.document for row in rows}  # the sentences of a document share one tuple
    places = {key: number for number, key in enumerate(documents)}
    for texts in (
        [row.text for row in rows],
        [row.pair or "" for row in rows],
        [part for row in rows for part in row.parts],
        [word for document in documents.values() for word in document],
    ):
        found.update(np.array([len(text) for text in texts], dtype=np.int64).tobytes())
        found.update("".join(texts).encode("utf-8", "surrogatepass"))
    shapes = [(row.pair is None, len(row.parts), places[id(row.document)], row.begin) for row in rows]
    found.update(np.array([*shapes, *((0, 0, 0, len(d)) for d in documents.values())], dtype=np.int64).tobytes())
    if labelled:
        found.update(json.dumps([row.label for row in rows], default=repr).encode())


@cache
def _code() -> str:
    """A digest of the code that encodes rows: other versions must not read the cached rows."""
    found = hashlib.blake2b(digest_size=16)
    package = Path(__file__).parent.parent
    for path in sorted([*package.glob("tasks/*.py"), *package.glob("text/*.py")]):
        found.update(path.read_bytes())
    return found.hexdigest()


def _write(path: Path, encoded: Encoded, *, with_details: bool) -> None:
    examples = encoded.examples
    arrays: Arrays = {
        "tokens": examples.tokens,
        "segments": examples.segments,
        "starts": examples.starts,
        "owners": np.asarray(encoded.owners, dtype=np.int64),
        **({} if encoded.sources is None else {"sources": np.asarray(encoded.sources, dtype=np.int64)}),
        **({} if examples.labels is None else {"labels": examples.labels}),
        **({} if examples.rows is None else {"rows": examples.rows}),
        **({} if examples.tags is None else {"tags": examples.tags}),
        **({} if examples.word_marks is None else {"read": examples.word_marks}),
        **(
            {} if examples.spelling is None else {"spelt": examples.spelling.places, "letters": examples.spelling.words}
        ),
        **(_flat_details(encoded.details) if with_details and encoded.details else {}),
    }
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    facts = {"shortened": encoded.shortened, "step": examples.step, "checksum": _checksum(arrays)}
    with suppress(OSError, SafetensorError):  # a full disk or a read-only folder: the next run encodes the rows again
        with new_file(path) as work:
            save_file(arrays, work, {"facts": json.dumps(facts)})
        _remove_oldest(path)


def _read(path: Path) -> Encoded | None:
    """The encoded rows of a file; None if it does not exist or is damaged."""
    try:
        with safe_open(path, "numpy") as file:
            facts = json.loads(file.metadata()["facts"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if facts["checksum"] != _checksum(arrays):
            return None
        flat: Any = [arrays.get(name) for name in ("tokens", "segments", "starts", "labels", "tags")]
        spelling = Spelling(arrays["spelt"], arrays["letters"]) if "spelt" in arrays else None
        examples = replace(Examples(*flat), step=facts["step"], word_marks=arrays.get("read"), spelling=spelling)
        examples = replace(examples, rows=arrays.get("rows"))
        found = Encoded(examples, arrays["owners"], _details(arrays), facts["shortened"], arrays.get("sources"))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None
    with suppress(OSError):
        os.utime(path)  # the files that have not been used for longest are removed first
    return found


def _checksum(arrays: Arrays) -> str:
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        found.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        found.update(arrays[name].tobytes())
    return found.hexdigest()


def _flat_details(details: Sequence[Any]) -> Arrays:
    """The details of all parts as arrays: the first tokens of words, or the windows of contexts."""
    if not isinstance(details[0], Window):
        return {"words": joined(details, np.int32), "word_starts": starts_of([len(d) for d in details])}
    return {
        "shifts": np.array([window.shift for window in details], dtype=np.int64),
        "offsets": joined([window.offsets for window in details], np.int32),
        "best": joined([window.best for window in details], np.bool_),
        "window_starts": starts_of([len(window.offsets) for window in details]),
    }


def _details(arrays: Arrays) -> list[Any]:
    if "words" in arrays:
        return np.split(arrays["words"], arrays["word_starts"][1:-1])
    if "offsets" not in arrays:
        return []
    starts = arrays["window_starts"]
    offsets, best = (np.split(arrays[name], starts[1:-1]) for name in ("offsets", "best"))
    return [Window(int(s), o, b) for s, o, b in zip(arrays["shifts"], offsets, best, strict=True)]


def _remove_oldest(new: Path) -> None:
    """Remove the files that have not been used for longest until the cache is small enough, and old partial files."""
    for partial in new.parent.glob(".*.partial"):
        if time.time() - partial.stat().st_mtime > ABANDONED:
            partial.unlink()
    files = sorted(((p.stat(), p) for p in new.parent.glob("*.safetensors")), key=lambda pair: pair[0].st_mtime)
    total = sum(stat.st_size for stat, _ in files)
    for stat, path in files:
        if total > LARGEST and path != new:
            path.unlink(missing_ok=True)
            total -= stat.st_size
