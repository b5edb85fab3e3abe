"""The benchmark of Korean vocabularies: what it refuses, how it cuts KorQuAD in two, and all of it with tiny shapes."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import korean
from benchmarks.korean_vocabularies import NAMES, halves, task_scores
from benchmarks.record import read_results
from bertsmith.text.tokenizer import train_wordpiece

CONTEXT = "서울은 대한민국의 수도이다. 부산은 항구 도시이다. "


def korquad(titles: str) -> str:
    articles = []
    for number, title in enumerate(titles):
        answer = {"text": "수도", "answer_start": CONTEXT.index("수도")}
        question = {"id": str(number), "question": "서울은 무엇인가?", "answers": [answer]}
        articles.append({"title": title, "paragraphs": [{"context": CONTEXT * 9, "qas": [question]}]})
    return json.dumps({"version": "1", "data": articles}, ensure_ascii=False)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "text").mkdir(parents=True)
    (folder / "text" / "ko.txt").write_text("\n\n".join(f"{CONTEXT * 5}{n}" for n in range(80)), encoding="utf-8")
    (folder / "KorQuAD_v1.0_dev.json").write_text(korquad("dcba"), encoding="utf-8")
    reviews = "id\tdocument\tlabel\n" + "".join(f"{n}\t영화가 좋다 {n}\t{n % 2}\n" for n in range(80))
    for part in ("train", "test"):
        (folder / f"ratings_{part}.txt").write_text(reviews, encoding="utf-8")
    train_wordpiece([CONTEXT] * 50, 200).save(folder / "tokenizers" / "wordpiece")
    return folder


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["pretrain", "--data", "x"], "name a vocabulary: wordpiece, wordpiece-kiwi, bytes"),
        (["finetune", "jamo", "--data", "x"], "'jamo' is not one of wordpiece"),
        (["ceilings"], "--data is needed"),
        (["pretrain", "unigram", "--data", "x", "--smoke"], "--smoke needs --results FOLDER"),
    ],
)
def test_bad_calls_are_refused(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        korean.main(given)
    assert message in capsys.readouterr().err
    assert len(NAMES) == 6


def test_korquad_is_cut_in_two_by_article(data: Path, tmp_path: Path) -> None:
    splits = halves(Namespace(data=data, work=tmp_path / "work", smoke=False))
    parts = [json.loads(Path(path).read_text(encoding="utf-8"))["data"] for path in (*splits.train, *splits.dev[""])]
    assert [[article["title"] for article in part] for part in parts] == [["a", "c"], ["b", "d"]]


def test_scores_are_the_mean_over_the_seeds(tmp_path: Path) -> None:
    for seed, f1 in ((1, 60.0), (2, 64.0)):
        (tmp_path / str(seed)).mkdir()
        scores = {"scores": {"f1": f1, "exact_match": f1 - 20}}
        (tmp_path / str(seed) / "scores.json").write_text(json.dumps(scores), encoding="utf-8")
    found = task_scores("korquad", tmp_path)
    assert (found["f1"]["mean"], found["exact_match"]["values"], found["failed"]) == (62.0, [40.0, 44.0], 0)


@pytest.mark.slow
def test_everything_runs_with_tiny_shapes(data: Path, tmp_path: Path) -> None:
    given = ["wordpiece", "--data", str(data), "--work", str(tmp_path / "work"), "--results", str(tmp_path / "results")]
    given += ["--smoke", "--jobs", "1", "--seeds", "1", "--device", "cpu"]
    korean.main(["pretrain", *given])
    korean.main(["finetune", *given])
    korean.main(["show", "--results", str(tmp_path / "results")])
    found = read_results("korean", tmp_path / "results")
    assert found["pretraining"]["wordpiece"]["steps"] == 3
    tasks = found["tasks"]["wordpiece"]
    assert 0 <= tasks["korquad"]["exact_match"]["mean"] <= 100
    assert 0 <= tasks["nsmc"]["accuracy"]["mean"] <= 100
    assert (tasks["korquad"]["failed"], tasks["nsmc"]["failed"]) == (0, 0)
