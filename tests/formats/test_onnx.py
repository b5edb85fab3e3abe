"""Exported graphs give the outputs of PyTorch for every head, on shapes other than those of the trace."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from variants import KINDS, VARIANTS, make

from bertsmith.errors import UserError
from bertsmith.formats import onnx as module

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]  # an export takes seconds


def run(path: Path, rows: int, length: int, model, encoder_alone: bool = False):
    """Outputs of the graph and of PyTorch, on a shape that the export itself did not check."""
    flat = module.Flat(model, encoder_alone)
    inputs = module.example_inputs(flat, rows, length, seed=99)
    with torch.inference_mode():
        expected = [t.numpy() for t in flat(*inputs)]
    feed = {name: t.numpy() for name, t in zip(flat.inputs, inputs, strict=True)}
    return module.session(path, 1).run(None, feed), expected


@pytest.mark.parametrize("kind", KINDS)
def test_every_head_gives_the_outputs_of_pytorch(kind, tmp_path, tiny_tokenizer):
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
def test_every_encoder_gives_the_states_of_pytorch(name, tmp_path, tiny_tokenizer):
    loaded = make("mlm", tiny_tokenizer, **VARIANTS[name].ours)
    report = module.export_onnx(loaded, tmp_path / "out", encoder_alone=True)
    assert report["outputs"] == ["last_hidden_state"]
    (found,), (expected,) = run(tmp_path / "out" / "model.onnx", 3, 21, loaded.model, encoder_alone=True)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "kind"),
    [("distilbert", "single"), ("electra", "choice"), ("modern", "multi")],
)
def test_heads_of_other_families_and_their_int8_graphs(family, kind, tmp_path, tiny_tokenizer):
    loaded = make(kind, tiny_tokenizer, **VARIANTS[family].ours)
    report = module.export_onnx(loaded, tmp_path / "out", int8=True)
    for name, tolerance in (("model.onnx", 1e-5), ("model_int8.onnx", 0.2)):
        (found,), (expected,) = run(tmp_path / "out" / name, 8, 21, loaded.model)
        np.testing.assert_allclose(found, expected, atol=tolerance * max(1.0, np.abs(expected).max()))
        inputs = [each.name for each in module.session(tmp_path / "out" / name).get_inputs()]
        assert inputs == report["inputs"]
        assert ("token_type_ids" in inputs) == (loaded.model.encoder.config.num_segments > 1)


@pytest.mark.parametrize("family", ["deberta", "deberta-v2"])
def test_int8_graphs_with_weights_that_states_and_positions_share(family, tmp_path, tiny_tokenizer):
    wide = {"hidden_size": 128, "intermediate_size": 256}  # the exporter computes the positions of small models itself
    loaded = make("single", tiny_tokenizer, **{**VARIANTS[family].ours, **wide})
    module.export_onnx(loaded, tmp_path / "out", int8=True)
    (found,), (expected,) = run(tmp_path / "out" / "model_int8.onnx", 8, 21, loaded.model)
    np.testing.assert_allclose(found, expected, atol=0.1 * np.abs(expected).max())


def test_int8_is_written_as_a_second_smaller_file(tmp_path, tiny_tokenizer):
    loaded = make("single", tiny_tokenizer, hidden_size=128, intermediate_size=512, num_layers=6)
    report = module.export_onnx(loaded, tmp_path / "out", int8=True)
    sizes = {name: entry["bytes"] for name, entry in report["files"].items()}
    assert sizes["model_int8.onnx"] < 0.6 * sizes["model.onnx"]
    (found,), (expected,) = run(tmp_path / "out" / "model_int8.onnx", 7, 30, loaded.model)
    assert 1e-6 < np.abs(found - expected).max() < 0.2 * np.abs(expected).max()
    import onnx

    kinds = [node.op_type for node in onnx.load(tmp_path / "out" / "model_int8.onnx").graph.node]
    assert {"MatMulInteger", "MultiHeadAttention"} <= set(kinds)
    # The last layer computes only [CLS] after its attention, and nothing there is quantised: attention output, the two
    # matrices of the feed-forward layer, the pooler and the classifier. In the others all but feed_forward.outer is.
    assert kinds.count("MatMul") == 5 + 5
    assert kinds.count("MatMulInteger") == 5 * 3 + 1
    domains = {node.domain for node in onnx.load(tmp_path / "out" / "model.onnx").graph.node}
    assert domains <= {""}  # the float32 graph has standard operators only


def test_an_export_that_differs_from_pytorch_leaves_no_files(tmp_path, tiny_tokenizer, monkeypatch):
    export = module._export

    def spoilt(flat, path, *, fused):
        with torch.no_grad():
            flat.model.head.output.bias.add_(0.01)
        export(flat, path, fused=fused)
        with torch.no_grad():
            flat.model.head.output.bias.sub_(0.01)

    monkeypatch.setattr(module, "_export", spoilt)
    with pytest.raises(UserError, match="differs from PyTorch: logits by"):
        module.export_onnx(make("single", tiny_tokenizer), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_head_without_weights_is_refused_and_its_encoder_is_exported_alone(tmp_path, tiny_tokenizer):
    from dataclasses import replace

    with pytest.raises(UserError, match=r"no weights for head\.output\.weight"):
        module.export_onnx(replace(make("single", tiny_tokenizer), missing=("head.output.weight",)), tmp_path / "out")
    bare = replace(make("mlm", tiny_tokenizer), missing=("masked_lm.transform.weight",))
    assert module.export_onnx(bare, tmp_path / "out")["outputs"] == ["last_hidden_state"]
    assert module.open_onnx(tmp_path / "out").outputs == ("last_hidden_state",)
