"""The benchmark of long sequences in small: every variant is measured, and one that fails does not end the others."""

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import long
from benchmarks.long import BERT, OURS, THEIRS, bert_of_equal_flops, main, modern
from bertsmith.model.cost import forward_flops

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_a_variant_that_fails_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("first line\nno such kernel")

    monkeypatch.setattr(long, "their_prediction", fail)
    arguments = ["--size", "smoke", "--part", "predict", "--lengths", "32", "64", "--tokens", "128"]
    monkeypatch.setattr(sys, "argv", ["long", *arguments, "--results", str(tmp_path)])
    main()
    results = json.loads((tmp_path / "long.json").read_text())["results"]["predict"]
    found = {key: entry for key, entry in results.items() if entry["tokens"] == 128}  # the project's are there, too
    assert found.keys() == {f"{OURS}, 32", f"{OURS}, 64", f"{BERT}, 32"}
    assert all(entry["tokens_per_second"] > 0 for entry in found.values())
    assert f"predict, {THEIRS}, sdpa, 64: no such kernel" in capsys.readouterr().out
    assert (tmp_path / "long.svg").exists()


def test_kernels_are_measured_after_one_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    from benchmarks import long_kernels

    def fail() -> long_kernels.Work:
        raise RuntimeError("no such kernel\nsecond line")

    x = torch.ones(8, 8)
    made = [long_kernels.Variant("wrong", fail, 1.0), long_kernels.Variant("right", lambda: lambda: x @ x, 1024.0)]
    monkeypatch.setattr(long_kernels, "variants", lambda *_: iter(made))
    given = argparse.Namespace(size="smoke", tokens=8, seconds=60.0, workers=0, results=tmp_path)
    long_kernels.kernels(given, modern("smoke"))
    found = json.loads((tmp_path / "long.json").read_text())["results"]["kernels"]["smoke, 8 tokens"]
    assert found.keys() == {"right", "taken"}
    assert "failed: RuntimeError: no such kernel" in capsys.readouterr().out
    profiled = long_kernels.profile("a product", lambda: x @ x, 8)
    assert profiled["ms"] == pytest.approx(sum(profiled["kinds"].values()), abs=0.02)
    assert "aten::mm" in profiled["kernels"]


def test_bert_has_the_operations_of_modern_bert() -> None:
    config = modern("base")
    bert = bert_of_equal_flops(config, 512)
    share = forward_flops(bert, [512], 73) / forward_flops(config, [512], 73)
    assert (bert.hidden_size, bert.family) == (768, "bert")
    assert share == pytest.approx(1, abs=0.04)
