"""Adding a task, by the steps of docs/design.md: a new task on an existing kind is one row of the table of tasks."""

import ast
import json
import random
from pathlib import Path

import pytest

import bertsmith
from bertsmith.config import override
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.inference.files import evaluate
from bertsmith.rows.columns import Columns
from bertsmith.tasks.description import DEV, Task
from bertsmith.tasks.kinds import KINDS
from bertsmith.tasks.prediction_files import score_file
from bertsmith.tasks.reading import read_task
from bertsmith.tasks.task import TASKS, find_task

BOOLQ = Task(
    "boolq",
    "single",
    ("accuracy",),
    {"text": ("question",), "pair": ("passage",), "label": ("answer", "label"), "key": ("idx",)},
    dev={"": DEV},
    test={"BoolQ": ("test",)},
    labels=("False", "True"),
    max_length=32,
)


@pytest.fixture
def boolq(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The row of the table, and a folder with the files of the data set."""
    monkeypatch.setitem(TASKS, BOOLQ.name, BOOLQ)
    draw = random.Random(1)
    for split, count in (("train", 96), ("validation", 16), ("test", 4)):
        rows = []
        for number in range(count):
            answer = draw.random() < 0.5
            words = {"question": f"is it a file {number}", "passage": "the list is a file" if answer else "numbers of"}
            rows.append({**words, "idx": number} | ({} if split == "test" else {"answer": str(answer)}))
        (tmp_path / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tmp_path


def test_one_row_of_the_table_is_enough_to_read_fine_tune_evaluate_and_predict(world: Path, boolq: Path) -> None:
    rows = list(read_task(find_task("boolq"), boolq / "train.jsonl", Columns(), labelled=True))
    assert rows[0].text == "is it a file 0"
    assert rows[0].pair is not None
    assert {row.label for row in rows} == {"False", "True"}

    settings = ["train.steps=30", "train.batch_size=16", "train.learning_rate=3e-3"]
    config = override(FinetuneConfig("boolq"), settings)
    scores = bertsmith.finetune(config, world / "run", boolq, boolq / "run", device="cpu")
    assert scores["accuracy"] == 100.0

    found = evaluate(boolq / "run", boolq / "validation.jsonl", device="cpu")
    assert found["accuracy"] == 100.0
    assert set(found["per_class"]) == {"False", "True"}

    predictor = bertsmith.Predictor.load(boolq / "run", device="cpu")
    assert next(predictor.predict([("is it a file 5", "the list is a file")]))["label"] == "True"

    official = boolq / "run" / "predictions" / "BoolQ.tsv"
    lines = official.read_text().splitlines()
    assert lines[0] == "index\tprediction"
    assert len(lines) == 1 + 4
    dev = boolq / "dev.tsv"
    dev.write_text("index\tprediction\n" + "".join(f"{n}\tTrue\n" for n in range(16)))
    assert 0 < score_file(dev, "boolq", boolq / "validation.jsonl")["accuracy"] < 100


def test_numbers_are_indices_into_the_labels_of_the_task(boolq: Path) -> None:
    data = boolq / "numbers.jsonl"
    data.write_text("".join(json.dumps({"question": "q", "passage": "p", "label": n}) + "\n" for n in (1, 0)))
    assert [row.label for row in read_task(BOOLQ, data, Columns(), labelled=True)] == ["True", "False"]


def test_kinds_differ_in_one_table_only() -> None:
    """A new kind is a row of `KINDS`: no other module compares the kind of a head with a name."""
    package = Path(bertsmith.__file__).parent
    found = []
    for path in (p for room in ("rows", "tasks", "finetuning") for p in (package / room).glob("*.py")):
        comparisons = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Compare))
        found += [f"{path.relative_to(package)}:{node.lineno}" for node in comparisons if names_a_kind(node)]
    assert not found


def names_a_kind(comparison: ast.Compare) -> bool:
    sides = [part for side in (comparison.left, *comparison.comparators) for part in ast.walk(side)]
    is_kind = any(isinstance(side, ast.Attribute) and side.attr in ("kind", "head") for side in sides)
    return is_kind and any(isinstance(side, ast.Constant) and side.value in KINDS for side in sides)


def test_a_comparison_with_a_kind_is_found() -> None:
    for text, expected in (
        ('head.kind in ("tags", "span")', True),
        ('task.head == "span"', True),
        ("a.kind == b", False),
    ):
        comparison = ast.parse(text, mode="eval").body
        assert isinstance(comparison, ast.Compare)
        assert names_a_kind(comparison) == expected
