"""A BiLSTM on a frozen encoder: the six variants of Table 7 are trained, saved, opened and scored."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from labels import of_task
from torch.testing import assert_close
from variants import VARIANTS as ENCODERS

from bertsmith.batch import Example, collate
from bertsmith.config import override, to_dict
from bertsmith.conversion import convert
from bertsmith.errors import Interrupted, UserError
from bertsmith.finetuning.frozen import frozen_examples
from bertsmith.finetuning.run import FinetuneConfig, finetune
from bertsmith.formats.hf import Loaded, Notes, load_folder, save_folder
from bertsmith.inference.features import Features
from bertsmith.inference.files import evaluate, predict
from bertsmith.inference.predictor import Predictor
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.model.recurrent import VARIANTS, FeatureConfig
from bertsmith.model.states import hidden_states
from bertsmith.recipes import feature_based
from bertsmith.rows.conll import read_conll
from bertsmith.tasks import tagging
from bertsmith.tasks.description import Limits
from bertsmith.training import fit as training

LABELS = ("O", "B-X", "I-X")
SMALL = {"hidden_size": 32, "num_heads": 2, "num_layers": 5, "intermediate_size": 64, "max_positions": 40}
CONLL = "\n".join(
    f"-DOCSTART- O\n\nthe O\nquick B-X\nfox I-X\n\njumps O\nover O\nthe O\nlazy B-X\ndog{'s' * (i % 2)} I-X\n\nfox O\n"
    for i in range(12)
)


def model_of(tokenizer, variant: str, seed: int = 0, size: int = 12, **changes) -> TaskModel:
    torch.manual_seed(seed)
    config = EncoderConfig(vocab_size=tokenizer.vocab_size, **{**SMALL, **changes})
    model = TaskModel(Encoder(config), HeadConfig("tags", LABELS, features=FeatureConfig(variant, size)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture
def start(tmp_path, tiny_tokenizer) -> Path:
    """A folder with an encoder, and a CoNLL file beside it."""
    plain = model_of(tiny_tokenizer, "last")
    save_folder(tmp_path / "bert", TaskModel(plain.encoder, HeadConfig("tags", LABELS)), tiny_tokenizer, Notes())
    (tmp_path / "train.conll").write_text(CONLL)
    return tmp_path / "bert"


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_scores_equal_those_of_an_lstm_on_each_sentence_alone(variant, encoder, tiny_tokenizer):
    model = model_of(tiny_tokenizer, variant, **ENCODERS[encoder].ours)
    draw = np.random.default_rng(0)
    reads = [np.array([1, 2, 5]), np.array([], dtype=np.int64), np.array([3]), np.array([1, 4, 6, 7])]
    examples = [
        Example(draw.integers(5, 60, 9 + i), np.zeros(9 + i, np.int64), of_task(words=r)) for i, r in enumerate(reads)
    ]
    scores = model.scores(collate(examples, packed=True))
    assert scores.shape == (sum(len(e.tokens) for e in examples), 3)
    begin, head = 0, model.head
    for example, read in zip(examples, reads, strict=True):
        own = scores[begin : begin + len(example.tokens)]
        begin += len(example.tokens)
        if not len(read):
            assert not own.any()
            continue
        found = hidden_states(model.encoder, collate([example], packed=True), range(6))
        layers = {"embeddings": [0], "second-to-last": [4], "last": [5], "sum-all": [1, 2, 3, 4, 5]}.get(
            variant, [2, 3, 4, 5]
        )
        states = [found[layer][torch.from_numpy(read)] for layer in layers]
        if variant.startswith("sum"):
            x = sum(weight * state for weight, state in zip(head.mix.softmax(0), states, strict=True))
        else:
            x = torch.cat(states, -1)
        assert_close(own[torch.from_numpy(read)], head.output(head.lstm(x)[0]), atol=1e-5, rtol=1e-4)
        rest = np.setdiff1d(np.arange(len(example.tokens)), read)
        assert not own[torch.from_numpy(rest)].any()


@torch.no_grad()
def test_frozen_encoder_has_no_dropout_in_training(tiny_tokenizer):
    model = model_of(tiny_tokenizer, "last")
    batch = collate([Example(np.arange(5, 25), np.zeros(20, np.int64), of_task(words=np.arange(1, 19)))], packed=True)
    expected = model.head.states(model.encoder, batch)
    assert_close(model.train().head.states(model.encoder, batch), expected, atol=0, rtol=0)
    assert not model.scores(batch).equal(model.scores(batch))  # the BiLSTM's own dropout


def test_stored_hidden_states_give_the_same_scores(start, tmp_path, tiny_tokenizer):
    model = model_of(tiny_tokenizer, "sum-last-four", max_positions=64)
    predictor = Predictor(Loaded(tmp_path, model, tiny_tokenizer, Notes()), "cpu")
    rows, head = list(read_conll(tmp_path / "train.conll", labelled=True))[:6], model.head_config
    examples = frozen_examples(predictor, rows, head, 64, tmp_path / "states").examples
    assert [e.labels["tags"].values.tolist() for e in examples] == [tagging.tag_indices(row, head) for row in rows]
    states = [e.labels["states"].values for e in examples]
    assert [s.shape for s in states] == [(len(e.tokens), 4, 32) for e in examples]
    assert all(s.dtype == np.float16 and not s.flags.owndata for s in states)
    encoded = tagging.encode(rows, tiny_tokenizer, Limits(64), head, labelled=True)
    with torch.inference_mode():
        cached = model.scores(collate(examples, packed=True))
        batch = collate(encoded.examples, packed=True)
        computed = model.scores(batch)[batch.labels["words"]]
    assert computed.std(0).min() > 0.01  # scores differ between words by more than the error of half precision
    assert_close(cached, computed, atol=1e-3, rtol=0)
    assert len(Features.open(tmp_path / "states")) == len(rows)


@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_folder_restores_the_whole_model(variant, tmp_path, tiny_tokenizer):
    model = model_of(tiny_tokenizer, variant)
    save_folder(tmp_path / "a", model, tiny_tokenizer, Notes("conll2003", max_length=40))
    loaded = load_folder(tmp_path / "a")
    assert not loaded.missing
    assert loaded.model.head_config == model.head_config
    assert loaded.model.state_dict().keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert_close(loaded.model.state_dict()[name], value, atol=0, rtol=0)
    assert not any(p.requires_grad for p in loaded.model.encoder.parameters())
    assert all(p.requires_grad for p in loaded.model.head.parameters())
    assert "transformers has no class" in json.loads((tmp_path / "a" / "bertsmith.json").read_text())["remark"]
    values = json.loads((tmp_path / "a" / "config.json").read_text())
    assert values["model_type"] == "bertsmith-features-bert"
    assert values["features"] == {"variant": variant, "hidden_size": 12, "num_layers": 2}  # nothing is standardised
    other = load_folder(tmp_path / "a", HeadConfig("tags", LABELS, features=FeatureConfig(variant, 20)))
    assert any(name.startswith("head.lstm.") for name in other.missing)
    biases = [v for n, v in other.model.state_dict().items() if "bias" in n and n.startswith("head.")]
    assert not any(bias.any() for bias in biases)
    assert load_folder(
        tmp_path / "a", HeadConfig("single", ("a", "b"))
    ).model.encoder.embeddings.tokens.weight.requires_grad


def test_transformers_refuses_to_open_the_folder(tmp_path, tiny_tokenizer):
    from transformers import AutoModelForTokenClassification

    save_folder(tmp_path / "a", model_of(tiny_tokenizer, "last"), tiny_tokenizer, Notes())
    with pytest.raises(ValueError, match="bertsmith-features-bert"):
        AutoModelForTokenClassification.from_pretrained(tmp_path / "a")
    for to, verify in (("onnx", False), ("tf1", False), ("sentence-transformers", False), ("hf", True)):
        with pytest.raises(UserError, match="convert the model it started from"):
            convert(tmp_path / "a", tmp_path / "b", to, verify=verify)
    convert(tmp_path / "a", tmp_path / "b", "hf")
    assert load_folder(tmp_path / "b").model.head_config.features == FeatureConfig("last", 12)


SETTINGS = ["train.epochs=12", "train.batch_size=6", "train.learning_rate=2e-2", "features.hidden_size=24"]


def config_of(variant: str, *changes: str) -> FinetuneConfig:
    return override(feature_based("tag", variant), [*SETTINGS, *changes])


@pytest.mark.parametrize("variant", ["last", "sum-all", "concat-last-four"])
def test_frozen_model_learns_and_is_evaluated_and_used_for_prediction(variant, start, tmp_path):
    data = tmp_path / "train.conll"
    scores = finetune(config_of(variant), start, data, tmp_path / "run", dev=data, device="cpu")
    assert scores["f1"] > 90
    assert evaluate(tmp_path / "run", data, device="cpu")["f1"] == pytest.approx(scores["f1"])
    assert predict(tmp_path / "run", data, tmp_path / "answers.jsonl", device="cpu") == 36
    first = json.loads((tmp_path / "answers.jsonl").read_text().splitlines()[0])
    (entity,) = first["entities"]
    assert entity.pop("score") > 0.5
    assert entity == {"type": "X", "start": 4, "end": 13, "text": "quick fox"}
    assert next(iter(Predictor.load(tmp_path / "run", "cpu").predict([""])))["tags"] == []
    before, after = load_folder(start).model.encoder.state_dict(), load_folder(tmp_path / "run" / "model").model.encoder
    for name, value in after.state_dict().items():
        assert_close(value, before[name], atol=0, rtol=0)
    assert not (tmp_path / "run" / "states").exists()
    assert to_dict(config_of(variant))["features"]["variant"] == variant


def test_resumed_run_gives_identical_weights(start, tmp_path, monkeypatch):
    data, config = tmp_path / "train.conll", config_of("sum-last-four", "train.epochs=2", "train.save_every=3")
    finetune(config, start, data, tmp_path / "whole", device="cpu")
    original = training._Loop._step

    def stops(loop, *arguments):
        if loop.budget.step == 7:
            raise Interrupted("stopped", 130)
        original(loop, *arguments)

    monkeypatch.setattr(training._Loop, "_step", stops)
    with pytest.raises(Interrupted):
        finetune(config, start, data, tmp_path / "run", device="cpu")
    monkeypatch.setattr(training._Loop, "_step", original)
    finetune(config, start, data, tmp_path / "run", device="cpu", resume=True)
    whole, again = (load_folder(tmp_path / name / "model").model.state_dict() for name in ("whole", "run"))
    for name, value in whole.items():
        assert_close(again[name], value, atol=0, rtol=0)


def test_bad_settings_are_refused(start, tmp_path):
    with pytest.raises(UserError, match="unknown variant 'lst'; did you mean 'last'"):
        feature_based("conll2003", "lst")
    with pytest.raises(UserError, match=r"features\.hidden_size must be at least 1"):
        override(feature_based("tag", "last"), ["features.hidden_size=0"])
    with pytest.raises(UserError, match="needs four layers, and the model has 2"):
        replace(FeatureConfig(), variant="concat-last-four").numbers(2)
