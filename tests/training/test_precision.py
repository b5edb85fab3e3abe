"""Which precision `auto` is on a CPU, and runs in it."""

from pathlib import Path

import pytest
import torch
from runs import cut, settings, weights

from bertsmith.finetuning.run import FinetuneConfig, finetune
from bertsmith.model.encoder import Encoder
from bertsmith.objectives.kinds import build_objective
from bertsmith.pretraining.run import pretrain
from bertsmith.training import parts, steps
from bertsmith.training.parts import faster_precision
from bertsmith.training.settings import TrainConfig, has_bfloat16

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
WIDE = ["model.hidden_size=256", "model.intermediate_size=256", "model.num_heads=4", "model.num_layers=1"]


@pytest.fixture
def unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with products in bfloat16."""
    monkeypatch.setattr(parts, "has_fast_bfloat16", lambda: True)


def objective(*changes: str) -> torch.nn.Module:
    config = settings(*WIDE, *changes)
    return build_objective(Encoder(config.model), config.objective)


def test_bfloat16_is_chosen_for_wide_layers_on_a_cpu_that_is_faster_in_it(unit, monkeypatch) -> None:
    config, wide = TrainConfig(steps=1), objective()
    assert faster_precision(config, wide, CPU).precision == "bfloat16"
    narrow = objective("model.intermediate_size=128")
    assert faster_precision(config, narrow, CPU) is config
    wide.encoder.requires_grad_(False)
    frozen = torch.nn.Module()
    frozen.encoders, frozen.untrained = [wide.encoder], [wide.encoder]
    assert faster_precision(config, frozen, CPU) is config  # a head on features, whose encoder is not trained
    wide.lstm = torch.nn.LSTM(256, 256)
    assert faster_precision(config, wide, CPU) is config
    del wide.lstm
    assert faster_precision(config, wide, torch.device("cuda")) is config
    for precision in ("float32", "bfloat16"):
        asked = TrainConfig(steps=1, precision=precision)
        assert faster_precision(asked, wide, CPU) is asked
    monkeypatch.setattr(parts, "has_fast_bfloat16", lambda: False)
    assert faster_precision(config, wide, CPU) is config


@pytest.mark.skipif(not has_bfloat16(), reason="this CPU has no matrix products in bfloat16")
def test_a_run_in_it_learns_and_resumes_to_the_bit(unit, world: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    """It is noted, not recorded: another machine may resume the run in float32."""
    seen = []
    real = steps.autocast_dtype
    monkeypatch.setattr(steps, "autocast_dtype", lambda *given: seen.append(real(*given)) or seen[-1])
    config = settings(*WIDE, "train.steps=4", "train.save_every=2")
    pretrain(config, world / "shards", tmp_path / "run", device="cpu")
    assert set(seen) == {torch.bfloat16}
    assert "note: this processor trains the model faster in bfloat16" in capsys.readouterr().err
    assert '"auto"' in (tmp_path / "run" / "config.json").read_text()
    again = cut(tmp_path / "run", tmp_path / "again", 2)
    pretrain(config, world / "shards", again, device="cpu", resume=True)
    assert weights(again) == weights(tmp_path / "run")
    quick = TrainConfig(epochs=15, batch_size=8, learning_rate=3e-3)
    scores = finetune(
        FinetuneConfig("classify", train=quick), tmp_path / "run", world / "train.csv", tmp_path / "tuned"
    )
    assert scores["accuracy"] > 90
