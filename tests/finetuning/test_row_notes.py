"""Before it trains, a run says what its labels are, and what in the rows is probably a mistake."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kind_rows import ROWS

from bertsmith.config import override
from bertsmith.errors import UserError
from bertsmith.finetuning.data import read_data
from bertsmith.finetuning.doubts import doubts
from bertsmith.finetuning.model import start_at_numbers, start_model
from bertsmith.finetuning.run import finetune
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.formats.hub import find_model
from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Columns, Row
from bertsmith.rows.tables import as_source
from bertsmith.tasks.dev_predictions import read_dev_predictions
from bertsmith.tasks.kinds import KINDS
from bertsmith.tasks.reading import Splits, guessed_columns, training_rows
from bertsmith.tasks.task import find_task

LINES = {
    "tag": "entities: X (14)",
    "answer": "questions: with an answer (14)",
    "choose": "each with 3 endings",
    "classify": "labels: a (7), b (7)",
    "pair": "labels: a (7), b (7)",
    "regress": "numbers from 0 to 4.33333, on average 2.16667",
}
FEW = ["train.steps=2", "train.batch_size=8", "data.max_length=32", "restarts=0"]


def overview(task_name: str, records: list[dict]) -> str:
    task, source = find_task(task_name), as_source(records)
    rows, _ = training_rows(task, [source], guessed_columns(task, source, Columns()))
    head = KINDS[task.head].head_for(task, rows)
    return KINDS[head.kind].overview(rows, head)


@pytest.mark.parametrize("task", LINES)
def test_the_labels_of_every_kind_are_described(task: str) -> None:
    assert overview(task, ROWS[task]) == LINES[task]


def test_lines_on_several_labels_many_labels_parts_of_speech_and_no_answers() -> None:
    several = [{"text": f"it is {i}", "label": ["x", "y"] if i % 2 else ["x"]} for i in range(6)]
    assert overview("classify", several) == "labels, several a row: x (6), y (3)"
    many = [{"text": f"it is {i}", "label": f"label {i // 2}"} for i in range(39)]
    assert overview("classify", many).endswith("label 2 (2), and 8 more with at most 2")
    words = [{"tokens": ["a", "list"], "tags": ["DT", "NN"]}] * 3
    assert overview("tag", words) == "tags of words: DT (3), NN (3)"
    spans = [{"text": "in Seoul", "entities": [{"start": 3, "end": 8, "label": "LC"}]}] * 2
    assert overview("tag", spans) == "entities: LC (2)"
    unanswered = {**ROWS["answer"][0], "answers": []}
    assert overview("answer", [*ROWS["answer"], unanswered]) == "questions: with an answer (14), without one (1)"


def test_single_labels_labels_by_case_and_dev_texts_that_are_trained_on_are_noted() -> None:
    rows = [Row(f"text {i}", None, label, f"t.csv, line {i}") for i, label in enumerate(["spam", "Spam", "ham", "ham"])]
    head = HeadConfig("single", ("Spam", "ham", "spam"))
    dev = {"": [replace(rows[2], place="d.csv, line 2"), Row("new", None, "ham", "d.csv, line 3")], "other": rows[:1]}
    assert doubts(rows, dev, head) == [
        "2 labels have a single training row each, from which little is learnt: 'Spam', 'spam'",
        "labels that differ only in their case are different labels: 'Spam' and 'spam'",
        "1 of the 2 dev rows have the same text as a training row, so that scores on them are too high; the first: "
        "d.csv, line 2",
        "other: 1 of the 1 dev rows have the same text as a training row, so that scores on them are too high; the "
        "first: t.csv, line 0",
    ]
    pairs = [replace(row, pair="so", label="ham") for row in rows]
    assert doubts(pairs, {"": rows}, replace(head, labels=("ham", "spam"))) == []
    assert doubts(rows, {}, HeadConfig("regression")) == []


def test_a_run_shows_its_labels_and_doubts_before_it_trains(world: Path, tmp_path: Path, capfd) -> None:
    config = override(FinetuneConfig("classify"), FEW)
    finetune(config, world / "run", world / "train.csv", tmp_path / "run", dev=world / "dev.csv", device="cpu")
    printed = " ".join(capfd.readouterr().err.split())
    labels = printed.index("40 training rows; labels: files (20), numbers (20)")
    assert labels < printed.index("note: 10 of the 10 dev rows have the same text") < printed.index("2 steps are few")


def file_of(tmp_path: Path, lines: list[str]) -> Path:
    path = tmp_path / "rows.csv"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("task", "lines", "noted"),
    [
        ("classify", [f"it is {i},{'ab'[i % 2]}" for i in range(9)], "'it is 0', 'a' look like a row"),
        ("regress", [f"it is {i},{i / 4}" for i in range(9)], "for example text,label"),
        ("classify", [f"this is a sentence of many words {i},{i}{'ab'[i % 2]}" for i in range(9)], "line 1:"),
        ("classify", ["what,kind", *(f"it is {i},{'ab'[i % 2]}" for i in range(9))], ""),
        ("regress", ["text,2024", *(f"it is {i},{'ab'[i % 2]}" for i in range(9))], ""),
    ],
)
def test_a_first_line_that_looks_like_a_row_is_noted(tmp_path: Path, capfd, task: str, lines, noted: str) -> None:
    with suppress(UserError):
        guessed_columns(find_task(task), file_of(tmp_path, lines), Columns())
    printed = " ".join(capfd.readouterr().err.split())
    assert (noted in printed) if noted else "look like a row" not in printed


def test_a_second_text_that_is_not_read_is_noted(tmp_path: Path, capfd) -> None:
    lines = ["subject line,body,kind", *(f"it {i},it is the number {i},{'ab'[i % 2]}" for i in range(9))]
    path, task = file_of(tmp_path, lines), find_task("classify")
    guessed_columns(task, path, Columns())
    printed = " ".join(capfd.readouterr().err.split())
    assert "the column 'subject line' has texts, too, and is not read; --pair 'subject line' reads it" in printed
    for given in (Columns(text="body"), Columns(pair="subject line")):
        guessed_columns(task, path, given)
    assert "is not read" not in capfd.readouterr().err
    repeated = ["product,body,kind", *(f"red shoe {i % 2},it is the number {i},{'ab'[i % 2]}" for i in range(9))]
    guessed_columns(task, file_of(tmp_path, repeated), Columns())
    assert "is not read" not in capfd.readouterr().err


def test_spaces_around_labels_are_no_sign_of_several_labels_a_row(tmp_path: Path) -> None:
    path = file_of(tmp_path, ["text,label", *(f"it is {i},{['a', ' a', 'b'][i % 3]}" for i in range(9))])
    assert guessed_columns(find_task("classify"), path, Columns()).separator == ""


def started(world: Path, numbers: list[float], *changes: str) -> tuple[str, float]:
    """The note on these numbers, and the bias that the output layer starts with."""
    loaded = start_model(
        find_model(world / "run"), HeadConfig("regression"), override(FinetuneConfig("regress"), list(changes))
    )
    note = start_at_numbers(loaded, numbers)
    return note, loaded.model.head.output.bias.item()


def test_the_output_layer_starts_at_the_mean_of_the_numbers(world: Path) -> None:
    note, bias = started(world, [1000.0, 3000.0])
    assert (
        note == "the numbers are large (mean 2,000, standard deviation 1,000), so that predictions start at their mean"
    )
    assert bias == 2000
    assert started(world, [0.0, 5.0]) == ("", 2.5)
    assert started(world, [7.0, 7.0]) == ("", 7)
    note, bias = started(world, [0.001, 0.003])
    assert note.endswith("which is learnt slowly; multiply them by 1e+03")
    assert bias == pytest.approx(0.002)


@pytest.mark.parametrize("changes", [["features.variant=last"], ["bilstm_layers=1"]])
def test_layers_above_the_encoder_start_at_the_mean_too(world: Path, changes: list[str]) -> None:
    config = override(FinetuneConfig("regress"), changes)
    head = HeadConfig("regression", features=config.features if config.features.variant else None)
    loaded = start_model(find_model(world / "run"), replace(head, bilstm_layers=config.bilstm_layers), config)
    assert start_at_numbers(loaded, [0.0, 5.0]) == ""
    top = getattr(loaded.model.head, "top", loaded.model.head)
    assert top.output.bias.item() == 2.5


def test_a_trained_output_layer_stays_as_it_is(world: Path, tmp_path: Path) -> None:
    rows = [{"text": f"the list {i}", "price": float(i % 5)} for i in range(40)]
    finetune(override(FinetuneConfig("regress"), FEW), world / "run", rows, tmp_path / "run", device="cpu")
    loaded = start_model(find_model(tmp_path / "run"), HeadConfig("regression"), FinetuneConfig("regress"))
    before = loaded.model.head.output.bias.item()
    assert (start_at_numbers(loaded, [10.0, 30.0]), loaded.model.head.output.bias.item()) == ("", before)


def test_large_numbers_are_learnt(world: Path, tmp_path: Path) -> None:
    """With an output layer that starts at 0, every prediction would be near 0."""
    rows = [{"text": f"the list {i}", "price": 40_000.0 + 1000 * i} for i in range(40)]
    finetune(override(FinetuneConfig("regress"), FEW), world / "run", rows, tmp_path / "run", device="cpu")
    predicted = [line["predicted"] for line in read_dev_predictions(tmp_path / "run")[1]]
    assert abs(np.mean([float(value) for (value,) in predicted]) - 60_000) < 15_000


def test_dev_rows_may_name_their_columns_otherwise(tmp_path: Path, capfd) -> None:
    train = file_of(tmp_path, ["text,label", *(f"it is {i},{'ab'[i % 2]}" for i in range(9))])
    columns = ["remark,kind", *(f"it was {i},{'ab'[i % 2]}" for i in range(9))]
    dev = tmp_path / "dev.csv"
    dev.write_text("\n".join(columns))
    data = read_data(FinetuneConfig("classify"), Splits([train], {"": [dev]}), "bertsmith finetune classify")
    assert (data.dev_rows[""][1].text, data.dev_rows[""][1].label) == ("it was 1", "b")
    printed = " ".join(capfd.readouterr().err.split())
    assert f"columns of {dev}: text = 'remark' (the longest text), label = 'kind' (by its name)" in printed
    dev.write_text("\n".join(["one,two", *(f"{i},0.{i}" for i in range(9))]))
    with pytest.raises(UserError, match=r"name the columns as those of the training rows: text,label"):
        read_data(FinetuneConfig("classify"), Splits([train], {"": [dev]}), "bertsmith finetune classify")
    dev.write_bytes("remark,kind\nit was,a\n".encode("utf-16"))
    with pytest.raises(UserError, match="this is not UTF-8") as caught:
        read_data(FinetuneConfig("classify"), Splits([train], {"": [dev]}), "bertsmith finetune classify")
    assert "name the columns" not in str(caught.value)


def test_a_folder_that_is_taken_is_refused_before_rows_are_read(world: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").write_text("")
    with pytest.raises(UserError, match="run is there already and not empty; add --resume"):
        finetune("classify", world / "run", file_of(tmp_path, ["no rows"]), tmp_path / "run", device="cpu")
