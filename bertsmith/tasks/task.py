"""Every task by its name: a task is one row of a table; its kind defines the rest (see `kinds`)."""

from __future__ import annotations

from bertsmith.errors import UserError, nearest_or_all
from bertsmith.model.config import HeadKind
from bertsmith.rows.columns import NAMES
from bertsmith.tasks.description import DEV, QUESTIONS, WORDS, Task
from bertsmith.tasks.glue import GLUE
from bertsmith.tasks.korean import KOREAN

PAIRS = {
    "text": ("text1", "sentence1", "premise", "question1", "question", "text_a", "text"),
    "pair": ("text2", "sentence2", "hypothesis", "question2", "sentence", "text_b", "pair"),
    "label": NAMES["label"],
}
CHOICES = {
    "text": ("sent1", "question", "context", "question_propmt", "text", "ctx"),
    "endings": ("endings", "choices", "options", "candidate_answers"),
    "label": ("label", "correct_answer_idx", "answer"),
}
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


def find_task(name: str) -> Task:
    """A task by its name."""
    if name not in TASKS:
        raise UserError(f"unknown task {name!r}{nearest_or_all(name, TASKS)}")
    return TASKS[name]


def plain_task(kind: HeadKind) -> Task:
    """The task for the user's own files with a kind of head; several labels are a case of `classify`."""
    return next((task for task in OWN if task.head == kind), TASKS["classify"])
