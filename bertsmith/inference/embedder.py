"""Sentence vectors: the hidden states of a text's tokens, pooled.

B sequences, H hidden size. Texts are processed in windows, so memory does not grow with the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from bertsmith.batch import Example, collate
from bertsmith.errors import UserError
from bertsmith.folders import new_file, writes
from bertsmith.formats.sentence_folder import Pooling, pooling_kind, read_pooling
from bertsmith.inference.engines import OnnxEngine, TorchEngine, batch_tokens, batches, refuse_not_finite, threads_of
from bertsmith.inference.output import ReadShare, check_out, say_shortened
from bertsmith.inference.predictor import WINDOW, Predictor
from bertsmith.inference.writers import VECTOR_FILES, Vectors, vector_writer
from bertsmith.model.config import PoolingKind
from bertsmith.model.pooling import pool
from bertsmith.model.states import hidden_states, layer_number
from bertsmith.progress import progress_bar
from bertsmith.rows.columns import Columns, read_rows
from bertsmith.tasks.spelled import example_of
from bertsmith.text.safe import safe_text


@writes()
def embed(
    model: str | Path | None,
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
    """Write a vector for every text of a file, in order; the model's folder gives the settings that are None here.

    If `model` is None, it is the one in BERTSMITH_MODEL or the default model of the package.
    """
    out = Path(out)
    _check_keep(out, keep)
    check_out(out, data, VECTOR_FILES, force=force)
    options: dict[str, Any] = {"normalize": normalize, "layer": layer, "max_length": max_length}
    embedder = Embedder.load(model, device, pooling=pooling, **options)
    count, share = 0, ReadShare()
    rows = read_rows(data, Columns(text), labelled=False, keep=keep, on_progress=share)
    with (
        new_file(out) as made,
        made.open("wb") as file,
        vector_writer(out.suffix.lower(), file, embedder.size) as write,
        progress_bar("embedding", 1.0) as advance,
    ):
        while window := list(islice(rows, WINDOW)):
            write(window, embedder.vectors([row.text for row in window]))
            count += len(window)
            advance(share.value, f"{count:,} texts")
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
        name: str | Path | None = None,
        device: str | None = None,
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        layer: int = -1,
        max_length: int | None = None,
    ) -> Embedder:
        """Open a model folder, a run or a hub name, or if the name is None, what `Predictor.load` opens then.

        The folder gives the other settings that are None here.
        """
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
            raise UserError(f"--layer {layer}: an ONNX graph gives only the last layer; leave out --layer")
        self.size = config.hidden_size
        self.layer = layer_number(layer, config.num_layers)
        saved = read_pooling(predictor.folder)
        self.pooling = saved or Pooling()
        if kind is not None and kind != self.pooling.kind:  # the folder's `normalize` is for its own pooling
            self.pooling = replace(self.pooling, kind=kind, normalize=False)
        if normalize is not None:
            self.pooling = replace(self.pooling, normalize=normalize)
        own = min(self.pooling.max_length or config.max_positions, config.max_positions)
        self.max_length = own if max_length is None else max_length
        least = self.tokenizer.frame.size(1) + 1
        if not least <= self.max_length <= config.max_positions:
            raise UserError(f"--max-length {max_length} is not between {least} and the model's {config.max_positions}")
        self.shortened = 0
        self.skipped = 0  # tokens at the start that are not pooled: [CLS] and those of a prompt
        if self.pooling.prompt and not self.pooling.include_prompt:
            prompt = self.pooling.prompt.lower() if self.pooling.lowercase else self.pooling.prompt
            self.skipped = len(self.tokenizer.frame.first) + len(self.tokenizer.encode([prompt])[0])

    def embed(self, texts: str | Iterable[str]) -> Vectors:
        """Return the vector of a text (H,), or a row for each of several texts (n, H), in their order.

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
        """Return a row for each text (n, H), in their order; batches hold texts of similar length."""
        return self.run(self.encode(texts))

    def encode(self, texts: Sequence[str]) -> list[Example]:
        """Return the examples that texts are encoded as, with the folder's prompt: the first step, before `run`."""
        texts = [self.pooling.prompt + safe_text(text) for text in texts]
        if self.pooling.lowercase:
            texts = [text.lower() for text in texts]
        room = self.max_length - self.tokenizer.frame.size(1)
        opened = self.tokenizer.opened()
        encoded = opened.encode(texts)
        self.shortened += sum(len(ids) > room for ids in encoded)
        return [example_of(opened.joiner.join(ids[:room]), opened) for ids in encoded]

    def run(self, examples: Sequence[Example]) -> Vectors:
        """Return a row for each encoded text (n, H), in their order."""
        found = np.empty((len(examples), self.size), dtype=np.float32)
        for chosen in batches(examples, batch_tokens(self._device)):
            found[chosen] = self._run([examples[i] for i in chosen])
        refuse_not_finite([found], "vectors", self.folder, self.engine)
        return found

    @property
    def _device(self) -> torch.device:
        return self.engine.device if isinstance(self.engine, TorchEngine) else torch.device("cpu")

    @torch.inference_mode()
    def _run(self, examples: Sequence[Example]) -> Vectors:
        batch = collate(examples, packed=True).to(self._device)
        if isinstance(self.engine, TorchEngine):
            encoder = self.engine.model.encoder.eval()
            with threads_of(self.engine.threads):
                hidden = hidden_states(encoder, batch, [self.layer])[self.layer]
        else:
            assert isinstance(self.engine, OnnxEngine)
            hidden = torch.from_numpy(np.concatenate(self.engine.states(examples)))
        pooled = pool(hidden.float(), batch.layout, self.pooling.kind, self.skipped)
        return (F.normalize(pooled, dim=-1) if self.pooling.normalize else pooled).cpu().numpy()


def _check_keep(out: Path, keep: Sequence[str]) -> None:
    if keep and out.suffix.lower() == ".npy":
        raise UserError(f"--keep {','.join(keep)}: a .npy file holds only vectors; --out a .parquet or .jsonl file")
    if "vector" in keep:
        raise UserError("--keep vector: the vectors have this name; rename the column")
