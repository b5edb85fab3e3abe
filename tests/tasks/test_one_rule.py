"""For every kind of task the files of `predict` have the scores of `evaluate`; scores by class; inputs from Python."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from conftest import reference
from variants import make

from bertsmith.errors import UserError
from bertsmith.formats.hf import Notes, save_folder
from bertsmith.inference.files import evaluate, fill, predict
from bertsmith.inference.predictor import Predictor
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.rows.columns import Row
from bertsmith.tasks.kinds import KINDS
from bertsmith.tasks.prediction_files import score_file

WORDS = "quick brown fox jumps over lazy dog and barks at foxes".split()  # no articles: the scripts drop them
TASKS = {
    "classify": "single",
    "several": "multi",
    "regress": "regression",
    "choose": "choice",
    "tag": "tags",
    "answer": "span",
    "squad2": "span",
    "squad1": "span",
}
TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")


def some_rows(task: str) -> list[dict]:
    draw, rows = random.Random(5), []
    for number in range(40):
        words = draw.choices(WORDS, k=8)
        row: dict = {"text": " ".join(words), "label": draw.choice(("red", "green", "blue"))}
        if task == "several":
            row = {"text": row["text"], "labels": draw.sample(("red", "green", "blue"), number % 3)}
        elif task == "regress":
            row["label"] = draw.random() * 5
        elif task == "choose":
            row = {"sent1": row["text"], "endings": draw.sample(WORDS, 4), "label": draw.randrange(4)}
        elif task == "tag":
            row = {"tokens": words, "tags": draw.choices(TAGS, k=8)}
        elif task in ("answer", "squad1", "squad2"):
            answer = words[number % 8] if number % 3 or task == "squad1" else ""
            row = {"id": f"q{number}", "question": "the fox", "context": row["text"]}
            row["answers"] = {"text": [answer] if answer else []}
        rows.append(row)
    return rows


@pytest.fixture
def model(request, tmp_path: Path, tiny_tokenizer, monkeypatch) -> tuple[str, Path, Path]:
    """A model with random weights and rows of its task; about half of the questions are predicted to have no answer."""
    task = request.param
    network = make(TASKS[task], tiny_tokenizer).model
    if task == "tag":
        network = TaskModel(network.encoder, HeadConfig("tags", TAGS)).eval()
    name = "classify" if task == "several" else task
    save_folder(tmp_path / "model", network, tiny_tokenizer, Notes(name, {}, 32))
    data = tmp_path / "dev.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in some_rows(task)))
    if TASKS[task] == "span":
        real = Predictor.logits

        def logits(self, examples):
            found = real(self, examples)
            for scores, example in zip(found, examples, strict=True):
                scores[0] += 9.0 * (int(example.tokens.sum()) % 2)
            return found

        monkeypatch.setattr(Predictor, "logits", logits)
    return name, tmp_path / "model", data


def test_the_dev_file_of_a_data_set_s_folder_is_evaluated(tiny_tokenizer, tmp_path: Path) -> None:
    network = make("single", tiny_tokenizer).model
    network = TaskModel(network.encoder, HeadConfig("single", ("0", "1"))).eval()
    save_folder(tmp_path / "model", network, tiny_tokenizer, Notes("nsmc", {}, 32))
    folder = tmp_path / "nsmc"
    folder.mkdir()
    with pytest.raises(UserError, match=r"nsmc has no dev file of nsmc \(ratings_test"):
        evaluate(tmp_path / "model", folder, device="cpu")
    file = folder / "ratings_test.txt"
    file.write_text("id\tdocument\tlabel\n1\tthe cat\t0\n2\ta dog sat\t1\n3\tthe mat\t1\n", encoding="utf-8")
    scores = evaluate(tmp_path / "model", folder, device="cpu")
    assert scores["rows"] == 3
    assert scores == evaluate(tmp_path / "model", file, device="cpu")


@pytest.mark.parametrize("model", TASKS, indirect=True)
def test_written_predictions_have_the_scores_of_evaluate(model, tmp_path: Path) -> None:
    name, folder, data = model
    scores = evaluate(folder, data, device="cpu")
    for kind in ("jsonl", "parquet"):
        predict(folder, data, tmp_path / f"out.{kind}", device="cpu")
        written = score_file(tmp_path / f"out.{kind}", name, data)
        shared = scores.keys() & written.keys() - {"task", "rows", "per_class"}
        assert shared >= {"f1", "exact_match"} if "exact_match" in scores else len(shared) >= 1
        assert {key: written[key] for key in shared} == pytest.approx({key: scores[key] for key in shared})
        assert written.get("per_class") == scores.get("per_class")


@pytest.mark.parametrize("model", ["squad2"], indirect=True)
def test_without_a_tuned_threshold_null_odds_above_zero_give_no_answer(model, tmp_path: Path) -> None:
    _, folder, data = model
    predict(folder, data, tmp_path / "out.jsonl", device="cpu")
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    unanswered = [answer["text"] == "" for answer in answers]
    assert 0 < sum(unanswered) < 40
    assert unanswered == [answer["null_odds"] > 0 for answer in answers]
    notes = json.loads((folder / "bertsmith.json").read_text())
    (folder / "bertsmith.json").write_text(json.dumps({**notes, "limits": {"threshold": None}}))
    assert all(answer["text"] for answer in Predictor.load(folder, "cpu").predict([("the fox", "a dog")] * 2))
    assert evaluate(folder, data, device="cpu")["NoAns_f1"] == 0.0


def test_scores_by_class_are_computed_by_hand() -> None:
    head = HeadConfig("single", ("a", "b", "c"))
    rows = [Row("", None, label, "") for label in "aab"]
    found = KINDS["single"].by_class(head, rows, [{"label": label} for label in "aba"])
    assert found["a"] == {"precision": 50.0, "recall": 50.0, "f1": 50.0, "rows": 2}
    assert found["b"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "rows": 1}
    assert found["c"] == {"precision": None, "recall": None, "f1": None, "rows": 0}  # no gold row
    several = KINDS["multi"].by_class(
        HeadConfig("multi", ("a", "b")), [Row("", None, ["a", "b"], "")], [{"labels": ["b"]}]
    )
    assert [several[name]["recall"] for name in "ab"] == [0.0, 100.0]
    assert KINDS["regression"].by_class(HeadConfig("regression"), rows, []) == {}


def test_scores_of_entities_equal_those_of_seqeval() -> None:
    metrics = pytest.importorskip("seqeval.metrics")
    draw = random.Random(2)
    gold, predicted = ([draw.choices(TAGS, k=6) for _ in range(200)] for _ in range(2))
    rows = [Row("", None, tags, "", parts=("x",) * 6) for tags in gold]
    found = KINDS["tags"].by_class(HeadConfig("tags", TAGS), rows, [{"tags": tags} for tags in predicted])
    expected = metrics.classification_report(gold, predicted, output_dict=True)
    for kind in ("PER", "LOC"):
        figures = [100 * expected[kind][name] for name in ("precision", "recall", "f1-score")]
        assert [found[kind][name] for name in ("precision", "recall", "f1")] == pytest.approx(figures)
        assert found[kind]["rows"] == expected[kind]["support"]


@pytest.mark.parametrize("model", ["classify"], indirect=True)
def test_a_string_is_predicted_as_one_text(model) -> None:
    predictor = Predictor.load(model[1], "cpu")
    one = predictor.predict("the quick fox")
    assert set(one) == {"label", "score", "scores"}
    first, _ = predictor.predict(["the quick fox", ("a dog", "barks")])
    assert first["scores"] == pytest.approx(one["scores"], abs=1e-5)
    assert predictor("the quick fox") == one
    assert len(predictor(["a dog", "a fox"])) == 2
    shown = repr(predictor)
    for part in ("classify", "red, green, blue", str(model[1]), "2 layers, hidden size 32", "torch on cpu, float32"):
        assert part in shown
    for wrong in (("a", "b"), {"text": "a"}, [3], [("a", "b", "c")], [{"text": "a"}]):
        with pytest.raises(UserError):
            predictor(wrong)


@pytest.mark.parametrize("model", ["tag"], indirect=True)
def test_a_list_of_words_is_one_sentence_for_a_tagger(model) -> None:
    predictor = Predictor.load(model[1], "cpu")
    (answer,) = predictor([["the", "quick-ish", "fox", "5"]])
    assert answer["words"] == ["the", "quick-ish", "fox", "5"]
    assert len(answer["tags"]) == len(answer["scores"]) == 4
    text = "the quick fox jumps over a dog"
    whole = predictor(text)
    assert whole["words"] == text.split()
    for entity in whole["entities"]:
        assert text[entity["start"] : entity["end"]] == entity["text"]
        first, last = (whole["words"].index(word) for word in (entity["text"].split()[0], entity["text"].split()[-1]))
        assert entity["score"] == pytest.approx(sum(whole["scores"][first : last + 1]) / (last + 1 - first))
    assert whole["entities"]
    with pytest.raises(UserError, match=r"write \[\[word"):
        predictor(["the", "quick", "fox"])


@pytest.mark.parametrize("model", ["choose", "answer"], indirect=True)
def test_questions_and_endings_are_given_from_python(model) -> None:
    predictor = Predictor.load(model[1], "cpu")
    if model[0] == "choose":
        (answer,) = predictor([("the fox", ["a", "b", "dog", "fox"])])
        assert answer["text"] == ["a", "b", "dog", "fox"][answer["choice"]]
    else:
        assert "nbest" in predictor([("the fox", "a dog barks")])[0]
    with pytest.raises(UserError, match="each item has to be a tuple"):
        predictor("the fox")


@pytest.mark.parametrize("model", ["classify", "answer"], indirect=True)
def test_logits_that_are_not_finite_are_refused(model, tmp_path: Path, monkeypatch) -> None:
    _, folder, data = model
    predictor = Predictor.load(folder, "cpu")
    with torch.no_grad():
        for parameter in predictor.engine.model.head.parameters():
            parameter.fill_(float("inf"))
    monkeypatch.setattr(Predictor, "load", lambda *names, **options: predictor)
    for call in (lambda: evaluate(folder, data), lambda: predict(folder, data, tmp_path / "out.jsonl")):
        with pytest.raises(UserError, match="scores that are not finite numbers"):
            call()
    assert not (tmp_path / "out.jsonl").exists()


def test_fill_names_the_missing_head(tmp_path: Path, tiny_tokenizer) -> None:
    for kind, words in (("single", r"no masked-word head \(it was fine-tuned for classify\)"), ("mlm", "")):
        loaded = make(kind, tiny_tokenizer)
        save_folder(tmp_path / kind, loaded.model, tiny_tokenizer, Notes())
        if words:
            with pytest.raises(UserError, match=words):
                fill(tmp_path / kind, "the [MASK]", device="cpu")
    reference("encoder", tiny_tokenizer.vocab_size).save_pretrained(tmp_path / "bare")
    tiny_tokenizer.save(tmp_path / "bare")
    with pytest.raises(UserError, match="has no masked-word head, so it cannot fill masks"):
        fill(tmp_path / "bare", "the [MASK]", device="cpu")
    for top in (0, -1):
        with pytest.raises(UserError, match=f"--top {top} must be at least 1"):
            fill(tmp_path / "mlm", "the [MASK]", top=top, device="cpu")
    assert len(fill(tmp_path / "mlm", "the [MASK]", top=3, device="cpu")[0]) == 3


@pytest.mark.parametrize("model", ["classify"], indirect=True)
def test_one_text_may_be_given_on_the_command_line(model, run_command, tmp_path: Path) -> None:
    _, folder, data = model
    code, out, _ = run_command("predict", folder, "the quick fox", "--device", "cpu", "--json")
    assert code == 0
    expected = Predictor.load(folder, "cpu")("the quick fox")
    assert json.loads(out) == expected
    code, out, _ = run_command("predict", folder, "the quick fox", "--n-best", 1, "--device", "cpu")
    assert code == 0
    assert expected["label"] in out
    assert len([line for line in out.splitlines() if any(label in line for label in ("red", "green", "blue"))]) == 2
    for wrong, words in (
        ("dev.csv", "no such file"),
        ("my rows.csv", "no such file"),
        ("fox", "no such file"),
    ):
        code, _, err = run_command("predict", folder, wrong, "--device", "cpu")
        assert (code, words in err) == (2, True)
    code, _, err = run_command(
        "predict", folder, tmp_path / "div.csv", "--out", tmp_path / "o.jsonl", "--device", "cpu"
    )
    assert (code, "no such file" in err) == (2, True)
    code, _, err = run_command("predict", folder, data, "--out", tmp_path / "o.jsonl", "--combine", "nbest")
    assert (code, "nbest is for answers in a text" in err) == (2, True)
    code, out, _ = run_command("evaluate", folder, "--data", data, "--device", "cpu")
    assert code == 0
    assert all(word in out for word in ("precision", "recall", "green"))
