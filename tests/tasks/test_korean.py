"""Korean tasks by their names: the released files, those of the hub, and scores equal to the published code."""

import json
import random
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import f1_score

from bertsmith.errors import UserError
from bertsmith.rows.columns import Columns, Row
from bertsmith.rows.entities import entities_of
from bertsmith.tasks import spans
from bertsmith.tasks.description import Limits
from bertsmith.tasks.kinds import KINDS
from bertsmith.tasks.metrics import METRICS
from bertsmith.tasks.prediction_files import score_file
from bertsmith.tasks.reading import find_splits, guessed_columns, read_task
from bertsmith.tasks.squad_scores import klue_scores
from bertsmith.tasks.task import find_task

STS = {"guid": "klue-sts-v1_dev_00000", "source": "rtt", "sentence1": "너무 친절했습니다.", "sentence2": "친절했어요."}
STS |= {"labels": {"label": 4.9, "real-label": 4.857, "binary-label": 1}, "annotations": {"agreement": "0:0:0:0:1:6"}}
NLI = {"guid": "klue-nli-v1_dev_00000", "premise": "발코니가 있다.", "hypothesis": "방이다.", "gold_label": "neutral"}
ARTICLE = {
    "title": "제주",
    "paragraphs": [
        {
            "context": "제주도에 비가 왔다.",
            "qas": [
                {
                    "guid": "m-1",
                    "question": "어디에?",
                    "answers": [{"text": "제주도", "answer_start": 0}],
                    "question_type": 1,
                },
                {
                    "guid": "m-2",
                    "question": "누가?",
                    "is_impossible": True,
                    "answers": [],
                    "plausible_answers": [{"text": "비", "answer_start": 5}],
                },
            ],
        }
    ],
}
RELEASED = {  # a task: its file, what is in it, and the text, the second text and the label of its first row
    "klue-tc": (
        "ynat-v1.1",
        [{"guid": "y", "title": "유튜브 지원", "label": "생활문화"}],
        ("유튜브 지원", None, "생활문화"),
    ),
    "klue-sts": ("klue-sts-v1.1", [STS], (STS["sentence1"], STS["sentence2"], 4.9)),
    "klue-nli": ("klue-nli-v1.1", [{**NLI, "author": "neutral"}], (NLI["premise"], NLI["hypothesis"], "neutral")),
    "klue-mrc": ("klue-mrc-v1.1", {"version": "v1", "data": [ARTICLE]}, None),
}


@pytest.mark.parametrize("name", RELEASED)
def test_klue_s_files_are_found_and_read(tmp_path: Path, name: str) -> None:
    stem, content, expected = RELEASED[name]
    for split in ("train", "dev"):
        (tmp_path / f"{stem}_{split}.json").write_text(json.dumps(content, ensure_ascii=False, indent=4))
    task = find_task(name)
    splits = find_splits(task, tmp_path)
    assert [path.name for path in (*splits.train, *splits.dev[""])] == [f"{stem}_train.json", f"{stem}_dev.json"]
    rows = list(read_task(task, splits.train, Columns(), labelled=True))
    assert rows[0].key
    if expected:
        assert (rows[0].text, rows[0].pair, rows[0].label) == expected
        KINDS[task.head].target(rows[0], KINDS[task.head].head_for(task, rows))
    else:
        assert [spans.answers_of(row) for row in rows] == [[("제주도", 0)], []]
        assert [row.key for row in rows] == ["m-1", "m-2"]


def test_the_hub_s_files_have_numbers_for_labels(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps({"guid": "y", "title": "유튜브", "label": 3}))
    (row,) = read_task(find_task("klue-tc"), tmp_path / "train.jsonl", Columns(), labelled=True)
    assert row.label == "생활문화"
    import pyarrow as pa
    import pyarrow.parquet as pq

    question = {
        "guid": "m",
        "question": "누가?",
        "context": "비가 왔다",
        "answers": {"text": ["비"], "answer_start": [0]},
    }
    pq.write_table(
        pa.Table.from_pylist([question | {"is_impossible": b} for b in (True, False)]), tmp_path / "m.parquet"
    )
    rows = read_task(find_task("klue-mrc"), tmp_path / "m.parquet", Columns(), labelled=True)
    assert [spans.answers_of(row) for row in rows] == [[], [("비", 0)]]
    tokens = {"sentence": "<경찰:OG>은 또", "tokens": list("경찰은 또"), "ner_tags": [4, 5, 12, 12, 12]}
    (tmp_path / "train.jsonl").write_text(json.dumps(tokens))
    (row,) = read_task(find_task("klue-ner"), tmp_path / "train.jsonl", Columns(), labelled=True)
    assert (row.text, entities_of(row)) == ("경찰은 또", [(0, 2, "OG")])
    head = KINDS["tags"].head_for(find_task("klue-ner"), [row])
    assert (head.unit, len(head.labels)) == ("token", 13)


def test_klue_ner_s_predictions_are_scored_by_its_own_scores(tmp_path: Path) -> None:
    file = "## 컬럼명 : CHAR\tNE_TAG\n## d-0\t<경찰:OG>은\n경\tB-OG\n찰\tI-OG\n은\tO\n \tO\n10\tB-QT\n".replace(
        "10", "1"
    )
    (tmp_path / "klue-ner-v1.1_train.tsv").write_text(file)
    (tmp_path / "predictions.txt").write_text(file.replace("찰\tI-OG", "찰\tO"))
    splits = find_splits(find_task("klue-ner"), tmp_path)
    scores = score_file(tmp_path / "predictions.txt", "klue-ner", splits.train[0])
    assert scores["entity_macro_f1"] == 50.0  # QT is right, OG is not
    # F1 of the tags: B-OG 1, I-OG 0, B-QT 1, O 2/3; the other nine of KLUE's thirteen count as 1.
    assert scores["char_macro_f1"] == pytest.approx(100 * (9 + 1 + 0 + 1 + 2 / 3) / 13)


def test_kornli_and_naver_ner_are_read_as_released(tmp_path: Path) -> None:
    for name, label in {"multinli.train.ko": "neutral", "snli_1.0_train.ko": "entailment"}.items():
        (tmp_path / f"{name}.tsv").write_text(f'sentence1\tsentence2\tgold_label\n그는 "갔다.\t갔다.\t{label}\n')
    (tmp_path / "xnli.dev.ko.tsv").write_text("sentence1\tsentence2\tgold_label\n왔다.\t갔다.\tcontradiction\n")
    splits = find_splits(find_task("kornli"), tmp_path)
    rows = list(read_task(find_task("kornli"), splits.train, Columns(), labelled=True))
    assert [(row.text, row.label) for row in rows] == [('그는 "갔다.', "entailment"), ('그는 "갔다.', "neutral")]
    assert splits.dev[""] == [tmp_path / "xnli.dev.ko.tsv"]
    (tmp_path / "train_data").write_text(
        "1\t비토리오\tPER_B\n2\t양일의\tDAT_B\n3\t1만\t-\n\n1\t네\t-\n2\t이순신\tPER_B\n"
    )
    (tmp_path / "test.tsv").write_text("비토리오 양일 만에\tPER-B DAT-B O\n")
    splits = find_splits(find_task("naver-ner"), tmp_path)
    train, dev = (
        list(read_task(find_task("naver-ner"), s, Columns(), labelled=True)) for s in (splits.train, splits.dev[""])
    )
    assert [row.parts for row in (*train, *dev)] == [
        ("비토리오", "양일의", "1만"),
        ("네", "이순신"),
        ("비토리오", "양일", "만에"),
    ]
    head = KINDS["tags"].head_for(find_task("naver-ner"), train)
    assert (head.unit, len(head.labels)) == ("word", 29)
    assert KINDS["tags"].target(dev[0], head) == [head.labels.index(t) for t in ("B-PER", "B-DAT", "O")]


def test_fields_of_objects_are_columns(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{**STS, "meta": {"by": {"name": f"n{i}"}}} for i in range(3)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    columns = Columns(text="sentence1", pair="sentence2", label="labels.binary-label", key="meta.by.name")
    for name in ("t.jsonl", "t.parquet"):
        task, path = find_task("pair"), tmp_path / name
        assert guessed_columns(task, path, columns).label == "labels.binary-label"
        found = list(read_task(task, path, columns, labelled=True, keep=["labels.real-label"]))
        assert [(row.label, row.key, row.kept) for row in found] == [
            (1, f"n{i}", {"labels.real-label": 4.857}) for i in range(3)
        ]
    with pytest.raises(UserError, match=r"no column 'labels.real'; did you mean 'labels.real-label'\?"):
        list(read_task(task, path, Columns(text="sentence1", pair="sentence2", label="labels.real"), labelled=True))
    row = Row("a", None, STS["labels"], "t, line 1")
    with pytest.raises(UserError, match=r"is not a number; name one of its fields, as in --label COLUMN\.label"):
        KINDS["regression"].target(row, KINDS["regression"].head_for(find_task("regress"), [row]))


def test_similar_sentences_are_scored_as_klue_does() -> None:
    draw = np.random.default_rng(1)
    for _ in range(20):
        gold, predicted = draw.uniform(0, 5, 40).round(1), draw.uniform(0, 5, 40)
        expected = 100 * f1_score(np.where(gold >= 3, 1, 0), np.where(predicted >= 3, 1, 0), average="binary")
        assert METRICS["f1_at_3"](gold.tolist(), predicted.tolist()) == pytest.approx(expected)


def reference(golds: dict[str, list[str]], predictions: dict[str, str]) -> tuple[float, float]:
    """Exact match and ROUGE-W, written from KLUE-MRC's definition: the longest common run of characters."""

    def plain(text: str) -> str:
        kept = [sign for sign in text.lower() if sign not in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"]
        return " ".join("".join(kept).split())

    def rouge(predicted: str, gold: str) -> float:
        if gold == "":
            return float(predicted == "")
        size = SequenceMatcher(None, predicted, gold).find_longest_match(0, len(predicted), 0, len(gold)).size
        precision, recall = size / len(predicted) if predicted else 0.0, size / len(gold)
        return 2 * precision * recall / (precision + recall) if precision + recall else 0.0

    exact, longest = [], []
    for key, answers in golds.items():
        answers, predicted = [plain(answer) for answer in answers] or [""], plain(predictions[key])
        exact.append(max(float(predicted == answer) for answer in answers))
        longest.append(max(rouge(predicted, answer) for answer in answers))
    return 100 * float(np.mean(exact)), 100 * float(np.mean(longest))


def test_answers_are_scored_as_klue_mrc_does() -> None:
    draw = random.Random(3)

    def text(most: int) -> str:
        return "".join(draw.choice("가나다라 마.,《A") for _ in range(draw.randrange(most)))

    for length in (4, 12, 400):
        golds = {str(i): [text(length) for _ in range(draw.randrange(3))] for i in range(60)}
        texts = {key: draw.choice([*golds[key], text(length), ""]) for key in golds}
        scores = klue_scores(golds, texts)
        assert (scores["exact_match"], scores["rouge_w"]) == pytest.approx(reference(golds, texts))


def test_the_threshold_for_no_answer_is_chosen_by_rouge_w() -> None:
    task, context = find_task("klue-mrc"), "제주도에 비가 왔다"
    labels: list[list[dict]] = [[{"text": "제주도"}], [], [{"text": "비가"}], []]
    rows = [Row("?", context, label, "", str(i)) for i, label in enumerate(labels)]
    answers, odds = ["제주도에", "비가", "왔다", "왔다"], [-3.0, 2.0, -1.0, -2.0]
    predictions = [{"nbest": [{"text": t}], "null_odds": o, "text": t} for t, o in zip(answers, odds, strict=True)]
    (threshold,) = spans.tune(task, rows, predictions).values()
    assert threshold == -3.0
    scores = spans.score(task, rows, predictions, KINDS["span"].head_for(task, rows), Limits(threshold=threshold))
    assert scores == pytest.approx({"exact_match": 50.0, "rouge_w": 100 * (6 / 7 + 1 + 0 + 1) / 4})
