"""Fine-tuning and evaluation on rows in memory give the same results as on a file."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import bertsmith
from bertsmith.config import override
from bertsmith.errors import UserError
from bertsmith.finetuning.protocols import finetune_many
from bertsmith.finetuning.run import FinetuneConfig, finetune
from bertsmith.inference.files import evaluate
from bertsmith.rows.columns import Columns
from bertsmith.rows.records import Table
from bertsmith.rows.tables import as_source
from bertsmith.tasks.reading import find_splits, read_task
from bertsmith.tasks.task import find_task
from bertsmith.training.run import facts_of

RECORDS = [{"text": "a b", "label": "x"}, {"text": "c", "label": "y"}]
SETTINGS: dict[str, Any] = {"learning_rate": 1e-3, "steps": 3, "batch_size": 8, "max_length": 32, "device": "cpu"}


@dataclass
class Frame:
    """A stand-in for `pandas.DataFrame`."""

    rows: list[dict]

    @property
    def columns(self) -> list[str]:
        return list(self.rows[0])

    def to_dict(self, orient: str) -> list[dict]:
        assert orient == "records"
        return self.rows


class NAType:
    """A stand-in for the type of `pandas.NA`."""


@dataclass
class Dataset:
    """A stand-in for `datasets.Dataset`, with labels as integers that have names."""

    rows: list[dict]
    features: dict[str, Any]

    def __iter__(self) -> Iterator[dict]:
        return iter(self.rows)


def read(data: Any, task: str = "classify") -> list[tuple[Any, ...]]:
    rows = read_task(find_task(task), find_splits(find_task(task), data).train, Columns(), labelled=True)
    return [(row.text, row.pair, row.label) for row in rows]


@pytest.mark.parametrize(
    "data",
    [
        RECORDS,
        iter(RECORDS),
        [("a b", "x"), ("c", "y")],
        [["a b", "x"], ["c", "y"]],
        {"text": ["a b", "c"], "label": ["x", "y"]},
        pa.table({"text": ["a b", "c"], "label": ["x", "y"]}),
        Frame(RECORDS),
        SimpleNamespace(to_dicts=lambda: RECORDS),
        {"train": RECORDS, "validation": RECORDS[:1]},
        Dataset(
            [{"text": "a b", "label": 0}, {"text": "c", "label": 1}],
            {"text": SimpleNamespace(dtype="string"), "label": SimpleNamespace(names=["x", "y"])},
        ),
    ],
)
def test_rows_in_all_forms_are_read(data: Any) -> None:
    assert read(data) == [("a b", None, "x"), ("c", None, "y")]


def test_pairs_splits_and_missing_values_are_read() -> None:
    assert read([("a", "b", "x")], "pair") == [("a", "b", "x")]
    splits = find_splits(find_task("classify"), {"train": RECORDS, "validation": RECORDS[:1]})
    (dev,) = splits.dev[""]
    assert isinstance(dev, Table)
    assert dev.records == RECORDS[:1]
    assert as_source([{"a": NAType(), "b": SimpleNamespace(tolist=lambda: [1, 2])}]).records == [
        {"a": None, "b": [1, 2]}
    ]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "the rows in memory are empty"),
        (["a text"], r"row 1 is 'a text': write a dict, or a tuple of \(text, label\)"),
        ([("a", "x"), 3], "row 2 is '3'"),
        (7, "int is neither a path nor rows"),
        ({"text": ["a"], "label": ["x", "y"]}, "different numbers of rows: text 1, label 2"),
        ([{"text": "a", "label": "x"}, {"text": "b"}], "row 2: nothing in column 'label'"),
    ],
)
def test_values_that_are_not_rows_are_refused(world: Path, tmp_path: Path, data: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        finetune("classify", world / "run", data, tmp_path / "run", **SETTINGS)


def test_fine_tuning_on_rows_equals_fine_tuning_on_their_file(world: Path, tmp_path: Path) -> None:
    with (world / "train.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = []
    for name, data in (
        ("file", world / "train.csv"),
        ("rows", rows),
        ("pairs", [(r["text"], r["label"]) for r in rows]),
    ):
        found.append(bertsmith.finetune("classify", model=world / "run", data=data, out=tmp_path / name, **SETTINGS))
    assert found[0] == found[1] == found[2]
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("file", "rows", "pairs")]
    assert weights[0] == weights[1] == weights[2]
    assert facts_of(tmp_path / "file")["rows_hash"] == facts_of(tmp_path / "rows")["rows_hash"]
    scores = [evaluate(tmp_path / "rows", data, device="cpu") for data in (world / "train.csv", rows)]
    assert scores[0] == scores[1]


def test_columns_are_chosen_by_arguments(world: Path, tmp_path: Path) -> None:
    rows = [{"id": i, "body": f"a text {i}", "left": "ab"[i % 2], "right": "xyz"[i % 3]} for i in range(12)]
    with pytest.raises(
        UserError,
        match=r"The columns are: id, body, left, right. For example: finetune\(…, text='body', label='left'\)",
    ):
        finetune("classify", world / "run", rows, tmp_path / "run", **SETTINGS)
    scores = finetune("classify", world / "run", rows, tmp_path / "run", label="right", dev=rows, **SETTINGS)
    assert (scores["rows"], scores["labels"], "accuracy" in scores) == (12, 3, True)


def test_seeds_on_rows_in_memory_equal_those_on_a_file(world: Path, tmp_path: Path) -> None:
    with (world / "train.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    quick = ["train.steps=3", "train.batch_size=8", "data.max_length=32", "train.learning_rate=1e-3"]
    config = override(FinetuneConfig("classify"), quick)

    def many(data: Any, name: str, dev: Any = None, **options: Any) -> dict[str, Any]:
        return finetune_many(config, world / "run", data, tmp_path / name, dev=dev, seeds=2, device="cpu", **options)

    of_file = many(world / "train.csv", "file", world / "train.csv")
    assert many(iter(rows), "rows", rows) == of_file
    assert many({"train": rows, "validation": rows}, "splits") == of_file
    assert many(rows, "rows", rows, resume=True) == of_file
    with pytest.raises(UserError, match=r"data is '40 rows in memory.* and '39 rows in memory"):
        many(rows[1:], "rows", rows, resume=True)
    with pytest.raises(UserError, match="dev is '40 rows in memory"):
        many({"train": rows, "validation": rows[1:]}, "splits", resume=True)
