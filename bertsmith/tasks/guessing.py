"""The columns of texts and labels, guessed from the names and the contents of a file's first rows.

A column with a usual name is taken first (`NAMES` and the like). Else the label is the column whose name has a word
such as `topic`, or the only one with few values; the text is the longest one; two texts have names such as `a` and `b`;
the endings of a choice are numbered or lettered columns; an answer is part of its context.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from bertsmith.rows.columns import VOTE, Columns, join_names, named_columns, split_names, words_of_name
from bertsmith.rows.entities import are_entities
from bertsmith.rows.records import Record
from bertsmith.tasks.description import Task

SAMPLE = 1000  # rows whose contents are looked at
FEWEST_WORDS = 7  # of a sentence; the name of a column has fewer
LABEL_WORDS = frozenset(
    """gold label labels class classes category categories target topic topics genre genres intent intents sentiment
    emotion emotions polarity rating ratings score scores stars similarity relatedness tag tags type kind grade relation
    stance verdict""".split()
)
CHOICE_WORDS = frozenset("gold label answer correct key target right solution".split())
SEVERAL = frozenset("labels genres tags topics categories emotions intents classes".split())
NO_TEXT = frozenset(
    "id ids uuid guid idx index url uri link hash file filename path date time timestamp created".split()
)
NUMBERED = re.compile(r"(.*?)[_ -]?([0-9]|[a-h])", re.I)
TWINS = (("1", "2"), ("a", "b"), ("0", "1"), ("first", "second"), ("left", "right"), ("premise", "hypothesis"))


@dataclass(frozen=True)
class Column:
    """A column of the first rows."""

    name: str
    values: Sequence[Any]  # without missing values

    @cached_property
    def words(self) -> frozenset[str]:
        return frozenset(words_of_name(self.name))

    @cached_property
    def distinct(self) -> int:
        return len(set(map(str, self.values)))

    @cached_property
    def is_number(self) -> bool:
        return bool(self.values) and all(map(_is_number, self.values))

    @cached_property
    def is_list(self) -> bool:
        return bool(self.values) and all(isinstance(value, (list, tuple)) for value in self.values)

    @cached_property
    def is_text(self) -> bool:
        """Whether it has texts: strings that are neither numbers nor ids, and not the same in all rows."""
        is_string = bool(self.values) and all(isinstance(value, str) for value in self.values)
        return (
            is_string and not self.is_number and not self.words & NO_TEXT and self.distinct >= min(2, len(self.values))
        )

    @cached_property
    def length(self) -> tuple[bool, float]:
        """The mean length of its texts, after whether they are sentences: single ASCII words are codes or names."""
        written = sum(len(value.split()) > 1 or not value.isascii() for value in self.values)
        return written >= len(self.values) / 10, sum(map(len, self.values)) / len(self.values)

    @cached_property
    def has_few_values(self) -> bool:
        """Whether its values are repeated, as labels are."""
        return 2 <= self.distinct <= max(2, len(self.values) / 2) and not self.words & NO_TEXT


@dataclass
class Guess:
    """The columns found so far, by role, and the reason for each that was found by its content."""

    sample: Sequence[Record]
    found: dict[str, str]
    why: dict[str, str] = field(default_factory=dict)

    @classmethod
    def start(cls, columns: Columns, names: Mapping[str, tuple[str, ...]], sample: Sequence[Record]) -> Guess:
        """The columns that the user has named or that have a usual name."""
        all_names = dict.fromkeys(name for record in sample for name in record)
        return cls(sample, {**named_columns(columns, names, all_names), "separator": columns.separator})

    @cached_property
    def columns(self) -> list[Column]:
        names = dict.fromkeys(name for record in self.sample for name in record)
        return [Column(n, [r[n] for r in self.sample if not _is_missing(r.get(n))]) for n in names]

    def free(self) -> list[Column]:
        """The columns without a role; votes of annotators never get one."""
        taken = {*self.found.values(), *split_names(self.found["endings"])}
        return [c for c in self.columns if c.values and c.name not in taken and not VOTE.fullmatch(c.name)]

    def texts(self) -> list[Column]:
        """Free columns with texts, the longest first."""
        return sorted((c for c in self.free() if c.is_text), key=lambda c: c.length, reverse=True)

    def take(self, role: str, candidates: Iterable[Column], why: str) -> None:
        """Give a role that has no column the first of the candidates."""
        if not self.found[role] and (first := next(iter(candidates), None)) is not None:
            self.found[role], self.why[role] = first.name, why

    def take_only(self, role: str, candidates: Sequence[Column], why: str) -> None:
        """Give a role the only candidate; where there are several, the user has to choose."""
        self.take(role, candidates if len(candidates) == 1 else (), why)

    def take_label_by_words(self, words: frozenset[str], candidates: Sequence[Column]) -> None:
        """Take as the label the candidate with one of these words in its name: `gold` first, else the only one."""
        named = [c for c in candidates if c.words & words]
        gold = [c for c in named if "gold" in c.words]
        self.take_only("label", gold or named, "by its name")


def guess_labels(guess: Guess, task: Task) -> None:
    """One or several labels of a text or a pair, and what separates several labels."""
    _guess_sequences(guess, task, is_number=False)
    if not guess.found["separator"] and (separator := _separator(guess)):
        guess.found["separator"], guess.why["separator"] = separator, "several labels a row"


def guess_number(guess: Guess, task: Task) -> None:
    """A number for a text or a pair."""
    _guess_sequences(guess, task, is_number=True)


def _guess_sequences(guess: Guess, task: Task, *, is_number: bool) -> None:
    is_pair = "pair" in task.names
    fits = [c for c in guess.free() if (c.is_number if is_number else c.has_few_values or c.is_list)]
    guess.take_label_by_words(LABEL_WORDS, fits)
    if not guess.found["text"] and not guess.found["pair"] and (is_pair or is_number):
        for role, column in zip(("text", "pair"), _twins(guess.texts()), strict=False):
            guess.take(role, [column], "one of two")
    both = guess.texts()[:2] if is_pair and not guess.found["text"] and not guess.found["pair"] else []
    guess.take("text", sorted(both, key=guess.columns.index) or guess.texts(), "the longest text")
    if is_pair:
        guess.take("pair", guess.texts(), "the longest text beside it")
    if is_number:
        numbers = [c for c in guess.free() if c.is_number and not c.words & NO_TEXT and not _counts(c)]
        guess.take_only("label", numbers, "the numbers")
    else:
        guess.take_only("label", [c for c in guess.free() if c.has_few_values or c.is_list], "few values")
        guess.take_only("label", [c for c in guess.free() if not c.words & NO_TEXT], "what is left")


def guess_choice(guess: Guess, task: Task) -> None:
    """A text, endings in a list or in columns of their own, and the right one."""
    guess.take("endings", [c for c in guess.free() if c.is_list and all(len(v) > 1 for v in c.values)], "a list")
    if not guess.found["endings"] and (family := _family(guess.free())):
        guess.found["endings"], guess.why["endings"] = join_names([c.name for c in family]), "numbered columns"
    guess.take_label_by_words(CHOICE_WORDS, guess.free())
    guess.take("text", guess.texts(), "the longest text")
    endings = split_names(guess.found["endings"])
    right = [c for c in guess.free() if all(_chooses(record, c.name, endings) for record in guess.sample)]
    guess.take_only("label", right, "it names an ending")


def guess_answer(guess: Guess, task: Task) -> None:
    """A question, a context, and the answer, which is part of the context."""
    questions = [c for c in guess.texts() if sum(v.rstrip().endswith("?") for v in c.values) > len(c.values) / 2]
    guess.take_only("text", questions, "questions")
    guess.take("pair", guess.texts(), "the longest text")
    context = guess.found["pair"]
    free = [c for c in guess.free() if all(isinstance(value, str) for value in c.values)]
    inside = [c for c in free if all(str(r.get(c.name) or "") in str(r.get(context) or "") for r in guess.sample)]
    guess.take("label", inside, "it stands in the context")
    guess.take("text", guess.texts(), "the longest text beside it")


def guess_tags(guess: Guess, task: Task) -> None:
    """Words and tags: lists or texts with the same number of words; or a text and its entities."""
    spans = [c for c in guess.columns if c.values and all(map(are_entities, c.values)) and any(c.values)]
    label = guess.found["label"]
    if spans and (not label or label in {c.name for c in spans}):
        guess.take("label", spans, "entities by their characters")
        texts = [c for c in guess.columns if c.values and all(isinstance(value, str) for value in c.values)]
        texts = [c for c in texts if c.name != guess.found["label"]]
        if guess.found["text"] not in {c.name for c in texts}:
            guess.found["text"] = ""
        guess.take("text", sorted(texts, key=lambda c: (c.name == "text", c.length), reverse=True), "the text")

    def parts(column: Column) -> list[list[Any]]:
        return [value.split() if isinstance(value, str) else list(value) for value in column.values]

    def kinds(column: Column) -> int:
        return len({str(part) for each in parts(column) for part in each})

    columns = [c for c in guess.columns if c.is_list or c.is_text]
    sizes = {c.name: [len(each) for each in parts(c)] for c in columns}
    for role, other in (("label", "text"), ("text", "label")):
        known = guess.found[other]
        alike = [c for c in guess.free() if c.name in sizes and (not known or sizes[c.name] == sizes.get(known))]
        alike = [c for c in alike if known or sum(sizes[c.name] == sizes[d] for d in sizes) > 1]
        guess.take(role, sorted(alike, key=kinds, reverse=role == "text"), "as many words as tags")


def unread_text(guess: Guess) -> str:
    """The longest column of sentences that has no role; empty if there is none. Values that are repeated are names."""
    return next((c.name for c in guess.texts() if c.length[0] and not c.has_few_values), "")


def header_is_row(guess: Guess) -> bool:
    """Whether the names of a file's columns look like a row: a label of the rows, a number above numbers, a text."""
    return any(
        (column.has_few_values and column.name in column.values)
        or (column.is_number and _is_number(column.name))
        or len(column.name.split()) >= FEWEST_WORDS
        for column in guess.columns
    )


def _twins(texts: Sequence[Column]) -> list[Column]:
    """Two columns whose names differ only in `1` and `2`, `a` and `b` and the like."""
    for one, other in TWINS:
        names = {(*words_of_name(c.name),): c for c in texts}
        for words, column in names.items():
            if one in words and (twin := names.get(tuple(other if word == one else word for word in words))):
                return [column, twin]
    return []


def _family(columns: Sequence[Column]) -> list[Column]:
    """The largest set of columns whose names are numbered or lettered: `A` to `D`, `opt1` to `opt5`."""
    families: dict[str, list[tuple[str, Column]]] = {}
    for column in columns:
        if match := NUMBERED.fullmatch(column.name):
            families.setdefault(match[1].lower(), []).append((match[2].lower(), column))
    whole = [
        [column for _, column in family]
        for family in families.values()
        if len(family) > 1
        and any(
            "".join(sign for sign, _ in family) == s[: len(family)] for s in ("0123456789", "123456789", "abcdefgh")
        )
    ]
    return max(whole, key=len, default=[])


def _chooses(record: Record, name: str, endings: Sequence[str]) -> bool:
    """Whether a value is the number, the letter or the text of an ending."""
    value, parts = str(record.get(name)).strip(), [record.get(ending) for ending in endings]
    parts = list(parts[0]) if len(parts) == 1 and isinstance(parts[0], (list, tuple)) else parts
    letters = "abcdefgh"[: len(parts)]
    return value in map(str, range(len(parts))) or value in parts or (len(value) == 1 and value.lower() in letters)


def _separator(guess: Guess) -> str:
    """What separates the labels of a row, where splitting leaves fewer distinct values."""
    label = next((c for c in guess.columns if c.name == guess.found["label"]), None)
    if label is None or not all(isinstance(value, str) for value in label.values):
        return ""
    for separator in "|;," if label.words & SEVERAL else "|;":
        parts = {part.strip() for value in label.values for part in value.split(separator)}
        if 1 < len(parts) < len({value.strip() for value in label.values}):
            return separator
    return ""


def _counts(column: Column) -> bool:
    """Whether a column numbers the rows."""
    values = [float(value) for value in column.values]
    return len(values) > 2 and all(b - a == 1 for a, b in pairwise(values))


def _is_missing(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError):
        return False
