"""ONNX files of other programs, whose inputs are tokens, mask and perhaps segments; vectors of our own export."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from variants import make

from bertsmith.errors import UserError
from bertsmith.formats import onnx as module
from bertsmith.formats.sentence_folder import Pooling, write_pooling
from bertsmith.inference.embedder import Embedder
from bertsmith.inference.predictor import Predictor

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
TEXTS = ["the quick fox", "a dog", "the lazy dogs bark at foxes and the fox jumps over"]
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class TwoInputs(torch.nn.Module):
    """A model without segments as an input."""

    def __init__(self, flat: module.Flat) -> None:
        super().__init__()
        self.flat = flat

    def forward(self, tokens, mask):
        return self.flat(tokens, mask, torch.zeros_like(tokens))


def export(kind: str, folder: Path, tokenizer, names: tuple[str, ...] = INPUTS[:2], output: str = "logits"):
    """Write an ONNX folder as another program does, without our files, and return the model."""
    loaded = make(kind, tokenizer)
    (folder / "onnx").mkdir(parents=True)
    flat = module.Flat(loaded.model, encoder_alone=kind == "mlm")
    with module._quiet():
        torch.onnx.export(
            TwoInputs(flat),
            module.example_inputs(flat, 2, 8, seed=0)[:2],
            folder / "onnx" / "model.onnx",
            input_names=names,
            output_names=[output],
            dynamic_shapes={name: {0: "batch", 1: "length"} for name in ("tokens", "mask")},
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    head = "ForSequenceClassification" if kind == "single" else "Model"
    labels = {str(i): name for i, name in enumerate(("red", "green", "blue"))}
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "max_position_embeddings": 48}
    config = {"model_type": "new", "architectures": [f"New{head}"], "id2label": labels, "rope_theta": 1.0, **sizes}
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": tokenizer.vocab_size}))
    tokenizer.save(folder)
    return loaded


@pytest.mark.slow
def test_a_classifier_of_another_family_without_segments(tmp_path, tiny_tokenizer):
    loaded = export("single", tmp_path / "model", tiny_tokenizer)
    expected = Predictor(loaded, "cpu")(TEXTS)
    predictor = Predictor.load(tmp_path / "model")
    for ours, wanted in zip(predictor(TEXTS), expected, strict=True):
        assert ours["label"] == wanted["label"]
        assert ours["scores"] == pytest.approx(wanted["scores"], abs=1e-4)
    assert "red, green, blue" in repr(predictor)
    assert "onnxruntime, float32" in repr(predictor)
    with pytest.raises(UserError, match="gives logits and not the states"):
        Embedder.load(tmp_path / "model")("a dog")


@pytest.mark.slow
def test_vectors_of_another_programs_encoder(tmp_path, tiny_tokenizer):
    loaded = export("mlm", tmp_path / "model", tiny_tokenizer, output="token_embeddings")
    write_pooling(tmp_path / "model", Pooling("mean", True, 32), 32)
    expected = Embedder(Predictor(loaded, "cpu"), "mean", True, max_length=32)(TEXTS)
    np.testing.assert_allclose(Embedder.load(tmp_path / "model")(TEXTS), expected, atol=1e-5)
    with pytest.raises(UserError, match="gives only the last layer"):
        Embedder.load(tmp_path / "model", layer=1)
    with pytest.raises(UserError, match="has no output layer for a task"):
        Predictor.load(tmp_path / "model")("a dog")


@pytest.mark.slow
def test_vectors_of_our_own_export(tmp_path, tiny_tokenizer):
    loaded = make("mlm", tiny_tokenizer)
    module.export_onnx(loaded, tmp_path / "onnx", encoder_alone=True)
    expected = Embedder(Predictor(loaded, "cpu"))(TEXTS)
    np.testing.assert_allclose(Embedder.load(tmp_path / "onnx")(TEXTS), expected, atol=1e-4)


@pytest.mark.slow
def test_graphs_with_other_inputs_are_refused(tmp_path, tiny_tokenizer):
    export("mlm", tmp_path / "model", tiny_tokenizer, ("input_ids", "position_ids"))
    with pytest.raises(UserError, match="wants the input 'position_ids'"):
        Embedder.load(tmp_path / "model")
