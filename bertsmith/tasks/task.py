"""Every task by its name, and what each kind of head does: the one place that tells the kinds apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bertsmith.errors import UserError, suggestion
from bertsmith.model.config import HeadKind
from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import NAMES, Row
from bertsmith.tasks import choice, sequences, spans, tagging
from bertsmith.tasks.description import DEV, Encoded, Limits, Task
from bertsmith.tasks.glue import GLUE, KOREAN
from bertsmith.tasks.sequences import target

__all__ = ["KINDS", "OWN", "TASKS", "Encoded", "Limits", "Task", "find_task", "target"]

PAIRS = {
    "text": ("text1", "sentence1", "premise", "question1", "question", "text_a", "text"),
    "pair": ("text2", "sentence2", "hypothesis", "question2", "sentence", "text_b", "pair"),
    "label": NAMES["label"],
}
QUESTIONS = {
    "text": ("question",),
    "pair": ("context", "passage", "text"),
    "label": ("answers", "answer"),
    "start": ("answer_start",),
    "key": ("id",),
}
CHOICES = {
    "text": ("sent1", "question", "context", "question_propmt", "text", "ctx"),
    "endings": ("endings", "choices", "options", "candidate_answers"),
    "label": ("label", "correct_answer_idx", "answer"),
}
WORDS = {"text": ("tokens", "words", "text"), "label": ("ner_tags", "tags", "labels", "label")}
NER = ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC")  # the hub's order of numbers
OWN = (
    Task("classify", "single", ("accuracy", "macro_f1"), NAMES, own=True),
    Task("pair", "single", ("accuracy", "macro_f1"), PAIRS, own=True, unlabelled="-"),
    Task("regress", "regression", ("pearson", "spearman"), NAMES, own=True),
    Task("tag", "tags", ("f1", "precision", "recall", "accuracy"), WORDS, own=True),
    Task("answer", "span", ("f1", "exact_match"), QUESTIONS, own=True, no_answer=True, max_length=384),
    Task("choose", "choice", ("accuracy",), CHOICES, own=True),
)
OTHERS = (
    Task(
        "squad1",
        "span",
        ("f1", "exact_match"),
        QUESTIONS,
        train=("train-v1.1", "train"),
        dev={"": ("dev-v1.1", *DEV)},
        max_length=384,
    ),
    Task(
        "squad2",
        "span",
        ("f1", "exact_match"),
        QUESTIONS,
        train=("train-v2.0", "train"),
        dev={"": ("dev-v2.0", *DEV)},
        no_answer=True,
        max_length=384,
    ),
    Task(
        "korquad",
        "span",
        ("f1", "exact_match"),
        QUESTIONS,
        train=("KorQuAD_v1.0_train", "train"),
        dev={"": ("KorQuAD_v1.0_dev", *DEV)},
        letters=True,
        max_length=384,
    ),
    Task(
        "swag",
        "choice",
        ("accuracy",),
        {**CHOICES, "pair": ("sent2",)},
        train=("train", "fold_0_train"),
        dev={"": (*DEV, "fold_0_dev")},
        test={"SWAG": ("test", "fold_0_test")},
        header=("category", "question", "choice0", "choice1", "choice2", "choice3", "label"),
    ),
    Task(
        "conll2003",
        "tags",
        ("f1", "precision", "recall", "accuracy"),
        WORDS,
        train=("eng.train", "train"),
        dev={"": ("eng.testa", *DEV)},
        test={"conll2003": ("eng.testb", "test")},
        labels=NER,
        max_length=512,
    ),
)
TASKS = {task.name: task for task in (*OWN, *GLUE, *OTHERS, *KOREAN)}
PLAIN = {"single": "classify", "multi": "classify", "regression": "regress", "choice": "choose", "tags": "tag"}


def find_task(name: str) -> Task:
    """A task by its name."""
    if name not in TASKS:
        raise UserError(f"unknown task {name!r}{suggestion(name, TASKS) or '; one of: ' + ', '.join(TASKS)}")
    return TASKS[name]


def plain_task(kind: HeadKind) -> Task:
    """The task for the user's own files of a head's kind."""
    return TASKS[PLAIN.get(kind, "answer")]


@dataclass(frozen=True)
class Kind:
    """What tells one kind of head from another.

    `head_for(task, rows)` is the head that training rows ask for; `check(row, head)` refuses a row whose label the head
    cannot learn; `encode` makes examples, `decode` plain answers out of one array of scores an example, and `score`
    compares them with the rows' labels.
    """

    head_for: Callable[[Task, Sequence[Row]], HeadConfig]
    check: Callable[[Row, HeadConfig], Any]
    encode: Callable[..., Encoded]
    decode: Callable[..., list[dict[str, Any]]]
    score: Callable[[Task, Sequence[Row], Sequence[dict[str, Any]], HeadConfig, Limits], dict[str, float]]


SEQUENCES = Kind(sequences.head_for, target, sequences.encode, sequences.decode, sequences.score)
KINDS: dict[HeadKind, Kind] = {
    "single": SEQUENCES,
    "multi": SEQUENCES,
    "regression": SEQUENCES,
    "choice": Kind(choice.head_for, choice.check, choice.encode, choice.decode, choice.score),
    "tags": Kind(tagging.head_for, tagging.check, tagging.encode, tagging.decode, tagging.score),
    "span": Kind(spans.head_for, spans.check, spans.encode, spans.decode, spans.score),
}
