"""Train a tokenizer on text files, with bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bertsmith.corpus.coverage import Coverage, coverage
from bertsmith.corpus.readers import Document, ReadErrors, parse
from bertsmith.corpus.sources import RECORD_ENDS, Block, Reading, Source, find_sources, read_blocks
from bertsmith.folders import new_folder, writes
from bertsmith.progress import Advance, progress_bar, say
from bertsmith.text.normalisation import Normalisation
from bertsmith.text.tokenizer import Kind, Tokenizer
from bertsmith.text.training import train

SAMPLE_BYTES = 100_000_000  # of plain text; training keeps every distinct word in memory, which takes less than 1 GiB
HELD_OUT_EVERY = 50  # one in this many documents is held out
HELD_OUT_FROM = 2_000_000  # bytes of text; of a smaller text nothing is held out
HELD_OUT_MOST = 4_000_000  # characters
SHARES = (10.0, 20.0, 60.0)  # percent of the time for measuring, characters and words; the rest is training


@dataclass(frozen=True, eq=False)
class TrainedTokenizer:
    """A new tokenizer, its coverage of held-out documents (None for a small text), and the sample it was trained on."""

    tokenizer: Tokenizer
    coverage: Coverage | None
    sampled: str  # a description; empty if the whole text was used


@writes()
def train_tokenizer(
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    vocab_size: int = 30_000,
    kind: Kind = "wordpiece",
    cased: bool | None = None,
    jamo: bool = False,
    normalise: Sequence[str] = (),
    morphemes: str = "",
    field: str = "text",
    encoding: str = "",
    skip_bad: bool = False,
) -> TrainedTokenizer:
    """Train a vocabulary on text files and save it as a folder.

    `kind` is WordPiece (BERT), byte-level BPE (RoBERTa), Unigram (ALBERT), BPE with marked ends (OpenAI GPT) or whole
    words (ELMo). `cased` keeps capitals and accents, by default with byte-level BPE and words; `jamo` decomposes Hangul
    into jamo, as the released uncased models do. `normalise` is a list of "nfc", "nfkc", "width" (full-width and
    half-width characters), "repeats=N" (repeated marks, ㅋㅋㅋㅋ) and "numbers" (each digit is 0); see
    `bertsmith.text.normalisation`. `morphemes="kiwi"` lets no entry cross from a Korean stem into a particle or an
    ending; Kiwi is only used for the training. Of more than 100 MB of text an evenly spread sample of that size is
    used. `encoding` is the encoding of the files, by default UTF-8; with `skip_bad` records and files that cannot be
    read are skipped, with a warning.
    """
    chosen = Normalisation.parse(normalise)
    sources = find_sources(inputs, encoding)
    with new_folder(out) as folder, progress_bar("training the vocabulary", 100) as advance:
        text = _Text(sources, field, advance, skip_bad)
        text.measure()
        sampled = text.sampled
        if sampled:
            say(f"note: the vocabulary is trained on {sampled}, spread evenly over all inputs")
        try:
            tokenizer = train(text, vocab_size, kind, cased=cased, jamo=jamo, normalise=chosen, morphemes=morphemes)
        finally:  # skipped files may be the reason that there are no words
            for warning in text.read_errors.warnings():
                say(f"warning: {warning}")
        tokenizer.save(folder)
        found = coverage(tokenizer, text.held_out) if text.held_out else None
    if tokenizer.vocab_size < vocab_size:
        say(f"note: the text supports {tokenizer.vocab_size:,} entries, fewer than --vocab-size {vocab_size:,}")
    return TrainedTokenizer(tokenizer, found, sampled)


@dataclass(eq=False)
class _Text:
    """The paragraphs to train on, which can be iterated any number of times, and the held-out paragraphs."""

    sources: list[Source]
    text_field: str
    advance: Advance
    skip_bad: bool = False
    size: int = 0  # bytes of plain text
    passes: int = 0
    read_errors: ReadErrors = field(default_factory=ReadErrors)
    held_out: list[str] = field(default_factory=list)

    def measure(self) -> None:
        """Count the bytes of text by reading all of it, since the size of a compressed file does not show it."""
        self.size = sum(map(_size, self._blocks()))

    @property
    def sampled(self) -> str:
        """A description of the sample's size; empty if the whole text is used."""
        return f"{SAMPLE_BYTES / 1e6:,.1f} of {self.size / 1e6:,.1f} MB of text" if self.size > SAMPLE_BYTES else ""

    def __iter__(self) -> Iterator[str]:
        self.read_errors, self.held_out = ReadErrors(), []
        room = HELD_OUT_MOST if self.size >= HELD_OUT_FROM else 0
        for number, document in enumerate(self._documents(), 1):
            length = sum(map(len, document))
            if number % HELD_OUT_EVERY == 0 and length <= room:
                self.held_out += document
                room -= length
            else:
                yield from document

    def _documents(self) -> Iterator[Document]:
        for block in sample(self._blocks(), min(1.0, SAMPLE_BYTES / max(1, self.size))):
            yield from parse(block, self.text_field, self.read_errors, self.skip_bad)

    def _blocks(self) -> Iterator[Block]:
        reading, total = Reading(), sum(source.size for source in self.sources)
        start, share = sum(SHARES[: self.passes]), SHARES[min(self.passes, len(SHARES) - 1)]
        for block in read_blocks(self.sources, self.text_field, reading, self.skip_bad):
            yield block
            self.advance(min(99.0, start + share * reading.bytes_read / total), "")
        self.read_errors.bad += reading.bad
        self.passes += 1


def sample(blocks: Iterable[Block], share: float) -> Iterator[Block]:
    """Cut every block to its beginning, so that together they are a share of the text, spread over all of it.

    Where a block gives too much, because it is cut at the end of a record or line, the next blocks give less.
    """
    due = 0.0
    for block in blocks:
        if share < 1:
            due += share * _size(block)
            if due < 1:
                continue
            block = _beginning(block, int(due))
            due -= _size(block)
        yield block


def _beginning(block: Block, size: int) -> Block:
    """A block's records up to the first one that ends after `size` bytes; plain text is cut at any line end."""
    if isinstance(block.data, list):
        rows, taken = 0, 0
        while rows < len(block.data) and taken < size:
            taken += len(block.data[rows].encode())
            rows += 1
        return replace(block, data=block.data[:rows])
    if block.kind == "text":
        end = block.data.find(b"\n", size - 1) + 1
    else:
        match = RECORD_ENDS[block.kind].search(block.data, size - 1)
        end = match.end() if match else 0
    return replace(block, data=block.data[:end]) if end else block


def _size(block: Block) -> int:
    """The number of bytes of a block's text."""
    return len(block.data) if isinstance(block.data, bytes) else sum(len(row.encode()) for row in block.data)
