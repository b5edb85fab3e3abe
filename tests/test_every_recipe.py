"""Every recipe trains: shrunk to a tiny size, two steps on a CPU, saved, and opened by us and by `transformers`."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import transformers
from runs import needs_teacher, shrunk

from bertsmith.config import load, override
from bertsmith.formats.families.table import FAMILIES
from bertsmith.formats.hf import load_folder
from bertsmith.model.config import EncoderConfig
from bertsmith.objectives.settings import MaskedLMConfig
from bertsmith.pretraining.run import pretrain
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.recipes import RECIPES, recipe
from bertsmith.training import runlog

pytestmark = pytest.mark.usefixtures("one_thread")


def first_of_equals(name: str) -> str:
    """The first recipe that differs only in its sizes, which are shrunk here, and in the learning rate."""
    return next(other for other in RECIPES if alike(other) == alike(name))


@cache
def alike(name: str) -> PretrainConfig:
    config = shrunk(name)
    return replace(config, recipe="", train=replace(config.train, learning_rate=1.0, warmup=0.0))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if first_of_equals(n) == n else pytest.mark.slow) for n in RECIPES]
)
def test_two_steps_of_a_recipe(name: str, world: Path, tmp_path: Path) -> None:
    config = shrunk(name)
    teacher = world / "run" if needs_teacher(config) else None
    pretrain(config, world / "shards", tmp_path / "run", teacher=teacher, device="cpu")
    records = [record for record in runlog.read(tmp_path / "run") if "loss" in record]
    assert [record["step"] for record in records] == [1, 2]
    losses = [value for record in records for key, value in record.items() if key.endswith("loss")]
    assert len(losses) >= 4
    assert np.isfinite(losses).all()
    folder = tmp_path / "run" / "model"
    written = load(PretrainConfig, tmp_path / "run" / "config.json")
    unchanged = ("data", "train", *(() if teacher else ("objective",)))
    assert [getattr(written, part) for part in unchanged] == [getattr(config, part) for part in unchanged]
    loaded = load_folder(folder)
    assert loaded.missing == ()
    assert loaded.model.encoder.config == written.model
    saved = json.loads((folder / "config.json").read_text())
    if hasattr(transformers, saved["architectures"][0]):
        opened = transformers.AutoConfig.from_pretrained(folder)
        assert opened.model_type == written.model.family


@pytest.mark.slow
def test_the_discriminator_of_electra_tiny_learns_more_than_the_share_of_replaced_tokens(
    world: Path, tmp_path: Path
) -> None:
    """At four times the rate its loss stays that of one probability for all tokens: the entropy of the share."""
    config = override(recipe("electra-tiny"), ["train.steps=100", "train.batch_size=16", "train.evaluate_every=0"])
    scores = pretrain(config, world / "shards", tmp_path / "run", device="cpu")
    wrong = 1 - scores["detection_accuracy"] / 100  # at most the share of replaced tokens, about 15 %
    entropy = -wrong * np.log(wrong) - (1 - wrong) * np.log(1 - wrong)
    assert scores["detection_loss"] < entropy - 0.02


PUBLISHED = {  # layers, width, heads; sequences, steps, warm-up steps, rate, beta2; dropout
    "roberta-base": (12, 768, 12, 8192, 500_000, 24_000, 6e-4, 0.98, 0.1),
    "roberta-large": (24, 1024, 16, 8192, 500_000, 30_000, 4e-4, 0.98, 0.1),
    "modern-base": (22, 768, 12, 4608, 372_251, 636, 8e-4, 0.98, 0.0),
    "modern-large": (28, 1024, 16, 4928, 348_079, 396, 5e-4, 0.98, 0.0),
    "gpt": (12, 768, 12, 64, None, 0, 2.5e-4, 0.999, 0.1),
    "albert-base": (12, 768, 12, 4096, 125_000, 3125, 0.00176, 0.999, 0.1),
    "albert-large": (24, 1024, 16, 4096, 125_000, 3125, 0.00176, 0.999, 0.1),
    "albert-xlarge": (24, 2048, 16, 4096, 125_000, 3125, 0.00176, 0.999, 0.1),
    "albert-xxlarge": (12, 4096, 64, 4096, 125_000, 3125, 0.00176, 0.999, 0.0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_values(name: str) -> None:
    """RoBERTa, section 4 and Table 9; ALBERT, Table 1 and section 4.1, with the released configurations; GPT, 4.1.

    ModernBERT: section 2.2 and the released settings, 1.719 + 0.3 trillion tokens.
    """
    config = recipe(name)
    model, data, train = config.model, config.data, config.train
    shape = model.num_layers, model.hidden_size, model.num_heads
    schedule = train.batch_size, train.steps, round(train.warmup * (train.steps or 0)), train.learning_rate, train.beta2
    assert (*shape, *schedule, model.hidden_dropout) == PUBLISHED[name]
    assert train.adam_eps == (1e-8 if name == "gpt" else 1e-6)
    if model.family == "modernbert":
        assert (data.max_length, data.long_length, data.masking.rate, data.pairs) == (1024, 8192, 0.3, "full")
        assert train.batch_size * train.steps * data.long_share * 8192 == pytest.approx(3e11, rel=1e-3)
        assert (train.weight_decay, train.schedule, train.optimizer) == (1e-5, "stable", "adamw")
        published = FAMILIES["modernbert"].defaults if name == "modern-base" else {"intermediate_size": 2624}
        assert published.items() - vars(model).items() <= {("vocab_size", 50368), ("pad_token_id", 50283)}
        return
    assert (data.max_length, train.weight_decay) == (512, 0.01)
    assert (model.intermediate_size, model.attention_dropout) == (4 * model.hidden_size, model.hidden_dropout)
    if name == "gpt":
        assert (data.pairs, train.epochs, train.schedule, train.optimizer) == ("contiguous", 100, "cosine", "adamw")
        assert round(train.warmup * 3_000_000) == 2000
        assert (model.direction, model.num_segments, model.activation) == ("left-to-right", 0, "gelu_tanh")
        assert (model.embedding_norm, model.head_transform, model.head_bias, model.pooler) == (False,) * 4
        assert model == replace(EncoderConfig(**FAMILIES["openai-gpt"].defaults), family="openai-gpt", vocab_size=30522)
    elif model.family == "roberta":
        assert (data.pairs, data.copies, train.optimizer, train.clip_norm) == ("full", 0, "adamw", 0.0)
        assert (model.num_segments, model.norm_eps, config.objective) == (1, 1e-5, MaskedLMConfig(next_sentence=False))
    else:
        assert (data.pairs, data.masking.unit, data.masking.span_max) == ("order", "n-gram", 3)
        assert (model.embedding_size, model.shared_layers, train.optimizer) == (128, "all", "lamb")
