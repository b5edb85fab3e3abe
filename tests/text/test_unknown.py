"""The share of unknown tokens, and the likely cause if it is high."""

import json
from pathlib import Path

import numpy as np
import pytest

from bertsmith.config import override
from bertsmith.finetuning.run import finetune
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.inference.files import evaluate, predict
from bertsmith.text.tokenizer import Tokenizer, train_wordpiece
from bertsmith.text.unknown import Unknowns

TEXTS = ["Der Hund und die Katze sind in Berlin. 영화가 정말 재미있다", "Anna liest ein Buch 연기도 좋았다"] * 3


def reopened(tokenizer: Tokenizer, folder: Path, **settings: object) -> Tokenizer:
    """The same vocabulary, loaded with other settings."""
    tokenizer.save(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer.load(folder)


def warning(tokenizer: Tokenizer, texts: list[str]) -> str | None:
    unknowns = Unknowns(tokenizer)
    unknowns.add(np.concatenate(tokenizer.encode(texts, special=True)))
    return unknowns.warning("the rows")


def test_no_warning_if_the_vocabulary_fits() -> None:
    for cased in (True, False):
        assert warning(train_wordpiece(TEXTS, 300, cased=cased), TEXTS) is None


@pytest.mark.parametrize(
    ("cased", "settings", "cause"),
    [
        (True, {"do_lower_case": True}, "lower-cases, but its vocabulary is cased"),
        (False, {"do_lower_case": True}, "decomposes Hangul"),
        (False, {"do_lower_case": False}, "keeps capitals, but its vocabulary has none"),
    ],
)
def test_the_warning_names_the_cause(tmp_path: Path, cased: bool, settings: dict, cause: str) -> None:
    sentence = warning(reopened(train_wordpiece(TEXTS, 300, cased=cased), tmp_path, **settings), TEXTS)
    assert sentence is not None
    assert cause in sentence


def test_a_script_without_capitals_is_not_told_to_lower_case() -> None:
    sentence = warning(train_wordpiece(["สมชายไปเที่ยวภูเก็ต"] * 3, 40, cased=True), ["กรุงเทพ"])
    assert "does not fit this text" in (sentence or "")


def test_the_warning_depends_on_the_share_of_unknown_tokens(tmp_path: Path) -> None:
    tokenizer = train_wordpiece(TEXTS, 300)
    unknowns = Unknowns(tokenizer)
    unknowns.add(tokenizer.joiner.join([tokenizer.unknown_id], [7, 8, 9]).tokens)
    assert unknowns.share == 0.25
    assert (unknowns.warning("the rows") or "").startswith("25.0 % of the tokens of the rows are [UNK]: the vocabulary")
    unknowns.add(np.full(46, 7))
    assert unknowns.share == 0.02
    assert unknowns.warning("the rows") is None


def test_fine_tuning_and_prediction_warn_of_unknown_tokens(
    world: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Half of the training rows are in a script that the vocabulary does not have."""
    foreign = [("Ж" * 3, "x"), ("the list", "y")] * 6
    config = override(FinetuneConfig("classify"), ["train.steps=1", "data.max_length=16"])
    scores = finetune(config, world / "run", foreign, tmp_path / "run", device="cpu")
    assert scores["unknown_percent"] == pytest.approx(100 / 3, abs=0.01)  # one of three tokens
    stderr = " ".join(capfd.readouterr().err.split())
    assert "warning: 33.3 % of the tokens of the training rows are [UNK]: the vocabulary does not fit" in stderr
    (tmp_path / "texts.csv").write_text("text,label\n" + "the list,x\n" * 30 + "ЖЖЖ,x\n" * 20)
    predict(tmp_path / "run", tmp_path / "texts.csv", tmp_path / "out.jsonl", device="cpu")
    assert "warning: 25.0 % of the tokens of the texts are [UNK]" in " ".join(capfd.readouterr().err.split())
    evaluate(tmp_path / "run", [("the list", "y")] * 3, device="cpu")
    assert "[UNK]" not in capfd.readouterr().err
