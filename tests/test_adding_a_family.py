"""Adding a family by the steps of docs/design.md: fields of the encoder, a frame, a table, a recipe, and no new code.

The made-up family `pebble` has rotary positions, gated feed-forward layers, local and global attention, a factorised
embedding and no segments; its files keep the two halves of the gate apart and transposed.
"""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from runs import cut
from safetensors.torch import load_file

import bertsmith
from bertsmith.config import override
from bertsmith.errors import UserError
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.formats.families.table import FAMILIES
from bertsmith.formats.family import Family, Field, Output
from bertsmith.formats.hf import load_folder
from bertsmith.formats.storage import Stored
from bertsmith.model.config import EncoderConfig
from bertsmith.objectives.settings import MaskedLMConfig
from bertsmith.pretraining.loader import DataConfig
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.recipes import RECIPES, recipe
from bertsmith.training.settings import TrainConfig

pytestmark = pytest.mark.usefixtures("one_thread")

# Step 1: the encoder, in existing fields.
ENCODER = EncoderConfig(
    hidden_size=32,
    num_layers=3,
    num_heads=2,
    intermediate_size=48,
    max_positions=64,
    num_segments=0,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    norm_first=True,
    bias=False,
    family="pebble",
    embedding_size=24,
    positions="rotary",
    window=16,
    global_every=3,
    gated=True,
)
# Step 3: the table (step 2, the frame, is WordPiece's).
LAYER = "pebble.layers.{i}"
WORDS = {
    "masked_lm.transform.*": "words.dense.*",
    "masked_lm.norm.*": "words.norm.*",
    "masked_lm.decoder.bias": "words.bias",
}
PEBBLE = Family(
    model_type="pebble",
    prefix="pebble.",
    encoder_class="PebbleModel",
    encoder={
        "encoder.embeddings.tokens.weight": Stored(("pebble.tokens",), tied=("words.out.weight",)),
        "encoder.embeddings.norm.*": "pebble.norm.*",
        "encoder.embeddings.projection.*": "pebble.projection.*",
        "encoder.layers.{i}.attention_norm.*": f"{LAYER}.norm_1.*",
        "encoder.layers.{i}.attention.qkv.*": f"{LAYER}.qkv.*",
        "encoder.layers.{i}.attention.output.*": f"{LAYER}.mix.*",
        "encoder.layers.{i}.feed_forward_norm.*": f"{LAYER}.norm_2.*",
        "encoder.layers.{i}.feed_forward.inner.*": Stored((f"{LAYER}.gate.*", f"{LAYER}.up.*"), transposed=True),
        "encoder.layers.{i}.feed_forward.outer.*": f"{LAYER}.down.*",
        "encoder.final_norm.*": "pebble.final.*",
    },
    outputs={
        "masked_lm": Output("PebbleForMaskedLM", WORDS),
        "single": Output(
            "PebbleForSequenceClassification", {"head.pooler.dense.*": "pool.*", "head.output.*": "score.*"}
        ),
    },
    fields={
        name: Field((name,))
        for name in (
            *("vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size", "max_positions"),
            *("hidden_dropout", "attention_dropout", "norm_eps", "init_std", "pad_token_id"),
            *("embedding_size", "window", "global_every", "rotary_base"),
        )
    },
    fixed={},
    defaults={"norm_first": True, "bias": False, "gated": True, "positions": "rotary", "num_segments": 0},
    reasons={"positions": "pebbles roll: their positions are rotary"},
)


# Step 4: a recipe.
def pebble() -> PretrainConfig:
    """A made-up encoder."""
    return PretrainConfig(
        recipe="pebble",
        model=ENCODER,
        data=DataConfig(max_length=32, pairs="full", copies=0),
        train=TrainConfig(steps=40, batch_size=16, learning_rate=3e-3, evaluate_every=0),
        objective=MaskedLMConfig(next_sentence=False),
    )


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "pebble", PEBBLE)
    monkeypatch.setitem(RECIPES, "pebble", pebble)


@pytest.fixture
def run(made_up: None, world: Path, tmp_path: Path) -> Path:
    """A pre-trained run of the made-up family."""
    scores = bertsmith.pretrain(recipe("pebble"), world / "shards", tmp_path / "run", device="cpu")
    guess = np.log(bertsmith.Tokenizer.load(tmp_path / "run" / "model").vocab_size)
    assert scores["mlm_loss"] < 0.9 * guess
    return tmp_path / "run"


def test_family_is_pretrained_saved_by_its_table_and_read_back(run: Path) -> None:
    folder = run / "model"
    values, saved = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    assert values["model_type"] == "pebble"
    assert values["architectures"] == ["PebbleForMaskedLM"]
    assert saved["pebble.layers.2.gate.weight"].shape == (32, 48)
    assert not [name for name in saved if name.startswith("encoder.")]
    loaded = load_folder(folder)
    assert loaded.missing == ()
    assert loaded.model.encoder.config == replace(ENCODER, vocab_size=loaded.tokenizer.vocab_size)
    reaches = [layer.reach for layer in loaded.model.encoder.config.layers]
    assert reaches == [(None, None), (8, 8), (8, 8)]


def test_resumed_run_gives_identical_bytes(made_up: None, world: Path, tmp_path: Path) -> None:
    config = override(recipe("pebble"), ["train.steps=6", "train.save_every=3", "train.keep=9"])
    bertsmith.pretrain(config, world / "shards", tmp_path / "whole", device="cpu")
    copy = cut(tmp_path / "whole", tmp_path / "cut", 3)
    bertsmith.pretrain(config, world / "shards", copy, device="cpu", resume=True)
    whole, resumed = (run / "model" / "model.safetensors" for run in (tmp_path / "whole", copy))
    assert resumed.read_bytes() == whole.read_bytes()


def test_family_fills_masks_classifies_and_embeds(run: Path, tmp_path: Path) -> None:
    assert len(bertsmith.fill(run, "the [MASK] is here", device="cpu")[0]) > 1
    draw = random.Random(1)
    rows = [(word, word == "file") for word in draw.choices(["file", "list"], k=120)]
    data = [
        {"text": f"return the {word} of {i}", "label": "yes" if label else "no"} for i, (word, label) in enumerate(rows)
    ]
    settings = ["train.steps=60", "train.batch_size=16", "train.learning_rate=3e-3", "data.max_length=16"]
    config = override(FinetuneConfig("classify"), settings)
    scores = bertsmith.finetune(config, run, data, tmp_path / "tuned", device="cpu")
    assert scores["accuracy"] == 100.0
    predictor = bertsmith.Predictor.load(tmp_path / "tuned", device="cpu")
    assert [found["label"] for found in predictor(["return the file of 7", "return the list of 7"])] == ["yes", "no"]
    vectors = bertsmith.Embedder.load(run, device="cpu")(["return the file", "return the list of it"])
    assert np.asarray(vectors).shape == (2, 32)


def test_refused_value_of_a_field_gives_the_reason_of_the_table(made_up: None) -> None:
    with pytest.raises(UserError, match=r"model\.positions=learned: pebbles roll.*; set model\.positions=rotary"):
        override(recipe("pebble"), ["model.positions=learned"])
