"""TensorFlow 1 checkpoints of BERT: to a model folder and back, against `transformers` and TensorFlow itself."""

import json
import os
import re
import subprocess
import venv
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from conftest import LABELS, REFERENCES, reference
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from bertsmith.errors import UserError
from bertsmith.formats import sorted_table
from bertsmith.formats.hf import load_folder
from bertsmith.formats.tensor_bundle import NUMBERS, data_file, index_file, read_index, read_tensor, write_bundle
from bertsmith.formats.tf1 import find_checkpoint, is_checkpoint, read_checkpoint, write_checkpoint
from bertsmith.formats.tf1_convert import guess_lowercase, hf_to_tf1, tf1_to_hf
from bertsmith.text.tokenizer import Tokenizer, train_wordpiece

for library in ("google_crc32c", "cramjam"):
    pytest.importorskip(library, reason="of the extra tf1")
pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG = {  # the configuration of the released uncased_L-12_H-768_A-12, smaller
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "max_position_embeddings": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "type_vocab_size": 2,
    "vocab_size": 99,
}
TEXTS = ["The quick brown fox", "jumps over 12 lazy dogs."]


def tf_name(name: str) -> str:
    """The released code's name of a weight of `transformers`, by rules instead of a table."""
    name = re.sub(r"LayerNorm\.weight$", "LayerNorm.gamma", name)
    name = re.sub(r"LayerNorm\.bias$", "LayerNorm.beta", name)
    name = re.sub(r"_embeddings\.weight$", "_embeddings", name)
    name = re.sub(r"^classifier\.(weight|bias)$", r"output_\1", name)
    name = re.sub(r"^qa_outputs\.(weight|bias)$", r"cls.squad.output_\1", name)
    name = re.sub(r"seq_relationship\.(weight|bias)$", r"seq_relationship.output_\1", name)
    name = name.replace("output_weight", "output_weights").replace(
        "cls.predictions.bias", "cls.predictions.output_bias"
    )
    name = re.sub(r"\.weight$", ".kernel", name)
    return name.replace("layer.", "layer_").replace(".", "/")


def tf_variables(model) -> dict[str, np.ndarray]:
    """The variables that TensorFlow would hold for a model of `transformers`."""
    skipped = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")
    prefix = "bert." if isinstance(model, transformers.BertModel) else ""
    state = {prefix + name: value.numpy() for name, value in model.state_dict().items() if name not in skipped}
    return {tf_name(n): value.T if tf_name(n).endswith("/kernel") else value for n, value in state.items()}


def released(folder: Path, variables: dict[str, np.ndarray], tokenizer: Tokenizer, **changes) -> Path:
    """Write a folder in the released layout."""
    folder.mkdir()
    write_bundle(folder / "bert_model.ckpt", sorted(variables.items()))
    (folder / "bert_config.json").write_text(json.dumps({**CONFIG, "vocab_size": tokenizer.vocab_size, **changes}))
    (folder / "vocab.txt").write_bytes(tokenizer.files()["vocab.txt"])
    return folder


def theirs(kind: str, tokenizer: Tokenizer):
    return reference(kind, tokenizer.vocab_size)


@torch.no_grad()
def same_outputs(folder: Path, model, kind: str) -> None:
    architecture = getattr(transformers, REFERENCES[kind][0])
    other, info = architecture.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    tokens = torch.arange(36).view(4, 9) % 90 + 5
    inputs = {"input_ids": tokens, "token_type_ids": tokens % 2}
    if kind == "choice":
        inputs = {name: value.view(2, 2, 9) for name, value in inputs.items()}
    assert_close(other.eval()(**inputs).to_tuple(), model(**inputs).to_tuple(), atol=0, rtol=0)


@pytest.fixture
def folder(tmp_path, tiny_tokenizer) -> Path:
    """A released folder of a pre-trained model."""
    return released(tmp_path / "uncased_L-3", tf_variables(theirs("mlm+nsp", tiny_tokenizer)), tiny_tokenizer)


def read_variables(folder: Path, name: str = "bert_model.ckpt") -> dict[str, np.ndarray]:
    entries = read_index(folder / name)
    return {name: read_tensor(name, entry) for name, entry in entries.items() if entry.dtype in NUMBERS}


def change(folder: Path, edit) -> None:
    """Rewrite a checkpoint with other variables."""
    variables = read_variables(folder)
    edit(variables)
    for file in folder.glob("bert_model.ckpt.*"):
        file.unlink()
    write_bundle(folder / "bert_model.ckpt", variables.items())


@pytest.mark.parametrize("kind", ["mlm+nsp", "mlm", "single", "regression", "span", "encoder"])
def test_a_released_folder_becomes_one_that_transformers_opens(kind, tmp_path, tiny_tokenizer):
    model = theirs(kind, tiny_tokenizer)
    variables = tf_variables(model)
    source = released(tmp_path / "tf", variables, tiny_tokenizer)
    report = tf1_to_hf(source, tmp_path / "hf", cased=False)
    same_outputs(tmp_path / "hf", model, kind)
    assert report["architecture"] == REFERENCES[kind][0]
    assert report["tensors"] == len(variables)
    assert report["parameters"] == sum(array.size for array in variables.values())
    assert (report["ignored"], report["left_out"]) == ({}, [])
    heads = {"pooler": "pooler", "predictions": "masked language model head", "seq_relationship": "next sentence head"}
    assert report["missing"] == [head for part, head in heads.items() if not any(part in name for name in variables)]
    loaded = load_folder(tmp_path / "hf")
    if kind == "single":
        assert loaded.model.head_config.labels == ("LABEL_0", "LABEL_1", "LABEL_2", "LABEL_3")
    if kind != "encoder":
        assert loaded.missing == ()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (
        tokenizer(TEXTS)["input_ids"]
        == tiny_tokenizer.encode(TEXTS, special=True)
        == loaded.tokenizer.encode(TEXTS, special=True)
    )


@pytest.mark.parametrize("kind", REFERENCES)
def test_conversion_to_hf_and_back_is_bit_identical(kind, tmp_path, tiny_tokenizer):
    model = theirs(kind, tiny_tokenizer)
    model.save_pretrained(tmp_path / "theirs")
    tiny_tokenizer.save(tmp_path / "theirs")
    report = hf_to_tf1(tmp_path / "theirs", tmp_path / "tf")
    variables = tf_variables(model)
    found = read_variables(tmp_path / "tf")
    assert found.keys() == variables.keys()
    assert all(np.array_equal(found[name], array) for name, array in variables.items())
    assert report["tensors"] == len(variables)
    assert any("cleaned up otherwise" in note for note in report["notes"])  # ours composes characters
    tf1_to_hf(tmp_path / "tf", tmp_path / "back")
    same_outputs(tmp_path / "back", model, kind)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "back"))
    if kind == "encoder":
        before = {f"bert.{name}": value for name, value in before.items()}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], value) and value.dtype == torch.float32 for name, value in after.items())
    one, two = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "back"))
    if kind in ("single", "multi", "tags"):
        assert two["id2label"] == {str(i): name for i, name in LABELS.items()}
    shared = [*CONFIG, "architectures", "problem_type", "id2label", "layer_norm_eps"]
    assert all(one.get(key) == two.get(key) for key in shared if key in one and key in two)


def test_the_written_files_are_those_of_the_release(tmp_path, folder):
    tf1_to_hf(folder, tmp_path / "hf")
    hf_to_tf1(tmp_path / "hf", tmp_path / "again")
    names = ["bert_config.json", "bert_model.ckpt.data-00000-of-00001", "bert_model.ckpt.index", "vocab.txt"]
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == names
    for name in names[1:]:
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes(), name
    values = json.loads((tmp_path / "again" / "bert_config.json").read_text())
    assert values.pop("do_lower_case") is True
    assert values == json.loads((folder / "bert_config.json").read_text())


def test_slots_counters_and_averages_are_ignored_and_counted(tmp_path, folder):
    weights = list(read_index(folder / "bert_model.ckpt"))

    def train(variables):
        for name in weights:
            for slot in ("adam_m", "adam_v", "Adam", "Adam_1", "LAMB", "lamb_v", "Momentum"):
                variables[f"{name}/{slot}"] = variables[name]
        variables["bert/pooler/dense/kernel/ExponentialMovingAverage"] = np.zeros((64, 64), np.float32)
        variables["training/Adam/bert/pooler/dense/kernel/m"] = np.zeros((64, 64), np.float32)
        variables |= {"global_step": np.array(100), "beta1_power": np.array(0.9, np.float32)}
        variables["crf/transitions"] = np.zeros((3, 3), np.float32)

    change(folder, train)
    report = tf1_to_hf(folder, tmp_path / "hf")
    assert report["ignored"] == {"optimiser slots": 7 * len(weights) + 1, "moving averages": 1, "counters": 2}
    assert report["left_out"] == ["crf/transitions"]
    assert report["tensors"] == len(weights)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_floats_become_float32(tmp_path, folder, dtype):
    before = dict(read_variables(folder).items())
    change(folder, lambda variables: variables.update({n: a.astype(dtype) for n, a in variables.items()}))
    report = tf1_to_hf(folder, tmp_path / "hf")
    assert f"weights of {dtype.__name__} are taken as float32" in report["notes"]
    found = load_file(tmp_path / "hf" / "model.safetensors")["bert.pooler.dense.weight"]
    assert found.dtype == torch.float32
    assert_close(found.T.numpy(), before["bert/pooler/dense/kernel"].astype(dtype).astype(np.float32), atol=0, rtol=0)


def test_half_precision_folders_become_float32(tmp_path, tiny_tokenizer):
    model = theirs("mlm", tiny_tokenizer).bfloat16()
    model.save_pretrained(tmp_path / "hf")
    tiny_tokenizer.save(tmp_path / "hf")
    hf_to_tf1(tmp_path / "hf", tmp_path / "tf")
    found = read_variables(tmp_path / "tf")
    assert {array.dtype for array in found.values()} == {np.dtype(np.float32)}
    wanted = model.bert.embeddings.word_embeddings.weight.detach().float().numpy()
    assert np.array_equal(found["bert/embeddings/word_embeddings"], wanted)


def test_weights_are_read_lazily(folder):
    checkpoint = read_checkpoint(folder)
    data = data_file(folder / "bert_model.ckpt")
    data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(UserError, match=r"data-00000-of-00001 is damaged: the bytes of bert/pooler/dense/kernel"):
        checkpoint.weights["bert.pooler.dense.weight"]
    with pytest.raises(KeyError):
        checkpoint.weights["bert.pooler.dense.kernel"]


def test_a_checkpoint_is_found_by_folder_prefix_or_file(tmp_path, folder):
    prefix = folder / "bert_model.ckpt"
    for path in (folder, prefix, index_file(prefix), data_file(prefix), str(folder)):
        assert find_checkpoint(path) == prefix
        assert is_checkpoint(path)
    run = tmp_path / "run"
    run.mkdir()
    for step in (0, 900, 1000):
        write_bundle(run / f"model.ckpt-{step}", {"a": np.zeros(1)}.items())
    assert find_checkpoint(run) == run / "model.ckpt-1000"
    for step in (0, 900, 1000):
        index_file(run / f"model.ckpt-{step}").rename(run / f"{step}.index")
    with pytest.raises(UserError, match="several checkpoints; name one: 0, 1000, 900"):
        find_checkpoint(run)
    with pytest.raises(UserError, match=r"no such checkpoint: .*nothing; .*nothing\.index is missing"):
        find_checkpoint(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"vocab\.txt is not a checkpoint"):
        find_checkpoint(folder / "vocab.txt")
    tf1_to_hf(folder, tmp_path / "hf")
    assert not is_checkpoint(tmp_path / "hf")
    assert not is_checkpoint("bert-base-uncased")


def test_config_and_vocabulary_may_be_given_separately(tmp_path, folder):
    run = tmp_path / "run"
    run.mkdir()
    write_bundle(run / "model.ckpt-7", read_variables(folder).items())
    with pytest.raises(UserError, match=r"run/bert_config\.json is missing"):
        tf1_to_hf(run, tmp_path / "hf")
    with pytest.raises(UserError, match=r"run/vocab\.txt is missing"):
        tf1_to_hf(run, tmp_path / "hf", config=folder / "bert_config.json")
    tf1_to_hf(run, tmp_path / "hf", config=folder / "bert_config.json", vocab=folder / "vocab.txt")
    assert load_folder(tmp_path / "hf").missing == ()


def remove(*ends: str):
    return lambda variables: [variables.pop(name) for name in list(variables) if name.endswith(ends)]


def add(name: str, *shape: int):
    return lambda variables: variables.update({name: np.zeros(shape, np.float32)})


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (add("generator/embeddings/word_embeddings", 99, 16), "a part of an ELECTRA: electra/embeddings is missing"),
        (add("bert/encoder/embedding_hidden_mapping_in/kernel", 16, 64), "missing key 'embedding_size'"),
        (add("bert/encoder/transformer/group_0/inner_group_0/ffn_1/bias", 9), "missing key 'embedding_size'"),
        (add("bert/embeddings/word_embeddings", 99, 16), r"shape \(99, 16\).*hidden_size = 64.* projection of fact"),
        (add("bert/embeddings/word_embeddings_2", 9, 64), r"word_embeddings \(99, 64\) cannot be multiplied by .*_2"),
        (add("bert/encoder/layer_0/bottleneck/input/dense/bias", 9), "a MobileBERT checkpoint"),
        (add("model/transformer/layer_0/ff/layer_1/bias", 9), "an XLNet checkpoint"),
        (add("_CHECKPOINTABLE_OBJECT_GRAPH", 1), "a TensorFlow 2 object checkpoint"),
        (remove("word_embeddings"), "holds no BERT: no bert/embeddings/word_embeddings; .*begin with bert, cls"),
        (remove("layer_1/output/dense/kernel"), "lacks bert/encoder/layer_1/output/dense/kernel"),
        (remove("cls/predictions/output_bias"), "lacks cls/predictions/output_bias"),
        (add("bert/encoder/layer_3/output/dense/bias", 64), "has bert/encoder/layer_3.*; mend num_hidden_layers"),
        (add("bert/encoder/layer_0/attention/self/relative/kernel", 4, 4), "or it is another model"),
        (add("bert/pooler/dense/kernel", 64, 32), r"bert/pooler/dense/kernel .* has shape \(32, 64\)"),
        (add("bert/pooler/dense/bias", 64, 1), r"has shape \(64, 1\)"),
        (lambda v: v.update({"bert/pooler/dense/bias": np.zeros(64, np.int32)}), "is of int32, not of floating point"),
    ],
)
def test_other_models_are_refused_with_the_reason(edit, reason, tmp_path, folder):
    change(folder, edit)
    with pytest.raises(UserError, match=reason):
        tf1_to_hf(folder, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"hidden_act": "tanh"}, "hidden_act 'tanh' is not one of gelu"),
        ({"embedding_size": 16}, "embedding_size 16: the checkpoint has no projection from it"),
        ({"hidden_sizes": 3}, "unknown key 'hidden_sizes'; did you mean 'hidden_size'"),
        ({"num_hidden_layers": 10**9}, "lacks bert/encoder/layer_3/"),
        ({"num_hidden_layers": 2}, "has bert/encoder/layer_2/"),
        ({"num_attention_heads": 5}, "hidden_size 64 cannot be divided among 5 heads"),
        ({"vocab_size": None}, "vocab_size must be a whole number"),
        ({"intermediate_size": 96}, r"has shape \(128, 64\), and the settings say intermediate_size = 96"),
        ({"model_type": "albert"}, "model_type 'albert', and the checkpoint is one of BERT"),
    ],
)
def test_wrong_settings_are_refused_by_name(values, reason, tmp_path, folder):
    path = folder / "bert_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    with pytest.raises(UserError, match=reason):
        tf1_to_hf(folder, tmp_path / "hf")


def test_incomplete_and_damaged_folders_are_refused_by_file(tmp_path, folder):
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "bert_config.json").write_bytes((folder / "bert_config.json").read_bytes())
    with pytest.raises(
        UserError, match=r"bert_config\.json without the weights: bert_model\.ckpt\.index and .* missing"
    ):
        tf1_to_hf(tmp_path / "alone", tmp_path / "hf")
    assert is_checkpoint(tmp_path / "alone")
    prefix = folder / "bert_model.ckpt"
    for file, cut, reason in (
        (data_file(prefix), 1000, r"data-00000-of-00001, which is truncated"),
        (index_file(prefix), 10, "does not end with the magic number"),
        (folder / "bert_config.json", 10, "is not valid JSON"),
        (folder / "vocab.txt", 300, r"vocab\.txt lacks \[PAD\]"),
    ):
        good = file.read_bytes()
        file.write_bytes(good[cut:] if file.name == "vocab.txt" else good[:-cut])
        with pytest.raises(UserError, match=reason):
            tf1_to_hf(folder, tmp_path / "hf")
        file.write_bytes(good)
    damaged = bytearray(data_file(prefix).read_bytes())
    damaged[-1] ^= 1
    data_file(prefix).write_bytes(damaged)
    with pytest.raises(UserError, match=r"the bytes of cls/seq_relationship/output_weights do not match"):
        tf1_to_hf(folder, tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "uncased_L-3"]  # no partial output is left


@pytest.mark.parametrize(
    ("name", "cased", "saved", "word", "lowercase"),
    [
        ("uncased_L-12_H-768_A-12", None, None, "Word", True),
        ("multi_cased_L-12_H-768_A-12", None, None, "word", False),
        ("biobert", None, None, "Word", False),
        ("scibert", None, None, "word", True),
        ("uncased", None, False, "word", False),
        ("uncased", True, True, "word", False),
        ("cased", False, False, "Word", True),
    ],
)
def test_lower_casing_is_guessed_with_a_reason(name, cased, saved, word, lowercase):
    found, reason = guess_lowercase(name, ["[PAD]", "[UNK]", "a", f"##{word}"], cased, saved)
    assert found is lowercase
    assert reason


def test_the_cased_option_sets_the_tokenizer(tmp_path, folder):
    tf1_to_hf(folder, tmp_path / "uncased")
    tf1_to_hf(folder, tmp_path / "cased", cased=True)
    uncased, cased = Tokenizer.load(tmp_path / "uncased"), Tokenizer.load(tmp_path / "cased")
    assert uncased.encode(["THE"]) == uncased.encode(["the"]) == cased.encode(["the"]) != cased.encode(["THE"])
    for name in ("uncased", "cased"):
        hf_to_tf1(tmp_path / name, tmp_path / f"{name}-tf")
        tf1_to_hf(tmp_path / f"{name}-tf", tmp_path / "back" / name)
        assert Tokenizer.load(tmp_path / "back" / name).hash == Tokenizer.load(tmp_path / name).hash


def test_every_line_of_the_vocabulary_keeps_its_id(tmp_path, tiny_tokenizer):
    model = reference("mlm", tiny_tokenizer.vocab_size + 4)
    folder = released(tmp_path / "tf", tf_variables(model), tiny_tokenizer, vocab_size=tiny_tokenizer.vocab_size + 4)
    lines = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    lines = [*lines[:20], "", "fox", *lines[20:], "fox", "last"]  # an empty line and a repeated one
    (folder / "vocab.txt").write_bytes("\r\n".join(lines).encode())
    tf1_to_hf(folder, tmp_path / "hf")
    for opened in (
        Tokenizer.load(tmp_path / "hf").backend,
        transformers.AutoTokenizer.from_pretrained(tmp_path / "hf"),
    ):
        vocab = opened.get_vocab()
        assert (vocab["last"], vocab["fox"]) == (len(lines) - 1, len(lines) - 2)
        assert all(vocab[token] == i for i, token in enumerate(lines) if token not in ("", "fox"))
    hf_to_tf1(tmp_path / "hf", tmp_path / "again")
    for name in ("hf", "again"):
        assert (tmp_path / name / "vocab.txt").read_bytes().decode() == "".join(f"{line}\n" for line in lines)


def test_a_vocabulary_that_is_too_long_is_refused(tmp_path, folder):
    with (folder / "vocab.txt").open("a") as file:
        file.write("more\n")
    with pytest.raises(UserError, match=r"vocab\.txt has (\d+) entries, and bert_config\.json has vocab_size = "):
        tf1_to_hf(folder, tmp_path / "hf")


def test_labels_that_do_not_fit_are_refused(tmp_path, tiny_tokenizer):
    labels = {"id2label": {"0": "a", "1": "b"}}
    folder = released(tmp_path / "tf", tf_variables(theirs("single", tiny_tokenizer)), tiny_tokenizer, **labels)
    with pytest.raises(UserError, match="id2label is to name the labels 0 to 3 of output_weights"):
        tf1_to_hf(folder, tmp_path / "hf")


def test_models_that_the_format_cannot_hold_are_refused(tmp_path, tiny_tokenizer):
    def save(model) -> Path:
        model.save_pretrained(tmp_path / "hf")
        tiny_tokenizer.save(tmp_path / "hf")
        return tmp_path / "hf"

    size = {"vocab_size": tiny_tokenizer.vocab_size, "hidden_size": 32, "num_attention_heads": 2}
    with pytest.raises(UserError, match="family electra; --to tf1 writes the released formats of bert and albert"):
        hf_to_tf1(save(transformers.ElectraForMaskedLM(transformers.ElectraConfig(**size))), tmp_path / "tf")
    weights = load_file(save(theirs("mlm", tiny_tokenizer)) / "model.safetensors")
    weights["cls.predictions.decoder.weight"] = weights["bert.embeddings.word_embeddings.weight"].clone()
    save_file(weights, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    hf_to_tf1(tmp_path / "hf", tmp_path / "tied")
    weights["cls.predictions.decoder.weight"][0, 0] += 1
    save_file(weights, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="one tensor for both"):
        hf_to_tf1(tmp_path / "hf", tmp_path / "tf")
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        hf_to_tf1(tmp_path / "hf", tmp_path / "tf")
    assert not (tmp_path / "tf").exists()


def test_settings_that_the_released_code_lacks_are_noted(tmp_path, tiny_tokenizer):
    model = reference("tags", tiny_tokenizer.vocab_size, hidden_act="gelu_new", layer_norm_eps=1e-5)
    weights = {n: value.numpy() for n, value in model.state_dict().items()}
    weights["something.else"] = np.zeros(1)
    (tmp_path / "tf").mkdir()
    config = {**model.config.to_dict(), "architectures": ["BertForTokenClassification"]}
    report = write_checkpoint(tmp_path / "tf", config, weights, ["[PAD]"])
    joined = " ".join(report["notes"])
    for words in ("layer_norm_eps is 1e-05", "'gelu_new'", "no BertForTokenClassification", "no .meta"):
        assert words in joined
    assert report["left_out"] == ["something.else"]
    assert report["missing"] == ["pooler", "masked language model head", "next sentence head"]
    checkpoint = read_checkpoint(tmp_path / "tf")
    assert checkpoint.config["layer_norm_eps"] == 1e-5
    assert checkpoint.config["hidden_act"] == "gelu_new"
    assert checkpoint.config["architectures"] == ["BertForTokenClassification"]


def test_our_own_folder_is_converted_to_tf1_and_back(tmp_path, world):
    hf_to_tf1(world / "run", tmp_path / "tf")
    tf1_to_hf(tmp_path / "tf", tmp_path / "hf")
    ours, back = load_folder(world / "run" / "model"), load_folder(tmp_path / "hf")
    assert ours.model.encoder.config == back.model.encoder.config
    state = back.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in ours.model.state_dict().items())


def test_a_jamo_tokenizer_is_converted_without_a_normalisation_note(tmp_path):
    tokenizer = train_wordpiece(["한국어 서울"] * 9, 60, jamo=True)
    model = theirs("mlm", tokenizer)
    model.save_pretrained(tmp_path / "hf")
    tokenizer.save(tmp_path / "hf")
    report = hf_to_tf1(tmp_path / "hf", tmp_path / "tf")
    assert not any("cleaned up otherwise" in note for note in report["notes"])
    tf1_to_hf(tmp_path / "tf", tmp_path / "back")
    assert Tokenizer.load(tmp_path / "back").encode(["서울 한국"]) == tokenizer.encode(["서울 한국"])


# With TensorFlow itself, in its own environment.

TENSORFLOW = """
import socket
import sys
import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
v1.disable_eager_execution()


def variable(name, value, **options):
    options.setdefault("dtype", value.dtype)
    return v1.get_variable(name, value.shape, initializer=lambda shape, dtype, partition_info=None: tf.cast(
        value if partition_info is None else value[tuple(
            slice(o, o + s) for o, s in zip(partition_info.var_offset, shape))], dtype), **options)


def write(source, folder):
    arrays = dict(np.load(source))
    with tf.Graph().as_default(), v1.Session() as session:
        weights = [variable(name, array) for name, array in arrays.items()]
        loss = tf.add_n([tf.reduce_sum(weight**2) for weight in weights])
        step = v1.train.get_or_create_global_step()
        train = v1.train.AdamOptimizer(1e-3).minimize(loss, step)
        session.run(v1.global_variables_initializer())
        session.run(train)
        v1.train.Saver().save(session, folder + "/model.ckpt", global_step=step)
        np.savez(folder + "/after.npz", **dict(zip(arrays, session.run(weights))))
    sockets = [socket.create_server(("localhost", 0)) for _ in range(2)]
    cluster = v1.train.ClusterSpec({"ps": [f"localhost:{s.getsockname()[1]}" for s in sockets]})
    for one in sockets:
        one.close()
    servers = [v1.train.Server(cluster, "ps", task) for task in range(2)]  # each writes a data file of its own
    with tf.Graph().as_default(), v1.Session(servers[0].target) as session:
        rows = np.arange(1000, dtype=np.float32).reshape(100, 10)
        for axis in (0, 1):
            variable(f"rows_{axis}", rows, partitioner=v1.fixed_size_partitioner(3, axis=axis))
        for number, dtype in enumerate((tf.float16, tf.float32, tf.float64, tf.bfloat16, tf.int32, tf.int64)):
            with tf.device(f"/job:ps/task:{number % 2}"):
                variable(dtype.name, np.arange(-3, 4), dtype=dtype)
        v1.get_variable("text", initializer=tf.constant(["some", "words"]), use_resource=False)
        session.run(v1.global_variables_initializer())
        v1.train.Saver(sharded=True).save(session, folder + "/odd.ckpt", write_meta_graph=False)


def read(prefix, target):
    reader = tf.train.load_checkpoint(prefix)
    shapes = reader.get_variable_to_shape_map()
    np.savez(target, **{name: reader.get_tensor(name) for name in shapes})
    with tf.Graph().as_default(), v1.Session() as session:
        weights = [v1.get_variable(name, shape) for name, shape in shapes.items()]
        v1.train.Saver().restore(session, prefix)
        for name, value in zip(shapes, session.run(weights)):
            assert np.array_equal(value, reader.get_tensor(name)), name


{"write": write, "read": read}[sys.argv[1]](*sys.argv[2:])
"""


@pytest.fixture(scope="module")
def tensorflow(tmp_path_factory):
    """Runs the script above with TensorFlow, in the environment of `BERTSMITH_TENSORFLOW` or of a cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bertsmith" / "tensorflow"
    home = Path(os.environ.get("BERTSMITH_TENSORFLOW") or cache)
    if not (home / "bin" / "python").exists():
        home = tmp_path_factory.mktemp("tensorflow")
        venv.create(home, with_pip=True)
        install = [home / "bin" / "python", "-m", "pip", "install", "--quiet", "tensorflow-cpu"]
        result = subprocess.run(install, capture_output=True, text=True, timeout=500)
        if result.returncode:
            pytest.skip(f"tensorflow-cpu cannot be installed: {result.stderr.strip().splitlines()[-1]}")
    script = tmp_path_factory.mktemp("script") / "script.py"
    script.write_text(TENSORFLOW)

    def run(*arguments: object) -> None:
        result = subprocess.run(
            [home / "bin" / "python", script, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "PYTHONPATH": "", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""},
        )
        assert result.returncode == 0, result.stderr[-3000:]

    return run


@pytest.mark.slow
def test_checkpoints_of_tensorflow_are_read(tmp_path, tensorflow, tiny_tokenizer):
    model = theirs("mlm+nsp", tiny_tokenizer)
    variables = tf_variables(model)
    np.savez(tmp_path / "weights.npz", **variables)
    source = released(tmp_path / "run", {}, tiny_tokenizer)
    for file in source.glob("bert_model.ckpt.*"):
        file.unlink()
    tensorflow("write", tmp_path / "weights.npz", source)
    report = tf1_to_hf(find_checkpoint(source / "model.ckpt-1"), tmp_path / "hf")
    assert report["ignored"] == {"optimiser slots": 2 * len(variables), "counters": 3}
    assert (report["left_out"], report["missing"]) == ([], [])
    after = np.load(source / "after.npz")
    found = tf_variables(transformers.BertForPreTraining.from_pretrained(tmp_path / "hf"))
    assert found.keys() == variables.keys()
    for name, array in found.items():
        assert np.array_equal(array, after[name]), name
        assert not np.array_equal(array, variables[name]), name  # one step of Adam later

    odd = read_variables(source, "odd.ckpt")
    assert len(list(source.glob("odd.ckpt.data-*"))) > 1
    rows = np.arange(1000, dtype=np.float32).reshape(100, 10)
    assert all(np.array_equal(odd.pop(f"rows_{axis}"), rows) for axis in (0, 1))
    assert {name: array.dtype.name for name, array in odd.items()} == {
        **{name: name for name in ("float16", "float32", "float64", "int32", "int64")},
        "bfloat16": "float32",
    }
    assert all(array.tolist() == list(range(-3, 4)) for array in odd.values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mlm+nsp", "span"])
def test_tensorflow_reads_our_checkpoints(kind, tmp_path, tensorflow, tiny_tokenizer):
    model = theirs(kind, tiny_tokenizer)
    model.save_pretrained(tmp_path / "hf")
    tiny_tokenizer.save(tmp_path / "hf")
    hf_to_tf1(tmp_path / "hf", tmp_path / "tf")
    tensorflow("read", tmp_path / "tf" / "bert_model.ckpt", tmp_path / "found.npz")
    found, variables = np.load(tmp_path / "found.npz"), tf_variables(model)
    assert set(found) == set(variables)
    for name, array in variables.items():
        assert found[name].dtype == np.float32
        assert np.array_equal(found[name], array), name


@pytest.mark.slow
def test_tensorflow_reads_tables_of_several_blocks(tmp_path, tensorflow, monkeypatch):
    monkeypatch.setattr(sorted_table, "BLOCK_SIZE", 1000)
    arrays = {f"scope/{'x' * (i % 90)}_{i}": np.full((1, i % 5), i, np.float32) for i in range(400)}
    write_bundle(tmp_path / "many", arrays.items())
    tensorflow("read", tmp_path / "many", tmp_path / "found.npz")
    found = np.load(tmp_path / "found.npz")
    assert all(np.array_equal(found[name], array) for name, array in arrays.items())
