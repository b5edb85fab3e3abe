"""Folders of ALBERT, of RoBERTa, and of BERTs with factorised embeddings: sharing, old fields, names of their own."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from variants import ALBERT, THEIR_ALBERT, make, randomise, their_model

from bertsmith.batch import lay_out
from bertsmith.errors import UserError
from bertsmith.formats.hf import Notes, load_folder, save_folder

pytestmark = pytest.mark.usefixtures("one_thread")
BATCH = lay_out(np.arange(36) % 90 + 5, np.arange(36) % 2, np.full(4, 9), packed=False)
BATCH.labels["masked"] = torch.arange(36)
INPUTS = {"input_ids": BATCH.tokens, "token_type_ids": BATCH.segments}
# config.json of albert-base-v2 and roberta-base as they are released, with smaller sizes.
ALBERT_V2 = {
    "attention_probs_dropout_prob": 0,
    "bos_token_id": 2,
    "classifier_dropout_prob": 0.1,
    "down_scale_factor": 1,
    "embedding_size": 24,
    "eos_token_id": 3,
    "gap_size": 0,
    "hidden_act": "gelu_new",
    "hidden_dropout_prob": 0,
    "initializer_range": 0.02,
    "inner_group_num": 1,
    "layer_norm_eps": 1e-12,
    "layers_to_keep": [],
    "model_type": "albert",
    "net_structure_type": 0,
    "num_hidden_groups": 1,
    "num_memory_blocks": 0,
    "pad_token_id": 0,
    "type_vocab_size": 2,
}
ROBERTA_BASE = {
    "attention_probs_dropout_prob": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-05,
    "model_type": "roberta",
    "pad_token_id": 0,
    "type_vocab_size": 2,
}


def edit(folder: Path, **changes) -> None:
    """Change fields of a configuration; None removes one."""
    values = {**json.loads((folder / "config.json").read_text()), **changes}
    values = {name: value for name, value in values.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values))


def rename(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    save_file({change(name): value for name, value in load_file(path).items()}, path, metadata={"format": "pt"})


@torch.no_grad()
def same_logits(folder: Path, theirs) -> None:
    """Assert that a folder of ours gives the logits of a model of `transformers`."""
    loaded, expected = load_folder(folder), theirs.eval()(**INPUTS)
    assert loaded.missing == ()
    ours = loaded.model.eval().logits(BATCH)
    if isinstance(ours, dict):
        ours, expected = ours["mlm"].view(4, 9, -1), expected["logits" if "logits" in expected else "prediction_logits"]
    else:
        expected = expected.logits
    assert_close(ours, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["mlm", "single"])
@pytest.mark.parametrize("sharing", ["all", "attention", "feed-forward"])
@pytest.mark.parametrize("family", ["albert", "bert", "roberta"])
def test_shared_layers_are_saved_for_transformers_and_read_back(family, sharing, kind, tmp_path, tiny_tokenizer):
    given = {**(ALBERT if family == "albert" else {"family": family}), "shared_layers": sharing, "num_layers": 3}
    loaded = make(kind, tiny_tokenizer, **given)
    save_folder(tmp_path, loaded.model, tiny_tokenizer, Notes())
    auto = "AutoModelForMaskedLM" if kind == "mlm" else "AutoModelForSequenceClassification"
    theirs, info = getattr(transformers, auto).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    same_logits(tmp_path, theirs)
    again = load_folder(tmp_path).model
    assert again.encoder.config == loaded.model.encoder.config
    assert_close(again.state_dict(), loaded.model.state_dict(), atol=0, rtol=0)
    layers = {name for name in load_file(tmp_path / "model.safetensors") if re.search(r"query\.weight", name)}
    assert len(layers) == (1 if (family, sharing) == ("albert", "all") else 3)


def test_shared_layers_that_differ_are_refused(tmp_path, tiny_tokenizer):
    loaded = make("mlm", tiny_tokenizer, **ALBERT, shared_layers="attention", num_layers=3)
    save_folder(tmp_path, loaded.model, tiny_tokenizer, Notes())
    weights = load_file(tmp_path / "model.safetensors")
    key = "albert.encoder.albert_layer_groups.1.albert_layers.0.attention.key.weight"
    changed = {**weights, key: weights[key] + 1}
    save_file(changed, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=rf"{key} differs from .*groups\.0.*; .* set shared_layers to none"):
        load_folder(tmp_path)
    edit(tmp_path, shared_layers="none")
    assert load_folder(tmp_path).model.encoder.config.shared_layers == "none"
    save_file({name: value for name, value in weights.items() if name != key}, tmp_path / "model.safetensors")
    edit(tmp_path, shared_layers="attention")
    with pytest.raises(UserError, match=f"the weights lack {key}"):
        load_folder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_groups": 2}, "num_hidden_groups 2 is not supported; 1 is, where all layers .*, and 3, where"),
        ({"num_hidden_groups": 1, "shared_layers": "attention"}, "num_hidden_groups 1 with shared_layers attention"),
        ({"inner_group_num": 2}, "inner_group_num = 2 is not supported; only 1 is"),
        ({"num_hidden_groups": 3}, "the weights lack .*groups.2.*; fix num_hidden_groups"),
        ({"is_decoder": True}, "is_decoder = True is not supported"),
        ({"classifier_dropout_prob": 2}, "classifier_dropout_prob must be at least 0 and under 1, not 2"),
    ],
)
def test_configurations_that_we_do_not_compute_are_refused(changes, reason, tmp_path, tiny_tokenizer):
    their_model("albert", "single", tiny_tokenizer.vocab_size).save_pretrained(tmp_path)
    tiny_tokenizer.save(tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(UserError, match=reason):
        load_folder(tmp_path)


@pytest.mark.parametrize(("variant", "released"), [("albert", ALBERT_V2), ("roberta", ROBERTA_BASE)])
def test_fields_of_released_configurations_are_read_and_kept(variant, released, tmp_path, tiny_tokenizer):
    theirs = their_model(variant, "mlm", tiny_tokenizer.vocab_size, **released)
    theirs.save_pretrained(tmp_path)
    sizes = json.loads((tmp_path / "config.json").read_text())
    needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    values = {**released, **{name: sizes[name] for name in (*needed, "max_position_embeddings", "architectures")}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    tiny_tokenizer.save(tmp_path)
    same_logits(tmp_path, theirs)
    loaded = load_folder(tmp_path)
    save_folder(tmp_path / "again", loaded.model, loaded.tokenizer, loaded.notes)
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert {name: again.get(name) for name in values if name != "inner_group_num"} == {
        name: value for name, value in values.items() if name != "inner_group_num"
    }
    edit(tmp_path, model_type=None, architectures=None if variant == "albert" else values["architectures"])
    same_logits(tmp_path, theirs)


@pytest.mark.parametrize("family", ["xlm-roberta", "camembert"])
def test_other_families_of_roberta_stay_what_they_are(family, tmp_path, tiny_tokenizer):
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=tiny_tokenizer.vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=41,
        pad_token_id=0,
    )
    theirs = randomise(transformers.AutoModelForMaskedLM.from_config(config))
    theirs.save_pretrained(tmp_path)
    tiny_tokenizer.save(tmp_path)
    same_logits(tmp_path, theirs)
    loaded = load_folder(tmp_path)
    save_folder(tmp_path / "again", loaded.model, loaded.tokenizer, loaded.notes)
    assert type(transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "again")) is type(theirs)


def bert_name(name: str) -> str:
    """BERT's name of a weight of ALBERT."""
    name = re.sub(r"albert_layer_groups\.(\d)\.albert_layers\.0", r"layer.\1", name).replace("albert.", "bert.")
    name = re.sub(r"attention\.(query|key|value)", r"attention.self.\1", name)
    name = re.sub(r"attention\.(dense|LayerNorm)", r"attention.output.\1", name)
    name = name.replace(".ffn.", ".intermediate.dense.").replace(".ffn_output.", ".output.dense.")
    name = name.replace("full_layer_layer_norm", "output.LayerNorm").replace("bert.pooler.", "bert.pooler.dense.")
    name = re.sub(r"^predictions\.(dense|LayerNorm)", r"cls.predictions.transform.\1", name)
    name = re.sub(r"^predictions\.bias", "cls.predictions.bias", name)
    return name.replace("sop_classifier.classifier", "cls.seq_relationship")


@pytest.mark.parametrize("projection", ["embeddings_project", "encoder.embedding_hidden_mapping_in"])
@pytest.mark.parametrize("kind", ["mlm+nsp", "single"])
def test_a_bert_with_a_projection_of_its_embeddings_is_read_as_albert(kind, projection, tmp_path, tiny_tokenizer):
    theirs = their_model("albert without sharing", kind, tiny_tokenizer.vocab_size)
    theirs.save_pretrained(tmp_path)
    tiny_tokenizer.save(tmp_path)
    rename(tmp_path, lambda n: bert_name(n).replace("encoder.embedding_hidden_mapping_in", projection))
    names = load_file(tmp_path / "model.safetensors")
    assert {"bert.encoder.layer.2.output.dense.weight", f"bert.{projection}.bias"} <= names.keys()
    (name,) = json.loads((tmp_path / "config.json").read_text())["architectures"]
    fields = dict.fromkeys(("num_hidden_groups", "inner_group_num", "classifier_dropout_prob"))
    edit(tmp_path, model_type="bert", architectures=[name.replace("Albert", "Bert")], **fields)
    same_logits(tmp_path, theirs)
    config = load_folder(tmp_path).model.encoder.config
    assert (config.family, config.embedding_size, config.shared_layers) == ("albert", 24, "none")
    rename(tmp_path, lambda n: n.removeprefix("bert."))  # the encoder alone
    encoder = load_folder(tmp_path).model.eval().encoder
    assert_close(encoder(BATCH), theirs.base_model(**INPUTS).last_hidden_state, atol=1e-5, rtol=0)


@pytest.mark.parametrize("sharing", ["all", "attention", "ffn", "none"])
def test_a_bert_with_a_product_as_its_table_of_tokens_is_read_as_bert(sharing, tmp_path, tiny_tokenizer):
    parts = {"all": ("attention", "intermediate", "output"), "attention": ("attention",), "none": ()}
    shared = parts.get(sharing, ("intermediate", "output"))
    theirs = their_model("bert", "mlm+nsp", tiny_tokenizer.vocab_size)
    state, saved = theirs.state_dict(), {}
    narrow, wide = torch.randn(len(state["cls.predictions.bias"]), 24), 0.2 * torch.randn(64, 24)
    state["bert.embeddings.word_embeddings.weight"].copy_(narrow @ wide.T)
    for name, value in state.items():
        if match := re.fullmatch(r"bert\.encoder\.layer\.(\d)\.(attention|intermediate|output)\.(.*)", name):
            layer, part, rest = match.groups()
            value.copy_(state[name.replace(f"layer.{layer}", "layer.0")] if part in shared else value)
            place = f"{part}." if part in shared else f"{part}.{layer}."
            name = name if sharing == "none" else f"bert.encoder.layer_shared.{place}{rest}"
        saved[name] = value.clone()
    saved["bert.embeddings.word_embeddings.weight"], saved["bert.embeddings.word_embeddings_2.weight"] = narrow, wide
    saved["cls.predictions.decoder.weight"] = torch.randn(narrow.shape)  # such files hold untrained ones
    saved["cls.predictions.project_layer.weight"] = torch.randn(24, 64)
    theirs.config.save_pretrained(tmp_path)
    save_file(saved, tmp_path / "model.safetensors")
    tiny_tokenizer.save(tmp_path)
    edit(tmp_path, model_type=None, architectures=None, embedding_size=24, ln_type="postln", share_type=sharing)
    same_logits(tmp_path, theirs)
    config = load_folder(tmp_path).model.encoder.config
    assert config == replace(config, family="bert", embedding_size=None)
    assert config.shared_layers == {"ffn": "feed-forward"}.get(sharing, sharing)
    edit(tmp_path, ln_type="preln")
    with pytest.raises(UserError, match="ln_type = 'preln' is not supported"):
        load_folder(tmp_path)


def test_the_dropout_of_a_head_is_a_field_of_albert(tmp_path, tiny_tokenizer):
    values = {**THEIR_ALBERT, "classifier_dropout_prob": 0.3}
    their_model("albert", "single", tiny_tokenizer.vocab_size, **values).save_pretrained(tmp_path)
    tiny_tokenizer.save(tmp_path)
    loaded = load_folder(tmp_path)
    assert loaded.model.head_config.dropout == 0.3
    save_folder(tmp_path / "again", loaded.model, loaded.tokenizer, loaded.notes)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["classifier_dropout_prob"] == 0.3
