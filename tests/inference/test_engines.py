"""Both engines give the model's predictions of single texts, in order, for texts of any length."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from variants import make

from bertsmith.batch import Example, collate
from bertsmith.errors import UserError
from bertsmith.formats import onnx as onnx_format
from bertsmith.formats.hf import Loaded, save_folder
from bertsmith.formats.onnx import export_onnx, open_onnx
from bertsmith.inference.engines import Int8Linear, OnnxEngine, TorchEngine, batches, int8_backends
from bertsmith.inference.predictor import Predictor, measure_int8
from bertsmith.rows.columns import Row
from bertsmith.training import settings
from bertsmith.training.settings import has_bfloat16

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
TEXTS = [
    "the quick brown fox",
    "dog",
    "",
    "a lazy dog barks at the foxes 012 " * 8,
    "jumps over 7",
    ("the fox", "dogs"),
]


@pytest.fixture(scope="module")
def single(tmp_path_factory, tiny_tokenizer) -> tuple[Loaded, Path]:
    """A classifier and a folder with it as a model folder and as an ONNX folder: an export takes seconds."""
    root = tmp_path_factory.mktemp("saved")
    loaded = make("single", tiny_tokenizer)
    save_folder(root / "model", loaded.model, loaded.tokenizer, loaded.notes)
    export_onnx(loaded, root / "onnx", int8=True)
    return loaded, root


@pytest.fixture(
    scope="module",
    params=[
        "single",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("span", "regression", "tags", "choice")),
    ],
)
def exported(request, tmp_path_factory, tiny_tokenizer):
    """A model of every kind of output, and its ONNX folder."""
    if request.param == "single":
        loaded, root = request.getfixturevalue("single")
        return loaded, root / "onnx"
    loaded = make(request.param, tiny_tokenizer)
    folder = tmp_path_factory.mktemp("onnx") / request.param
    export_onnx(loaded, folder, int8=True)
    return loaded, folder


@pytest.fixture(scope="module")
def saved(single) -> tuple[Path, Path]:
    """A classifier as a model folder and as an ONNX folder."""
    return single[1] / "model", single[1] / "onnx"


def some_examples(vocab_size: int, count: int = 53) -> list[Example]:
    rng = np.random.default_rng(3)
    lengths = rng.integers(2, 49, count)
    return [Example(rng.integers(0, vocab_size, n), (np.arange(n) > n // 2).astype(np.int64)) for n in lengths]


@torch.inference_mode()
def one_by_one(model, examples: list[Example]) -> list[np.ndarray]:
    """The reference: each text alone, in the padded layout."""
    results = []
    for example in examples:
        batch = collate([example], packed=False)
        scores = model.scores(batch)
        results.append(scores[0].numpy())
    return results


def test_float32_predictions_are_equal_in_both_engines(exported):
    loaded, folder = exported
    examples = some_examples(loaded.tokenizer.vocab_size)
    expected = one_by_one(loaded.model, examples)
    for engine in (TorchEngine(loaded.model, torch.device("cpu")), OnnxEngine(open_onnx(folder), threads=1)):
        found = engine.run(examples)
        assert [f.shape for f in found] == [e.shape for e in expected]
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_int8_is_close_to_float32(exported):
    loaded, folder = exported
    examples = some_examples(loaded.tokenizer.vocab_size)
    expected = np.concatenate([e.ravel() for e in one_by_one(loaded.model, examples)])
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    cpu, engines = torch.device("cpu"), [OnnxEngine(open_onnx(folder), threads=1, precision="int8")]
    engines += [TorchEngine(loaded.model, cpu, precision="int8")] if int8_backends() else []
    engines += [TorchEngine(loaded.model, cpu, precision="bfloat16")] if has_bfloat16() else []
    for engine in engines:
        found = np.concatenate([f.ravel() for f in engine.run(examples)])
        difference = np.abs(found - expected).mean() / expected.std()
        assert 1e-6 < difference < 0.1, type(engine)  # it differs from float32, by little
    after = loaded.model.state_dict()
    assert all(value.dtype == torch.float32 and torch.equal(value, before[name]) for name, value in after.items())


def test_int8_quantises_three_matrices_of_each_layer(tiny_tokenizer):
    """Embeddings, norms, the output layer and the matrix after the activation are not quantised."""
    if not int8_backends():
        pytest.skip("torch has no int8 kernels here")
    loaded = make("single", tiny_tokenizer)
    model = TorchEngine(loaded.model, torch.device("cpu"), precision="int8").model
    eight = {name for name, part in model.named_modules() if isinstance(part, Int8Linear)}
    parts = ("attention.qkv", "attention.output", "feed_forward.inner")
    assert eight == {f"encoder.layers.{i}.{part}" for i in range(2) for part in parts}
    kept = dict(model.named_parameters())
    outer = {n for n in kept if ".feed_forward.outer." in n}
    half = torch.bfloat16 if has_bfloat16() else torch.float32
    assert {kept[n].dtype for n in outer} == {half}
    for name in kept.keys() - outer:
        assert torch.equal(kept[name], loaded.model.get_parameter(name))


def test_int8_graphs_keep_the_matrices_that_need_float32(tmp_path):
    """Those are the matrix after the activation and those applied to `[CLS]`, which the exporter writes as Gemm."""
    from onnx import TensorProto, helper, numpy_helper, save

    rng = np.random.default_rng(0)
    weights = {"first": (8, 16), "second": (16, 8), "pooler": (8, 8), "output": (8, 3)}
    arrays = [numpy_helper.from_array(rng.normal(size=s).astype(np.float32), n) for n, s in weights.items()]
    arrays.append(numpy_helper.from_array(np.zeros(8, np.float32), "bias"))
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["a"], "node_first"),
        helper.make_node("MatMul", ["a", "second"], ["b"], "node_second"),
        helper.make_node("Gemm", ["b", "pooler", "bias"], ["c"], "node_pooler"),
        helper.make_node("Gemm", ["c", "output"], ["y"], "node_output"),
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["rows", w]) for n, w in (("x", 8), ("y", 3)))
    graph = helper.make_graph(nodes, "graph", [x], [y], arrays)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "model.onnx")
    onnx_format._quantise(tmp_path / "model.onnx", tmp_path / "int8.onnx")
    kept = {t.name: t.data_type for t in onnx_format.require("onnx").load(tmp_path / "int8.onnx").graph.initializer}
    assert {name for name in weights if kept.get(name) == TensorProto.FLOAT} == {"second", "pooler", "output"}
    assert kept["first_quantized"] == TensorProto.INT8


def test_batches_are_full_and_of_nearly_equal_lengths():
    examples = some_examples(50, 500)
    lengths = np.array([len(e.tokens) for e in examples])
    found = list(batches(examples, 512, 1 / 8))
    assert sorted(i for chosen in found for i in chosen) == list(range(500))
    for chosen in found:
        assert len(chosen) * lengths[chosen].max() <= 512
        assert lengths[chosen].min() >= lengths[chosen].max() * 7 / 8
    rectangles = sum(len(chosen) * lengths[chosen].max() for chosen in found)
    assert rectangles < 1.05 * lengths.sum()
    assert [len(c) for c in batches(some_examples(50, 3), 1)] == [1, 1, 1]  # a long text has a batch of its own
    assert list(batches([], 512)) == []


@pytest.mark.parametrize("threads", [None, 1, 2])
def test_a_folder_without_torch_weights_gives_the_same_predictions(saved, threads):
    model, onnx = saved
    assert not list(onnx.glob("*.safetensors"))
    threads_before = torch.get_num_threads()
    ours = Predictor.load(model, "cpu", threads=threads)
    theirs = Predictor.load(onnx, threads=threads)
    assert isinstance(ours.engine, TorchEngine)
    assert isinstance(theirs.engine, OnnxEngine)
    for a, b in zip(ours.predict(TEXTS), theirs.predict(TEXTS), strict=True):
        assert a["label"] == b["label"]
        assert a["scores"] == pytest.approx(b["scores"], abs=1e-4)
    alone = [next(ours.predict([text])) for text in TEXTS]
    assert [a["scores"] for a in ours.predict(TEXTS)] == [pytest.approx(a["scores"], abs=1e-5) for a in alone]
    assert torch.get_num_threads() == threads_before


def test_the_number_of_threads_is_used(saved, monkeypatch):
    seen = []
    predictor = Predictor.load(saved[0], "cpu", threads=3)
    encoder = predictor.engine.model.encoder
    encoder.register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
    list(predictor.predict(TEXTS))
    assert set(seen) == {3}
    options = Predictor.load(saved[1], threads=2).engine.session.get_session_options()
    assert options.intra_op_num_threads == 2


@pytest.mark.slow  # it exports another model
def test_both_engines_fill_masked_words(tmp_path, tiny_tokenizer):
    loaded = make("mlm+nsp", tiny_tokenizer)
    export_onnx(loaded, tmp_path / "onnx")
    text = "the [MASK] jumps over the [MASK]"
    ours, theirs = Predictor(loaded, "cpu").fill(text), Predictor.load(tmp_path / "onnx").fill(text)
    assert [[c["token"] for c in row] for row in ours] == [[c["token"] for c in row] for row in theirs]
    assert ours[0][0]["probability"] == pytest.approx(theirs[0][0]["probability"], abs=1e-4)
    with pytest.raises(UserError, match="no output layer"):
        list(Predictor.load(tmp_path / "onnx").predict(["fox"]))


def test_the_loss_of_int8_is_written_into_the_folder(tmp_path, saved, tiny_tokenizer):
    import json
    import shutil

    folder = tmp_path / "onnx"
    shutil.copytree(saved[1], folder)
    texts = [f"{a} {b} fox" for a in ("the", "lazy", "brown") for b in ("dog", "0", "barks", "quick")]
    labels = [answer["label"] for answer in Predictor.load(folder).predict(texts)]
    wrong = next(name for name in ("red", "green", "blue") if name != labels[0])
    rows = [Row(t, None, label, "here") for t, label in zip(texts, [wrong, *labels[1:]], strict=True)]
    quality = measure_int8(folder, rows)
    assert quality["float32"]["accuracy"] == pytest.approx(1100 / 12)
    cost = 1100 / 12 - quality["int8"]["accuracy"]
    assert quality["drop"]["accuracy"] == pytest.approx(cost)
    assert quality["in_words"].startswith(
        f"int8 {'costs' if cost >= 0 else 'gains'} {abs(cost):.1f} points of accuracy"
    )
    report = json.loads((folder / "onnx.json").read_text())
    assert report["quality"] == quality
    assert report["files"].keys() == {"model.onnx", "model_int8.onnx"}


def test_errors_name_the_fix(saved, monkeypatch):
    model, onnx = saved
    with pytest.raises(UserError, match="did you mean 'onnxruntime'"):
        Predictor.load(onnx, engine="onnxruntim")
    with pytest.raises(UserError, match="unknown precision 'int4'"):
        Predictor.load(onnx, precision="int4")
    with pytest.raises(UserError, match="threads must be between 1"):
        Predictor.load(onnx, threads=0)
    with pytest.raises(UserError, match=r"holds no model\.onnx"):
        Predictor.load(model, engine="onnxruntime")
    with pytest.raises(UserError, match=r"model\.safetensors is missing"):
        Predictor.load(onnx, engine="torch")
    with pytest.raises(UserError, match="not in bfloat16"):
        Predictor.load(onnx, precision="bfloat16")
    with monkeypatch.context() as patched:  # another CPU
        patched.setattr(settings, "has_bfloat16", lambda: False)
        with pytest.raises(UserError, match="this CPU has no products in bfloat16; choose float32"):
            Predictor.load(model, "cpu", precision="bfloat16")
        patched.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "aarch64"})
        with pytest.raises(UserError, match="no reliable int8 kernels for this CPU; export to ONNX"):
            Predictor.load(model, "cpu", precision="int8")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UserError, match=r"pip install 'bertsmith\[onnx\]'"):
        Predictor.load(onnx)
