"""The doctor: finds problems of a text or a corpus folder that would harm the training, before it is run.

Of large inputs a sample is examined: whole blocks (or shards), spread evenly over the input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bertsmith.config import to_dict
from bertsmith.corpus import sources as files
from bertsmith.corpus.doctor.findings import (
    Diagnosis,
    Finding,
    histogram,
    raw_findings,
    text_findings,
    token_findings,
)
from bertsmith.corpus.doctor.measures import (
    TOKENISED,
    Part,
    Spread,
    TextMeasures,
    TokenMeasures,
    make_corpus,
    measure_tokens,
    unknown_words,
)
from bertsmith.corpus.readers import ReadErrors, parse
from bertsmith.corpus.shards import MANIFEST, PLAN, Corpus
from bertsmith.corpus.sources import Block, Reading, Source, find_sources, open_source, read_blocks
from bertsmith.corpus.store import Store
from bertsmith.errors import UserError
from bertsmith.progress import progress_bar
from bertsmith.text.tokenizer import Tokenizer

SAMPLE_BYTES = 64 << 20
BYTES_PER_TOKEN = 4  # of text, about
LABELS = {"problem": "PROBLEM", "warning": "warning", "ok": "ok"}


def examine(
    inputs: Sequence[str | Path],
    *,
    tokenizer: str | Path | None = None,
    text_field: str = "text",
    encoding: str = "",
    sample_bytes: int = SAMPLE_BYTES,
    answers: str | Path | None = None,
) -> Diagnosis:
    """Examine raw text, or one corpus folder, for problems that would harm the training.

    Of more than `sample_bytes` of text a sample of about that size is examined. Findings on tokens need a tokenizer;
    a corpus folder has its own. `answers` is a file of questions in SQuAD's form, whose answers should begin and end at
    borders of tokens.
    """
    if sample_bytes < 1:
        raise UserError(f"the sample is {sample_bytes} bytes; give at least 1")
    corpora = [item for item in inputs if _is_corpus(item)]
    if corpora and len(inputs) > 1:
        raise UserError(f"{corpora[0]} is a corpus folder; examine it by itself")
    tok = Tokenizer.load(tokenizer) if tokenizer is not None else None
    if answers is not None and tok is None and not corpora:
        raise UserError("--answers needs --tokenizer: whether answers end at tokens depends on the vocabulary")
    questions = [] if answers is None else [_question_finding(answers, tok or Tokenizer.load(corpora[0]))]
    if corpora:
        found = _examine_corpus(Corpus.open(corpora[0]), tok, str(tokenizer), sample_bytes)
    else:
        found = _examine_text(find_sources(inputs, encoding), tok, text_field, sample_bytes)
    return replace(found, findings=tuple(_worst_first([*found.findings, *questions]))) if questions else found


def _is_corpus(item: str | Path) -> bool:
    store = Store(str(item))
    return store.exists(MANIFEST) or store.exists(PLAN)


# A corpus folder


def _question_finding(path: str | Path, tokenizer: Tokenizer) -> Finding:
    from bertsmith.corpus.doctor.answers import answer_finding  # reads tasks, which need torch

    return answer_finding(path, tokenizer)


def _examine_corpus(corpus: Corpus, given: Tokenizer | None, where: str, sample_bytes: int) -> Diagnosis:
    tokenizer = Tokenizer.load(corpus.folder)
    if given is not None:
        corpus.check_tokenizer(given.hash, where)
    part, text = Part(corpus, max(1, sample_bytes // BYTES_PER_TOKEN)), TextMeasures(by_sentence=True)
    count = len(part.documents)
    with progress_bar("examining the corpus", count) as advance:
        for number, sentences in enumerate(part.texts(tokenizer)):
            text.measure(sentences, sentences)
            if number % 256 == 0:
                advance(number, "")
        advance(count, "")
    tokens = measure_tokens(part, tokenizer)
    whole = {f"all_{name}": getattr(corpus.manifest, name) for name in ("documents", "sentences", "tokens")}
    sampled = len(part.shards) < len(corpus.shards)
    facts = {"kind": "corpus", "inputs": [str(corpus.folder)], **whole, "sampled": sampled}
    findings = [*text_findings(text, raw=False, sampled=sampled, built=corpus.manifest.clean)]
    findings += token_findings(tokens, text, {}, tokenizer)
    note = "wrapped lines, HTML, control characters, invalid UTF-8, the unknown words: examine the raw text, too"
    return _diagnosis(facts, text, tokens, findings, [note])


# Raw text


def _examine_text(sources: Sequence[Source], tok: Tokenizer | None, text_field: str, sample_bytes: int) -> Diagnosis:
    spread = Spread(TOKENISED)
    text, facts = _read(sources, text_field, sample_bytes, spread)
    if not text.documents:
        raise UserError(text.first_bad or f"no text in {', '.join(source.url for source in sources)}")
    findings = [*raw_findings(text), *text_findings(text, raw=True, sampled=facts["sampled"])]
    if tok is None:
        note = "unknown tokens, tokens per word, next-sentence pairs, padding: they need --tokenizer"
        return _diagnosis(facts, text, None, findings, [note])
    with TemporaryDirectory() as folder:
        corpus = make_corpus(spread.kept, tok, Path(folder))
        if corpus is None:
            raise UserError(f"no words in {', '.join(source.url for source in sources)}")
        tokens = measure_tokens(Part(corpus, corpus.manifest.tokens), tok)
    unknown = unknown_words(spread.kept, tok) if tokens.unknown else {}
    facts |= {"tokenised_documents": len(spread.kept), "unknown_words": unknown}
    return _diagnosis(facts, text, tokens, [*findings, *token_findings(tokens, text, unknown, tok)], [])


def _read(
    sources: Sequence[Source], text_field: str, sample_bytes: int, spread: Spread
) -> tuple[TextMeasures, dict[str, Any]]:
    """Measure the documents of a sample, and keep some of them to be tokenised."""
    text, sample = TextMeasures(), Sample(sources, text_field, sample_bytes)
    with progress_bar("examining the text", sample.total) as advance:
        for block in sample:
            _measure_block(block, text_field, text, spread)
            advance(sample.reading.bytes_read, f"{text.documents:,} documents")
        advance(sample.total, f"{text.documents:,} documents")
    text.add_read_errors(ReadErrors(bad=sample.reading.bad))
    urls = [source.url for source in sources]
    facts = {"kind": "text", "inputs": urls[:20], "files": len(urls), "input_bytes": sample.total}
    return text, {**facts, "looked_at_bytes": sample.taken, "sampled": sample.skipped}


def _measure_block(block: Block, text_field: str, text: TextMeasures, spread: Spread) -> None:
    read_errors, before = ReadErrors(), (text.documents, text.paragraphs, text.characters)
    for document in parse(block, text_field, read_errors, skip_bad=True):
        text.measure_raw(document)
        spread.add(document)
    after = text.documents, text.paragraphs, text.characters
    text.add_block(*(b - a for a, b in zip(before, after, strict=True)))
    text.add_read_errors(read_errors)


@dataclass
class Sample:
    """Whole blocks spread evenly over files, up to about `limit` bytes; of a small input, all blocks."""

    sources: Sequence[Source]
    text_field: str
    limit: int
    reading: Reading = field(default_factory=Reading)
    taken: int = 0
    skipped: bool = False

    @property
    def total(self) -> int:
        """The size of all files on disk, compressed or not."""
        return sum(source.size for source in self.sources)

    def __iter__(self) -> Iterator[Block]:
        done = 0
        for source in self.sources:
            self.reading.bytes_read = done
            if self._is_ahead(done + source.size):  # the file is not opened
                self.skipped = True
            else:
                yield from self._of_file(source, done)
            done += source.size

    def _of_file(self, source: Source, start: int) -> Iterator[Block]:
        rows, place, end = _num_rows(source), float(start), start + source.size
        for block in read_blocks([source], self.text_field, self.reading, skip_bad=True):
            if rows:
                place = start + source.size * (block.first_line - 1) / rows
            if self._is_ahead(place):
                self.skipped = True
            else:
                self.taken += _size(block)
                yield block
            place = float(self.reading.bytes_read)
            if not rows and place < end and self._is_ahead(end):
                self.skipped = True
                break

    def _is_ahead(self, place: float) -> bool:
        """Whether the blocks taken so far suffice up to this place; room is left for the last block."""
        whole = self.total <= self.limit and all(map(_is_plain, self.sources))
        room = self.limit if whole else max(0, self.limit - files.BLOCK_BYTES)
        return self.taken > room * place / self.total


def _is_plain(source: Source) -> bool:
    return not source.compression and source.kind != "parquet"


def _num_rows(source: Source) -> int:
    """The number of rows of a parquet file, which gives the places of its blocks; 0 for other files."""
    if source.kind != "parquet" or source.compression:
        return 0
    import pyarrow.parquet as pq

    try:
        with open_source(source) as (file, _):
            return int(pq.read_metadata(file).num_rows)
    except (ValueError, OSError):  # the error is raised again when the file is read
        return 0


def _size(block: Block) -> int:
    return len(block.data) if isinstance(block.data, bytes) else sum(map(len, block.data))


# The diagnosis


def _diagnosis(
    facts: dict[str, Any],
    text: TextMeasures,
    tokens: TokenMeasures | None,
    findings: Sequence[Finding],
    left_out: Sequence[str],
) -> Diagnosis:
    """Put facts, findings (the worst first) and histograms together."""
    letters = sum(text.letters.values())
    counts = {"documents": text.documents, "sentences": len(text.sentences), "characters": text.characters}
    scripts = {name: count / letters for name, count in text.letters.most_common() if count}
    facts = {**facts, **counts, "scripts": scripts}
    shown = [histogram("Document length in characters", "documents", text.lengths)]
    if tokens is None:
        shown.append(histogram("Sentence length in characters", "sentences", text.sentences))
    else:
        pairs = {str(length): to_dict(pairs) for length, pairs in tokens.pairs.items()}
        facts |= {"tokens": tokens.tokens, "tokens_per_word": tokens.pieces / max(1, tokens.words), "pairs": pairs}
        shown.append(histogram("Document length in tokens", "documents", tokens.documents))
        shown.append(histogram("Sentence length in tokens", "sentences", tokens.sentences))
    return Diagnosis(facts, tuple(_worst_first(findings)), tuple(shown), tuple(left_out))


def _worst_first(findings: Sequence[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: list(LABELS).index(finding.severity))


def summary(diagnosis: Diagnosis) -> str:
    """Two sentences on what was examined and what was found."""
    facts = diagnosis.facts
    corpus = facts["kind"] == "corpus"
    size = f"{facts['tokens']:,} tokens" if corpus else f"{facts['looked_at_bytes'] / 1e6:,.1f} MB of text"
    whole = "a sample, spread evenly over all of it" if facts["sampled"] else "all of it"
    counts = [len(diagnosis.of(severity)) for severity in ("problem", "warning")]
    found = f"{counts[0]} problem{'s'[: counts[0] != 1]}, {counts[1]} warning{'s'[: counts[1] != 1]}"
    return f"Examined {size} ({whole}): {facts['documents']:,} documents. Found: {found}."


def describe(diagnosis: Diagnosis) -> list[str]:
    """The diagnosis as lines for the terminal, the worst first."""
    lines = [summary(diagnosis)]
    for finding in diagnosis.findings:
        lines.append(f"{LABELS[finding.severity]:>7}  {finding.sentence}")
        lines += [f"{'':>9}for example: {example}" for example in finding.examples]
        lines += [f"{'':>9}fix: {finding.fix}"] if finding.fix else []
    return lines + [f"{'-':>7}  Not examined: {note}." for note in diagnosis.left_out]
