"""Every recipe trains: shrunk to a tiny size, two steps on a CPU, saved, and opened by us and by `transformers`."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import transformers

from bertsmith.config import override
from bertsmith.formats.hf import load_folder
from bertsmith.pretraining.models import fitted
from bertsmith.pretraining.run import pretrain
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.recipes import RECIPES, recipe
from bertsmith.training import runlog

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = ["model.hidden_size=32", "model.num_layers=2", "model.num_heads=2", "model.intermediate_size=64"]
SHORT = [
    "model.max_positions=48",
    "data.max_length=32",
    "train.batch_size=4",
    "train.steps=2",
    "train.evaluate_every=0",
]


def shrunk(name: str, teacher: Path) -> PretrainConfig:
    """A recipe with other sizes and a shorter run; its objective, data policy, optimiser and schedule stay."""
    config = recipe(name)
    changes = [*SMALL, *SHORT]
    if config.model.embedding_size is not None:
        changes.append("model.embedding_size=16")
    if config.data.long_length is not None:
        changes.append("data.long_length=48")
    if config.objective.kind == "distillation":
        changes += [f"objective.teacher={teacher}", "objective.half=false"]  # the sizes are those of this test
    return override(replace(config, train=replace(config.train, hours=None, steps=2)), changes)


@pytest.mark.parametrize("name", RECIPES)
def test_two_steps_of_a_recipe(name: str, world: Path, tmp_path: Path) -> None:
    config = shrunk(name, world / "run")
    pretrain(config, world / "shards", tmp_path / "run", device="cpu")
    records = [record for record in runlog.read(tmp_path / "run") if "loss" in record]
    assert [record["step"] for record in records] == [1, 2]
    losses = [value for record in records for key, value in record.items() if key.endswith("loss")]
    assert len(losses) >= 4
    assert np.isfinite(losses).all()
    folder = tmp_path / "run" / "model"
    loaded = load_folder(folder)
    assert loaded.missing == ()
    assert loaded.model.encoder.config == fitted(config.model, loaded.tokenizer)
    saved = json.loads((folder / "config.json").read_text())
    if hasattr(transformers, saved["architectures"][0]):
        opened = transformers.AutoConfig.from_pretrained(folder)
        assert opened.model_type == config.model.family
