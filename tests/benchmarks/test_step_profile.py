"""The profile of a step runs through on a CPU, where it sees no kernels of a GPU, and times the steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks import step_profile
from benchmarks.corpora import corpus_folder, train_tokenizers
from benchmarks.family_toy import write_toy_data
from benchmarks.speedrun_table import WORDPIECE

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = ["model.num_layers=1", "model.hidden_size=16", "model.num_heads=2", "model.intermediate_size=32"]


def test_steps_are_timed_and_their_kernels_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_toy_data(tmp_path / "data")
    train_tokenizers(data, [WORDPIECE], 150)
    corpus = corpus_folder(data, tmp_path, WORDPIECE)
    changes = [part for change in [*TINY, "data.max_length=16", "train.batch_size=4"] for part in ("--set", change)]
    given = ["pretrain", "quickstart", "--data", str(corpus), "--steps", "26", "--device", "cpu", *changes]
    step_profile.main(given)
    out = capsys.readouterr().out
    assert re.search(r"^\d+\.\d\d ms a step, \d+\.\d steps a second$", out, re.M)
    assert "of kernels a step" in out
    with pytest.raises(SystemExit):
        step_profile.main([*given, "--steps", "25"])
    assert "--steps must be above 25" in capsys.readouterr().err
