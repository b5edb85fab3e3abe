"""Raw text to a corpus folder: read, split into sentences, tokenise on all cores, write shards in input order."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as Backend

from bertsmith.data.readers import Document, Documents
from bertsmith.data.shards import Corpus, ShardFacts, Tokens, write_manifest, write_shard
from bertsmith.errors import UserError
from bertsmith.folders import new_folder
from bertsmith.progress import progress_bar, say
from bertsmith.text.sentences import split_sentences
from bertsmith.text.tokenizer import Tokenizer

BLOCK_CHARACTERS = 1 << 20  # what a worker takes at a time
SHARD_TOKENS = 1 << 25  # when a shard is full
MAX_SENTENCE = 512  # tokens; a longer "sentence" (a table, a list) is cut, so that no text is out of reach


def build_corpus(
    inputs: Sequence[str | Path],
    tokenizer: str | Path,
    out: str | Path,
    *,
    workers: int | None = None,
    field: str = "text",
) -> Corpus:
    """Tokenise text files into a corpus folder; the result does not depend on the number of workers."""
    tok, documents, count = Tokenizer.load(tokenizer), Documents.of(inputs, field), workers
    if count is None:
        count = os.cpu_count() or 1
    if count < 1:
        raise UserError(f"--workers {workers}: give a number of at least 1")
    with new_folder(out) as folder, progress_bar("building the corpus", documents.num_bytes) as advance:
        shards: list[ShardFacts] = []
        total = 0
        for part in _shard_sized(_tokenised(documents, tok, count)):
            name = folder / f"{len(shards):05}.safetensors"
            shards.append(write_shard(name, part, tok.vocab_size, tok.hash))
            total += len(part.tokens)
            advance(documents.reading.bytes_read, f"{total:,} tokens")
        if not total:
            raise UserError(f"no text in {', '.join(map(str, inputs))}")
        tok.save(folder)
        write_manifest(folder, tok.hash, tok.vocab_size, shards)
    if warning := documents.reading.warning():
        say(f"warning: {warning}")
    return Corpus.open(out)


def _tokenised(documents: Iterable[Document], tok: Tokenizer, workers: int) -> Iterator[Tokens]:
    """Blocks of documents through the workers, in order, never more than a few of them in flight."""
    if workers == 1:
        yield from (tokenise(block, tok.backend) for block in _blocks(documents))
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start_worker, (tok.backend.to_str(),)) as pool:
        waiting: deque[Future[Tokens]] = deque()
        for block in _blocks(documents):
            waiting.append(pool.submit(_work, block))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _blocks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    block: list[Document] = []
    size = 0
    for document in documents:
        block.append(document)
        size += sum(map(len, document))
        if size >= BLOCK_CHARACTERS:
            yield block
            block, size = [], 0
    if block:
        yield block


def tokenise(block: Sequence[Document], backend: Backend) -> Tokens:
    """Sentences and token ids of some documents; what holds no token is left out."""
    split = [[s for paragraph in document for s in split_sentences(paragraph)] for document in block]
    encodings = iter(backend.encode_batch_fast([s for d in split for s in d], add_special_tokens=False))
    ids: list[list[int]] = []
    sizes: list[int] = []
    for sentences in split:
        before = len(ids)
        for _ in sentences:
            sentence = next(encodings).ids
            ids += [sentence[i : i + MAX_SENTENCE] for i in range(0, len(sentence), MAX_SENTENCE)]
        if len(ids) > before:
            sizes.append(len(ids) - before)
    tokens = np.array([token for sentence in ids for token in sentence], dtype=np.uint32)
    return Tokens(tokens, np.array([len(i) for i in ids], dtype=np.int64), np.array(sizes, dtype=np.int64))


def _shard_sized(parts: Iterable[Tokens]) -> Iterator[Tokens]:
    held: list[Tokens] = []
    for part in parts:
        held.append(part)
        if sum(len(p.tokens) for p in held) >= SHARD_TOKENS:
            yield Tokens.join(held)
            held = []
    if held and sum(len(p.tokens) for p in held):
        yield Tokens.join(held)


_backend: Backend | None = None


def _start_worker(serialised: str) -> None:
    global _backend
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker is one core
    _backend = Backend.from_str(serialised)


def _work(block: list[Document]) -> Tokens:
    assert _backend is not None
    return tokenise(block, _backend)
