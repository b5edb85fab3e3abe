"""Sentence vectors: the states of a text's tokens, pooled, to `.npy`, parquet or JSON lines.

B sequences, L padded length, H hidden size. Texts go through in windows, so that memory does not grow with the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.batch import Example, Layout, collate
from bertsmith.errors import UserError
from bertsmith.folders import new_file, writes
from bertsmith.formats.sentence_folder import Pooling, PoolingKind, pooling_kind, read_pooling
from bertsmith.inference.engines import TOKENS, OnnxEngine, TorchEngine, batches, refuse_not_finite
from bertsmith.inference.files import say_shortened
from bertsmith.inference.output import check_out
from bertsmith.inference.predictor import WINDOW, Predictor
from bertsmith.model.states import hidden_states, layer_number
from bertsmith.progress import progress_bar
from bertsmith.rows.columns import Columns, Row, read_rows
from bertsmith.text.safe import safe_text

Vectors = NDArray[np.float32]
KINDS = (".npy", ".parquet", ".jsonl")


class Write(Protocol):
    """Takes the rows of a window and their vectors."""

    def __call__(self, rows: Sequence[Row], vectors: Vectors) -> None: ...


@writes()
def embed(
    model: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    layer: int = -1,
    max_length: int | None = None,
    keep: Sequence[str] = (),
    text: str = "text",
    force: bool = False,
    device: str | None = None,
) -> dict[str, Any]:
    """A vector for every text of a file, in order; what is not asked for is as the model's folder says."""
    out = Path(out)
    _check_keep(out, keep)
    check_out(out, data, KINDS, force=force)
    options: dict[str, Any] = {"normalize": normalize, "layer": layer, "max_length": max_length}
    embedder = Embedder.load(model, device, pooling=pooling, **options)
    count, share = 0, 0.0

    def told(now: float) -> None:
        nonlocal share
        share = now

    rows = read_rows(data, Columns(text), labelled=False, keep=keep, told=told)
    with (
        new_file(out) as made,
        made.open("wb") as file,
        _writer(out.suffix.lower(), file, embedder.size) as write,
        progress_bar("embedding", 1.0) as advance,
    ):
        while window := list(islice(rows, WINDOW)):
            write(window, embedder.vectors([row.text for row in window]))
            count += len(window)
            advance(share, f"{count:,} texts")
    say_shortened(embedder.shortened, embedder.max_length)
    used = {"pooling": embedder.pooling.kind, "normalize": embedder.pooling.normalize}
    return {"vectors": str(out), "rows": count, "dimensions": embedder.size, **used}


class Embedder:
    """An encoder with its pooling, ready to turn texts into vectors.

    >>> import bertsmith
    >>> embedder = bertsmith.Embedder.load("sentence-transformers/all-MiniLM-L6-v2")
    >>> embedder(["a cat", "a kitten"]).shape
    (2, 384)
    """

    @classmethod
    def load(
        cls,
        name: str | Path,
        device: str | None = None,
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        layer: int = -1,
        max_length: int | None = None,
    ) -> Embedder:
        """Open a model folder, a run or a hub name; what is not asked for is as the folder says."""
        kind = pooling_kind(pooling) if pooling else None
        return cls(Predictor.load(name, device), kind, normalize, layer, max_length)

    def __init__(
        self,
        predictor: Predictor,
        kind: PoolingKind | None = None,
        normalize: bool | None = None,
        layer: int = -1,
        max_length: int | None = None,
    ) -> None:
        self.folder, self.engine, self.tokenizer = predictor.folder, predictor.engine, predictor.tokenizer
        config = predictor.config
        if isinstance(self.engine, OnnxEngine) and layer not in (-1, config.num_layers):
            raise UserError(f"--layer {layer}: an ONNX graph gives the last layer alone; leave --layer out")
        self.size = config.hidden_size
        self.layer = layer_number(layer, config.num_layers)
        saved = read_pooling(predictor.folder)
        self.pooling = saved or Pooling()
        if kind is not None and kind != self.pooling.kind:  # another vector: what the folder says of its length is void
            self.pooling = replace(self.pooling, kind=kind, normalize=False)
        if normalize is not None:
            self.pooling = replace(self.pooling, normalize=normalize)
        own = min(self.pooling.max_length or config.max_positions, config.max_positions)
        self.max_length = own if max_length is None else max_length
        least = self.tokenizer.frame.size(1) + 1
        if not least <= self.max_length <= config.max_positions:
            raise UserError(f"--max-length {max_length} is not between {least} and the model's {config.max_positions}")
        self.shortened = 0
        self.skipped = 0  # tokens at the beginning that are not pooled: [CLS] and a prompt's
        if self.pooling.prompt and not self.pooling.include_prompt:
            prompt = self.pooling.prompt.lower() if self.pooling.lowercase else self.pooling.prompt
            self.skipped = len(self.tokenizer.frame.first) + len(self.tokenizer.encode([prompt])[0])

    def embed(self, texts: str | Iterable[str]) -> Vectors:
        """The vector of a text (H,), or a row for each of several texts (n, H), in their order.

        >>> embedder = Embedder.load("sentence-transformers/all-MiniLM-L6-v2")
        >>> embedder.embed("a cat").shape
        (384,)
        """
        if isinstance(texts, str):
            return self.vectors([texts])[0]
        listed = list(texts)
        if wrong := [text for text in listed if not isinstance(text, str)]:
            raise UserError(f"cannot embed {wrong[0]!r}; give a text, or a list of texts")
        return self.vectors(listed)

    __call__ = embed

    def __repr__(self) -> str:
        norm = ", vectors of length 1" if self.pooling.normalize else ""
        what = f"{self.size} dimensions, {self.pooling.kind} pooling{norm}"
        return f"<Embedder of {self.folder}: {what}; {self.engine!r}>"

    def vectors(self, texts: Sequence[str]) -> Vectors:
        """A row a text (n, H), in their order; batches hold texts of similar length."""
        texts = [self.pooling.prompt + safe_text(text) for text in texts]
        if self.pooling.lowercase:
            texts = [text.lower() for text in texts]
        examples = self._examples(texts)
        found = np.empty((len(examples), self.size), dtype=np.float32)
        for chosen in batches(examples, TOKENS.get(self._device.type, 2048)):
            found[chosen] = self._run([examples[i] for i in chosen])
        refuse_not_finite([found], "vectors", self.folder, self.engine)
        return found

    def _examples(self, texts: Sequence[str]) -> list[Example]:
        room = self.max_length - self.tokenizer.frame.size(1)
        encoded = self.tokenizer.encode(texts)
        self.shortened += sum(len(ids) > room for ids in encoded)
        joined = [self.tokenizer.joiner.join(ids[:room]) for ids in encoded]
        return [Example(each.tokens, each.segments) for each in joined]

    @property
    def _device(self) -> torch.device:
        return self.engine.device if isinstance(self.engine, TorchEngine) else torch.device("cpu")

    @torch.inference_mode()
    def _run(self, examples: Sequence[Example]) -> Vectors:
        batch = collate(examples, packed=True).to(self._device)
        if isinstance(self.engine, TorchEngine):
            encoder = self.engine.model.encoder.eval()
            hidden = hidden_states(encoder, batch, [self.layer])[self.layer]
        else:
            assert isinstance(self.engine, OnnxEngine)
            hidden = torch.from_numpy(np.concatenate(self.engine.states(examples)))
        pooled = pool(hidden.float(), batch.layout, self.pooling.kind, self.skipped)
        return (F.normalize(pooled, dim=-1) if self.pooling.normalize else pooled).cpu().numpy()


def pool(hidden: Tensor, layout: Layout, kind: PoolingKind, skipped: int = 0) -> Tensor:
    """One vector a sequence (B, H): of `[CLS]`, or the mean or the largest over its tokens after those `skipped`."""
    if kind == "cls":
        return layout.flat(hidden).index_select(0, layout.firsts)
    if kind == "max":
        return layout.pad(hidden, float("-inf"))[:, skipped:].amax(1)
    lengths = layout.pad(torch.ones_like(hidden[..., :1]))[:, skipped:].sum(1)
    return layout.pad(hidden)[:, skipped:].sum(1) / lengths.clamp_min(1)


def _check_keep(out: Path, keep: Sequence[str]) -> None:
    if keep and out.suffix.lower() == ".npy":
        raise UserError(f"--keep {','.join(keep)}: a .npy file holds vectors alone; --out a .parquet or .jsonl file")
    if "vector" in keep:
        raise UserError("--keep vector: the vectors have this name; rename the column")


@contextmanager
def _writer(kind: str, file: IO[bytes], size: int) -> Iterator[Write]:
    if kind == ".jsonl":
        yield lambda rows, vectors: _write_json(file, rows, vectors)
    elif kind == ".parquet":
        yield from _parquet(file, size)
    else:
        yield from _npy(file, size)


def _npy(file: IO[bytes], size: int) -> Iterator[Write]:
    """The header is written last: how many rows there are is known only then, and numpy leaves room for the number."""
    count = 0

    def header() -> int:
        shape = {"descr": "<f4", "fortran_order": False, "shape": (count, size)}
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, shape)
        return file.tell()

    def write(rows: Sequence[Row], vectors: Vectors) -> None:
        nonlocal count
        file.write(np.ascontiguousarray(vectors, dtype="<f4").data)
        count += len(vectors)

    begin = header()
    yield write
    assert header() == begin


def _parquet(file: IO[bytes], size: int) -> Iterator[Write]:
    """A row group a window; the types of the columns that are kept are those of the first one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer: Any = None

    def write(rows: Sequence[Row], vectors: Vectors) -> None:
        nonlocal writer
        columns = {name: [row.kept[name] for row in rows] for name in rows[0].kept}
        try:
            table = pa.table(columns, schema=writer and pa.schema(list(writer.schema)[:-1]))
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise UserError(f"{rows[0].place} and after: a column that is kept changes its type: {error}") from None
        if writer is None:  # a column without a value so far may get text
            table = table.cast(
                pa.schema([f.with_type(pa.string()) if f.type == pa.null() else f for f in table.schema])
            )
        values = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), size)
        table = table.append_column("vector", values) if columns else pa.table({"vector": values})
        writer = writer or pq.ParquetWriter(file, table.schema)
        writer.write_table(table)

    try:
        yield write
    finally:
        if writer is not None:
            writer.close()


def _write_json(file: IO[bytes], rows: Sequence[Row], vectors: Vectors) -> None:
    for row, vector in zip(rows, vectors, strict=True):
        short = [float(str(value)) for value in vector]  # as many digits as 32 bits have
        line = json.dumps({**row.kept, "vector": short}, ensure_ascii=False, default=str)
        file.write(line.encode() + b"\n")
