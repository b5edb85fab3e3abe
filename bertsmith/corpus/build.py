"""Build a corpus folder from raw text: read, clean, split into sentences, tokenise on all cores, write shards.

The input is cut into blocks and each block becomes one shard, whichever worker makes it: the bytes do not depend on
the number of workers, and a build that was stopped resumes with the shards that are missing.
"""

from __future__ import annotations

import json
import os
from array import array
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors.numpy import save
from tokenizers import Tokenizer as Backend

from bertsmith.config import to_dict
from bertsmith.corpus.cleaning import CleanConfig, clean
from bertsmith.corpus.duplicates import DropList, Drops, find_drops, hash_documents
from bertsmith.corpus.readers import Document, ReadErrors, parse
from bertsmith.corpus.shards import (
    PLAN,
    SUFFIX,
    Corpus,
    Tokens,
    pack_shard,
    read_origin,
    read_written,
    shard_name,
    write_manifest,
)
from bertsmith.corpus.sources import BLOCK_BYTES, Block, Reading, Source, find_sources, read_blocks
from bertsmith.corpus.store import SEAL, Store
from bertsmith.corpus.workers import Engine, run_in_order, stopped_by_signals
from bertsmith.errors import UserError
from bertsmith.folders import writes
from bertsmith.progress import progress_bar, say
from bertsmith.text.sentences import split_sentences
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.text.unknown import Unknowns

MAX_SENTENCE = 512  # tokens; a longer "sentence" (a table, a list) is cut, so that all of its text is used
ENCODE_SENTENCES = 4096  # encoded at a time, to bound the memory of the library
HASHES = ".hashes"
Run = Callable[[Callable[[Any], Any], Iterable[Any]], Generator[Any, None, None]]


@dataclass(frozen=True)
class BuildConfig:
    """How a corpus is built: the cleaning, and whether bad records and files are skipped."""

    clean: CleanConfig = field(default_factory=CleanConfig)
    skip_bad: bool = False
    text_field: str = "text"
    encoding: str = ""  # of the input; empty: UTF-8


@dataclass(frozen=True)
class Work:
    """The input of a worker: a block, what to drop from it, and how to process the rest."""

    block: Block
    config: BuildConfig
    drops: Drops = field(default_factory=Drops)
    tokenizer: str = ""  # serialised
    space: str = ""  # before a sentence inside a document


@writes()
def build_corpus(
    inputs: Sequence[str | Path],
    tokenizer: str | Path,
    out: str | Path,
    *,
    config: BuildConfig | None = None,
    workers: int | None = None,
    engine: Engine = "local",
    address: str | None = None,
) -> Corpus:
    """Tokenise text files into a corpus folder; the same call after an interruption resumes the build."""
    count = os.cpu_count() or 1 if workers is None else workers
    if count < 1:
        raise UserError(f"--workers {workers}: give a number of at least 1")
    config = config or BuildConfig()
    tok, sources, store = Tokenizer.load(tokenizer), find_sources(inputs, config.encoding), Store(str(out))
    _open_plan(store, _plan(tok, sources, config))
    try:
        with stopped_by_signals("finished shards are kept, and the same command resumes the build"):
            _build(store, sources, tok, config, partial(run_in_order, workers=count, engine=engine, address=address))
    except BaseException as error:
        if not any(name.endswith((SUFFIX, HASHES)) for name in store.names()):  # nothing to resume from
            store.remove()
        elif isinstance(error, UserError):
            raise UserError(
                f"{error}; finished shards are kept: fix the file or add --skip-bad, and run the same command again"
            ) from None
        raise
    return Corpus.open(out)


def _plan(tok: Tokenizer, sources: Sequence[Source], config: BuildConfig) -> dict[str, Any]:
    """Everything that the bytes of the shards depend on, except the contents of files, which each shard records."""
    settings = {name: value for name, value in to_dict(config).items() if name != "skip_bad"}
    if not config.encoding:
        del settings["encoding"]  # older versions, whose builds can be resumed, had no such setting
    return {"tokenizer": tok.hash, "inputs": [s.url for s in sources], "block_bytes": BLOCK_BYTES, **settings}


def _open_plan(store: Store, plan: dict[str, Any]) -> None:
    """Begin a build, or resume the one that was stopped; any other folder is refused and not changed."""
    if store.local is not None and store.local.is_file():
        raise UserError(f"--out {store.url} is a file; give a folder")
    names = store.names()
    if not names:
        store.write(PLAN, json.dumps(plan, indent=2).encode())
        return
    if PLAN not in names:
        raise UserError(f"--out {store.url} is there already and not empty; choose another --out or remove it")
    stored = _read_plan(store)
    for key, value in plan.items():
        if stored.get(key) != value:
            raise UserError(
                f"{store.url} holds an unfinished corpus with other {key}: {stored.get(key)!r}, now {value!r}; "
                "resume it with the same command, choose another --out, or remove it"
            )
    store.sweep()
    say(f"resuming {store.url}: {sum(name.endswith(SUFFIX) for name in names)} shards are finished")


def _read_plan(store: Store) -> dict[str, Any]:
    try:
        stored = json.loads(store.read(PLAN))
    except ValueError:
        stored = None
    if not isinstance(stored, dict):
        raise UserError(f"{store.url}/{PLAN} is damaged; remove {store.url} and build the corpus again")
    return stored


def _build(store: Store, sources: Sequence[Source], tok: Tokenizer, config: BuildConfig, run: Run) -> None:
    """Find duplicates, tokenise, and write the manifest last."""
    read_errors = ReadErrors()
    with _hash_store(store) as hashes:
        drops = _compare(hashes, sources, config, run) if config.clean.compares else None
        _tokenise(store, sources, tok, config, drops, run, read_errors)
        for name in hashes.names():
            if name.endswith((HASHES, HASHES + SEAL, ".drops")):
                hashes.delete(name)
    unknown = tok.unknown_id
    written = [read_written(store, name, unknown) for name in store.names() if name.endswith(SUFFIX)]
    for shard in written:
        read_errors.add(shard.read_errors)
        if not shard.facts.documents:
            store.delete(shard.facts.name)
            store.delete(shard.facts.name + SEAL)
    if not any(shard.facts.documents for shard in written):
        raise UserError(f"no text in {', '.join(source.url for source in sources)}")
    for name, data in tok.files().items():
        store.write(name, data)
    write_manifest(store, tok.hash, tok.vocab_size, written, clean=config.clean)
    for name in (PLAN, *(shard.facts.name + SEAL for shard in written)):
        store.delete(name)
    counts = Unknowns(tok, sum(s.facts.tokens for s in written), sum(s.unknown for s in written))
    if warning := counts.warning("the corpus"):
        say(f"warning: {warning}")
    for warning in read_errors.warnings():
        say(f"warning: {warning}")


def _hash_store(store: Store) -> AbstractContextManager[Any]:
    """The folder for hashes between the passes: that of the shards, or a local one if the shards are remote."""
    return nullcontext(store) if store.local is not None else _TemporaryStore()


class _TemporaryStore(TemporaryDirectory[str]):
    def __enter__(self) -> Store:  # type: ignore[override]
        return Store(super().__enter__())


def _compare(hashes: Store, sources: Sequence[Source], config: BuildConfig, run: Run) -> DropList:
    """The first pass: hash every block, then find the hashes that repeat."""
    names: list[str] = []

    def missing() -> Iterator[Work]:
        for number, block in enumerate(_blocks(sources, config, "looking for duplicates", ReadErrors())):
            names.append(f"{number:06}{HASHES}")
            if read_origin(hashes, names[-1]) != block.origin:
                pending.append(names[-1])
                yield Work(block, config)

    pending: list[str] = []
    with closing(run(hash_block, missing())) as results:
        for number, result in enumerate(results):
            hashes.write_sealed(pending[number], result)
    assert hashes.local is not None
    return find_drops([hashes.local / name for name in names], config.clean, hashes.local)


def _tokenise(
    store: Store,
    sources: Sequence[Source],
    tok: Tokenizer,
    config: BuildConfig,
    drops: DropList | None,
    run: Run,
    read_errors: ReadErrors,
) -> None:
    """The second pass: a shard for every block that has none yet."""
    serialised = tok.backend.to_str()
    pending: list[str] = []

    def missing() -> Iterator[Work]:
        for number, block in enumerate(_blocks(sources, config, "building the corpus", read_errors)):
            if read_origin(store, shard_name(number)) != block.origin:
                pending.append(shard_name(number))
                yield Work(block, config, drops.of(number) if drops else Drops(), serialised, tok.space)

    with closing(run(tokenise_block, missing())) as results:
        for number, shard in enumerate(results):
            store.write_sealed(pending[number], shard)


def _blocks(sources: Sequence[Source], config: BuildConfig, title: str, read_errors: ReadErrors) -> Iterator[Block]:
    """Yield all blocks, with a progress bar over the bytes read."""
    reading = Reading()
    with progress_bar(title, sum(source.size for source in sources)) as advance:
        for block in read_blocks(sources, config.text_field, reading, config.skip_bad):
            advance(reading.bytes_read, "")
            yield block
        advance(reading.bytes_read, "")
    read_errors.bad += reading.bad


def hash_block(work: Work) -> bytes:
    """Hash the documents of a block: the work of the first pass."""
    hashes = hash_documents(_documents(work, ReadErrors(), Counter()), work.config.clean)
    return save(hashes, {"bertsmith": json.dumps({"origin": work.block.origin})})


def tokenise_block(work: Work) -> bytes:
    """Turn a block into the bytes of a shard: the work of the second pass."""
    read_errors, stats = ReadErrors(), Counter[str]()
    documents = _kept(_documents(work, read_errors, stats), work.drops, stats)
    tokens = tokenise(documents, _backend(work.tokenizer), work.space)
    return pack_shard(tokens, _vocab_size(work.tokenizer), dict(stats), read_errors, work.block.origin)


def _documents(work: Work, read_errors: ReadErrors, stats: Counter[str]) -> Iterator[Document]:
    """Yield the cleaned documents of a block."""
    for document in parse(work.block, work.config.text_field, read_errors, work.config.skip_bad):
        stats["documents_read"] += 1
        if cleaned := clean(document, work.config.clean):
            yield cleaned
        else:
            stats["documents_filtered"] += 1


def _kept(documents: Iterable[Document], drops: Drops, stats: Counter[str]) -> Iterator[Document]:
    """Yield the documents without duplicates."""
    first = 0
    for number, document in enumerate(documents):
        kept = [text for place, text in enumerate(document, first) if place not in drops.paragraphs]
        first += len(document)
        if number in drops.documents:
            stats["duplicate_documents"] += 1
            continue
        stats["dropped_paragraphs"] += len(document) - len(kept)
        if kept:
            yield kept


@lru_cache(maxsize=1)
def _backend(serialised: str) -> Backend:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker uses one core
    return Backend.from_str(serialised)


@lru_cache(maxsize=1)
def _vocab_size(serialised: str) -> int:
    """The largest id plus one, which decides the data type of the ids."""
    return max(_backend(serialised).get_vocab().values()) + 1


def tokenise(documents: Iterable[Document], backend: Backend, space: str = "") -> Tokens:
    """Split documents into sentences and tokenise them; sentences and documents without tokens are dropped.

    `space` is put before every sentence that follows another one (see `Tokenizer.space`).
    """
    tokens, lengths, sizes = array("I"), array("q"), array("q")
    for batch in _batches(documents):
        texts = [space * (place > 0) + text for document in batch for place, text in enumerate(document)]
        encodings = iter(backend.encode_batch_fast(texts, add_special_tokens=False))
        for sentences in batch:
            before = len(lengths)
            for _ in sentences:
                ids = next(encodings).ids
                tokens.extend(ids)
                lengths.extend(min(MAX_SENTENCE, len(ids) - i) for i in range(0, len(ids), MAX_SENTENCE))
            if len(lengths) > before:
                sizes.append(len(lengths) - before)
    columns = np.frombuffer(lengths, np.int64), np.frombuffer(sizes, np.int64)
    return Tokens(np.frombuffer(tokens, np.uint32), *columns)


def _batches(documents: Iterable[Document]) -> Iterator[list[list[str]]]:
    """Yield documents as lists of sentences, some thousand sentences at a time."""
    batch: list[list[str]] = []
    count = 0
    for document in documents:
        batch.append([sentence for paragraph in document for sentence in split_sentences(paragraph)])
        count += len(batch[-1])
        if count >= ENCODE_SENTENCES:
            yield batch
            batch, count = [], 0
    yield batch
