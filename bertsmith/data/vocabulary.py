"""Text files to a tokenizer folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bertsmith.data.readers import Documents
from bertsmith.folders import new_folder
from bertsmith.progress import Advance, progress_bar, say
from bertsmith.text.tokenizer import Tokenizer, train_wordpiece


def train_tokenizer(
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    vocab_size: int = 30_000,
    cased: bool = False,
    jamo: bool = False,
    field: str = "text",
) -> Tokenizer:
    """Train a WordPiece vocabulary on text files and save it as a folder.

    `cased` keeps capitals and accents; `jamo` breaks Hangul into its letters, as the original uncased form does.
    """
    documents = Documents.of(inputs, field)
    with new_folder(out) as folder, progress_bar("training the vocabulary", 2 * documents.num_bytes) as advance:
        tokenizer = train_wordpiece(_Passes(documents, advance), vocab_size, cased=cased, jamo=jamo)
        tokenizer.save(folder)
    if warning := documents.reading.warning():
        say(f"warning: {warning}")
    if tokenizer.vocab_size < vocab_size:
        say(f"note: the text supports {tokenizer.vocab_size:,} entries, fewer than the {vocab_size:,} asked for")
    return tokenizer


@dataclass(eq=False)
class _Passes:
    """The paragraphs of documents, with the progress of going through them twice."""

    documents: Documents
    advance: Advance
    done: int = 0

    def __iter__(self) -> Iterator[str]:
        for number, paragraph in enumerate(self.documents.paragraphs()):
            yield paragraph
            if number % 1000 == 0:
                self.advance(self.done + self.documents.reading.bytes_read, "")
        self.done += self.documents.num_bytes
