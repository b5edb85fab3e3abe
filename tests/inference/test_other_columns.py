"""`evaluate` reads rows whose columns have other names than those of the training data."""

from pathlib import Path

import pytest

from bertsmith.config import override
from bertsmith.errors import UserError
from bertsmith.finetuning.run import finetune
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.inference.files import evaluate, predict
from bertsmith.inference.predictor import Predictor
from bertsmith.rows.columns import Columns
from bertsmith.tasks.reading import columns_of_other_rows
from bertsmith.tasks.task import find_task

TRAINED = Columns(text="body", label="topic")
COMMAND = "bertsmith evaluate run --data dev.csv"


def rows_file(tmp_path: Path, header: str, row: str = "it is the number {i},{label}") -> Path:
    path = tmp_path / "dev.csv"
    lines = [row.format(i=i, label="ab"[i % 2]) for i in range(8)]
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


@pytest.mark.parametrize(
    ("header", "given", "text", "label"),
    [
        ("body,topic", {}, "body", "topic"),
        ("topic,text", {"text": "topic", "label": "text"}, "topic", "text"),
        ("message,topic", {}, "message", "topic"),
        ("message,team", {}, "message", "team"),
        ("one,two", {"label": "two"}, "one", "two"),
    ],
)
def test_columns_are_those_given_those_of_training_or_guessed(tmp_path, capfd, header, given, text, label) -> None:
    found = columns_of_other_rows(find_task("classify"), rows_file(tmp_path, header), TRAINED, given, COMMAND)
    assert (found.text, found.label, found.pair, found.separator) == (text, label, "", "")
    guessed = {text, label} - {"body", "topic"} - set(given.values())
    assert ("columns of " in capfd.readouterr().err) == bool(guessed)


def test_a_second_text_is_missed_and_a_separator_is_that_of_training(tmp_path: Path) -> None:
    task, path = find_task("classify"), rows_file(tmp_path, "one,two,topic", "it is the number {i},so {i},{label}|b")
    assert columns_of_other_rows(task, path, TRAINED, {"text": "one"}, COMMAND).separator == ""
    pair = Columns(text="one", pair="other", label="topic", separator="|")
    with pytest.raises(UserError, match=r"no column 'other'; .* --data dev.csv --text one --label topic --pair two"):
        columns_of_other_rows(task, path, pair, {}, COMMAND)
    found = columns_of_other_rows(task, path, pair, {"pair": "two"}, COMMAND)
    assert (found.pair, found.separator) == ("two", "|")


def test_an_error_names_the_columns_and_the_options(tmp_path: Path) -> None:
    path = rows_file(tmp_path, "one,two,three", "it is {i},also {i},0.{i}")
    words = r"which column is the label\? The columns are: one, two, three. For example: bertsmith evaluate run "
    with pytest.raises(UserError, match=words + r"--data dev.csv --text one --label"):
        columns_of_other_rows(find_task("classify"), path, TRAINED, {}, COMMAND)


@pytest.fixture(scope="module")
def classifier(world: Path, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("classifier") / "run"
    config = override(FinetuneConfig("classify"), ["train.steps=2", "data.max_length=32", "restarts=0"])
    finetune(config, world / "run", world / "train.csv", run, dev=world / "dev.csv", device="cpu")
    return run


def test_scores_do_not_depend_on_the_names_of_columns(world: Path, classifier: Path, tmp_path, run_command) -> None:
    path = tmp_path / "other.csv"
    path.write_text((world / "dev.csv").read_text().replace("text,label", "sentence two,kind", 1))
    expected = evaluate(classifier, world / "dev.csv", device="cpu")
    assert evaluate(classifier, path, device="cpu") == expected
    options = ("--text", "sentence two", "--label", "kind")
    code, out, err = run_command("evaluate", classifier, "--data", path, *options, "--json", "--device", "cpu")
    assert (code, "columns:" in err) == (0, False)
    assert f'"rows": {expected["rows"]}' in out
    rows = [{"body": "a file of words", "group": "files"}]
    with pytest.raises(UserError, match=r"the rows in memory: .* For example: evaluate\(…, text='body'"):
        evaluate(classifier, rows, label="lable", device="cpu")
    code, _, err = run_command("evaluate", path, "--task", "classify", "--data", path, "--label", "kind")
    assert (code, "--text, --pair and --label are for a model" in err) == (2, True)


def test_prediction_names_the_option_of_a_missing_text(classifier: Path, tmp_path: Path) -> None:
    path = rows_file(tmp_path, "message,topic")
    with pytest.raises(
        UserError, match=r"no column 'text'; the columns are: message, topic; name another one with --text"
    ):
        predict(classifier, path, tmp_path / "out.csv", device="cpu")
    assert predict(Predictor.load(classifier, "cpu"), path, tmp_path / "out.csv", text="message") == 8


def test_a_row_that_cannot_be_scored_is_named_with_what_to_do(classifier: Path, tmp_path: Path) -> None:
    path = tmp_path / "dev.csv"
    path.write_text("text,label\na file,files\na number,\n")
    with pytest.raises(UserError, match=r"line 3: no label in column 'label'; mend the row or remove it"):
        evaluate(classifier, path, device="cpu")


def test_one_text_for_a_model_of_pairs_is_noted(world: Path, tmp_path: Path, run_command) -> None:
    rows = [{"text1": f"it is {i}", "text2": "so", "label": "ab"[i % 2]} for i in range(8)]
    config = override(FinetuneConfig("pair"), ["train.steps=1", "data.max_length=16", "restarts=0"])
    finetune(config, world / "run", rows, tmp_path / "pairs", device="cpu")
    noted = "the model was trained on pairs of texts, and this is one text; --pair gives the second one"
    _, _, err = run_command("predict", tmp_path / "pairs", "it is so", "--device", "cpu")
    assert noted in " ".join(err.split())
    _, _, err = run_command("predict", tmp_path / "pairs", "it is so", "--pair", "so", "--device", "cpu")
    assert noted not in " ".join(err.split())


def test_the_example_of_a_command_names_a_model_only_where_the_command_did(world: Path, tmp_path: Path) -> None:
    path, out = rows_file(tmp_path, "one,two"), tmp_path / "out"
    for model, named in ((None, ""), (world / "run", f"--model {world / 'run'} ")):
        with pytest.raises(UserError, match=f"bertsmith finetune choose {named}--data {path} --out {out} --text one"):
            finetune("choose", model, path, out, device="cpu")
