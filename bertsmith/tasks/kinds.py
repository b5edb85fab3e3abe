"""The kinds of tasks: a row of the table defines a kind, from the columns of its rows to its prediction files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from numpy.typing import NDArray

from bertsmith.model.config import HeadKind
from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Row
from bertsmith.tasks import (
    baseline,
    by_class,
    ceiling,
    choice,
    comparison,
    documents,
    guessing,
    official_files,
    overview,
    sequences,
    spans,
    tagging,
)
from bertsmith.tasks.description import Encoded, Limits, Prediction, Task
from bertsmith.tasks.spelled import encode_spelled
from bertsmith.text.frame import Frame
from bertsmith.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Kind:
    """How tasks with one kind of head are read, encoded, decoded, scored, compared and written.

    All functions take labelled rows, except for `encode` and `decode`. Fields that a kind does not need (classes, a
    constant baseline, limits to tune) keep their defaults.
    """

    # Reading rows.
    guess: Callable[[guessing.Guess, Task], None]  # find the columns that were not named by their content
    check: Callable[[Row], Any]  # refuse a label that no head of this kind can learn
    head_for: Callable[[Task, Sequence[Row]], HeadConfig]  # the head for the labels of training rows
    target: Callable[[Row, HeadConfig], Any]  # what the head learns from a row; a label that it lacks is refused
    from_input: Callable[[Any], Row | None]  # a row from a value that a program passes; None if the value does not fit
    input_form: str  # a description of such values
    overview: Callable[[Sequence[Row], HeadConfig], str]  # a line on the labels of rows
    # From rows to predictions and scores.
    encode: Callable[..., Encoded]
    decode: Callable[..., list[Prediction]]  # predictions of one array of logits per example
    score: Callable[[Task, Sequence[Row], Sequence[Prediction], HeadConfig, Limits], dict[str, float]]
    # Reports and files.
    compare: Callable[[Task, HeadConfig, Row, Prediction], comparison.Comparison]
    write: Callable[[Path, str, Task, Sequence[Row], Sequence[Prediction]], None]  # in the form of a server or script
    gold: Callable[[Row, HeadConfig], Prediction] | None = None  # the prediction that agrees with a row's label
    column: str = ""  # the field of a prediction that prediction files have as a column
    by_class: Callable[[HeadConfig, Sequence[Row], Sequence[Prediction]], by_class.ClassScores] = lambda *_: {}
    official_split: Literal["dev", "test"] = "test"  # what the data sets' servers or scripts score
    # Fields that only some kinds need.
    has_classes: bool = False  # labels are names, which a table may store as numbers
    reads_windows: bool = False  # a text may be read in windows whose logits are pooled (`data.windows`)
    tags_words: bool = False  # every word has a label, and files may have one word per line
    finish_rows: Callable[..., Iterable[Row]] = sequences.finish_rows  # give rows the task's label names, and words
    align: Callable[[list[Row], list[str] | None], tuple[list[Row], str]] = lambda rows, skipped: (rows, "")
    check_dev: Callable[[Sequence[Row]], None] = lambda rows: None  # refuse dev rows that cannot be scored
    group: Callable[[Row], str] = lambda row: row.text  # rows of one group are either all held out or all trained on
    stratum: Callable[[Row, HeadConfig], Any] = lambda row, head: 0  # held-out rows are drawn in proportion to these
    class_counts: Callable[[Sequence[Row], HeadConfig], NDArray[Any]] | None = None  # the rows of each class
    numbers: Callable[[Sequence[Row], HeadConfig], list[float]] = lambda rows, head: []  # that are learnt as they are
    goal: Callable[[Task, HeadConfig], str] = lambda task, head: task.metrics[0]  # the score of the best model
    constant_loss: Callable[..., float | None] = lambda rows, head, weights: None  # of the best constant prediction
    constant: Callable[[Sequence[Row], Sequence[Prediction], HeadConfig], str] = lambda *_: ""  # if all are the same
    limits_note: Callable[[Limits, Frame], str | None] = lambda limits, frame: None  # a warning about them
    # How far the tokens of a vocabulary limit the scores on rows: a note, and figures for the result of a run.
    ceiling: Callable[[Sequence[Row], Tokenizer, HeadConfig, Task], tuple[str, dict[str, float]]] = lambda *_: ("", {})
    limits_to_save: Callable[[Sequence[Row], Limits], dict[str, object]] = lambda rows, limits: {}
    tune: Callable[[Task, Sequence[Row], Sequence[Prediction]], dict[str, float | None]] = lambda *_: {}  # on dev rows


TEXT_OR_PAIR = "a text or a pair of texts, (first, second)"
SINGLE = Kind(
    guess=guessing.guess_labels,
    check=sequences.check_labels,
    head_for=sequences.head_for,
    target=sequences.label_index,
    from_input=sequences.from_input,
    input_form=TEXT_OR_PAIR,
    overview=overview.label_line,
    encode=partial(sequences.encode, target=sequences.label_index),
    decode=partial(sequences.decode, predict=sequences.predict_label),
    score=sequences.score_label,
    compare=comparison.compare_label,
    write=official_files.write_glue,
    gold=sequences.gold_label,
    column="label",
    by_class=by_class.label_scores,
    has_classes=True,
    stratum=lambda row, head: sequences.label_of(row),
    class_counts=sequences.label_counts,
    constant_loss=baseline.label_loss,
    constant=baseline.constant_label,
    limits_to_save=documents.limits_to_save,
    reads_windows=True,
)
MULTI = replace(
    SINGLE,
    target=sequences.multi_hot,
    overview=overview.labels_line,
    encode=partial(sequences.encode, target=sequences.multi_hot),
    decode=partial(sequences.decode, predict=sequences.predict_labels),
    score=sequences.score_labels,
    compare=comparison.compare_labels,
    gold=sequences.gold_labels,
    column="labels",
    by_class=by_class.labels_scores,
    stratum=lambda row, head: 0,
    class_counts=sequences.labels_counts,
    constant_loss=baseline.labels_loss,
    constant=baseline.constant_labels,
)
REGRESSION = Kind(
    guess=guessing.guess_number,
    check=sequences.check_number,
    head_for=sequences.regression_head,
    target=sequences.number_of,
    from_input=sequences.from_input,
    input_form=TEXT_OR_PAIR,
    overview=overview.number_line,
    encode=partial(sequences.encode, target=sequences.number_of),
    decode=partial(sequences.decode, predict=sequences.predict_number),
    score=sequences.score_number,
    compare=comparison.compare_number,
    write=official_files.write_glue,
    gold=sequences.gold_number,
    column="value",
    stratum=sequences.number_of,
    numbers=lambda rows, head: [sequences.number_of(row, head) for row in rows],
    constant_loss=baseline.number_loss,
    constant=baseline.constant_number,
    limits_to_save=documents.limits_to_save,
    reads_windows=True,
)
CHOICE = Kind(
    guess=guessing.guess_choice,
    check=choice.check_row,
    head_for=choice.head_for,
    target=choice.ending_index,
    from_input=choice.from_input,
    input_form="a tuple (context, [endings])",
    overview=overview.choice_line,
    encode=choice.encode,
    decode=choice.decode,
    score=choice.score,
    compare=comparison.compare_choice,
    write=official_files.write_choices,
    gold=choice.gold_choice,
    column="choice",
    constant_loss=baseline.choice_loss,
)
TAGS = Kind(
    guess=guessing.guess_tags,
    check=tagging.tags_of,
    head_for=tagging.head_for,
    target=tagging.check_tags,
    from_input=tagging.from_input,
    input_form="a text or a list of its words",
    overview=overview.tag_line,
    encode=tagging.encode,
    decode=tagging.decode,
    score=tagging.score,
    compare=comparison.compare_tags,
    write=official_files.write_tags,
    gold=tagging.gold_tags,
    by_class=by_class.tag_scores,
    has_classes=True,
    tags_words=True,
    finish_rows=tagging.finish_rows,
    goal=tagging.goal,
    ceiling=lambda rows, tokenizer, head, task: (tagging.ceiling(rows, tokenizer, head), {}),
    constant_loss=baseline.tag_loss,
    constant=baseline.constant_tag,
)
SPAN = Kind(
    guess=guessing.guess_answer,
    check=spans.check_row,
    head_for=spans.head_for,
    target=spans.gold_answers,
    from_input=spans.from_input,
    input_form="a tuple (question, context)",
    overview=overview.answer_line,
    encode=spans.encode,
    decode=spans.decode,
    score=spans.score,
    compare=comparison.compare_answer,
    write=official_files.write_squad,
    official_split="dev",
    align=spans.align_answers,
    check_dev=spans.check_dev,
    group=lambda row: row.pair or "",
    limits_note=spans.stride_note,
    ceiling=ceiling.ceiling,
    limits_to_save=spans.limits_to_save,
    tune=spans.tune,
)
LISTED: dict[HeadKind, Kind] = {
    "single": SINGLE,
    "multi": MULTI,
    "regression": REGRESSION,
    "choice": CHOICE,
    "tags": TAGS,
    "span": SPAN,
}
KINDS = {name: replace(kind, encode=partial(encode_spelled, kind.encode)) for name, kind in LISTED.items()}
