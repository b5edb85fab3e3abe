"""Every recipe trains: shrunk to a tiny size, two steps on a CPU, saved, and opened by us and by `transformers`."""

import json
from pathlib import Path

import numpy as np
import pytest
import transformers
from runs import needs_teacher, shrunk

from bertsmith.config import load
from bertsmith.formats.hf import load_folder
from bertsmith.pretraining.run import pretrain
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.recipes import RECIPES
from bertsmith.training import runlog

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", RECIPES)
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
