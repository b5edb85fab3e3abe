"""The doctor's measurements: of text as it is read, and of tokens and segment pairs as training would see them."""

from __future__ import annotations

import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.corpus.build import tokenise
from bertsmith.corpus.cleaning import CleanConfig, script_counts
from bertsmith.corpus.duplicates import text_hash
from bertsmith.corpus.readers import Document, ReadErrors
from bertsmith.corpus.shards import Corpus, Shard, pack_shard, read_written, shard_name, write_manifest
from bertsmith.corpus.store import Store
from bertsmith.pretraining.segments import PairSource
from bertsmith.text.frame import Frame, has_letter
from bertsmith.text.sentences import split_sentences, unwrap
from bertsmith.text.tokenizer import Tokenizer

NUM_EXAMPLES, EXAMPLE_LENGTH = 3, 120
REMEMBERED = 500_000  # hashes that are kept in memory, to show examples of duplicates
DISTINCT_LINES = 200_000
TOKENISED = 4 << 20  # characters of raw text that are tokenised
NUM_PAIRS, PAIR_LENGTHS = 2000, (128, 512)
LONG_PARAGRAPH, SHORT_LINE = (
    CleanConfig.paragraph_length,
    {False: 100, True: 50},
)  # characters; `SHORT_LINE` by whether text is split into sentences
SHORT_DOCUMENT, LONG_DOCUMENT = 200, 5_000_000  # characters
BLANKLESS = 1000  # paragraphs; a block of one document with more has no blank lines

_ENDED = re.compile(r"[.!?…。！？।؟۔][\"'”’»)\]」』]*(?:\s|$)|[다요죠까][\"'”’)]*$")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f]")
_TAGS = "a|b|i|p|u|br|hr|em|li|ol|ul|td|th|tr|h[1-6]|img|div|sub|sup|ref|span|font|html|head|body|table|strong|script"
_MARKUP = re.compile(rf"</?(?:{_TAGS}|style)(?:\s[^<>]{{0,200}})?/?>|&(?:nbsp|amp|quot|lt|gt|#\d{{1,6}});", re.I)


@dataclass
class Repeats:
    """The exact share of texts that repeat an earlier one, at 8 bytes per text."""

    hashes: array[int] = field(default_factory=lambda: array("Q"))
    seen: set[int] = field(default_factory=set)

    def add(self, text: str) -> bool:
        """Count a text; return whether it is known to be a duplicate."""
        value = text_hash(text)
        self.hashes.append(value)
        if value in self.seen:
            return True
        if len(self.seen) < REMEMBERED:
            self.seen.add(value)
        return False

    @property
    def share(self) -> float:
        values = np.array(self.hashes, dtype=np.uint64)
        return 1 - len(np.unique(values)) / len(values) if len(values) else 0.0


@dataclass
class Spread:
    """A sample of the added documents, spread evenly, up to a number of characters."""

    limit: int
    kept: list[Document] = field(default_factory=list)
    size: int = 0
    number: int = 0
    stride: int = 1

    def add(self, document: Document) -> None:
        if self.number % self.stride == 0:
            self.kept.append(_head(document, self.limit // 4))
            self.size += sum(map(len, self.kept[-1]))
        while self.size > self.limit:
            self.stride *= 2
            self.kept = self.kept[::2]
            self.size = sum(len(paragraph) for document in self.kept for paragraph in document)
        self.number += 1


@dataclass
class TextMeasures:
    """Measurements of documents as text; in a corpus folder, sentences take the place of paragraphs."""

    by_sentence: bool = False  # for a corpus folder, whose documents have sentences but no paragraphs
    paragraphs: int = 0
    characters: int = 0
    one_line: int = 0
    one_sentence: int = 0
    unended: int = 0
    joined: int = 0
    controls: int = 0
    replacements: int = 0
    marked_up: int = 0  # lines
    blankless: int = 0  # characters of blocks without a blank line
    invalid: int = 0
    bad: int = 0
    first_bad: str = ""
    lengths: array[int] = field(default_factory=lambda: array("q"))
    sentences: array[int] = field(default_factory=lambda: array("q"))  # characters of each
    document_repeats: Repeats = field(default_factory=Repeats)
    paragraph_repeats: Repeats = field(default_factory=Repeats)
    short_lines: Counter[str] = field(default_factory=Counter)
    letters: Counter[str] = field(default_factory=Counter)
    main_scripts: Counter[str] = field(default_factory=Counter)
    examples: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def documents(self) -> int:
        return len(self.lengths)

    def note(self, name: str, text: str) -> None:
        """Keep an example if there are not enough yet."""
        if len(self.examples[name]) < NUM_EXAMPLES:
            self.examples[name].append(shorten(text))

    def measure(self, document: Document, sentences: Sequence[str]) -> None:
        """Measure what raw text and a corpus folder both show of a document."""
        text = "\n".join(document)
        self.lengths.append(len(text))
        self.characters += len(text)
        self.paragraphs += len(document)
        if len(document) == 1:
            self.one_line += 1
            self.note("document_boundaries", text)
        if self.document_repeats.add(text):
            self.note("duplicate_documents", text)
        else:
            self._measure_lines(document)
        self._measure_sentences(text, sentences)
        if self.documents <= 2000 or self.documents % 16 == 0:
            self._measure_scripts(document)

    def measure_raw(self, document: Document) -> None:
        """Measure a document of raw text, including what a corpus folder does not show."""
        self.measure(document, [sentence for paragraph in document for sentence in split_sentences(paragraph)])
        for paragraph in document:
            self._measure_characters(paragraph)
        joined = unwrap(document)
        if len(joined) < len(document):
            self.joined += len(document) - len(joined)
            first = next(i for i, paragraph in enumerate(joined) if paragraph != document[i])
            self.note("wrapped_lines", " ⏎ ".join(document[first : first + 2]))

    def _measure_lines(self, document: Document) -> None:
        """Count duplicates of long paragraphs, and the number of documents that each short one occurs in."""
        for paragraph in _passages(document) if self.by_sentence else document:
            if len(paragraph) >= LONG_PARAGRAPH and self.paragraph_repeats.add(paragraph):
                self.note("duplicate_paragraphs", paragraph)
        self.short_lines.update({line for line in document if len(line) < SHORT_LINE[self.by_sentence]})
        if len(self.short_lines) > DISTINCT_LINES:  # the most frequent ones stay
            self.short_lines = Counter(dict(self.short_lines.most_common(DISTINCT_LINES // 2)))

    def _measure_sentences(self, text: str, sentences: Sequence[str]) -> None:
        self.sentences.extend(map(len, sentences))
        if len(text) < SHORT_DOCUMENT:
            self.note("short_documents", text)
        if len(sentences) < 2:
            self.one_sentence += 1
            self.note("one_sentence", text)
        if not any(_ENDED.search(sentence) for sentence in sentences):
            self.unended += 1
            self.note("no_sentences", text)

    def _measure_scripts(self, document: Document) -> None:
        counts = script_counts(document)
        self.letters.update(counts)
        name, count = counts.most_common(1)[0]
        if count:
            self.main_scripts[name] += 1
            self.note(f"script {name}", document[0])

    def _measure_characters(self, paragraph: str) -> None:
        """Count markup, control characters and U+FFFD, which do not belong in text."""
        if markup := _MARKUP.search(paragraph):
            self.marked_up += 1
            self.note("markup", paragraph[max(0, markup.start() - 40) :])
        if controls := len(_CONTROL.findall(paragraph)):
            self.controls += controls
            self.note("control_characters", paragraph)
        if "\ufffd" in paragraph:
            self.replacements += paragraph.count("\ufffd")
            self.note("replacement_characters", paragraph)

    def add_block(self, documents: int, paragraphs: int, characters: int) -> None:
        """Count the characters of a block without blank lines."""
        if documents == 1 and paragraphs >= BLANKLESS:
            self.blankless += characters

    def add_read_errors(self, read_errors: ReadErrors) -> None:
        """Count what could not be read."""
        self.invalid += read_errors.replaced
        self.bad += len(read_errors.bad)
        self.first_bad = self.first_bad or "".join(read_errors.bad[:1])
        for name, texts in (
            ("invalid_utf8", [read_errors.first_replaced]),
            ("bad_records", read_errors.bad[:NUM_EXAMPLES]),
        ):
            for text in filter(None, texts):
                self.note(name, text)


@dataclass(frozen=True)
class Pairs:
    """Segment pairs as next sentence prediction would see them."""

    next_share: float
    first: float  # mean lengths in tokens
    second: float
    padding: float  # the share of a padded batch that packing saves


@dataclass(frozen=True, eq=False)
class TokenMeasures:
    """Measurements of documents as tokens."""

    tokens: int
    unknown: int
    words: int
    pieces: int  # tokens of words, without punctuation
    documents: NDArray[Any]  # tokens of each
    sentences: NDArray[Any]
    pairs: dict[int, Pairs]


def measure_tokens(part: Part, tokenizer: Tokenizer) -> TokenMeasures:
    """Count the tokens of a corpus by kind, and draw pairs from it."""
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    for shard in part.shards:
        counts += np.bincount(shard.tokens, minlength=len(counts))
    marks = tokenizer.is_special | ~np.array([has_letter(text) for text in tokenizer.spellings])
    once_per_word = tokenizer.frame.word_marker.once_per_word(tokenizer.is_marked)
    return TokenMeasures(
        tokens=int(counts.sum()),
        unknown=int(counts[tokenizer.unknown_id]),
        words=int(counts[once_per_word & ~marks].sum()),
        pieces=int(counts[~marks].sum()),
        documents=part.corpus.document_tokens[part.documents],
        sentences=np.concatenate([np.diff(shard.sentences) for shard in part.shards]),
        pairs={length: draw_pairs(part, tokenizer.frame, length) for length in PAIR_LENGTHS if len(part.documents) > 1},
    )


def draw_pairs(part: Part, frame: Frame, max_length: int) -> Pairs:
    """Draw pairs spread evenly over a corpus; a small corpus is used for several epochs."""
    source = PairSource(part.corpus, part.documents, max_length, frame=frame)
    samples = np.arange(NUM_PAIRS)
    if len(source) < NUM_PAIRS:
        epochs, indices = np.divmod(samples, len(source))
    else:
        epochs, indices = np.zeros_like(samples), samples * len(source) // NUM_PAIRS
    pairs = source.pairs(epochs, indices)
    first, second = np.mean([(len(pair.first), len(pair.second)) for pair in pairs], axis=0).tolist()
    fill = (first + second + frame.size(2)) / max_length
    return Pairs(sum(pair.is_next for pair in pairs) / len(pairs), first, second, 1 - fill)


@dataclass(frozen=True, eq=False)
class Part:
    """Whole shards spread evenly over a corpus, up to about `max_tokens` tokens."""

    corpus: Corpus
    max_tokens: int

    @property
    def stride(self) -> int:
        return -(-self.corpus.manifest.tokens // self.max_tokens)

    @property
    def shards(self) -> Sequence[Shard]:
        return self.corpus.shards[:: self.stride]

    @cached_property
    def documents(self) -> NDArray[np.int64]:
        """The numbers of the documents of these shards."""
        bounds = list(pairwise(self.corpus.first_documents))[:: self.stride]
        return np.concatenate([np.arange(begin, end) for begin, end in bounds])

    def texts(self, tokenizer: Tokenizer) -> Iterator[list[str]]:
        """Yield the documents as lists of sentences, spelled from their tokens."""
        for number in self.documents.tolist():
            tokens, bounds = self.corpus.document(number)
            yield [tokenizer.spell(tokens[begin:end]) for begin, end in pairwise(bounds.tolist())]


def make_corpus(documents: Sequence[Document], tokenizer: Tokenizer, folder: Path) -> Corpus | None:
    """Write documents as a corpus of one shard into a temporary folder; None if they have no tokens."""
    store, name = Store(str(folder)), shard_name(0)
    tokens = tokenise(documents, tokenizer.backend, tokenizer.space)
    if not len(tokens.tokens):
        return None
    store.write_sealed(name, pack_shard(tokens, tokenizer.vocab_size, {}, ReadErrors()))
    write_manifest(store, tokenizer.hash, tokenizer.vocab_size, [read_written(store, name)])
    return Corpus.open(folder)


def unknown_words(documents: Sequence[Document], tokenizer: Tokenizer) -> dict[str, int]:
    """The 20 most frequent unknown words, among the 50,000 most frequent words, and their counts."""
    counts = Counter(word for document in documents for paragraph in document for word in paragraph.split())
    words, unknown = [word for word, _ in counts.most_common(50_000)], tokenizer.unknown_id
    lost = [word for word, ids in zip(words, tokenizer.encode(words), strict=True) if unknown in ids]
    found: Counter[str] = Counter()
    for word, encoding in zip(lost, tokenizer.encode_aligned(lost), strict=True):
        for number, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if number == unknown:
                found[word[begin:end]] += counts[word]
    return dict(found.most_common(20))


def _passages(sentences: Sequence[str]) -> Iterator[str]:
    """Yield, from each sentence on, as many as make a long paragraph, since short sentences may repeat."""
    for first in range(len(sentences)):
        passage = ""
        for sentence in sentences[first:]:
            passage = f"{passage} {sentence}"
            if len(passage) > LONG_PARAGRAPH:
                yield passage[1:]
                break


def shorten(text: str) -> str:
    """A text on one line, cut to the length of an example, with control characters escaped."""
    text = _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text[: 4 * EXAMPLE_LENGTH])
    text = " ".join(text.split())
    return text if len(text) <= EXAMPLE_LENGTH else text[: EXAMPLE_LENGTH - 1] + "…"


def _head(document: Document, limit: int) -> Document:
    """The beginning of a document, up to about `limit` characters."""
    ends = np.cumsum([len(paragraph) for paragraph in document])
    return document[: int(np.searchsorted(ends, limit)) + 1]
