"""The benchmark of DeBERTa beside `transformers`, whose first version does not compile everywhere."""

import pytest
import torch

from benchmarks import relative_speed
from bertsmith.model.sizes import encoder_config


@pytest.mark.parametrize("compiles", [True, False])
def test_a_peer_that_does_not_compile_runs_as_it_is(compiles: bool, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def step(name: str, config: object, batch: object, compiled: bool) -> object:
        if compiled and not compiles:
            raise RuntimeError("backend compiler failed")
        return lambda: None

    monkeypatch.setattr(relative_speed, "DEVICE", torch.device("cuda"))
    monkeypatch.setattr(relative_speed, "peer_step", step)
    monkeypatch.setattr(relative_speed, "measure", lambda step, count, warm: {"seconds": 0.5, "memory_gb": 1.0})
    monkeypatch.setattr(relative_speed, "free_memory", lambda: None)
    found = relative_speed.peer_speed("deberta v1", "v1, 128", encoder_config("tiny"), None, (100, 1, 1))  # type: ignore[arg-type]
    assert found == {"tokens_per_second": 200, "memory_gb": 1.0, "compiled": compiles}
    assert ("v1, 128, transformers, compiled: failed: RuntimeError" in capsys.readouterr().out) is not compiles
