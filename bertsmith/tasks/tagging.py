"""Tagging of words (section 5.3): a word's tag is predicted at its first sub-token, in the context of its document."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.batch import IGNORE, Example, Label
from bertsmith.errors import UserError
from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Row
from bertsmith.rows.conll import bio_name, to_bio, with_documents
from bertsmith.tasks.description import Encoded, Limits, Prediction, Task
from bertsmith.tasks.examples import TAG, WORD, Examples
from bertsmith.tasks.metrics import entities, seqeval_metrics
from bertsmith.tasks.sequences import are_texts, softmax
from bertsmith.text.offsets import FLAG, PICTURE, SKIN_TONES, marks
from bertsmith.text.tokenizer import Tokenizer

Pieces = dict[str, list[int]]  # the sub-tokens of each word


def head_for(task: Task, rows: Sequence[Row]) -> HeadConfig:
    """A head for the tags of the rows, `O` first."""
    found = {tag for row in rows for tag in tags_of(row)} | set(task.labels)
    labels = task.labels if found == set(task.labels) else tuple(sorted(found, key=lambda tag: (tag != "O", tag)))
    if len(labels) < 2:
        raise UserError(f"all words have the tag {labels[0]!r}: there is nothing to tell apart")
    return HeadConfig("tags", labels)


def words_of(row: Row) -> list[tuple[int, int]]:
    """The words of a row and their places in its text: those of `parts`, else split by letters and punctuation."""
    if not row.parts:
        return [match.span() for match in word_pattern().finditer(row.text)]
    ends = np.cumsum([len(word) + 1 for word in row.parts]) - 1
    return [(int(end) - len(word), int(end)) for word, end in zip(row.parts, ends, strict=True)]


@cache
def word_pattern() -> re.Pattern[str]:
    """Letters and digits together, each punctuation sign alone, both with combining marks (accents, vowel signs)."""
    sign = rf"{FLAG}{{2}}|[^\w\s](?:\u200d{PICTURE}|[{marks()}{SKIN_TONES}])*"
    return re.compile(rf"\w[\w{marks()}]*|{sign}")


def tags_of(row: Row) -> list[str]:
    """The tags of a row's words in BIO."""
    tags = row.label.split() if isinstance(row.label, str) else row.label
    if not isinstance(tags, (list, tuple)):
        raise UserError(f"{row.place}: the tags are {row.label!r}, not a list")
    if len(tags) != len(row.parts):
        raise UserError(f"{row.place}: {len(row.parts)} words and {len(tags)} tags; every word has one")
    if wrong := [tag for tag in tags if not isinstance(tag, (str, int))]:
        raise UserError(f"{row.place}: {wrong[0]!r} is not a tag")
    return to_bio(tags)


def tag_indices(row: Row, head: HeadConfig) -> list[int]:
    """The index of each word's tag among the head's labels."""
    known = replace(head, labels=bio_labels(head))
    return [known.label_index(tag, f"{row.place}: ") for tag in tags_of(row)]


def bio_labels(head: HeadConfig) -> tuple[str, ...]:
    """The head's labels in BIO; older versions saved `PER-B` where the file had that."""
    return tuple(map(bio_name, head.labels))


def encode(rows: Sequence[Row], tokenizer: Tokenizer, limits: Limits, head: HeadConfig, *, labelled: bool) -> Encoded:
    """A sentence with all the context that fits, in several parts where it is longer than the model.

    In training, each sentence is an example of its own; otherwise sentences with the same context share one, so that a
    document that fits is computed once, not once per sentence.
    """
    room = limits.max_length - tokenizer.frame.size(1)
    before = len(tokenizer.frame.first)
    texts = [[row.text[begin:end] for begin, end in words_of(row)] for row in rows]
    pieces = _pieces([word for row in rows for word in row.document] + [w for words in texts for w in words], tokenizer)
    examples: list[Example] = []
    owners, details, sources = [], [], []
    places: dict[tuple[int | tuple[str, ...], int, int], int] = {}  # of the examples, by document and window
    for number, (row, words) in enumerate(zip(rows, texts, strict=True)):
        classes = np.array(tag_indices(row, head) if labelled else [IGNORE] * len(words))
        document, offset = (row.document, row.begin) if row.document else (tuple(words), 0)
        alone = labelled or not row.document
        sizes = np.minimum(np.array([len(pieces[word]) for word in document], dtype=np.int64), room)
        for first, end, left, right in _windows(sizes, offset, offset + len(words), room):
            begins = before + sizes[left:first].sum() + np.cumsum([0, *sizes[first:end]])[:-1]
            window = (number if alone else row.document, left, right)
            owners.append(number)
            details.append(begins)
            source = places.setdefault(window, len(examples))
            if source < len(examples) and head.features is not None:
                both = np.intersect1d(begins, examples[source].labels["words"].values)
                source = len(examples) if len(both) else source  # words that a BiLSTM reads in two sentences
            sources.append(source)
            if source < len(examples):
                known = examples[source].labels
                words_so_far = np.concatenate([known["words"].values, begins])
                first_words = np.append(known["sentences"].values, begins[:1])
                labels = {**known, "words": Label(words_so_far, WORD), "sentences": Label(first_words, WORD)}
                examples[source] = replace(examples[source], labels=labels)
                continue
            tokens = [piece for word in document[left:right] for piece in pieces[word][:room]]
            joined = tokenizer.joiner.join(tokens)
            tags = np.full(len(joined.tokens), IGNORE)
            tags[begins] = classes[first - offset : end - offset]
            labels = {"words": Label(begins, WORD), "sentences": Label(begins[:1], WORD)}
            if labelled:
                labels["tags"] = Label(tags, TAG)
            examples.append(Example(joined.tokens, joined.segments, labels))
    return Encoded(Examples.of(examples), owners, details, sources=sources)


def _pieces(words: Sequence[str], tokenizer: Tokenizer) -> Pieces:
    """The sub-tokens of each word; a word without sub-tokens is the unknown token."""
    distinct = list(dict.fromkeys(words))
    unknown = [tokenizer.unknown_id]
    found = tokenizer.encode([tokenizer.space + word for word in distinct])
    return {word: ids or unknown for word, ids in zip(distinct, found, strict=True)}


def _windows(sizes: NDArray[Any], begin: int, end: int, room: int) -> Iterator[tuple[int, int, int, int]]:
    """The words from `begin` to `end` in parts that fit: the bounds of each part and of its context."""
    ends = np.concatenate([[0], np.cumsum(sizes)])
    first = begin
    while True:
        last = min(end, int(np.searchsorted(ends, ends[first] + room, side="right")) - 1)
        free = room - (ends[last] - ends[first])
        after = ends[-1] - ends[last]
        wanted = max(free // 2, free - after)  # before; context that one side does not need goes to the other
        left = int(np.searchsorted(ends, ends[first] - wanted, side="left"))
        right = int(np.searchsorted(ends, ends[left] + room, side="right")) - 1
        yield first, last, left, right
        first = last
        if first >= end:
            return


def decode(
    rows: Sequence[Row], encoded: Encoded, logits: Sequence[NDArray[np.float32]], head: HeadConfig, limits: Limits
) -> list[Prediction]:
    """The tag of each word with its probability, and the entities that the tags mark, with their places in the text."""
    predictions = []
    for number, row in enumerate(rows):
        parts = [(logits[encoded.source_of(i)], encoded.details[i]) for i in encoded.parts_of(number)]
        words_scores = [softmax(word) for scores, begins in parts for word in scores[begins]]
        tags = [head.labels[int(scores.argmax())] for scores in words_scores]
        highest = [float(scores.max()) for scores in words_scores]
        places = words_of(row)
        words = [row.text[begin:end] for begin, end in places]
        found = find_entities(row.text, places, tags, highest)
        predictions.append({"words": words, "tags": tags, "scores": highest, "entities": found})
    return predictions


def find_entities(
    text: str, places: Sequence[tuple[int, int]], tags: Sequence[str], scores: Sequence[float] | None = None
) -> list[dict[str, Any]]:
    """Entities as type, text and characters; with the tags' scores, the mean of an entity's words."""
    found = []
    for kind, words in entity_words(tags):
        begin, end = places[words[0]][0], places[words[-1]][1]
        entity = {"type": kind, "text": text[begin:end], "start": begin, "end": end}
        found.append(entity if scores is None else {**entity, "score": sum(scores[w] for w in words) / len(words)})
    return found


def entity_words(tags: Sequence[str]) -> list[tuple[str, list[int]]]:
    """The type of each entity, and the numbers of its words."""
    found: list[tuple[str, list[int]]] = []
    for number, tag in enumerate(to_bio(tags)):
        head, dash, kind = tag.partition("-")
        if dash and head == "I":
            found[-1][1].append(number)
        elif dash and head == "B":
            found.append((kind, [number]))
    return found


def score(
    task: Task, rows: Sequence[Row], predictions: Sequence[Prediction], head: HeadConfig, limits: Limits
) -> dict[str, float]:
    """F1, precision and recall of entities, where the tags mark entities; and the accuracy over words."""
    gold, predicted = [tags_of(row) for row in rows], [to_bio(p["tags"]) for p in predictions]
    pairs = [(g, p) for one, other in zip(gold, predicted, strict=True) for g, p in zip(one, other, strict=True)]
    scores = {"accuracy": 100.0 * sum(g == p for g, p in pairs) / max(1, len(pairs))}
    return {**(entities(gold, predicted) if _has_entities(bio_labels(head)) else {}), **scores}


def goal(task: Task, head: HeadConfig) -> str:
    """The score by which the best model is kept: F1 of entities, or accuracy where the tags mark none."""
    return task.metrics[0] if _has_entities(head.labels) else "accuracy"


def _has_entities(labels: Sequence[str]) -> bool:
    return any(label.startswith(("B-", "I-")) for label in labels)


def check_dev(rows: Sequence[Row]) -> None:
    """Refuse to train where the library that scores entities is missing."""
    seqeval_metrics()


def gold_tags(row: Row, head: HeadConfig) -> Prediction:
    """The prediction that agrees with a row's tags."""
    return {"tags": tags_of(row)}


def finish_rows(rows: Iterable[Row], task: Task, *, labelled: bool) -> Iterator[Row]:
    """Sentences of a table with their words and tags, in the context of their documents."""
    return with_documents(_with_words(rows, task, labelled))


def _with_words(rows: Iterable[Row], task: Task, labelled: bool) -> Iterator[Row]:
    """Words are those of the table or, if there are tags, split at spaces; numbers become the task's tags."""
    for row in rows:
        if not row.parts and not labelled:
            yield row
            continue
        parts = row.parts or tuple(row.text.split())
        label = row.label.split() if isinstance(row.label, str) else row.label
        if isinstance(label, list):
            label = [task.labels[n] if isinstance(n, int) and 0 <= n < len(task.labels) else n for n in label]
        yield replace(row, parts=parts, label=label, text=" ".join(parts))


def from_input(item: Any) -> Row | None:
    """A row of a text or of a list of its words."""
    if isinstance(item, str):
        return Row(item, None, None, "")
    return Row(" ".join(item), None, None, "", parts=tuple(item)) if are_texts(item) else None
