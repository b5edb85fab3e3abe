"""The benchmark of long sequences in small: every variant is measured, and one that fails does not end the others."""

import json
import sys
from pathlib import Path

import pytest

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


def test_bert_has_the_operations_of_modern_bert() -> None:
    config = modern("base")
    bert = bert_of_equal_flops(config, 512)
    share = forward_flops(bert, [512], 73) / forward_flops(config, [512], 73)
    assert (bert.hidden_size, bert.family) == (768, "bert")
    assert share == pytest.approx(1, abs=0.04)
