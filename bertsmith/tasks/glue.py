"""The tasks of GLUE: one row of a table each, for the files of the data set itself and those of the hub."""

from __future__ import annotations

from typing import Any

from bertsmith.model.config import HeadKind
from bertsmith.tasks.description import Task

YES_NO, ENTAILS = ("0", "1"), ("entailment", "not_entailment")
NLI = ("entailment", "neutral", "contradiction")  # the hub's order of numbers
PAIR = (("sentence1",), ("sentence2",), ("label",))
SINGLE = (("sentence",), (), ("label",))


def _task(
    name: str,
    server: str,
    metrics: tuple[str, ...],
    columns: tuple[tuple[str, ...], ...],
    labels: tuple[str, ...] = (),
    **changes: Any,
) -> Task:
    names = {role: each for role, each in zip(("text", "pair", "label"), columns, strict=True) if each}
    head: HeadKind = "single" if labels else "regression"
    values: dict[str, Any] = {"test": {server: ("test",)}, **changes}
    values["unlabelled"] = "-" if "entailment" in labels else ""
    return Task(name, head, metrics, {**names, "key": ("index", "id", "idx")}, labels=labels, **values)


MRPC = (("#1 String", "sentence1"), ("#2 String", "sentence2"), ("Quality", "label"))
QQP = (("question1",), ("question2",), ("is_duplicate", "label"))
MNLI = (("sentence1", "premise"), ("sentence2", "hypothesis"), ("gold_label", "label"))
STSB = (("sentence1",), ("sentence2",), ("score", "label"))
BESIDE = ("../AX/diagnostic", "../AX/AX", "../diagnostic/diagnostic", "../ax/test")  # MNLI's folder; the last: the hub
MNLI_FILES = {
    "dev": {"": ("dev_matched", "validation_matched"), "mismatched": ("dev_mismatched", "validation_mismatched")},
    "test": {"MNLI-m": ("test_matched",), "MNLI-mm": ("test_mismatched",), "AX": ("diagnostic", "AX", "ax", *BESIDE)},
}
GLUE = (
    _task("cola", "CoLA", ("matthews", "accuracy"), SINGLE, YES_NO, header=("source", "label", "star", "sentence")),
    _task("sst2", "SST-2", ("accuracy",), SINGLE, YES_NO),
    _task("mrpc", "MRPC", ("f1", "accuracy"), MRPC, YES_NO, symmetric=True),
    _task("stsb", "STS-B", ("spearman", "pearson"), STSB, scale=(0.0, 5.0), symmetric=True),
    _task("qqp", "QQP", ("f1", "accuracy"), QQP, YES_NO, symmetric=True),
    _task("mnli", "MNLI-m", ("accuracy",), MNLI, NLI, **MNLI_FILES),
    _task("qnli", "QNLI", ("accuracy",), (("question",), ("sentence",), ("label",)), ENTAILS),
    _task("rte", "RTE", ("accuracy",), PAIR, ENTAILS),
    _task("wnli", "WNLI", ("accuracy",), PAIR, YES_NO),
)
