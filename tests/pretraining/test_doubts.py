"""Pre-training notes text that is poor for what is asked, and a model that knows only how frequent words are."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from runs import settings, shrunk

from bertsmith.corpus.build import build_corpus
from bertsmith.corpus.shards import Corpus
from bertsmith.finetuning.run import finetune
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.objectives.causal_lm import CausalLM
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.objectives.replaced_token import ReplacedToken
from bertsmith.objectives.settings import CAUSAL_LM
from bertsmith.pretraining import held_out
from bertsmith.pretraining.doubts import doubts, learnt_little, loss_without_context
from bertsmith.pretraining.loader import DataConfig, Loader
from bertsmith.pretraining.run import pretrain
from bertsmith.pretraining.segments import segment_source
from bertsmith.text.tokenizer import Tokenizer

NO_PAIRS = ("data.pairs=full", "objective.next_sentence=false")
Make = Callable[[list[list[str]]], Corpus]


@pytest.fixture
def corpus_of(world: Path, tmp_path: Path) -> Make:
    def make(documents: list[list[str]]) -> Corpus:
        (tmp_path / "text.txt").write_text("\n\n".join("\n".join(lines) for lines in documents) + "\n")
        return build_corpus([tmp_path / "text.txt"], world / "tok", tmp_path / "shards", workers=1)

    return make


def lines(number: int, count: int) -> list[str]:
    return [f"The length of list {number} is {n} and this line is a sentence." for n in range(count)]


def test_documents_that_are_lines_are_noted_where_pairs_are_learnt(corpus_of: Make) -> None:
    corpus = corpus_of([lines(number, 1) for number in range(40)])
    (note,) = doubts(settings(), corpus, np.arange(10))
    assert note.startswith(
        "a document has 1.0 sentences on average, so that the two segments of a pair are mostly parts"
    )
    assert "separate documents, and nothing else, by a blank line and build the corpus again" in note
    assert doubts(settings(*NO_PAIRS), corpus, np.arange(10)) == []


def test_one_document_that_is_most_of_the_text_is_noted_where_pairs_are_learnt(corpus_of: Make) -> None:
    corpus = corpus_of([lines(0, 150), *(lines(number, 5) for number in range(1, 11))])
    (note,) = doubts(settings(), corpus, np.arange(10))
    assert note.startswith("one document of 11 holds 7")
    assert doubts(settings(*NO_PAIRS), corpus, np.arange(10)) == []


@pytest.mark.parametrize(
    ("documents", "kept", "advice"),
    [(100, 2, "data.held_out=0.1 holds out 10"), (30, 3, "more text, or more documents"), (100, 10, ""), (100, 0, "")],
)
def test_few_held_out_documents_are_noted_with_what_to_do(
    corpus_of: Make, documents: int, kept: int, advice: str
) -> None:
    corpus = corpus_of([lines(number, 3) for number in range(documents)])
    notes = doubts(settings(), corpus, np.arange(kept))
    assert len(notes) == bool(advice)
    for note in notes:
        assert note.startswith(f"{kept} of {documents} documents are held out (")
        assert f" of the text), so their scores are noisy: {advice}" in note


def test_loss_without_context_is_that_of_the_frequencies_of_words(world: Path) -> None:
    corpus, tokenizer = Corpus.open(world / "shards"), Tokenizer.load(world / "tok")
    source = segment_source("next", corpus, np.array([3, 7]), 24, 0.1, seed=3)
    loader, trained = Loader.of(source, tokenizer, DataConfig(24)), np.arange(10, 30)
    counts = Counter(int(token) for document in trained for token in corpus.document(document)[0])
    total = sum(counts.values()) + tokenizer.vocab_size
    targets = [t for i in held_out.batches(loader) for t in loader.batch(0 * i, i).labels["targets"].tolist()]
    expected = -np.mean([np.log((counts[target] + 1) / total) for target in targets])
    assert loss_without_context(corpus, trained, loader) == pytest.approx(expected)
    one_way = {"objective": CAUSAL_LM, "direction": "left-to-right", "predicted_words": 6}
    few = loss_without_context(corpus, trained, Loader.of(source, tokenizer, DataConfig(24), **one_way))
    assert few < 1  # nearly all words are the unknown one


def test_a_model_that_knows_only_the_frequencies_has_learnt_little() -> None:
    encoder = Encoder(EncoderConfig(50, 16, 1, 2, 32))
    masked = MaskedLM(encoder)
    expected = "it has learnt hardly more than word frequencies: its held-out loss is 5.79, and that of a model which "
    assert learnt_little(masked, {"mlm_loss": 5.79}, 5.8) == f"{expected}ignores the context 5.80"
    assert learnt_little(masked, {"mlm_loss": 5.4}, 5.8) == ""
    assert learnt_little(masked, {}, 5.8) == learnt_little(masked, {"mlm_loss": 5.79}, None) == ""
    assert learnt_little(ReplacedToken(encoder), {"mlm_loss": 5.79}, 5.8) == ""  # that is its generator's loss
    finds = {"mlm_loss": 5.79, "detection_recall": 0.3}
    assert learnt_little(ReplacedToken(encoder), finds, 5.8).endswith("of those held out it finds 0.3 %")
    assert learnt_little(ReplacedToken(encoder), finds | {"detection_recall": 7.4}, 5.8) == ""
    one_way = CausalLM(Encoder(EncoderConfig(50, 16, 1, 2, 32, direction="left-to-right")))
    assert learnt_little(one_way, {"lm_loss": 6.0}, 5.8)


def test_caution_is_saved_with_the_model_and_repeated_by_finetune(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = pretrain(settings("train.steps=2"), world / "shards", tmp_path / "run", device="cpu")
    without = json.loads((tmp_path / "run" / "run.json").read_text())["loss_without_context"]
    assert 4 < without < 7 < scores["mlm_loss"] + 0.5
    caution = json.loads((tmp_path / "run" / "model" / "bertsmith.json").read_text())["caution"]
    assert caution.endswith(f"is {scores['mlm_loss']:.2f}, and that of a model which ignores the context {without:.2f}")
    line = f"note: {tmp_path / 'run' / 'model'}: {caution}"
    assert f"{line}. It needs more steps" in capsys.readouterr().err
    finetune("classify", tmp_path / "run", world / "train.csv", tmp_path / "tuned", steps=1, device="cpu")
    assert capsys.readouterr().err.count(line) == 1
    assert json.loads((tmp_path / "tuned" / "model" / "bertsmith.json").read_text())["caution"] == ""


def test_a_detector_that_finds_nothing_has_a_caution(world: Path, tmp_path: Path) -> None:
    scores = pretrain(shrunk("speedrun"), world / "shards", tmp_path / "run", device="cpu")
    assert scores["detection_recall"] < 2
    caution = json.loads((tmp_path / "run" / "model" / "bertsmith.json").read_text())["caution"]
    assert caution.startswith("it has hardly learnt to detect replaced tokens")


def test_a_model_that_has_learnt_has_no_caution(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bertsmith.pretraining.run.loss_without_context", lambda *a: 20.0)
    pretrain(settings("train.steps=1"), world / "shards", tmp_path / "run", device="cpu")
    assert "word frequencies" not in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "model" / "bertsmith.json").read_text())["caution"] == ""
    assert json.loads((tmp_path / "run" / "run.json").read_text())["loss_without_context"] == 20.0
