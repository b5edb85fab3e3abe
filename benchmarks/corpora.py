"""The text of the benchmarks that pre-train: its files, the tokenizers trained on it, and the corpora made of both."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bertsmith.config import override
from bertsmith.corpus.build import BuildConfig, build_corpus
from bertsmith.corpus.shards import MANIFEST
from bertsmith.corpus.sources import Reading, find_sources, read_blocks
from bertsmith.corpus.vocabulary import train_tokenizer
from bertsmith.text.tokenizer import Kind

KINDS: tuple[Kind, ...] = ("wordpiece", "bytes", "unigram")  # of tokenizers
VOCABULARY = 32_000
FACTS = "facts.json"


@dataclass(frozen=True)
class Text:
    """What a corpus is made of: a tokenizer, text files by the beginnings of their names (none: all), the cleaning."""

    tokenizer: str
    files: tuple[str, ...] = ()
    clean: tuple[str, ...] = ()  # changes of the settings of `corpus build`


def text_files(data: Path, beginnings: Sequence[str] = ()) -> list[Path]:
    """The text files whose names begin in one of these ways, in the folders `text` up to two levels down."""
    found = [path for depth in ("", "*/") for path in data.glob(f"{depth}text/*.txt*")]
    if not found:
        raise SystemExit(f"{data} holds no text: put .txt or .txt.xz files into {data}/text")
    chosen = [path for path in found if path.name.startswith(tuple(beginnings) or "")]
    if not chosen:
        raise SystemExit(f"{data} holds no text file whose name begins with {' or '.join(beginnings)}")
    return sorted(chosen, key=lambda path: path.name)  # the order of the documents decides which ones are held out


def train_tokenizers(data: Path, kinds: Sequence[Kind], vocabulary: int) -> None:
    """Train a tokenizer of every kind on the same text, and note how many bytes each file has."""
    text, out = text_files(data), data / "tokenizers"
    for kind in kinds:
        if not (out / kind).exists():
            train_tokenizer(text, out / kind, vocab_size=vocabulary, kind=kind)
    write_sizes(data)


def write_sizes(data: Path) -> None:
    """Note how many bytes each text file has without its compression, beside the tokenizers."""
    blocks = {path.name: read_blocks(find_sources([path]), "text", Reading()) for path in text_files(data)}
    sizes = {name: sum(len(block.data) for block in found) for name, found in blocks.items()}
    (data / "tokenizers" / FACTS).write_text(json.dumps({"bytes": sizes}), encoding="utf-8")


def in_tokenizers(data: Path, name: str) -> Path:
    """The folder of a tokenizer inside the data, or the file beside them."""
    for depth in ("", "*/"):
        for found in sorted(data.glob(f"{depth}tokenizers/{name}")):
            return found
    raise SystemExit(f"{data} holds no tokenizers/{name}: run `tokenizers` first")


def corpus_folder(data: Path, work: Path, name: str, text: Text | None = None) -> Path:
    """The corpus of this name, built if that is not done; one of all the text has the name of its tokenizer."""
    folder, text = work / "corpora" / name, text or Text(name)
    if not (folder / MANIFEST).exists():
        files, tokenizer = text_files(data, text.files), in_tokenizers(data, text.tokenizer)
        config = override(BuildConfig(), text.clean)
        build_corpus(files, tokenizer, folder, config=config, workers=max(1, (os.cpu_count() or 2) - 1))
    return folder


def text_bytes(data: Path, files: Sequence[Path]) -> int:
    """The bytes of these text files, without their compression."""
    sizes = json.loads(in_tokenizers(data, FACTS).read_text(encoding="utf-8"))["bytes"]
    return sum(sizes[path.name] for path in files)
