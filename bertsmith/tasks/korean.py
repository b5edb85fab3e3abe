"""Korean tasks: one row of a table each, for the released files and those of the hub.

KLUE (Park et al. 2021) with the scores of its own code, KorNLI and KorSTS (Ham et al. 2020), KorQuAD (in `task`), NSMC,
and the named entities of Naver's NLP Challenge, which are read from the user's copy.
"""

from __future__ import annotations

from typing import Any

from bertsmith.tasks.description import DEV, QUESTIONS, WORDS, Names, Task
from bertsmith.tasks.glue import NLI, YES_NO

KEY = ("guid", "id")
TOPICS = (
    "IT과학",
    "경제",
    "사회",
    "생활문화",
    "세계",
    "스포츠",
    "정치",
)  # this and the next: the hub's order of numbers
KLUE_TYPES = ("DT", "LC", "OG", "PS", "QT", "TI")
NAVER_TYPES = ("PER", "FLD", "AFW", "ORG", "LOC", "CVL", "DAT", "TIM", "NUM", "EVT", "ANM", "PLT", "MAT", "TRM")
SENTENCES: Names = {
    "text": ("sentence1", "premise"),
    "pair": ("sentence2", "hypothesis"),
    "label": ("gold_label", "label"),
}
TRANSLATED = "snli_1.0_train.ko+multinli.train.ko"  # KorNLI's training rows are in two files


def _bio(types: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{prefix}-{name}" for name in types for prefix in "BI")


def _klue(released: str) -> dict[str, Any]:
    """The files of a KLUE task, in both versions."""

    def stems(split: str) -> tuple[str, ...]:
        return tuple(f"{released}-{version}_{split}" for version in ("v1.1", "v1"))

    return {
        "train": (*stems("train"), "train"),
        "dev": {"": (*stems("dev"), *DEV)},
        "test": {released: (*stems("test"), "test")},
    }


KOREAN = (
    Task(
        "nsmc",
        "single",
        ("accuracy", "macro_f1"),
        {"text": ("document", "text"), "label": ("label",), "key": ("id",)},
        train=("ratings_train", "train"),
        dev={"": ("ratings_test", *DEV, "test")},
        labels=YES_NO,
    ),
    Task(
        "korsts",
        "regression",
        ("spearman", "pearson"),
        {"text": ("sentence1",), "pair": ("sentence2",), "label": ("score", "label"), "key": ("id",)},
        train=("sts-train", "train"),
        dev={"": ("sts-dev", *DEV)},
        test={"KorSTS": ("sts-test", "test")},
        scale=(0.0, 5.0),
        symmetric=True,
    ),
    Task(
        "kornli",
        "single",
        ("accuracy",),
        SENTENCES,
        train=(TRANSLATED, "train"),
        dev={"": ("xnli.dev.ko", *DEV)},
        test={"KorNLI": ("xnli.test.ko", "test")},
        labels=NLI,
    ),
    Task(
        "naver-ner",
        "tags",
        ("f1", "precision", "recall", "accuracy"),
        WORDS,
        train=("train_data", "train"),
        dev={"": (*DEV, "test_data", "test")},
        labels=("O", *_bio(NAVER_TYPES)),
        header=("text", "label"),
    ),
    Task(
        "klue-tc",
        "single",
        ("macro_f1", "accuracy"),
        {"text": ("title",), "label": ("label",), "key": KEY},
        labels=TOPICS,
        **_klue("ynat"),
    ),
    Task(
        "klue-sts",
        "regression",
        ("pearson", "f1_at_3"),
        {"text": ("sentence1",), "pair": ("sentence2",), "label": ("labels.label", "label"), "key": KEY},
        scale=(0.0, 5.0),
        symmetric=True,
        **_klue("klue-sts"),
    ),
    Task("klue-nli", "single", ("accuracy",), {**SENTENCES, "key": KEY}, labels=NLI, **_klue("klue-nli")),
    Task(
        "klue-ner",
        "tags",
        ("entity_macro_f1", "char_macro_f1", "f1"),
        {**WORDS, "key": KEY},
        labels=(*_bio(KLUE_TYPES), "O"),
        **_klue("klue-ner"),
    ),
    Task(
        "klue-mrc",
        "span",
        ("exact_match", "rouge_w"),
        {**QUESTIONS, "key": KEY},
        no_answer=True,
        letters=True,
        max_length=512,
        **_klue("klue-mrc"),
    ),
)
