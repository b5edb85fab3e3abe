"""Question answering: windows, character offsets, no answer, the official files, and fine-tuning."""

import json
from pathlib import Path

import numpy as np
import pytest

from bertsmith.config import override
from bertsmith.errors import UserError
from bertsmith.finetuning.run import FinetuneConfig, finetune
from bertsmith.inference.files import evaluate, predict
from bertsmith.inference.predictor import Predictor
from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Columns, Row
from bertsmith.tasks import spans
from bertsmith.tasks.description import Limits
from bertsmith.tasks.prediction_files import score_file
from bertsmith.tasks.reading import read_task, training_rows
from bertsmith.tasks.task import find_task
from bertsmith.text.tokenizer import Tokenizer

SPAN = HeadConfig("span")
CONTEXT = (
    "  A “Café” opened in 1999, near the  river. " + "The list is long and the file is old. " * 12 + "Bob wrote it."
)


def gold_logits(encoded) -> list[np.ndarray]:
    found = []
    for example in encoded.examples:
        scores = np.zeros((len(example.tokens), 2), dtype=np.float32)
        start, end = example.labels["label"].values
        scores[start, 0] = scores[end, 1] = 5
        found.append(scores)
    return found


@pytest.mark.parametrize("answer", ["Café", "1999", "near the  river", "Bob", "old. The list"])
def test_the_character_offsets_of_an_answer_are_right_in_every_window(world: Path, answer: str) -> None:
    tokenizer, limits = Tokenizer.load(world / "tok"), Limits(48, stride=12)
    start = CONTEXT.index(answer)
    row = Row("Which one is it?", CONTEXT, [{"text": answer, "answer_start": start}], "")
    encoded = spans.encode([row], tokenizer, limits, SPAN, labelled=True)
    assert len(encoded.examples) > 3
    assert max(len(e.tokens) for e in encoded.examples) == 48
    (found,) = spans.decode([row], encoded, gold_logits(encoded), SPAN, limits)
    assert found["text"] == answer == CONTEXT[found["start"] : found["end"]]
    assert found["start"] == start
    held = [e.labels["label"].values.tolist() for e in encoded.examples]
    assert [0, 0] in held  # windows without the answer point at [CLS]


def test_windows_cover_the_text_and_each_token_has_one_window_with_most_context() -> None:
    assert spans.windows(5, 10, 4) == [(0, 5)]
    assert spans.windows(20, 10, 4) == [(0, 10), (4, 14), (8, 18), (12, 20)]
    assert spans.windows(0, 10, 4) == [(0, 0)]
    assert spans.windows(25, 10, 128) == [(0, 10), (10, 20), (20, 25)]
    assert spans.most_context([(0, 10), (4, 14)], 14).tolist() == [0] * 7 + [1] * 7
    # Token 7 has two tokens after it in the first window and three before it in the second.


def test_long_questions_are_truncated_and_counted(world: Path) -> None:
    tokenizer = Tokenizer.load(world / "tok")
    row = Row("why " * 90, "because", [], "")
    encoded = spans.encode([row], tokenizer, Limits(128, max_query=20), SPAN, labelled=True)
    assert encoded.shortened == 1
    assert int(encoded.examples[0].segments.argmax()) == 22
    wide = Row("why", "word " * 100, [{"text": "word " * 30, "answer_start": 0}], "")
    assert spans.encode([wide], tokenizer, Limits(24, stride=8), SPAN, labelled=True).shortened == 1


def test_decoding_skips_invalid_spans() -> None:
    window = spans.Window(2, np.array([[0, 1], [2, 3], [4, 5], [6, 7]]), np.array([True, True, True, False]))
    scores = np.zeros((7, 2), dtype=np.float32)
    scores[1, 0] = scores[0, 1] = 9  # the question and [CLS] are no answers
    scores[5, 0] = scores[5, 1] = 8  # this token has more context in another window
    scores[4, 0], scores[3, 1], scores[4, 1] = 7, 6, 5
    best = max(spans.candidates(scores, window, Limits(max_answer=2)))
    assert best == (15.0, 4, 7)
    assert all(end - begin <= 3 for _, begin, end in spans.candidates(scores, window, Limits(max_answer=2)))


def test_no_answer_is_predicted_above_the_threshold() -> None:
    window = spans.Window(1, np.array([[0, 3]]), np.array([True]))
    scores = np.array([[2.0, 1.0], [1.0, 1.5], [0.0, 0.0]], dtype=np.float32)
    encoded = spans.Encoded([None], [0], [window])
    row = Row("q", "yes", None, "")
    answers = [spans.decode([row], encoded, [scores], SPAN, Limits(threshold=t))[0] for t in (None, 0.4, 0.6)]
    assert [a["text"] for a in answers] == ["yes", "", "yes"]
    assert [a["null_odds"] for a in answers] == pytest.approx([0.5] * 3)
    assert answers[1]["nbest"][0]["text"] == "yes"


def squad(questions: list[dict], context: str) -> dict:
    return {"version": "x", "data": [{"title": "t", "paragraphs": [{"context": context, "qas": questions}]}]}


def test_answers_at_other_places_are_found_and_missing_ones_are_skipped(tmp_path: Path) -> None:
    qas = [
        {"id": "1", "question": "q", "answers": [{"text": "fox", "answer_start": 4}]},
        {"id": "2", "question": "q", "answers": [{"text": "fox", "answer_start": 20}]},
        {"id": "3", "question": "q", "answers": [{"text": "wolf", "answer_start": 0}]},
        {"id": "4", "question": "q", "answers": [], "is_impossible": True},
    ]
    path = tmp_path / "train-v2.0.json"
    path.write_text("\ufeff" + json.dumps(squad(qas, "the fox met a second fox")), encoding="utf-8")
    rows, notes = training_rows(find_task("squad2"), [path], Columns())
    assert [(r.key, r.label[0]["answer_start"] if r.label else None) for r in rows] == [
        ("1", 4),
        ("2", 21),
        ("4", None),
    ]
    assert "1 answers were found at another place" in notes[0]
    assert "question '2'" in notes[0]
    assert "1 rows were left out" in notes[1]
    assert "question '3'" in notes[1]
    with pytest.raises(UserError, match=r"question '3'.*'wolf' is not in its context"):
        training_rows(find_task("answer"), [path], Columns())


def test_the_formats_of_the_hub_and_of_tables_are_read(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    answers = [{"text": ["fox"], "answer_start": [4]}, {"text": [], "answer_start": []}]
    table = {"id": ["1", "2"], "question": ["q", "r"], "context": ["the fox"] * 2, "answers": answers}
    pq.write_table(pa.table(table), tmp_path / "train.parquet")
    (tmp_path / "rows.csv").write_text("question,context,answer,answer_start\nq,the fox,fox,4\nr,the fox,the,\n")
    for name, starts in (("train.parquet", [4, None]), ("rows.csv", [4, 0])):
        rows, _ = training_rows(find_task("answer"), [tmp_path / name], Columns())
        assert [r.label[0]["answer_start"] if r.label else None for r in rows] == starts


@pytest.fixture(scope="module")
def learnt(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on questions whose answer is the word after `is`, or nothing where the context has no such word."""
    root = tmp_path_factory.mktemp("squad")
    words = "file list class object module method string number value name".split()
    qas = []
    for i in range(60):
        word = words[i % 10]
        context = f"the {words[(i * 7) % 10]} of it is {word} ." if i % 3 else f"the {word} ."
        answers = [{"text": word, "answer_start": context.index(f"is {word}") + 3}] if i % 3 else []
        question = {"id": f"q{i}", "question": "what is it ?", "answers": answers, "is_impossible": not answers}
        qas.append({"context": context, "qas": [question]})
    data = {"version": "v2.0", "data": [{"title": "t", "paragraphs": qas}]}
    (root / "train-v2.0.json").write_text(json.dumps(data))
    (root / "dev-v2.0.json").write_text(json.dumps(data))
    changes = ["train.epochs=14", "train.batch_size=8", "train.learning_rate=4e-3", "data.max_length=32"]
    config = override(FinetuneConfig("squad2"), changes)
    scores = finetune(config, world / "run", root, root / "run", device="cpu")
    (root / "scores.json").write_text(json.dumps(scores))
    return root


def test_a_model_learns_to_answer_and_to_give_no_answer(learnt: Path) -> None:
    scores = json.loads((learnt / "scores.json").read_text())
    assert scores["f1"] > 80
    assert scores["f1"] == scores["best_f1"]  # the threshold was chosen for it
    notes = json.loads((learnt / "run/model/bertsmith.json").read_text())
    assert notes["limits"]["threshold"] == scores["best_f1_thresh"]
    again = evaluate(learnt / "run", learnt / "dev-v2.0.json", device="cpu")
    assert again["f1"] == pytest.approx(scores["f1"])
    predictor = Predictor.load(learnt / "run", "cpu")
    (answer,) = predictor.predict([("what is it ?", "the value of it is module .")])
    assert set(answer) >= {"text", "start", "end", "score", "null_odds", "nbest"}


def test_the_official_script_reads_the_prediction_files(learnt: Path) -> None:
    scores = json.loads((learnt / "scores.json").read_text())
    folder, data = learnt / "run" / "predictions", learnt / "dev-v2.0.json"
    predictions = json.loads((folder / "predictions.json").read_text())
    assert set(predictions) == {f"q{i}" for i in range(60)}
    assert "" in predictions.values()
    official = score_file(folder / "predictions.json", "squad2", data)
    assert official["f1"] == pytest.approx(scores["f1"])
    assert official["NoAns_total"] == 20
    with_odds = score_file(folder / "predictions.json", "squad2", data, null_odds=folder / "null_odds.json")
    assert "best_f1_thresh" in with_odds
    predict(learnt / "run", learnt, learnt / "submission", device="cpu")
    for path in folder.iterdir():
        assert (learnt / "submission" / path.name).read_text() == path.read_text()
    (learnt / "few.json").write_text(json.dumps({"q1": predictions["q1"]}))
    assert score_file(learnt / "few.json", "squad1", data)["unanswered"] == 59
    (learnt / "none.json").write_text(json.dumps({"other": "x"}))
    with pytest.raises(UserError, match="answers none of the questions"):
        score_file(learnt / "none.json", "squad2", data)


def test_squad_without_impossible_questions_always_answers(tmp_path: Path) -> None:
    qas = [{"id": "1", "question": "q", "answers": [{"text": "fox", "answer_start": 4}]}]
    (tmp_path / "dev.json").write_text(json.dumps(squad(qas, "the fox")))
    rows = list(read_task(find_task("squad1"), tmp_path / "dev.json", Columns(), labelled=True))
    assert spans.tune(find_task("squad1"), rows, []) == {}
    twice = [*rows, *rows]
    with pytest.raises(UserError, match="a second question has the id '1'"):
        spans.gold_texts(twice)


def test_the_score_of_no_answer_is_the_smallest_of_all_windows() -> None:
    """As in the released script (`score_null` of `run_squad.py`): one window with the answer is enough."""
    window = spans.Window(1, np.array([[0, 3]]), np.array([True]))
    one = np.array([[2.0, 1.0], [1.0, 1.5], [0.0, 0.0]], dtype=np.float32)  # null 3, best 2.5
    other = np.array([[-1.0, -4.0], [0.0, 0.25], [0.0, 0.0]], dtype=np.float32)  # null -5, best 0.25
    row, encoded = Row("q", "yes", None, ""), spans.Encoded([None] * 2, [0, 0], [window] * 2)
    for scores in ([one, other], [other, one]):
        (answer,) = spans.decode([row], encoded, scores, SPAN, Limits())
        assert answer["null_odds"] == pytest.approx(-5.0 - 2.5)


def test_the_threshold_is_the_one_with_the_best_f1() -> None:
    """Here exact match is best without any answer, while F1 also counts partial matches."""
    answers = [("a tall green tree", "green tree", -2.0), ("the old red house", "red house", 1.0), ("", "x", 3.0)]
    rows = [Row("q", gold or "x", [{"text": gold, "answer_start": 0}] if gold else [], "") for gold, _, _ in answers]
    found = [{"text": text, "null_odds": odds, "nbest": [{"text": text}]} for _, text, odds in answers]
    assert spans.tune(find_task("squad2"), rows, found) == {"threshold": 1.0}
    scores = spans.score(find_task("squad2"), rows, found, SPAN, Limits(threshold=1.0))
    assert (scores["best_exact_thresh"], scores["best_f1_thresh"]) == (0.0, 1.0)
    assert scores["f1"] == scores["best_f1"] == pytest.approx(100 * (2 * 0.8 + 1) / 3, abs=10)
