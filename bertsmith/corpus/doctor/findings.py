"""The doctor's findings: each with a severity, a figure and the option that fixes the problem."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from bertsmith.corpus.cleaning import CleanConfig
from bertsmith.corpus.doctor.measures import (
    LONG_DOCUMENT,
    LONG_PARAGRAPH,
    NUM_EXAMPLES,
    NUM_PAIRS,
    SHORT_DOCUMENT,
    TextMeasures,
    TokenMeasures,
    shorten,
)
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.text.unknown import likely_cause

Severity = Literal["ok", "warning", "problem"]
NEVER = 9e9
LIMITS: dict[str, tuple[float, float]] = {  # thresholds for a warning and for a problem
    "bad_records": (1, 1),
    "invalid_utf8": (1e-6, 1e-3),
    "document_boundaries": (0.5, 0.9),
    "duplicate_documents": (0.01, 0.1),
    "duplicate_paragraphs": (0.02, 0.2),
    "boilerplate": (0.01, 0.1),
    "short_documents": (0.2, 0.6),
    "long_documents": (0.1, NEVER),
    "one_sentence": (0.15, 0.5),
    "no_sentences": (0.1, 0.5),
    "wrapped_lines": (0.1, 0.4),
    "scripts": (0.02, NEVER),
    "markup": (0.005, 0.1),
    "control_characters": (1e-5, 1e-2),
    "replacement_characters": (1e-5, 1e-3),
    "unknown_tokens": (0.005, 0.05),
    "tokens_per_word": (2.0, 3.0),
    "next_sentence": (0.05, 0.15),
    "padding_128": (0.6, NEVER),
    "padding_512": (0.6, NEVER),
}
HANGUL_FACTOR = 1.5  # a Korean word includes its particles, so more tokens per word are normal
BUILD = "corpus build"
BLANK_LINES = "separate documents, and nothing else, by a blank line"
MAX_BARS = 12


@dataclass(frozen=True)
class Finding:
    """A sentence on one property of the text, and how to fix it."""

    name: str
    severity: Severity
    value: float
    sentence: str
    fix: str = ""
    examples: tuple[str, ...] = ()


@dataclass(frozen=True)
class Histogram:
    """The number of items with a length from each edge up to the next one; the last bar has no upper edge."""

    title: str
    items: str
    edges: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Diagnosis:
    """What was examined, what was found, and what could not be examined."""

    facts: dict[str, Any]
    findings: tuple[Finding, ...]
    histograms: tuple[Histogram, ...]
    left_out: tuple[str, ...] = ()

    def of(self, severity: Severity) -> tuple[Finding, ...]:
        """The findings of one severity."""
        return tuple(finding for finding in self.findings if finding.severity == severity)


def text_findings(
    text: TextMeasures, *, raw: bool, sampled: bool, built: CleanConfig | None = None
) -> Iterator[Finding]:
    """Findings on documents as text; `built` is how a corpus folder's text was cleaned, if known."""
    yield _boundaries(text, raw)
    yield from _repetitions(text, raw, sampled, built)
    yield _boilerplate(text)
    yield from _document_lengths(text)
    yield from _sentences(text)
    yield _scripts(text)


def raw_findings(text: TextMeasures) -> Iterator[Finding]:
    """Findings that only raw text can show."""
    sentence = f"Records or files that cannot be read: {text.bad:,}."
    yield _finding("bad_records", text.bad, sentence, f"fix them, or skip them: {BUILD} --skip-bad", text)
    sentence = f"Places that are not valid UTF-8: {text.invalid:,}."
    yield _finding("invalid_utf8", text.invalid / text.characters, sentence, "convert the files to UTF-8", text)
    share = text.joined / text.paragraphs
    sentence = f"{percent(share)} of the lines are broken in mid-sentence, as on a page of fixed width."
    yield _finding(
        "wrapped_lines", share, sentence, "`corpus build` joins them by default: --set clean.unwrap=true", text
    )
    share = text.marked_up / text.paragraphs
    sentence = f"{percent(share)} of the lines hold HTML tags or entities."
    yield _finding("markup", share, sentence, "extract the text first: one paragraph per line, no tags", text)
    yield from _characters(text)


def _characters(text: TextMeasures) -> Iterator[Finding]:
    sentence = f"{text.controls:,} of {text.characters:,} characters are control characters."
    fix = "check whether these files are text; the tokenizer drops control characters"
    yield _finding("control_characters", text.controls / text.characters, sentence, fix, text)
    lost = max(0, text.replacements - text.invalid)
    sentence = f"{lost:,} of {text.characters:,} characters are U+FFFD: lost in an earlier decoding."
    fix = "decode the original files with the right encoding"
    yield _finding("replacement_characters", lost / text.characters, sentence, fix, text)


def token_findings(
    tokens: TokenMeasures, text: TextMeasures, unknown: dict[str, int], tokenizer: Tokenizer
) -> Iterator[Finding]:
    """Findings on documents as tokens and segment pairs."""
    share = tokens.unknown / max(1, tokens.tokens)
    sentence = f"{percent(share)} of the tokens are {tokenizer.frame.unknown}."
    fix = likely_cause(tokenizer)
    examples = [f"{word} ({count:,} times)" for word, count in unknown.items()]
    yield _finding("unknown_tokens", share, sentence, fix, examples)
    per_word = tokens.pieces / max(1, tokens.words)
    factor = HANGUL_FACTOR if main_script(text) == "hangul" else 1.0
    sentence = f"A word is {per_word:.2f} tokens on average."
    fix = "`tokenizer train` on this text, or with a larger --vocab-size"
    yield _finding("tokens_per_word", per_word, sentence, fix, text, factor)
    yield from _pairs(tokens)


def _pairs(tokens: TokenMeasures) -> Iterator[Finding]:
    if not tokens.pairs:
        sentence = "No pairs can be drawn: a random second segment comes from another document, and there is only one."
        yield Finding("next_sentence", "problem", 1.0, sentence, BLANK_LINES)
    for length, pairs in tokens.pairs.items():
        if length == min(tokens.pairs):
            sentence = (
                f"{percent(pairs.next_share)} of {NUM_PAIRS:,} pairs drawn at length {length} are next sentences; "
                f"their segments have {pairs.first:.0f} and {pairs.second:.0f} tokens on average."
            )
            fix = f"documents of one word cannot be divided: --set clean.min_length={SHORT_DOCUMENT} of {BUILD}"
            yield _finding("next_sentence", abs(pairs.next_share - 0.5), sentence, fix)
        sentence = f"Packing saves {percent(pairs.padding)} of the positions at length {length}: padding."
        fix = f"documents are short for this length: --set data.max_length={128 if length > 128 else 64} of pretrain"
        yield _finding(f"padding_{length}", pairs.padding, sentence, fix)


def _boundaries(text: TextMeasures, raw: bool) -> Finding:
    """Whether all text is one document, or every line is a document."""
    lines = "line" if raw else "sentence"
    if text.documents == 1 or text.blankless > text.characters / 2:
        sentence = f"There is no blank line: {text.paragraphs:,} {lines}s make {_many(text.documents, 'document')}."
        return Finding("document_boundaries", "problem", 1.0, sentence, BLANK_LINES)
    share = text.one_line / text.documents
    flat = float(np.median(text.lengths)) >= 5 * SHORT_DOCUMENT  # whole documents, each on a line of its own
    sentence = f"{percent(share)} of {text.documents:,} documents have only one {lines}."
    fix = f"{BLANK_LINES}: next-sentence pairs need documents of several sentences"
    return _finding("document_boundaries", 0.0 if flat else share, sentence, fix, text)


def _repetitions(text: TextMeasures, raw: bool, sampled: bool, built: CleanConfig | None) -> Iterator[Finding]:
    share = text.document_repeats.share
    sentence = f"{_at_least(sampled, share)}{percent(share)} of the documents are exact copies of earlier ones."
    yield _finding("duplicate_documents", share, sentence, _dropping("duplicate_documents", raw, built), text)
    share, things = text.paragraph_repeats.share, "paragraphs" if raw else "passages"
    things += f" of {LONG_PARAGRAPH} characters or more"
    sentence = f"{_at_least(sampled, share)}{percent(share)} of the {things} are exact copies of earlier ones."
    yield _finding("duplicate_paragraphs", share, sentence, _dropping("duplicate_paragraphs", raw, built), text)


def _dropping(name: str, raw: bool, built: CleanConfig | None) -> str:
    """How to drop duplicates, which `corpus build` does by default."""
    if raw:
        return f"nothing: {BUILD} drops them by default (clean.{name}=true)"
    if built is not None and getattr(built, name):
        near = "--set clean.near_duplicates=0.8 drops documents that are nearly equal"
        return f"clean.{name} was on, so these are parts of passages that differ elsewhere; {near}"
    return _option(name, True)


def _at_least(sampled: bool, share: float) -> str:
    """A sample shows only a lower bound on duplicates."""
    return "at least " if sampled and share else ""


def _boilerplate(text: TextMeasures) -> Finding:
    """Short lines that occur in many documents; their share is one of characters."""
    often = 20 if text.documents >= 200 else max(5, text.documents // 10)
    lines = [(line, count) for line, count in text.short_lines.most_common() if count >= often]
    share = sum(len(line) * count for line, count in lines) / text.characters
    everywhere = bool(lines) and lines[0][1] >= 0.2 * text.documents
    sentence = (
        f"{_many(len(lines), 'short line')} found in {often} documents or more: {percent(share)} of the text."
        if lines
        else f"No short line occurs in {often} documents or more."
    )
    value = max(share, LIMITS["boilerplate"][0]) if everywhere else share
    examples = [f"{shorten(line)[:100]} (in {count:,} documents)" for line, count in lines[:NUM_EXAMPLES]]
    return _finding("boilerplate", value, sentence, _option("boilerplate", often), examples)


def _document_lengths(text: TextMeasures) -> Iterator[Finding]:
    lengths = np.array(text.lengths)
    share = float(np.mean(lengths < SHORT_DOCUMENT))
    sentence = f"{percent(share)} of the documents have under {SHORT_DOCUMENT} characters."
    yield _finding("short_documents", share, sentence, _option("min_length", SHORT_DOCUMENT), text)
    share = float(lengths[lengths > LONG_DOCUMENT].sum()) / text.characters
    sentence = f"The longest document has {int(lengths.max()):,} characters."
    fix = f"a document is one article or one book: {BLANK_LINES}"
    yield _finding("long_documents", share, sentence, fix, text)


def _sentences(text: TextMeasures) -> Iterator[Finding]:
    share = text.one_sentence / text.documents
    sentence = f"{percent(share)} of the documents have one sentence; next-sentence pairs need two."
    fix = f"{_option('min_length', SHORT_DOCUMENT)}, or {BLANK_LINES}"
    yield _finding("one_sentence", share, sentence, fix, text)
    share = text.unended / text.documents
    sentence = f"{percent(share)} of the documents have no complete sentence: titles, lists or tables."
    yield _finding("no_sentences", share, sentence, _option("min_length", SHORT_DOCUMENT), text)


def _scripts(text: TextMeasures) -> Finding:
    """Documents mainly in another script than most documents; Japanese is written in two."""
    main = main_script(text)
    own = {"han", "kana"} if main in ("han", "kana") else {main}
    others = {name: count for name, count in text.main_scripts.items() if name not in own}
    share = sum(others.values()) / max(1, sum(text.main_scripts.values()))
    names = ", ".join(sorted(others, key=lambda name: -others[name])) or "none"
    sentence = f"{percent(share)} of the documents are mainly in another script than {main or 'none'}: {names}."
    fix = f"if that is not intended: {_option('script', main)}; if it is: `tokenizer train` on all of it"
    examples = [text.examples[f"script {name}"][0] for name in others]
    return _finding("scripts", share, sentence, fix, examples)


def main_script(text: TextMeasures) -> str:
    """The script that most documents are mainly written in."""
    return text.main_scripts.most_common(1)[0][0] if text.main_scripts else ""


def _finding(
    name: str, value: float, sentence: str, fix: str, examples: TextMeasures | Sequence[str] = (), factor: float = 1.0
) -> Finding:
    """A finding whose severity follows from its value; one that is fine has no fix."""
    warning, problem = (factor * limit for limit in LIMITS[name])
    sentence = sentence[:1].upper() + sentence[1:]
    if value < warning:
        return Finding(name, "ok", float(value), sentence)
    shown = examples.examples[name] if isinstance(examples, TextMeasures) else examples
    severity: Severity = "problem" if value >= problem else "warning"
    return Finding(name, severity, float(value), sentence, fix, tuple(shown[:NUM_EXAMPLES]))


def _option(name: str, value: Any) -> str:
    """A cleaning option of `corpus build`, as it is written on the command line."""
    return f"--set clean.{name}={str(value).lower()} of {BUILD}"


def _many(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def percent(share: float) -> str:
    """Format a share as a percentage: 12.3 %."""
    return "under 0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


def histogram(title: str, items: str, values: ArrayLike) -> Histogram:
    """A histogram of lengths by powers of two; the rarest lengths at both ends share a bar."""
    lengths = np.asarray(values)
    if not len(lengths):
        return Histogram(title, items, (0,), (0,))
    low, high = np.log2(np.maximum(1, np.quantile(lengths, (0.005, 0.995)))).astype(int)
    step = -(-(high - low + 1) // MAX_BARS)
    edges = [0, *(2**k for k in range(low + step, high + 1, step))]
    counts, _ = np.histogram(lengths, [*edges, np.inf])
    return Histogram(title, items, tuple(edges), tuple(counts.tolist()))
