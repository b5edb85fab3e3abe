"""Converted models open in other programs and compute the same; the parity report names the layer that differs."""

import builtins
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from conftest import REFERENCES, reference
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from variants import their_cases, their_model

from bertsmith import verify
from bertsmith.config import override
from bertsmith.conversion import Options, convert
from bertsmith.errors import UserError
from bertsmith.formats.hf import load_folder
from bertsmith.formats.sentence_folder import read_pooling
from bertsmith.inference.embedder import Embedder
from bertsmith.inference.files import evaluate
from bertsmith.inference.predictor import Predictor

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = ["the dogs bark", "", "a quick brown fox jumps over the lazy dog", "THE DOGS"]
HEADS = ["mlm+nsp", "mlm", "single", "multi", "regression", "tags", "span", "choice"]


@pytest.fixture
def saved(tmp_path, tiny_tokenizer):
    """Saves a small model of `transformers` as a folder."""

    def save(kind: str = "mlm", model=None) -> Path:
        (model or reference(kind, tiny_tokenizer.vocab_size)).save_pretrained(tmp_path / "theirs")
        tiny_tokenizer.save(tmp_path / "theirs")
        return tmp_path / "theirs"

    return save


def spoil(folder: Path, name: str, by: float = 0.1) -> None:
    weights = load_file(folder / "model.safetensors")
    weights[name].view(-1)[0] += by
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("variant", "kind"),
    [
        pytest.param(variant, kind, marks=() if variant == "bert" or kind in ("mlm", "single") else pytest.mark.slow)
        for variant, kind in their_cases(HEADS)
    ],
)  # their logits themselves are compared in test_saved_format.py, for every head
def test_parity_of_every_head(variant, kind, saved, tmp_path, tiny_tokenizer):
    source = saved(model=their_model(variant, kind, tiny_tokenizer.vocab_size))
    report = convert(source, tmp_path / "out", "hf", verify=True)["parity"]
    assert report["equal"]
    assert report["largest_difference"] < 2e-5
    layers = ["embeddings", "layer 1", "layer 2", "layer 3"]
    scores = {"mlm+nsp": ["logits mlm", "logits nsp"]}.get(kind, [f"logits {kind}"])
    assert list(report["differences"]) == [*layers, *scores]
    assert report["tokens"] == 3 + 17 + 48 + 9 + 33 + 48  # the model has 48 positions


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("bert.embeddings.position_embeddings.weight", "embeddings"),
        ("bert.encoder.layer.1.output.dense.bias", "layer 2"),
        ("bert.encoder.layer.2.attention.self.value.bias", "layer 3"),
        ("cls.predictions.bias", "logits mlm"),
        ("cls.seq_relationship.bias", "logits nsp"),
    ],
)
def test_parity_report_names_the_layer_of_a_changed_weight(name, first, saved, tmp_path):
    source = saved("mlm+nsp")
    convert(source, tmp_path / "out", "hf")
    assert verify.parity(tmp_path / "out", source)["equal"]
    spoil(tmp_path / "out", name)
    report = verify.parity(tmp_path / "out", source)
    assert not report["equal"]
    assert next(where for where, value in report["differences"].items() if value > 1e-3) == first


@pytest.mark.parametrize("kind", REFERENCES)
def test_conversion_to_tensorflow_and_back_is_reported_equal(kind, saved, tmp_path):
    pytest.importorskip("google_crc32c")
    source = saved(kind)
    to_tf1 = convert(source, tmp_path / "uncased", "tf1", verify=True)
    assert (to_tf1["from"], to_tf1["to"], to_tf1["parity"]["equal"]) == ("hf", "tf1", True)
    back = convert(tmp_path / "uncased", tmp_path / "back", verify=True)
    assert (back["from"], back["to"], back["parity"]["equal"]) == ("tf1", "hf", True)
    assert any(name.startswith("logits") for name in back["parity"]["differences"]) == (kind != "encoder")


def test_a_tensorflow_checkpoint_is_converted_to_every_format(saved, tmp_path):
    pytest.importorskip("google_crc32c")
    convert(saved("mlm"), tmp_path / "tf", "tf1")
    half = convert(tmp_path / "tf", tmp_path / "half", options=Options(cased=False, dtype="float16"), verify=True)
    assert (half["do_lower_case"], half["dtype"], half["parity"]["equal"]) == (True, "float16", True)
    convert(tmp_path / "tf", tmp_path / "st", "sentence-transformers", Options(cased=True))
    assert not load_folder(tmp_path / "st").tokenizer.lowercase


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_weights_are_saved_in_the_chosen_dtype(dtype, saved, tmp_path):
    source = saved("single")
    report = convert(source, tmp_path / "out", "hf", Options(dtype=dtype), verify=True)
    assert report["dtype"] == dtype
    assert report["parity"]["equal"]
    weights = load_file(tmp_path / "out" / "model.safetensors")
    before = load_file(source / "model.safetensors")
    assert weights.keys() == before.keys()
    assert all(torch.equal(w, before[name].to(getattr(torch, dtype))) for name, w in weights.items())
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype="auto")
    assert theirs.dtype == getattr(torch, dtype)
    assert load_folder(tmp_path / "out").model.encoder.embeddings.tokens.weight.dtype == torch.float32
    back = convert(tmp_path / "out", tmp_path / "back", "hf", Options(dtype="float32"))
    assert back["dtype"] == "float32"


def test_a_pickled_weight_file_becomes_safetensors(saved, tmp_path):
    source = saved("mlm")
    state = transformers.BertForMaskedLM.from_pretrained(source).state_dict()
    assert "cls.predictions.decoder.weight" in state
    (source / "model.safetensors").unlink()
    torch.save(state, source / "pytorch_model.bin")
    convert(source, tmp_path / "out", "hf")
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".json", ".md", ".safetensors", ".txt"}
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert "cls.predictions.decoder.weight" not in weights
    assert all(torch.equal(weight, state[name]) for name, weight in weights.items())
    _, info = transformers.BertForMaskedLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]


def test_a_fine_tuned_run_keeps_its_task(run_command, world, tmp_path):
    finetune = ["finetune", "classify", "--model", world / "run", "--data", world / "train.csv", "--device", "cpu"]
    assert run_command(*finetune, "--out", tmp_path / "c", "--set", "train.steps=2")[0] == 0
    convert(tmp_path / "c", tmp_path / "out", "hf", Options(dtype="float16"))
    ours, again = Predictor.load(tmp_path / "c", "cpu"), Predictor.load(tmp_path / "out", "cpu")
    assert again.notes == ours.notes
    scores = [[a["score"] for a in p.predict(["a file", "numbers"])] for p in (ours, again)]
    assert scores[1] == pytest.approx(scores[0], abs=1e-2)


POOLINGS = [("mean", None), ("mean", True), ("cls", False), ("max", None), ("max", True)]


@pytest.mark.parametrize(
    ("head", "kind", "normalize"),
    [
        *(("encoder", *pooling) for pooling in POOLINGS),
        *((head, *pooling) for head in ("mlm+nsp", "single") for pooling in POOLINGS[1:3]),
        *(
            pytest.param(head, *pooling, marks=pytest.mark.slow)
            for head in ("mlm+nsp", "single")
            for pooling in (POOLINGS[0], *POOLINGS[3:])
        ),
    ],
)
def test_sentence_transformers_opens_the_folder(head, kind, normalize, saved, tmp_path):
    library = pytest.importorskip("sentence_transformers")
    options = Options(pooling=kind, normalize=normalize, max_length=32)
    report = convert(saved(head), tmp_path / "out", "sentence-transformers", options, verify=True)
    assert report["parity"]["equal"]
    assert (report["architecture"], report["pooling"], report["normalize"]) == ("BertModel", kind, bool(normalize))
    model = library.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert model.max_seq_length == 32
    assert len(model) == 3 if normalize else len(model) == 2
    texts = [*TEXTS, "dogs bark " * 30]
    theirs = model.encode(texts)
    again = Embedder(Predictor.load(tmp_path / "out", "cpu"))
    before = Embedder(Predictor.load(tmp_path / "theirs", "cpu"), kind, normalize, max_length=32)
    for embedder in (again, before):
        np.testing.assert_allclose(embedder.vectors(texts), theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", ["bert", "pre-norm"])
def test_transformers_loads_the_encoder_alone_without_missing_weights(variant, saved, tmp_path, tiny_tokenizer):
    source = saved(model=their_model(variant, "single", tiny_tokenizer.vocab_size))
    convert(source, tmp_path / "out", "sentence-transformers")
    architecture = json.loads((tmp_path / "out" / "config.json").read_text())["architectures"][0]
    classes = {"bert": "BertModel", "pre-norm": "RobertaPreLayerNormModel"}
    assert architecture == classes[variant]
    model, info = transformers.AutoModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(model).__name__ == architecture
    assert all("pooler" in name for name in info["missing_keys"])
    assert not info["unexpected_keys"]
    tokens = torch.arange(5, 25).view(2, 10)
    first, second = (m.eval()(tokens).last_hidden_state for m in (model, their_base(source)))
    assert_close(first, second, atol=0, rtol=0)


def test_converting_a_sentence_folder_keeps_pooling_prompts_and_length(saved, tmp_path, capsys):
    library = pytest.importorskip("sentence_transformers")
    convert(
        saved("encoder"),
        tmp_path / "st",
        "sentence-transformers",
        Options(pooling="cls", normalize=True, max_length=16),
    )
    prompts = {"prompts": {"query": "the fox "}, "default_prompt_name": "query"}
    (tmp_path / "st" / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    texts = [*TEXTS, "dogs bark " * 30]
    expected = library.SentenceTransformer(str(tmp_path / "st"), device="cpu").encode(texts)
    report = convert(tmp_path / "st", tmp_path / "hf", "hf")
    assert (report["pooling"], report["normalize"], report["max_length"]) == ("cls", True, 16)
    convert(tmp_path / "st", tmp_path / "again", "sentence-transformers")
    for name in ("hf", "again"):
        assert read_pooling(tmp_path / name) == read_pooling(tmp_path / "st")
        found = library.SentenceTransformer(str(tmp_path / name), device="cpu").encode(texts)
        np.testing.assert_allclose(found, expected, atol=1e-6, rtol=0)
    modules = json.loads((tmp_path / "st" / "modules.json").read_text())
    dense = {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"}
    (tmp_path / "st" / "modules.json").write_text(json.dumps([*modules, dense]))
    capsys.readouterr()
    convert(tmp_path / "st", tmp_path / "alone", "hf")
    assert "the encoder alone is written, without its modules" in capsys.readouterr().err
    assert not (tmp_path / "alone" / "modules.json").exists()


def their_base(source: Path):
    return transformers.AutoModelForSequenceClassification.from_pretrained(source).base_model


@pytest.mark.slow
def test_onnx_reports_how_int8_changes_the_score(world, tmp_path, capsys):
    from bertsmith.finetuning.run import FinetuneConfig, finetune

    onnx = pytest.importorskip("onnx")
    config = override(FinetuneConfig("classify"), ["train.steps=3", "train.batch_size=8", "data.max_length=32"])
    finetune(config, world / "run", world / "train.csv", tmp_path / "run", device="cpu")
    options = Options(int8=True, data=world / "dev.csv")
    report = convert(tmp_path / "run", tmp_path / "out", "onnx", options, verify=True)
    assert report["parity"]["equal"]
    differences = report["parity"]["differences"]
    assert list(differences) == ["model.onnx logits", "model_int8.onnx logits"]
    assert differences["model.onnx logits"] < 1e-4
    assert differences["model.onnx logits"] != differences["model_int8.onnx logits"]
    assert "int8 costs" in report["in_words"] or "int8 gains" in report["in_words"]
    spoilt = onnx.load(tmp_path / "out" / "model.onnx")  # --verify runs the file that was written
    bias = next(t for t in spoilt.graph.initializer if t.name.endswith("head.output.bias"))
    bias.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(bias) + 0.1, bias.name))
    onnx.save(spoilt, tmp_path / "out" / "model.onnx")
    found = verify.onnx_parity(tmp_path / "out", tmp_path / "run" / "model")
    assert not found["equal"]
    assert found["differences"]["model.onnx logits"] == pytest.approx(0.1, abs=1e-3)
    kept = json.loads((tmp_path / "out" / "onnx.json").read_text())
    assert {"model.onnx", "model_int8.onnx"} == set(kept["files"])
    assert {"float32", "int8"} <= set(json.dumps(kept["quality"]).replace('"', " ").split())
    answers = evaluate(tmp_path / "out", world / "dev.csv", precision="int8", threads=1)
    assert answers["rows"] == 10
    with pytest.raises(UserError, match="--data shows what int8 costs; add --int8"):
        convert(tmp_path / "run", tmp_path / "again", "onnx", Options(data=world / "dev.csv"))


def test_bad_options_and_paths_are_refused(saved, tmp_path):
    source, out = saved("single"), tmp_path / "out"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for arguments, message in (
        ((source, out), "--to is missing"),
        ((source, out, "hff"), "--to 'hff' is not one of .*; did you mean 'hf'"),
        ((source, out, "hf", Options(int8=True)), "--int8 is for --to onnx, not for hf"),
        ((source, out, "tf1", Options(dtype="float16")), "--dtype is for --to hf and sentence-transformers"),
        ((source, out, "hf", Options(max_length=3)), "--max-length is for --to sentence-transformers"),
        ((source, out, "hf", Options(cased=True)), "--cased/--uncased is for TensorFlow 1"),
        ((source, out, "hf", Options(dtype="int4")), "--dtype 'int4' is not one of float32"),
        ((source, out, "sentence-transformers", Options(pooling="sum")), "--pooling 'sum' is not one of"),
        ((source, out, "sentence-transformers", Options(max_length=99)), "--max-length 99 is not between 3 and .* 48"),
        ((source, tmp_path / "full", "hf"), "^DST .*full is there already and not empty; choose another DST"),
        ((source, tmp_path / "full", "tf1"), "^DST .*full is there already"),
        ((source, source / "config.json", "hf"), "^DST .*config.json is a file"),
        ((tmp_path / "none" / "x", out, "hf"), "no such model folder"),
    ):
        with pytest.raises(UserError, match=message):
            convert(*arguments)
    assert not out.exists()
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "code.Model"}}))
    with pytest.raises(UserError, match="unknown key 'auto_map'"):
        convert(source, out, "hf")


def test_verify_without_transformers_is_refused_before_converting(saved, tmp_path, monkeypatch):
    source, real = saved(), builtins.__import__

    def no_transformers(name, *arguments, **options):
        if name == "transformers":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", no_transformers)
    with pytest.raises(UserError, match="pip install transformers"):
        convert(source, tmp_path / "out", "hf", verify=True)
    assert not (tmp_path / "out").exists()
    convert(source, tmp_path / "out", "hf")


def test_the_convert_command(run_command, saved, tmp_path, monkeypatch):
    source = saved("mlm")
    command = ["convert", source, tmp_path / "half", "--to", "hf", "--half", "--verify"]
    code, out, err = run_command(*command)
    assert code == 0, err
    for words in ("float16", "BertForMaskedLM", "embeddings", "layer 3", "logits mlm", "e-0"):
        assert words in out
    code, out, _ = run_command("convert", source, tmp_path / "st", "--to", "sentence-transformers", "--json")
    assert json.loads(out)["pooling"] == "mean"
    code, _, err = run_command("convert", source, tmp_path / "x", "--to", "hf", "--half", "--dtype", "bfloat16")
    assert (code, "give one of them" in err) == (2, True)
    monkeypatch.setattr(verify, "TOLERANCE", 0.0)
    code, out, _ = run_command("convert", source, tmp_path / "again", "--to", "hf", "--verify", "--json")
    assert code == 1
    assert json.loads(out)["parity"]["equal"] is False


def test_embed_and_predict_are_commands(run_command, saved, tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(TEXTS)))
    embed = ["embed", saved("single"), tmp_path / "in.jsonl", "--out", tmp_path / "v.npy", "--device", "cpu", "--json"]
    code, out, err = run_command(*embed, "--pooling", "cls", "--normalize")
    assert code == 0, err
    assert json.loads(out)["rows"] == 4
    assert np.load(tmp_path / "v.npy").shape == (4, 64)
    predict = ["predict", tmp_path / "theirs", tmp_path / "in.jsonl", "--keep", "id, text", "--device", "cpu"]
    code, out, err = run_command(*predict, "--out", "-")
    assert code == 0, err
    assert [json.loads(line)["id"] for line in out.splitlines()] == [0, 1, 2, 3]
    assert run_command(*predict, "--out", tmp_path / "a.csv", "--resume")[0] == 0
    assert (tmp_path / "a.csv").read_text().startswith("id,text,label,score,scores.red,scores.green")


def test_tables_have_one_line_per_entry(capsys):
    from bertsmith.commands.show import show

    show({"losses": {"run": 2.5, "run2": 1e-6}}, False)
    first, second = capsys.readouterr().out.splitlines()[1:3]
    assert ("losses" in first, "run: 2.5000" in first, "run2: 1.0e-06" in second) == (True, True, True)
