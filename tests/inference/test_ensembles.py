"""Ensembles average scores or merge n-best lists, and models that do not match are refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from bertsmith.config import override
from bertsmith.errors import UserError
from bertsmith.finetuning.run import FinetuneConfig, finetune
from bertsmith.inference.files import evaluate, predict
from bertsmith.inference.predictor import Predictor
from bertsmith.rows.columns import Row
from bertsmith.tasks.description import Limits
from bertsmith.tasks.kinds import KINDS
from bertsmith.tasks.spans import merge

QUICK = ["train.steps=6", "train.batch_size=8", "train.learning_rate=2e-3", "data.max_length=24"]
QUESTIONS = [("what is it", f"it is a file of {n} numbers and a list of names") for n in range(6)]


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


DATA = {
    "classify": [{"text": f"a {w} of {w}", "label": w} for w in ("file", "list", "name") * 4],
    "regress": [{"text": f"a {w}", "label": n} for n, w in enumerate(("file", "list", "name") * 4)],
    "tag": [{"tokens": ["a", w], "tags": ["O", t]} for w, t in (("file", "B-X"), ("list", "B-Y")) * 6],
    "choose": [{"text": "a", "endings": ["file", "list"], "label": n % 2} for n in range(12)],
    "answer": [
        {"question": q, "context": c, "answers": {"text": ["a file"] * (n % 2), "answer_start": [6] * (n % 2)}}
        for n, (q, c) in enumerate(QUESTIONS * 2)
    ],
}


@pytest.fixture(scope="module")
def trained(world, tmp_path_factory):
    """Runs of a task with several seeds, each trained once."""
    root, made = tmp_path_factory.mktemp("ensembles"), {}

    def train(task: str, seed: int = 1, *changes: str) -> Path:
        key = "-".join([task, str(seed), *changes])
        if key not in made:
            data = write(root / f"{task}.jsonl", DATA[task])
            config = override(FinetuneConfig(task), [*QUICK, f"train.seed={seed}", *changes])
            finetune(config, world / "run", data, root / key, dev=data, device="cpu")
            made[key] = root / key
        return made[key]

    return train


@pytest.mark.parametrize("task", DATA)
def test_logits_are_averaged_for_every_head(trained, task: str) -> None:
    runs = [trained(task, seed) for seed in (1, 2, 3)]
    ensemble, members = Predictor.load(runs, "cpu"), [Predictor.load(run, "cpu") for run in runs]
    data = [Row(row.get("text", "a list of names"), None, None, "") for row in DATA["classify"]]
    examples = KINDS["single"].encode(data, ensemble.tokenizer, Limits(24), ensemble.head, labelled=False).examples
    means = [np.mean(scores, axis=0) for scores in zip(*(m.logits(examples) for m in members), strict=True)]
    for found, expected in zip(ensemble.logits(examples), means, strict=True):
        assert np.allclose(found, expected, atol=1e-6)
        assert found.dtype == np.float32
    scores = evaluate(runs, runs[0].parent / f"{task}.jsonl", device="cpu")
    assert scores["task"] == task
    assert scores["rows"] == 12


def test_predictions_of_two_models_are_those_of_their_mean(trained, tmp_path) -> None:
    runs = [trained("classify", seed) for seed in (1, 2)]
    data = runs[0].parent / "classify.jsonl"
    assert predict(runs, data, tmp_path / "out.jsonl", device="cpu") == 12
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    text = DATA["classify"][0]["text"]
    logits = [np.log(list(a["scores"].values())) for r in runs for a in Predictor.load(r, "cpu").predict([text])]
    expected = np.exp(np.mean(logits, axis=0))
    assert np.allclose(list(found[0]["scores"].values()), expected / expected.sum(), atol=1e-6)


def entry(text: str, score: float) -> dict:
    return {"text": text, "start": 0, "end": len(text), "score": score}


def answer(odds: float, *entries: dict) -> dict:
    return {**entries[0], "null_odds": odds, "nbest": list(entries)}


def test_n_best_lists_are_merged_by_the_mean_of_their_probabilities() -> None:
    one, two = answer(-3.0, entry("x", 0.6), entry("y", 0.4)), answer(1.0, entry("y", 0.9), entry("z", 0.1))
    merged = merge([one, two], Limits(n_best=2))
    assert [e["text"] for e in merged["nbest"]] == ["y", "x"]
    assert merged["text"] == "y"
    assert merged["score"] == pytest.approx(0.65)
    assert merged["null_odds"] == -1.0
    assert merge([one, two], Limits(threshold=0.0))["text"] == "y"
    assert merge([one, two], Limits(threshold=-2.0))["text"] == ""
    nothing = {"text": "", "start": None, "end": None, "score": 1.0, "null_odds": 2.0, "nbest": []}
    assert merge([nothing, nothing], Limits())["nbest"] == []
    assert one["nbest"][0]["score"] == 0.6  # the inputs are not modified


def test_models_with_different_windows_combine_by_n_best(trained) -> None:
    runs = [trained("answer", 1), trained("answer", 2, "data.max_length=16")]
    ensemble = Predictor.load(runs, "cpu")
    members = [list(Predictor.load(run, "cpu").predict(QUESTIONS)) for run in runs]
    for found, answers in zip(ensemble.predict(QUESTIONS), zip(*members, strict=True), strict=True):
        assert found == merge(answers, ensemble.limits)
    thresholds = [Predictor.load(run, "cpu").limits.threshold for run in runs]
    assert ensemble.limits.threshold == pytest.approx(sum(thresholds) / 2)
    with pytest.raises(UserError, match="combine them by nbest"):
        Predictor.load(runs, "cpu", combine="logits")
    same_windows = [trained("answer", seed) for seed in (1, 2)]
    assert Predictor.load(same_windows, "cpu", combine="nbest").members
    assert not Predictor.load(same_windows, "cpu").members
    assert "f1" in evaluate(runs, runs[0].parent / "answer.jsonl", device="cpu")


def test_models_that_do_not_match_are_refused(trained, world, tmp_path) -> None:
    classify = trained("classify")
    with pytest.raises(UserError, match=r"was trained for tag, .* for classify"):
        Predictor.load([classify, trained("tag")], "cpu")
    other = write(tmp_path / "other.jsonl", [{"text": f"a {w}", "label": w} for w in ("red", "blue") * 6])
    finetune(override(FinetuneConfig("classify"), QUICK), world / "run", other, tmp_path / "other", device="cpu")
    with pytest.raises(UserError, match="blue, red against file, list, name"):
        Predictor.load([classify, tmp_path / "other"], "cpu")
    with pytest.raises(UserError, match="encode texts differently"):
        Predictor.load([classify, trained("classify", 1, "data.max_length=16")], "cpu")
    with pytest.raises(UserError, match="nbest is for answers in a text"):
        Predictor.load([classify, classify], "cpu", combine="nbest")
    with pytest.raises(UserError, match="unknown way"):
        Predictor.load([classify, classify], "cpu", combine="mean")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no model is given"):
        Predictor.load([], "cpu")


def test_the_commands_take_several_models(trained, tmp_path, run_command) -> None:
    runs = [str(trained("classify", seed)) for seed in (1, 2, 3)]
    data = str(Path(runs[0]).parent / "classify.jsonl")

    out = str(tmp_path / "answers.jsonl")
    assert run_command("predict", *runs, data, "--out", out, "--device", "cpu")[0] == 0
    assert len(Path(out).read_text().splitlines()) == 12
    code, output, _ = run_command("evaluate", *runs, "--data", data, "--json", "--device", "cpu")
    assert code == 0
    assert json.loads(output) == evaluate(runs, data, device="cpu")
    code, _, errors = run_command("evaluate", *runs, "--data", data, "--task", "rte", "--device", "cpu")
    assert (code, "one file of predictions" in errors) == (2, True)
