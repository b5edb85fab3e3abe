"""Held-out evaluation reads the documents that training does not, and its scores are correct."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY, randomise

from bertsmith.config import override
from bertsmith.corpus.shards import Corpus
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.objectives.kinds import build_objective
from bertsmith.objectives.objective import Objective
from bertsmith.objectives.settings import CAUSAL_LM, MASKED_LM
from bertsmith.pretraining import held_out
from bertsmith.pretraining.loader import DataConfig, Loader, split_documents
from bertsmith.pretraining.run import pretrain
from bertsmith.pretraining.segments import segment_source
from bertsmith.recipes import recipe
from bertsmith.text.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH = 24
OBJECTIVE = {"both": MASKED_LM, "left-to-right": CAUSAL_LM}


def loader_of(world: Path, documents: np.ndarray, direction: str = "both") -> Loader:
    corpus = Corpus.open(world / "shards")
    source = segment_source("next", corpus, documents, LENGTH, 0.1, seed=3)
    return Loader.of(
        source, Tokenizer.load(world / "tok"), DataConfig(LENGTH), objective=OBJECTIVE[direction], direction=direction
    )


def objective_of(loader: Loader, direction: str = "both") -> Objective:
    config = EncoderConfig(
        loader.tokenizer.vocab_size, 16, num_layers=1, num_heads=2, intermediate_size=32, direction=direction
    )
    objective = randomise(build_objective(Encoder(config), OBJECTIVE[direction])).train()
    with torch.no_grad():
        objective.get_submodule(objective.token_head).decoder.bias[loader.tokenizer.id(".")] += (
            3.0  # some predictions are right
        )
    return objective


def plain_scores(objective: Objective, loader: Loader, indices: np.ndarray) -> dict[str, float]:
    """The expected scores, computed one sequence and one token at a time."""
    name = objective.token_loss
    losses, right, pairs = [], [], []
    for index in indices:
        batch = loader.batch(np.array([0]), np.array([index]))
        with torch.no_grad():
            scores = objective.eval().logits(batch)
        for row, target in zip(scores[name].double().numpy(), batch.labels["targets"].tolist(), strict=True):
            losses.append(math.log(np.exp(row - row[target]).sum()))
            right.append(row[target] == row.max())
        if name == "mlm":
            (first, second), follows = scores["nsp"][0].tolist(), batch.labels["next"].item()
            pairs.append((0 if first > second else 1) == follows)
    loss = sum(losses) / len(losses)
    found = {f"{name}_loss": loss, f"{name}_perplexity": math.e**loss, f"{name}_accuracy": 100 * np.mean(right)}
    return {**found, **({"nsp_accuracy": 100 * np.mean(pairs)} if pairs else {})}


@pytest.mark.parametrize("direction", ["both", "left-to-right"])
def test_scores_equal_a_plain_recomputation(world: Path, direction: str, monkeypatch) -> None:
    monkeypatch.setattr(held_out, "AT_ONCE", 10 * LENGTH)  # several batches, the last one smaller
    loader = loader_of(world, np.array([3, 7]), direction)
    assert 15 < len(loader.source) < held_out.SEQUENCES
    objective = objective_of(loader, direction)
    found = held_out.evaluate(objective, loader, [])
    expected = plain_scores(objective, loader, np.arange(len(loader.source)))
    assert found == {name: pytest.approx(value, rel=1e-4) for name, value in expected.items()}
    assert 0 < found["mlm_accuracy" if direction == "both" else "lm_accuracy"] < 100


def test_large_held_out_data_is_evaluated_on_a_fixed_sample(world: Path, monkeypatch) -> None:
    monkeypatch.setattr(held_out, "SEQUENCES", 12)
    monkeypatch.setattr(held_out, "AT_ONCE", 5 * LENGTH)
    loader = loader_of(world, np.arange(20))
    objective, calls = objective_of(loader), []
    real = Loader.batch
    monkeypatch.setattr(Loader, "batch", lambda self, e, i: calls.append((e.tolist(), i.tolist())) or real(self, e, i))
    first, second = (held_out.evaluate(objective, loader, []) for _ in range(2))
    assert first == second
    assert calls[:3] == calls[3:]
    indices = [i for _, part in calls[:3] for i in part]
    assert {e for epochs, _ in calls for e in epochs} == {0}
    assert len(set(indices)) == 12 < max(indices)  # not only the first ones
    assert first["mlm_loss"] == pytest.approx(plain_scores(objective, loader, np.array(indices))["mlm_loss"], rel=1e-4)


def test_samples_show_the_likeliest_words_with_their_probabilities(world: Path) -> None:
    loader = loader_of(world, np.array([3, 7]))
    objective, tokenizer = objective_of(loader), loader.tokenizer
    samples = held_out.choose_samples(Corpus.open(world / "shards"), np.array([3, 7]), tokenizer, 512)
    shown = held_out.evaluate(objective, loader, samples)["samples"]
    assert len(shown) == len(samples) == held_out.TEXTS
    for sample, found in zip(samples, shown, strict=True):
        assert found["answers"] == sample.answers
        assert found["text"].count("[MASK]") == len(sample.masked) == len(found["guesses"])
        ids = torch.from_numpy(sample.example.tokens)
        assert (ids[sample.masked] == tokenizer.id("[MASK]")).all()
        batch = held_out.collate([sample.example], packed=False)
        with torch.no_grad():
            states = objective.encoder(batch)[0, sample.masked]
            chances = objective.masked_lm(states).softmax(-1)
        for row, guesses in zip(chances, found["guesses"], strict=True):
            best = sorted(range(len(row)), key=lambda i, row=row: -row[i])[: held_out.CANDIDATES]
            assert [word for word, _ in guesses] == [tokenizer.token(i) for i in best]
            assert [chance for _, chance in guesses] == pytest.approx([row[i].item() for i in best], abs=1e-4)


def test_samples_fit_into_the_positions_of_the_encoder(world: Path) -> None:
    corpus, tokenizer = Corpus.open(world / "shards"), loader_of(world, np.array([3, 7])).tokenizer
    lengths = {
        positions: [len(s.example.tokens) for s in held_out.choose_samples(corpus, np.arange(40), tokenizer, positions)]
        for positions in (20, 512)
    }
    assert 20 < max(lengths[512]) <= held_out.LONGEST + 2
    assert 0 < max(lengths[20]) <= 20


def test_a_run_is_evaluated_on_documents_that_are_not_trained_on(world: Path, tmp_path: Path, monkeypatch) -> None:
    """Samples and the second phase use held-out documents too; training reads none of them."""
    evaluated, learnt, samples = [], [], []

    def evaluate(objective, loader, given, dtype):
        evaluated.append((loader.source.max_length, loader.source.documents.tolist()))
        samples.extend(given)
        return {"mlm_loss": 1.0}

    step = Loader.step
    monkeypatch.setattr(held_out, "evaluate", evaluate)
    monkeypatch.setattr(
        Loader, "step", lambda self, *a: learnt.append(self.source.documents.tolist()) or step(self, *a)
    )
    changes = [*TINY, "train.steps=4", "train.batch_size=4", "data.max_length=16", "train.workers=0"]
    changes += ["data.long_length=32", "data.long_share=0.5", "data.held_out=0.2"]
    pretrain(override(recipe("bert-tiny"), changes), world / "shards", tmp_path / "run", device="cpu")
    corpus = Corpus.open(world / "shards")
    train, kept = split_documents(corpus.manifest.documents, 0.2)
    assert evaluated == [(16, kept.tolist()), (32, kept.tolist())]
    assert learnt == [train.tolist()] * 4
    assert len(samples) == held_out.TEXTS
    words = {n: " ".join(map(str, corpus.document(n)[0])) for n in range(corpus.manifest.documents)}
    tokenizer = Tokenizer.load(world / "tok")
    for sample in samples:
        ids = sample.example.tokens.copy()
        ids[sample.masked] = [tokenizer.id(word) for word in sample.answers]
        text = " ".join(map(str, ids[1:-1]))
        assert any(text in words[n] for n in kept.tolist())


def test_held_out_text_of_varied_sequences_has_full_ones(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated, learnt, step = [], [], Loader.step
    monkeypatch.setattr(held_out, "evaluate", lambda _, loader, *given: evaluated.append(loader.source) or {"loss": 1})
    monkeypatch.setattr(Loader, "step", lambda self, *a: learnt.append(self.source) or step(self, *a))
    changes = [*TINY, "train.steps=2", "train.batch_size=4", "data.max_length=16", "train.workers=0"]
    changes += ["data.long_length=null", "data.pairs=varied", "data.short_share=0.5", "objective.next_sentence=false"]
    pretrain(override(recipe("bert-tiny"), changes), world / "shards", tmp_path / "run", device="cpu")
    assert [source.short_share for source in learnt] == [0.5] * 2
    assert [source.short_share for source in evaluated] == [0.0]
