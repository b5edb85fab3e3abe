"""Tagging of words (section 5.3): a word's tag is predicted at its first sub-token, in the context of its document.

Where entities are given by their characters, every sub-token is tagged (see `units`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.batch import IGNORE, Example, Label
from bertsmith.errors import UserError
from bertsmith.model.heads import HeadConfig
from bertsmith.progress import say
from bertsmith.rows.columns import Row
from bertsmith.rows.conll import bio_name, to_bio, with_documents
from bertsmith.rows.entities import FORM, Entity, are_characters, are_entities, entities_of, of_characters, unread_keys
from bertsmith.tasks.description import Encoded, Limits, Prediction, Task
from bertsmith.tasks.documents import OVERLAP
from bertsmith.tasks.examples import TAG, WORD, Examples
from bertsmith.tasks.metrics import character_f1, entities, entity_macro_f1
from bertsmith.tasks.sequences import are_texts, softmax
from bertsmith.tasks.units import Places, are_spaced, characters_of, unit_tags, units_of, words_of
from bertsmith.text.tokenizer import Tokenizer


def head_for(task: Task, rows: Sequence[Row]) -> HeadConfig:
    """A head for the tags of the rows, `O` first; it tags sub-tokens where entities are given by their characters."""
    spans = [row for row in rows if has_spans(row)]
    types = {entity.label for row in spans for entity in entities_of(row)}
    found = {tag for row in rows if not has_spans(row) for tag in tags_of(row)} | set(task.labels)
    found |= {"O", *(f"{prefix}-{name}" for name in types for prefix in "BI")} if spans else set()
    labels = task.labels if found == set(task.labels) else tuple(sorted(found, key=lambda tag: (tag != "O", tag)))
    if len(labels) < 2:
        raise UserError(
            "no row has an entity: there is nothing to learn"
            if spans
            else f"all words have the tag {labels[0]!r}: there is nothing to tell apart"
        )
    return HeadConfig("tags", labels, unit="token" if spans else "spaced" if are_spaced(rows) else "word")


def has_spans(row: Row) -> bool:
    """Whether a labelled row has entities by their characters instead of words with tags."""
    return not row.parts and bool(row.text)


def tags_of(row: Row) -> list[str]:
    """The tags of a row's words in BIO; those of its characters, without spaces, where it has entities."""
    if has_spans(row):
        return unit_tags(characters_of(row), entities_of(row))
    tags = row.label.split() if isinstance(row.label, str) else row.label
    if not isinstance(tags, (list, tuple)):
        raise UserError(f"{row.place}: the tags are {row.label!r}, not a list")
    if len(tags) != len(row.parts):
        raise UserError(f"{row.place}: {len(row.parts)} words and {len(tags)} tags; every word has one")
    if wrong := [tag for tag in tags if not isinstance(tag, (str, int))]:
        raise UserError(f"{row.place}: {wrong[0]!r} is not a tag")
    return to_bio(tags)


def gold_entities(row: Row) -> list[Entity]:
    """The entities of a row by their characters, also where its words have tags."""
    return entities_of(row) if has_spans(row) else tag_entities(words_of(row), tags_of(row))


def tag_entities(places: Places, tags: Sequence[str]) -> list[Entity]:
    """The entities that the tags of units mark, by their characters."""
    return [Entity(places[units[0]][0], places[units[-1]][1], kind) for kind, units in entity_words(tags)]


def tag_indices(row: Row, head: HeadConfig) -> list[int]:
    """The index of each word's or character's tag among the head's labels."""
    return _indices(tags_of(row), row, head)


def check_tags(row: Row, head: HeadConfig) -> list[int]:
    """Refuse a row with a tag or a type of entity that the head does not know."""
    if has_spans(row):
        return _indices([f"B-{entity.label}" for entity in entities_of(row)], row, head)
    return tag_indices(row, head)


def _indices(tags: Sequence[str], row: Row, head: HeadConfig) -> list[int]:
    known = replace(head, labels=bio_labels(head))
    return [known.label_index(tag, f"{row.place}: ") for tag in tags]


def bio_labels(head: HeadConfig) -> tuple[str, ...]:
    """The head's labels in BIO; older versions saved `PER-B` where the file had that."""
    return tuple(map(bio_name, head.labels))


def encode(rows: Sequence[Row], tokenizer: Tokenizer, limits: Limits, head: HeadConfig, *, labelled: bool) -> Encoded:
    """A sentence with all the context that fits, in several parts where it is longer than the model.

    In training, each sentence is an example of its own; otherwise sentences with the same context share one, so that a
    document that fits is computed once, not once per sentence. `details` are the first tokens of words or, where
    sub-tokens are tagged, their places in the text beside them.
    """
    room = limits.max_length - tokenizer.frame.size(1)
    before = len(tokenizer.frame.first)
    by_token = head.unit == "token"
    examples: list[Example] = []
    owners, details, sources = [], [], []
    windows: dict[tuple[int | tuple[str, ...], int, int], int] = {}  # the number of each example, by its document
    for number, (row, units) in enumerate(zip(rows, units_of(rows, tokenizer, head), strict=True)):
        count, offset = len(units.places), units.begin
        classes = np.array(_unit_classes(row, units.places, head) if labelled else [IGNORE] * count)
        alone = not row.document or by_token
        sizes = np.minimum(np.array([len(pieces) for pieces in units.pieces], dtype=np.int64), room)
        for first, end, left, right in _windows(sizes, offset, offset + count, room):
            begins = before + sizes[left:first].sum() + np.cumsum([0, *sizes[first:end]])[:-1]
            window = (number if alone else row.document, left, right)
            owners.append(number)
            places = np.array(units.places[first - offset : end - offset], dtype=np.int64).reshape(-1, 2)
            details.append(np.column_stack([begins, places]) if by_token else begins)
            source = len(examples) if labelled else windows.setdefault(window, len(examples))
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
            tokens = [token for pieces in units.pieces[left:right] for token in pieces[:room]]
            joined = tokenizer.joiner.join(tokens)
            tags = np.full(len(joined.tokens), IGNORE)
            tags[begins] = classes[first - offset : end - offset]
            labels = {"words": Label(begins, WORD), "sentences": Label(begins[:1], WORD)}
            if labelled:
                labels["tags"] = Label(tags, TAG)
            examples.append(Example(joined.tokens, joined.segments, labels))
    return Encoded(Examples.of(examples), owners, details, sources=sources)


def _unit_classes(row: Row, places: Places, head: HeadConfig) -> list[int]:
    """The index of each unit's tag: the tags of the row's words, or those that its entities give to sub-tokens."""
    if head.unit != "token" and not has_spans(row):
        return tag_indices(row, head)
    return _indices(unit_tags(places, gold_entities(row)), row, head)


def _windows(sizes: NDArray[Any], begin: int, end: int, room: int) -> Iterator[tuple[int, int, int, int]]:
    """The words from `begin` to `end` in parts that fit: the bounds of each part and of its context.

    A part leaves some room for the context on both sides, where there is any, if the words do not fit whole.
    """
    ends = np.concatenate([[0], np.cumsum(sizes)])
    margin = 0 if ends[end] - ends[begin] <= room else room // OVERLAP // 2
    first = begin
    while True:
        own = room - min(margin, ends[first])
        if ends[end] - ends[first] > own - min(margin, ends[-1] - ends[end]):
            own -= margin
        fits = int(np.searchsorted(ends, ends[first] + own, side="right")) - 1
        last = min(end, max(first + 1, fits))  # a single word may need all the room
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
        by_token = parts[0][1].ndim == 2
        places = [(int(a), int(b)) for _, d in parts for _, a, b in d] if by_token else words_of(row, head.unit)
        words_scores = [softmax(word) for scores, d in parts for word in scores[d[:, 0] if by_token else d]]
        tags = [head.labels[int(scores.argmax())] for scores in words_scores]
        highest = [float(scores.max()) for scores in words_scores]
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


def predicted_tags(row: Row, prediction: Prediction) -> list[str]:
    """The predicted tags in BIO of what `tags_of` gives the gold tags of: a row's words or characters."""
    if row.parts and prediction.get("words", row.parts) in (row.parts, list(row.parts)):
        return to_bio(prediction["tags"])
    return unit_tags(words_of(row) if row.parts else characters_of(row), predicted_entities(prediction))


def scores_at(places: Sequence[int], text: str, prediction: Prediction) -> list[float]:
    """The probability of the tag that each of these characters has: that of the predicted unit which it is in."""
    scores, end = np.zeros(len(text)), 0
    for word, score in zip(prediction["words"], prediction["scores"], strict=True):
        begin = text.index(word, end)  # units stand in the order of the text
        end = begin + len(word)
        scores[begin:end] = score
    return [float(scores[place]) for place in places]


def text_tags(row: Row, prediction: Prediction) -> list[str]:
    """The predicted tags of all characters of a text, its spaces included."""
    return unit_tags([(place, place + 1) for place in range(len(row.text))], predicted_entities(prediction))


def predicted_entities(prediction: Prediction) -> list[Entity]:
    """The entities of a prediction by their characters."""
    return [Entity(entity["start"], entity["end"], entity["type"]) for entity in prediction["entities"]]


def score(
    task: Task, rows: Sequence[Row], predictions: Sequence[Prediction], head: HeadConfig, limits: Limits
) -> dict[str, float]:
    """F1, precision and recall of entities, where the tags mark entities; and the accuracy over words.

    Entities that are given by their characters are right if all their characters and their type are; then the accuracy
    is over characters, and there are KLUE-NER's two scores.
    """
    gold = [tags_of(row) for row in rows]
    predicted = [predicted_tags(row, prediction) for row, prediction in zip(rows, predictions, strict=True)]
    pairs = [(g, p) for one, other in zip(gold, predicted, strict=True) for g, p in zip(one, other, strict=True)]
    scores = {"accuracy": 100.0 * sum(g == p for g, p in pairs) / max(1, len(pairs))}
    sides = [[entity_words(tags) for tags in side] for side in (gold, predicted)]
    if any(map(has_spans, rows)):
        scores["entity_macro_f1"] = entity_macro_f1(*sides)
        scores["char_macro_f1"] = character_f1(gold, predicted, bio_labels(head))
    return {**(entities(*sides) if _has_entities(bio_labels(head)) else {}), **scores}


def goal(task: Task, head: HeadConfig) -> str:
    """The score by which the best model is kept: F1 of entities, or accuracy where the tags mark none."""
    return task.metrics[0] if _has_entities(head.labels) else "accuracy"


def _has_entities(labels: Sequence[str]) -> bool:
    return any(label.startswith(("B-", "I-")) for label in labels)


def ceiling(rows: Sequence[Row], tokenizer: Tokenizer, head: HeadConfig) -> str:
    """A note on the entities that the vocabulary cannot mark: a boundary lies inside one of its tokens."""
    if head.unit != "token":
        return ""
    gold = [{*gold_entities(row)} for row in rows]
    marked = [
        {*tag_entities(units.places, unit_tags(units.places, sorted(side)))}
        for units, side in zip(units_of(rows, tokenizer, head), gold, strict=True)
    ]
    total, right = sum(map(len, gold)), sum(len(one & other) for one, other in zip(gold, marked, strict=True))
    if right == total:
        return ""
    return (
        f"{total - right:,} of {total:,} entities do not begin and end with a token of this vocabulary; they are "
        f"marked as nearly as its tokens allow, and F1 can reach {200 * right / (total + right):.1f} at most"
    )


def gold_tags(row: Row, head: HeadConfig) -> Prediction:
    """The prediction that agrees with a row's tags."""
    if not has_spans(row):
        return {"tags": tags_of(row)}
    return {"entities": [{"type": e.label, "start": e.start, "end": e.end} for e in entities_of(row)]}


def finish_rows(rows: Iterable[Row], task: Task, *, labelled: bool) -> Iterator[Row]:
    """Sentences of a table with their words and tags, in the context of their documents."""
    return with_documents(_with_words(_noting_keys(rows) if labelled else rows, task, labelled))


def _noting_keys(rows: Iterable[Row]) -> Iterator[Row]:
    """The same rows; a note names the keys of entities that are not read, with the row that has each of them first."""
    first: dict[str, str] = {}
    for row in rows:
        for key in unread_keys(row.label):
            first.setdefault(key, row.place)
        yield row
    if first:
        keys = ", ".join(f"{key!r} ({place})" for key, place in first.items())
        say(f"note: keys of entities that are not read, and where each is first: {keys}; {FORM}")


def _with_words(rows: Iterable[Row], task: Task, labelled: bool) -> Iterator[Row]:
    """Words are those of the table or, if there are tags, split at spaces; numbers become the task's tags."""
    for row in rows:
        by_character = are_characters(row.parts)
        if by_character or (labelled and not row.parts and are_entities(row.label)) or not (row.parts or labelled):
            yield _of_characters(row, task) if by_character else row
            continue
        if labelled and are_entities(row.label) and row.label:
            raise UserError(f"{row.place}: entities by their characters need a text, and there is a list of words")
        parts = row.parts or tuple(row.text.split())
        yield replace(row, parts=parts, label=_named(row.label, task), text=" ".join(parts))


def _named(label: Any, task: Task) -> Any:
    """Tags as a list; numbers become the task's tags."""
    label = label.split() if isinstance(label, str) else label
    if not isinstance(label, list):
        return label
    return [task.labels[n] if isinstance(n, int) and 0 <= n < len(task.labels) else n for n in label]


def _of_characters(row: Row, task: Task) -> Row:
    """A row whose words are its characters, as a text with entities."""
    label = row.label and tags_of(replace(row, label=_named(row.label, task)))
    entities = label and of_characters(row.parts, label)
    return replace(row, text="".join(row.parts), label=entities, parts=())


def from_input(item: Any) -> Row | None:
    """A row of a text or of a list of its words."""
    if isinstance(item, str):
        return Row(item, None, None, "")
    return Row(" ".join(item), None, None, "", parts=tuple(item)) if are_texts(item) else None
