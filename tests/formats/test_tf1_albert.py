"""TensorFlow 1 checkpoints of ALBERT, of a BERT with factorised embeddings and of albert_zh, in their own names."""

import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch.testing import assert_close
from variants import randomise, their_model

from bertsmith.batch import lay_out
from bertsmith.conversion import convert
from bertsmith.errors import UserError
from bertsmith.formats.hf import load_folder
from bertsmith.formats.tensor_bundle import read_index, read_tensor, write_bundle
from bertsmith.formats.tf1 import is_checkpoint, read_checkpoint
from bertsmith.formats.tf1_convert import tf1_to_hf

pytestmark = pytest.mark.usefixtures("one_thread")
LAYERS = 3
SETTINGS = {
    "attention_probs_dropout_prob": 0,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0,
    "embedding_size": 24,
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "max_position_embeddings": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": LAYERS,
    "type_vocab_size": 2,
}
GOOGLE = {  # what else the released albert_config.json holds
    "num_hidden_groups": 1,
    "inner_group_num": 1,
    "net_structure_type": 0,
    "gap_size": 0,
    "num_memory_blocks": 0,
    "down_scale_factor": 1,
}

COMMON = [  # names of `transformers` and the released code's, outside the layers
    (r"LayerNorm\.weight$", "LayerNorm.gamma"),
    (r"LayerNorm\.bias$", "LayerNorm.beta"),
    (r"_embeddings\.weight$", "_embeddings"),
    (r"^albert\.", "bert."),
    (r"^bert\.pooler\.(weight|bias)", r"bert.pooler.dense.\1"),
    (r"^predictions\.(dense|LayerNorm)", r"cls.predictions.transform.\1"),
    (r"^(cls\.)?predictions\.bias", "cls.predictions.output_bias"),
    (r"^(sop_classifier\.classifier|cls\.seq_relationship)\.weight", "cls.seq_relationship.output_weights"),
    (r"^(sop_classifier\.classifier|cls\.seq_relationship)\.bias", "cls.seq_relationship.output_bias"),
    (r"^classifier\.weight", "output_weights"),
    (r"^classifier\.bias", "output_bias"),
    (r"\.weight$", ".kernel"),
]
ALBERT = [  # ALBERT's own names: the inverse of what the converter of `transformers` did
    (r"full_layer_layer_norm\.weight", "LayerNorm_1.gamma"),
    (r"full_layer_layer_norm\.bias", "LayerNorm_1.beta"),
    *COMMON,
    (r"albert_layer_groups\.(\d)\.albert_layers\.0\.", r"transformer.group_\1.inner_group_0."),
    (r"attention\.LayerNorm", "LayerNorm"),
    (r"ffn_output\.", "ffn_1.intermediate.output.dense."),
    (r"\.ffn\.", ".ffn_1.intermediate.dense."),
    (r"attention\.dense", "attention_1.output.dense"),
    (r"attention\.(query|key|value)", r"attention_1.self.\1"),
]
BERT = [  # BERT's names of ALBERT's weights
    (r"full_layer_layer_norm\.", "output.LayerNorm."),
    *COMMON,
    (r"albert_layer_groups\.(\d)\.albert_layers\.0\.", r"layer_\1."),
    (r"attention\.LayerNorm", "attention.output.LayerNorm"),
    (r"ffn_output\.", "output.dense."),
    (r"\.ffn\.", ".intermediate.dense."),
    (r"attention\.dense", "attention.output.dense"),
    (r"attention\.(query|key|value)", r"attention.self.\1"),
]
CHINESE = [(r"layer\.0\.", "layer_shared."), *COMMON]  # albert_zh's names of BERT's weights


def renamed(name: str, rules: list[tuple[str, str]]) -> str:
    """The variable of TensorFlow for a weight of `transformers`: every rule in turn."""
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name.replace(".", "/")


def variables(model, rules: list[tuple[str, str]]) -> dict[str, np.ndarray]:
    """The variables that TensorFlow would hold for a model of `transformers`."""
    state = {renamed(n, rules): value.numpy() for n, value in model.state_dict().items() if "decoder" not in n}
    return {name: value.T if name.endswith("/kernel") else value for name, value in state.items()}


def released(folder: Path, values: dict, settings: dict, tokenizer, config: str = "albert_config.json") -> Path:
    """Write a folder as it is released."""
    folder.mkdir()
    write_bundle(folder / "model.ckpt-best", sorted(values.items()))
    (folder / config).write_text(json.dumps({**settings, "vocab_size": tokenizer.vocab_size}))
    (folder / "vocab.txt").write_bytes(tokenizer.files()["vocab.txt"])
    return folder


@torch.no_grad()
def same_outputs(folder: Path, model) -> None:
    """Assert that `transformers` opens a folder with the outputs of a model, and that ours are equal."""
    other, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    batch = lay_out(np.arange(36) % 90 + 5, np.arange(36) % 2, np.full(4, 9), packed=False)
    inputs = {"input_ids": batch.tokens, "token_type_ids": batch.segments}
    expected = model.eval()(**inputs).to_tuple()
    assert_close(other.eval()(**inputs).to_tuple(), expected, atol=1e-6, rtol=0)
    batch.labels["masked"] = torch.arange(36)
    ours = load_folder(folder).model.eval().logits(batch)
    found = [ours["mlm"].view(4, 9, -1), ours["nsp"]] if isinstance(ours, dict) else [ours]
    assert_close(found, list(expected), atol=1e-5, rtol=0)


def written_back(work: Path, released: Path, variables: dict[str, np.ndarray]) -> None:
    """Assert that the folder `hf` becomes the released files again: the same names, values, settings and vocabulary."""
    report = convert(work / "hf", work / "back", "tf1", verify=True)
    assert report["parity"]["equal"]
    assert (report["left_out"], report["checkpoint"]) == ([], str(work / "back" / "model.ckpt-best"))
    entries = read_index(work / "back" / "model.ckpt-best")
    assert entries.keys() == variables.keys() - {"global_step"}
    for name, entry in entries.items():
        np.testing.assert_array_equal(read_tensor(name, entry), variables[name])
    old, new = (json.loads((folder / "albert_config.json").read_text()) for folder in (released, work / "back"))
    assert {**old, **new, "do_lower_case": True} == {**old, "do_lower_case": True}
    assert [
        (work / "back" / name).read_bytes() for name in ("vocab.txt", "spiece.model") if (work / "back" / name).exists()
    ] == [path.read_bytes() for path in (*released.glob("vocab.txt"), *released.glob("*.model"))]


def test_albert_as_google_released_it(tmp_path, tiny_tokenizer):
    model = their_model("albert", "mlm+nsp", tiny_tokenizer.vocab_size)
    saved = {**variables(model, ALBERT), "global_step": np.int64(7)}
    assert "bert/encoder/transformer/group_0/inner_group_0/ffn_1/intermediate/output/dense/kernel" in saved
    folder = released(tmp_path / "albert_base", saved, {**SETTINGS, **GOOGLE}, tiny_tokenizer)
    assert is_checkpoint(folder)
    report = tf1_to_hf(folder, tmp_path / "hf")
    assert (report["architecture"], report["left_out"], report["ignored"]) == (
        "AlbertForPreTraining",
        [],
        {"counters": 1},
    )
    same_outputs(tmp_path / "hf", model)
    written_back(tmp_path, folder, saved)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["hidden_act"] == "gelu_new"
    assert load_folder(tmp_path / "hf").model.encoder.config.shared_layers == "all"


def test_albert_of_tensorflow_hub_and_a_classifier(tmp_path, tiny_tokenizer):
    model = their_model("albert", "single", tiny_tokenizer.vocab_size)
    saved = {f"module/{name}": value for name, value in variables(model, ALBERT).items()}
    folder = released(tmp_path / "hub", saved, {**SETTINGS, **GOOGLE}, tiny_tokenizer, "albert_config_base.json")
    assert tf1_to_hf(folder, tmp_path / "hf")["architecture"] == "AlbertForSequenceClassification"
    same_outputs(tmp_path / "hf", model)


def test_bert_with_factorised_embeddings_becomes_albert_with_a_group_for_each_layer(tmp_path, tiny_tokenizer):
    model = their_model("albert without sharing", "mlm+nsp", tiny_tokenizer.vocab_size, hidden_act="gelu")
    saved = variables(model, BERT)
    assert {"bert/encoder/layer_2/output/dense/kernel", "bert/encoder/embedding_hidden_mapping_in/kernel"} <= {*saved}
    folder = released(tmp_path / "tiny", saved, SETTINGS, tiny_tokenizer, "bert_config.json")
    tf1_to_hf(folder, tmp_path / "hf")
    same_outputs(tmp_path / "hf", model)
    assert load_folder(tmp_path / "hf").model.encoder.config.shared_layers == "none"


def chinese(tokenizer) -> tuple[transformers.BertForPreTraining, dict[str, np.ndarray]]:
    """A model as albert_zh computes it, and its variables: a product of two tables, and one layer for all."""
    sizes = {name: value for name, value in SETTINGS.items() if name != "embedding_size"}
    config = transformers.BertConfig(**{**sizes, "vocab_size": tokenizer.vocab_size, "hidden_act": "gelu_new"})
    model = randomise(transformers.BertForPreTraining(config))
    narrow, wide = np.random.default_rng(0).normal(size=(config.vocab_size, 24)), np.eye(24, 64)
    state = model.state_dict()
    state["bert.embeddings.word_embeddings.weight"].copy_(torch.from_numpy(narrow @ wide))
    for name in [name for name in state if ".layer.0." in name]:
        for layer in range(1, LAYERS):
            state[name.replace(".layer.0.", f".layer.{layer}.")].copy_(state[name])
    own = variables(model, CHINESE)
    saved = {name: value for name, value in own.items() if "layer/" not in name}
    saved["bert/embeddings/word_embeddings"] = narrow.astype(np.float32)
    saved["bert/embeddings/word_embeddings_2"] = wide.astype(np.float32)
    return model, saved


def test_albert_zh_becomes_bert_with_equal_layers_and_the_product_of_its_tables(tmp_path, tiny_tokenizer):
    model, saved = chinese(tiny_tokenizer)
    settings = {**SETTINGS, "ln_type": "postln", "directionality": "bidi"}
    folder = released(tmp_path / "albert_tiny_zh", saved, settings, tiny_tokenizer, "albert_config_tiny.json")
    report = tf1_to_hf(folder, tmp_path / "hf")
    assert report["left_out"] == []
    same_outputs(tmp_path / "hf", model)
    opened = load_folder(tmp_path / "hf").model.encoder.config
    assert (opened.family, opened.shared_layers, opened.embedding_size) == ("bert", "all", None)
    (folder / "albert_config_tiny.json").write_text(
        json.dumps({**settings, "vocab_size": tiny_tokenizer.vocab_size, "ln_type": "preln"})
    )
    with pytest.raises(UserError, match="ln_type = 'preln' is not supported; only 'postln' is"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"inner_group_num": 2}, "inner_group_num = 2 is not supported; only 1 is"),
        ({"num_hidden_groups": 2}, "lacks bert/encoder/transformer/group_1/"),
        ({"embedding_size": 16}, r"word_embeddings .* has shape \(99, 24\).* embedding_size = 16"),
        ({"embedding_size": None}, "embedding_size must be a whole number"),
        ({"net_structur_type": 0}, "unknown key 'net_structur_type'; did you mean 'net_structure_type'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, reason, tmp_path, tiny_tokenizer):
    saved = variables(their_model("albert", "mlm+nsp", tiny_tokenizer.vocab_size), ALBERT)
    folder = released(tmp_path / "tf", saved, {**SETTINGS, **GOOGLE, **changes}, tiny_tokenizer)
    with pytest.raises(UserError, match=reason):
        tf1_to_hf(folder, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def field(number: int, value: bytes | int | float) -> bytes:
    """A field of a protocol buffer, for numbers under 128 and texts under 16,384 bytes."""
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    if isinstance(value, int):
        return bytes([number << 3, value])
    size = bytes([len(value)]) if len(value) < 128 else bytes([len(value) & 127 | 128, len(value) >> 7])
    return bytes([number << 3 | 2]) + size + value


def test_the_vocabulary_of_sentencepiece_is_taken_over(tmp_path):
    kinds = {"<pad>": 4, "<unk>": 2, "[CLS]": 4, "[SEP]": 4, "[MASK]": 4}
    words = [*kinds, *"▁ a b c d e ▁ab ▁abc de ▁cab".split()]
    data = b"".join(
        field(1, field(1, word.encode()) + field(2, -1.0 * i) + field(3, kinds.get(word, 1)))
        for i, word in enumerate(words)
    )
    model = their_model("albert", "mlm+nsp", len(words))
    folder = tmp_path / "albert_base"
    folder.mkdir()
    write_bundle(folder / "model.ckpt-best", sorted(variables(model, ALBERT).items()))
    (folder / "albert_config.json").write_text(json.dumps({**SETTINGS, **GOOGLE, "vocab_size": len(words)}))
    (folder / "30k-clean.model").write_bytes(data + field(2, field(3, 1)))
    report = tf1_to_hf(folder, tmp_path / "hf")
    assert report["do_lower_case"] is True
    loaded = load_folder(tmp_path / "hf")
    assert [loaded.tokenizer.token(i) for i in range(len(words))] == words
    assert loaded.tokenizer.kind == "unigram"
    (ids,) = loaded.tokenizer.encode(["ABC de"], special=True)
    assert [words[i] for i in ids] == ["[CLS]", "▁abc", "▁", "de", "[SEP]"]
    assert (tmp_path / "hf" / "spiece.model").read_bytes() == (folder / "30k-clean.model").read_bytes()
    written_back(tmp_path, folder, variables(model, ALBERT))
    (tmp_path / "hf" / "spiece.model").unlink()
    with pytest.raises(UserError, match=r"hf has no spiece\.model, which the released code reads"):
        convert(tmp_path / "hf", tmp_path / "none", "tf1")
    same_weights = type(model).from_pretrained(tmp_path / "hf").state_dict()
    assert_close(same_weights, model.state_dict(), atol=0, rtol=0)
