"""Exported graphs give what PyTorch gives, for every head, on shapes that they were not traced with."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from variants import KINDS, VARIANTS, randomise

from bertsmith.batch import Example
from bertsmith.errors import UserError
from bertsmith.formats import onnx as module
from bertsmith.formats.hf import Loaded, Notes
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.objectives.masked_lm import MaskedLM

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.usefixtures("one_thread")


def make(kind: str, tokenizer, **changes) -> Loaded:
    """A small model with wide random weights."""
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 64, "max_positions": 48}
    encoder = Encoder(EncoderConfig(**{"vocab_size": tokenizer.vocab_size, **sizes, **changes}))
    if kind in ("mlm", "mlm+nsp"):
        model = MaskedLM(encoder, kind == "mlm+nsp")
    else:
        labels = ("red", "green", "blue") if kind in ("single", "multi", "tags") else ()
        model = TaskModel(encoder, HeadConfig(kind, labels, 4 if kind == "choice" else 0))
    return Loaded(Path("here"), randomise(model).eval(), tokenizer, Notes())


def run(path: Path, rows: int, length: int, model, encoder_alone: bool = False):
    """What the graph gives and what PyTorch gives, on a shape that the export itself did not try."""
    flat = module.Flat(model, encoder_alone)
    inputs = module._inputs(model.encoder.config, rows, length, seed=99)
    with torch.inference_mode():
        expected = [t.numpy() for t in flat(*inputs)]
    feed = {name: t.numpy() for name, t in zip(module.INPUTS, inputs, strict=True)}
    return module.session(path, 1).run(None, feed), expected


@pytest.mark.parametrize("kind", KINDS)
def test_every_head(kind, tmp_path, tiny_tokenizer):
    loaded = make(kind, tiny_tokenizer)
    report = module.export_onnx(loaded, tmp_path / "out")
    names = {"mlm": ["mlm_logits"], "mlm+nsp": ["mlm_logits", "nsp_logits"]}
    assert report["outputs"] == names.get(kind, ["logits"])
    assert json.loads((tmp_path / "out" / "onnx.json").read_text()) == report
    for rows, length in [(4, 17), (8, 48), (12, 2)]:
        found, expected = run(tmp_path / "out" / "model.onnx", rows, length, loaded.model)
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert not list((tmp_path / "out").glob("*.safetensors"))


@pytest.mark.parametrize("name", VARIANTS)
def test_every_encoder(name, tmp_path, tiny_tokenizer):
    loaded = make("mlm", tiny_tokenizer, **VARIANTS[name].ours)
    report = module.export_onnx(loaded, tmp_path / "out", encoder_alone=True)
    assert report["outputs"] == ["last_hidden_state"]
    (found,), (expected,) = run(tmp_path / "out" / "model.onnx", 3, 21, loaded.model, encoder_alone=True)
    np.testing.assert_allclose(found, expected, atol=1e-5)
