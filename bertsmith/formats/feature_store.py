"""The store of hidden states: memory-mapped Arrow files in a folder with `features.json`.

Each part is an Arrow IPC file with complete texts, which other programs open as well. W words of a part, n words of a
text, H hidden size. The layers of a word are adjacent, so a text is one contiguous range of the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from bertsmith.config import from_dict, read_json
from bertsmith.errors import UserError
from bertsmith.folders import file_hash, new_file

Dtype = Literal["float16", "float32"]
Align = Literal["first", "mean", "none"]
INDEX, VERSION = "features.json", 1


@dataclass(frozen=True)
class Entry:
    """A text with its words (or tokens), their offsets, and one vector per layer for each of them."""

    text: str
    words: list[str]
    offsets: NDArray[np.int32]  # (n, 2) start and end in characters of the text
    vectors: NDArray[Any]  # (layers, n, H)


@dataclass(frozen=True)
class Described:
    """The content of `features.json`: the layers in the order of the vectors; texts, words, checksum of each part."""

    model: str
    layers: tuple[int, ...]
    align: Align
    dtype: Dtype
    hidden_size: int
    texts: tuple[int, ...] = ()
    words: tuple[int, ...] = ()
    hashes: tuple[str, ...] = ()  # SHA-256; older stores have none
    version: int = VERSION

    def __post_init__(self) -> None:
        for name, kind in (("align", Align), ("dtype", Dtype)):
            if getattr(self, name) not in get_args(kind):
                raise UserError(f"--{name} {getattr(self, name)!r} is not one of {', '.join(get_args(kind))}")

    @property
    def bytes_per_word(self) -> int:
        """The size of a word's vectors."""
        return len(self.layers) * self.hidden_size * np.dtype(self.dtype).itemsize


class Features:
    """A folder of features, opened lazily: `features[i]` is a view of the memory-mapped file."""

    def __init__(self, folder: Path, described: Described) -> None:
        self.folder, self.described = folder, described
        self.layers = described.layers
        self._ends = list(accumulate(described.texts))
        self._parts: dict[int, tuple[Any, NDArray[Any]]] = {}

    @classmethod
    def open(cls, folder: str | Path) -> Features:
        """Open a folder; only its index is read."""
        folder = Path(folder)
        if not (folder / INDEX).exists():
            raise UserError(
                f"{folder} holds no features: {INDEX} is missing; `bertsmith features` writes it at the end"
            )
        return cls(folder, read_index(folder / INDEX))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int) -> Entry:
        number = number + len(self) if number < 0 else number
        if not 0 <= number < len(self):
            raise IndexError(f"text {number} of {len(self)}")
        part = int(np.searchsorted(self._ends, number, side="right"))
        table, vectors = self._part(part)
        row = number - (self._ends[part - 1] if part else 0)
        starts = table.column("vectors").offsets
        begin, end = starts[row].as_py(), starts[row + 1].as_py()
        places = table.column("offsets")[row].values.flatten().to_numpy().reshape(-1, 2)
        return Entry(
            table.column("text")[row].as_py(),
            table.column("words")[row].as_py(),
            places,
            vectors[begin:end].transpose(1, 0, 2),
        )

    def __iter__(self) -> Iterator[Entry]:
        return (self[i] for i in range(len(self)))

    def _part(self, number: int) -> tuple[Any, NDArray[Any]]:
        """Return the columns of a part and its vectors (W, layers, H), both memory-mapped."""
        if number not in self._parts:
            path = part_file(self.folder, number)
            if self.described.hashes and file_hash(path) != self.described.hashes[number]:
                raise UserError(f"{path} is damaged: its checksum is not that of {INDEX}; extract the features again")
            table = read_part(path)
            flat = table.column("vectors").values.values.to_numpy(zero_copy_only=True)
            self._parts[number] = table, flat.reshape(-1, len(self.layers), self.described.hidden_size)
        return self._parts[number]


def part_file(folder: Path, number: int) -> Path:
    """Return the path of a part."""
    return folder / f"part-{number:05}.arrow"


def read_part(path: Path) -> Any:
    """Return the single record batch of a part, memory-mapped."""
    import pyarrow as pa

    try:
        return pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}; extract the features again") from None


def write_part(
    path: Path,
    texts: Sequence[str],
    words: Sequence[Sequence[str]],
    offsets: NDArray[np.int32],
    vectors: NDArray[Any],
) -> None:
    """Write a part: the texts, their words, and the offsets (W, 2) and vectors (W, layers, H) of all words."""
    import pyarrow as pa

    starts = np.concatenate([[0], np.cumsum([len(each) for each in words])]).astype(np.int64)
    pairs = pa.FixedSizeListArray.from_arrays(pa.array(offsets.reshape(-1)), 2)
    values = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), int(np.prod(vectors.shape[1:])))
    columns = {
        "text": pa.array(texts, pa.string()),
        "words": pa.array(words, pa.list_(pa.string())),
        "offsets": pa.LargeListArray.from_arrays(pa.array(starts), pairs),
        "vectors": pa.LargeListArray.from_arrays(pa.array(starts), values),
    }
    batch = pa.record_batch(columns)
    with new_file(path) as work, pa.ipc.new_file(str(work), batch.schema) as writer:
        writer.write_batch(batch)


def read_index(path: Path) -> Described:
    """Read and check an index."""
    values = read_json(path)
    if values.get("version") != VERSION:
        raise UserError(f"{path}: version {values.get('version')!r} is not {VERSION}; extract them again")
    described = from_dict(Described, values, str(path))
    if len({len(described.texts), len(described.words), len(described.hashes) or len(described.texts)}) != 1:
        raise UserError(f"{path} is damaged: it does not say the same number of parts everywhere")
    return described


def write_index(folder: Path, described: Described, name: str = INDEX) -> None:
    """Write the index; under its final name it completes the folder."""
    with new_file(folder / name) as work:
        work.write_text(json.dumps(asdict(described), indent=1) + "\n", encoding="utf-8")
