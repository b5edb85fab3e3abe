"""Feature extraction (section 5.3): hidden states of any layers for every word or token of a file, in a compact store.

Texts are processed in parts, so memory does not grow with the file. A text longer than the model's positions is encoded
in overlapping windows, and each word is taken from the window where it has the most context. W words of a part, H
hidden size.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.batch import Example, collate
from bertsmith.errors import UserError
from bertsmith.folders import file_hash, refuse_existing, sync, writes
from bertsmith.formats.feature_store import Align, Described, Features, part_file, read_index, write_index, write_part
from bertsmith.inference.engines import Precision, batch_tokens, batches, threads_of
from bertsmith.inference.output import (
    FACTS,
    ReadShare,
    check_partial,
    kept_for_resume,
    open_partial,
    output_facts,
    partial_folder,
)
from bertsmith.inference.predictor import Predictor
from bertsmith.model.states import hidden_states, parse_layers
from bertsmith.progress import progress_bar, say
from bertsmith.rows.columns import NAMES, Columns, Row, read_rows
from bertsmith.rows.conll import is_conll, read_conll
from bertsmith.tasks.spelled import example_of
from bertsmith.tasks.units import words_of
from bertsmith.text.tokenizer import Tokenizer

__all__ = ["Features", "features"]

PARTS = "parts.json"
PART_BYTES = 256 * 2**20  # of vectors that memory holds at once
PASSAGES = 1024  # that are tokenised together
WORDS = {"text": ("tokens", "words", *NAMES["text"])}


@writes()
def features(
    model: str | Path | None,
    data: str | Path,
    out: str | Path,
    *,
    layers: str = "-1",
    align: str = "first",
    dtype: str = "float16",
    conll: bool = False,
    documents: bool = True,
    max_length: int | None = None,
    overlap: int | None = None,
    text: str = "",
    resume: bool = False,
    precision: Precision | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """Write the hidden states of some layers for every word of a file; `Features.open(out)` reads them.

    `align` takes the `first` sub-token of a word, the `mean` of its sub-tokens, or with `none` every sub-token by
    itself. A CoNLL file (by its name, or with `conll`) gives the words; with `documents` its sentences are encoded in
    the context of their document. If `model` is None, it is the one in BERTSMITH_MODEL or the default model of the
    package.
    """
    out, work = Path(out), partial_folder(Path(out))
    refuse_existing(out)
    predictor = Predictor.load(model, device, precision=precision)
    extractor = Extractor(predictor, layers, align, dtype, max_length, overlap)
    check_partial(out, resume, "remove it")
    settings = {"layers": list(extractor.described.layers), "align": align, "dtype": dtype, "documents": documents}
    settings |= {"max_length": extractor.max_length, "overlap": extractor.overlap}
    facts, described = output_facts(predictor, data, Columns(text), ()), extractor.described
    if open_partial(work, {**facts, **settings}, "remove it to start again"):
        described = _finished_parts(work, described)
    share = ReadShare()
    with kept_for_resume(work, part_file(work, 0)):
        rows = _rows(data, text, conll, documents, share)
        described = write_parts(extractor, described, work, rows, share)
    return _finish(work, out, described)


def write_parts(
    extractor: Extractor, described: Described, work: Path, rows: Iterable[Row], share: ReadShare
) -> Described:
    """Write the parts that are missing and return the description of all; `share` holds the progress of `rows`."""
    rows = islice(rows, sum(described.texts), None)
    with progress_bar("extracting", 1.0) as advance:
        for part in extractor.parts(rows):
            path = part_file(work, len(described.texts))
            texts, words = extractor.write(path, part)
            described = replace(
                described,
                texts=(*described.texts, texts),
                words=(*described.words, words),
                hashes=(*described.hashes, file_hash(path)),
            )
            write_index(work, described, PARTS)
            advance(share.value, f"{sum(described.texts):,} texts, {sum(described.words):,} vectors")
    return described


def _rows(data: str | Path, text: str, conll: bool, documents: bool, share: ReadShare) -> Iterator[Row]:
    if conll or is_conll(data):
        rows = read_conll(data, labelled=False)
    else:
        rows = read_rows(data, Columns(text), labelled=False, names=WORDS, on_progress=share)
    return rows if documents else (replace(row, document=(), begin=0) for row in rows)


@dataclass(frozen=True)
class Passage:
    """Tokens that are encoded together: a text, or a document with its sentences.

    Word i has the tokens `firsts[i]` to `firsts[i + 1]`; text i has the words `ends[i - 1]` to `ends[i]`.
    """

    texts: list[str]
    words: list[str]
    offsets: list[tuple[int, int]]  # of each word in its text
    firsts: NDArray[np.int64]  # (words + 1,)
    tokens: NDArray[np.int64]
    ends: list[int]  # of each text, in words
    tokenizer: Tokenizer  # that the tokens belong to; it knows the words outside the vocabulary


def passages(rows: Iterable[Row], tokenizer: Tokenizer, align: Align) -> Iterator[Passage]:
    """Yield a passage for the rows of each document, and one for every other row."""
    numbered = enumerate(rows)
    groups = (
        [row for _, row in g] for _, g in groupby(numbered, lambda e: id(e[1].document) if e[1].document else -e[0])
    )
    while chunk := list(islice(groups, PASSAGES)):
        tokenizer = tokenizer.opened()
        whole = iter(tokenizer.encode_aligned([group[0].text for group in chunk if not group[0].parts]))
        given = list(dict.fromkeys(word for group in chunk for row in group for word in row.parts))
        spaced = tokenizer.encode_aligned([tokenizer.space + word for word in given])
        pieces = dict(zip(given, spaced, strict=True))
        for group in chunk:
            if group[0].parts:
                yield _of_words(group, pieces, tokenizer, align)
            else:
                yield _of_text(group[0].text, next(whole), tokenizer, align)


def _of_text(text: str, encoding: Any, tokenizer: Tokenizer, align: Align) -> Passage:
    """Return the passage of a text, with the words of the tokenizer: split at spaces and punctuation."""
    owners, offsets = np.array(encoding.word_ids, dtype=np.int64), encoding.offsets
    firsts = np.flatnonzero(np.diff(owners, prepend=-1)) if align != "none" else np.arange(len(owners))
    firsts = np.append(firsts, len(owners))
    places = offsets
    if align != "none":
        places = [(offsets[a][0], offsets[b - 1][1]) for a, b in pairwise(firsts.tolist())]
    words = encoding.tokens if align == "none" else [text[begin:end] for begin, end in places]
    return Passage([text], words, places, firsts, np.array(encoding.ids, dtype=np.int64), [len(words)], tokenizer)


def _of_words(rows: Sequence[Row], pieces: dict[str, Any], tokenizer: Tokenizer, align: Align) -> Passage:
    """Return the passage of sentences with given words; a word that normalisation removes becomes unknown."""
    words: list[str] = []
    offsets: list[tuple[int, int]] = []
    tokens: list[int] = []
    sizes: list[int] = []
    ends: list[int] = []
    for row in rows:
        for word, (begin, end) in zip(row.parts, words_of(row), strict=True):
            encoding = pieces[word]
            ids = encoding.ids or [tokenizer.unknown_id]
            tokens += ids
            if align == "none" and encoding.ids:
                words += encoding.tokens
                start = begin - len(tokenizer.space)
                offsets += [(max(begin, start + a), max(begin, start + b)) for a, b in encoding.offsets]
                sizes += [1] * len(ids)
            else:
                words.append(tokenizer.frame.unknown if align == "none" else word)
                offsets.append((begin, end))
                sizes.append(len(ids))
        ends.append(len(words))
    firsts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    texts = [row.text for row in rows]
    return Passage(texts, words, offsets, firsts, np.array(tokens, dtype=np.int64), ends, tokenizer)


def windows(passage: Passage, room: int, overlap: int) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
    """Yield windows of a passage that fit into the model: begin, end, and the tokens whose states are taken from there.

    Two neighbours meet in the middle of their overlap, where a token has as much context in one as in the other. A word
    belongs to the window of its middle; its tokens are taken from two windows only if it does not fit into that one.
    """
    count, firsts, sizes = len(passage.tokens), passage.firsts[:-1], np.diff(passage.firsts)
    number = max(1, -(-(count - overlap) // (room - overlap)))
    begins = np.linspace(0, max(0, count - room), number).round().astype(np.int64)
    borders = (begins[1:] + begins[:-1] + room) / 2
    of_words = np.searchsorted(borders, firsts + (sizes - 1) / 2, side="right")
    whole = (firsts >= begins[of_words]) & (firsts + sizes <= begins[of_words] + room)
    nearest = np.searchsorted(borders, np.arange(count), side="right")
    taken = np.where(np.repeat(whole, sizes), np.repeat(of_words, sizes), nearest)
    for i, begin in enumerate(begins.tolist()):
        yield begin, min(begin + room, count), np.flatnonzero(taken == i)


@dataclass(frozen=True)
class Window:
    """A window to encode: the places of the tokens that are taken, their words in the part, and their weights."""

    example: Example
    places: NDArray[np.int64]
    words: NDArray[np.int64]
    weights: NDArray[np.float32]


class Extractor:
    """An encoder with the settings that turn its hidden states into features."""

    def __init__(
        self,
        predictor: Predictor,
        layers: str,
        align: str,
        dtype: str,
        max_length: int | None = None,
        overlap: int | None = None,
    ) -> None:
        engine = predictor.torch_engine
        self.encoder, self.device, self.engine = engine.model.encoder, engine.device, engine
        self.tokenizer, config = predictor.tokenizer, self.encoder.config
        numbers = parse_layers(layers, config.num_layers)
        name = str(predictor.folder)
        self.described = Described(name, numbers, align, dtype, config.hidden_size)  # type: ignore[arg-type]
        length = config.max_positions if max_length is None else max_length
        least = self.tokenizer.frame.size(1) + 2
        if not least <= length <= config.max_positions:
            raise UserError(f"--max-length {max_length} is not between {least} and the model's {config.max_positions}")
        self.max_length, self.room = length, length - self.tokenizer.frame.size(1)
        self.overlap = self.room // 4 if overlap is None else overlap
        if not 0 <= self.overlap <= self.room // 2:
            raise UserError(f"--overlap {overlap} is not between 0 and {self.room // 2}, half of a window")

    def parts(self, rows: Iterable[Row]) -> Iterator[list[Passage]]:
        """Yield lists of passages whose vectors fit into memory together; a larger passage is a list by itself."""
        chosen: list[Passage] = []
        size = 0
        for passage in passages(rows, self.tokenizer, self.described.align):
            more = len(passage.words) * self.described.bytes_per_word
            if chosen and size + more > PART_BYTES:
                yield chosen
                chosen, size = [], 0
            chosen.append(passage)
            size += more
        if chosen:
            yield chosen

    def write(self, path: Path, part: Sequence[Passage]) -> tuple[int, int]:
        """Compute and write a part; return the numbers of its texts and words."""
        cuts = [words for p in part for words in _cut(p.words, p.ends)]
        offsets = [place for passage in part for place in passage.offsets]
        places = np.array(offsets, dtype=np.int32).reshape(-1, 2)
        with tempfile.TemporaryFile(dir=path.parent) as scratch:
            vectors = self._zeros(len(places), scratch)
            self._fill(vectors, list(self.windows(part)))
            write_part(path, [text for passage in part for text in passage.texts], cuts, places, vectors)
        return len(cuts), len(places)

    def _zeros(self, words: int, scratch: Any) -> NDArray[Any]:
        """Return zeros (W, layers, H), in memory or, for a single very long text, on disk."""
        shape = (words, len(self.described.layers), self.described.hidden_size)
        if words * self.described.bytes_per_word <= PART_BYTES:
            return np.zeros(shape, self.described.dtype)
        return np.memmap(scratch, self.described.dtype, "w+", shape=shape)

    def windows(self, part: Sequence[Passage]) -> Iterator[Window]:
        """Yield the windows of passages; their words are numbered from the first word of the part."""
        before = 0
        for passage in part:
            sizes = np.diff(passage.firsts)
            words, weights = np.repeat(np.arange(len(sizes)), sizes), np.repeat(1 / sizes, sizes).astype(np.float32)
            read = np.ones(len(words), dtype=bool)
            if self.described.align == "first":
                read[:], weights[:] = False, 1
                read[passage.firsts[:-1]] = True
            for begin, end, taken in windows(passage, self.room, self.overlap) if len(words) else ():
                joined = passage.tokenizer.joiner.join(passage.tokens[begin:end])
                taken = taken[read[taken]]
                places = taken - begin + joined.begins[0]
                yield Window(example_of(joined, passage.tokenizer), places, before + words[taken], weights[taken])
            before += len(sizes)

    @torch.inference_mode()
    def _fill(self, vectors: NDArray[Any], cut: list[Window]) -> None:
        """Add the states of all windows to the vectors of their words; batches hold windows of similar length."""
        self.encoder.eval()
        for chosen in batches([window.example for window in cut], batch_tokens(self.device)):
            some = [cut[i] for i in chosen]
            words, pooled = self._pooled(some)
            vectors[words] += pooled.cpu().numpy()
            if not np.isfinite(vectors[words]).all():
                advice = "; use --dtype float32" if self.described.dtype == "float16" else ""
                raise UserError(f"a hidden state is not finite as {self.described.dtype}{advice}")

    @torch.inference_mode()
    def states(self, some: Sequence[Window]) -> list[tuple[NDArray[np.int64], NDArray[Any]]]:
        """Return the words of each window and their pooled states (words, layers, H), for windows of several parts."""
        self.encoder.eval()
        begins = np.cumsum([0, *(int(window.words.max(initial=-1)) + 1 for window in some)])
        shifted = [replace(w, words=w.words + begin) for w, begin in zip(some, begins, strict=False)]
        words, pooled = self._pooled(shifted)
        bounds = np.searchsorted(words, begins)
        found = pooled.cpu().numpy()
        return [(words[a:b] - begin, found[a:b]) for (a, b), begin in zip(pairwise(bounds), begins, strict=False)]

    def _pooled(self, some: Sequence[Window]) -> tuple[NDArray[np.int64], Tensor]:
        """Return the words of some windows and their pooled states (words, layers, H)."""
        batch = collate([window.example for window in some], packed=True)
        starts = np.concatenate([[0], np.cumsum([len(window.example.tokens) for window in some])])
        places = np.concatenate([start + window.places for start, window in zip(starts, some, strict=False)])
        with threads_of(self.engine.threads):
            states = hidden_states(self.encoder, batch.to(self.device), self.described.layers)
        read = torch.from_numpy(places).to(self.device)
        found = torch.stack([states[layer][read].float() for layer in self.described.layers], 1)  # (tokens, layers, H)
        words, owners = np.unique(np.concatenate([window.words for window in some]), return_inverse=True)
        weights = torch.from_numpy(np.concatenate([window.weights for window in some])).to(self.device)
        pooled = found.new_zeros(len(words), *found.shape[1:])
        pooled.index_add_(0, torch.from_numpy(owners).to(self.device), found * weights[:, None, None])
        return words, pooled.to(getattr(torch, self.described.dtype))


def _cut(words: list[str], ends: list[int]) -> Iterator[list[str]]:
    return (words[begin:end] for begin, end in zip([0, *ends], ends, strict=False))


def _finished_parts(work: Path, described: Described) -> Described:
    """Return the description with the parts that a stopped run has written, up to the first that is damaged."""
    for left in work.glob(".*"):  # half-written files of the killed process
        left.unlink()
    written = read_index(work / PARTS) if (work / PARTS).exists() else described
    good = 0
    while good < len(written.hashes) and _is_whole(part_file(work, good), written.hashes[good]):
        good += 1
    if good < len(written.hashes):
        say(f"note: {part_file(work, good)} is damaged; it and the parts after it are extracted again")
    say(f"resuming after {sum(written.texts[:good]):,} texts")
    parts = {"texts": written.texts[:good], "words": written.words[:good], "hashes": written.hashes[:good]}
    return replace(described, **parts)  # type: ignore[arg-type]


def _is_whole(path: Path, expected: str) -> bool:
    return path.exists() and file_hash(path) == expected


def _finish(work: Path, out: Path, described: Described) -> dict[str, Any]:
    """Rename the partial folder to the output folder and return a summary of it."""
    size = sum(path.stat().st_size for path in work.glob("part-*"))
    write_index(work, described)
    for name in (FACTS, PARTS):
        (work / name).unlink(missing_ok=True)
    if out.exists():
        out.rmdir()  # an empty folder; any other was refused
    os.replace(work, out)
    sync(out.parent)
    unit, count = "token" if described.align == "none" else "word", sum(described.words)
    return {
        "features": str(out),
        "texts": sum(described.texts),
        f"{unit}s": count,
        "layers": list(described.layers),
        "dimensions": described.hidden_size,
        "dtype": described.dtype,
        "bytes": size,
        f"bytes_per_{unit}": round(size / max(1, count)),
    }
