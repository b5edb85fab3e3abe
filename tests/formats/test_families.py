"""A family is a table of names, storage, settings and refusals: a made-up family needs its table and no code."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from variants import randomise

from bertsmith.batch import lay_out
from bertsmith.config import from_dict, override, to_dict
from bertsmith.errors import UserError
from bertsmith.formats.families.bert import FIELDS, FIXED
from bertsmith.formats.families.table import FAMILIES, family_of
from bertsmith.formats.family import Family, Field, Output
from bertsmith.formats.hf import Notes, load_folder, save_folder
from bertsmith.formats.saved_config import config_in, config_out
from bertsmith.formats.storage import Stored
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.objectives.settings import MaskedLMConfig
from bertsmith.recipes import recipe

pytestmark = pytest.mark.usefixtures("one_thread")


def turned(name: str) -> Stored:
    return Stored((name,), transposed=True)


LAYER = "turned.h.{i}"
WORDS = {
    "masked_lm.transform.*": turned("words.dense.*"),
    "masked_lm.norm.*": "words.norm.*",
    "masked_lm.decoder.bias": "words.bias",
}
TURNED = Family(
    model_type="turned",
    prefix="turned.",
    encoder_class="TurnedModel",
    encoder={
        "encoder.embeddings.tokens.weight": Stored(("turned.wte.weight",), tied=("words.out.weight",)),
        "encoder.embeddings.segments.weight": "turned.segments.weight",
        "encoder.embeddings.positions.weight": Stored(("turned.wpe.weight",), pad_rows=True),
        "encoder.embeddings.norm.*": "turned.ln_0.*",
        "encoder.layers.{i}.attention.qkv.*": turned(f"{LAYER}.c_attn.*"),  # fused
        "encoder.layers.{i}.attention.output.*": turned(f"{LAYER}.c_proj.*"),
        "encoder.layers.{i}.attention_norm.*": f"{LAYER}.ln_1.*",
        "encoder.layers.{i}.feed_forward.inner.*": Stored((f"{LAYER}.up_a.*", f"{LAYER}.up_b.*"), transposed=True),
        "encoder.layers.{i}.feed_forward.outer.*": turned(f"{LAYER}.down.*"),
        "encoder.layers.{i}.feed_forward_norm.*": f"{LAYER}.ln_2.*",
    },
    outputs={
        "masked_lm": Output("TurnedForMaskedLM", WORDS),
        "single": Output(
            "TurnedForSequenceClassification",
            {"head.pooler.dense.*": "pool.*", "head.output.*": turned("score.*")},
        ),
    },
    fields={
        **FIELDS,
        "num_layers": Field(("n_layer",)),
        "hidden_dropout": Field(("resid_pdrop", "embd_pdrop")),
        "activation": Field(("afn",), values={"gelu_tanh": "gelu", "relu": "relu"}, aliases={"gelu_new": "gelu_tanh"}),
        "bias": Field(("use_bias",)),
    },
    fixed={**FIXED, "n_special": 0},
    defaults={"activation": "gelu_tanh"},
    reasons={
        "norm_first": "turned models normalise after each sublayer",
        "activation": "turned models know two activations",
    },
)
GROUP = "shared.groups.0.layers.0"
SHARED = replace(
    TURNED,
    model_type="shared",
    prefix="shared.",
    encoder_class="SharedModel",
    encoder={
        "encoder.embeddings.tokens.weight": Stored(("shared.words.weight",), tied=("words.out.weight",)),
        "encoder.embeddings.norm.*": "shared.norm.*",
        "encoder.embeddings.projection.*": "shared.mapping.*",
        "encoder.layers.{i}.attention.qkv.*": Stored((f"{GROUP}.query.*", f"{GROUP}.key.*", f"{GROUP}.value.*")),
        "encoder.layers.{i}.attention.output.*": f"{GROUP}.dense.*",
        "encoder.layers.{i}.attention_norm.*": f"{GROUP}.norm.*",
        "encoder.layers.{i}.feed_forward.inner.*": Stored((f"{GROUP}.wi.*", f"{GROUP}.gate.*")),
        "encoder.layers.{i}.feed_forward.outer.*": f"{GROUP}.wo.*",
        "encoder.layers.{i}.feed_forward_norm.*": f"{GROUP}.full_norm.*",
    },
    fields={
        **{name: field for name, field in TURNED.fields.items() if name != "num_segments"},
        "embedding_size": Field(("embedding_size",)),
        "rotary_base": Field(("rope_theta",)),
    },
    defaults={"shared_layers": "all", "gated": True, "positions": "rotary", "num_segments": 0},
    reasons={"shared_layers": "all layers of shared models have the same weights"},
)


@pytest.fixture
def made_up(monkeypatch):
    monkeypatch.setitem(FAMILIES, "turned", TURNED)
    monkeypatch.setitem(FAMILIES, "shared", SHARED)


def encoder_config(vocab_size: int = 99, **changes) -> EncoderConfig:
    sizes = {"max_positions": 32, "activation": "gelu_tanh", "family": "turned"}
    return EncoderConfig(vocab_size, 64, 2, 4, 128, **{**sizes, **changes})


def make_model(kind: str, config: EncoderConfig):
    encoder = Encoder(config)
    head = HeadConfig("single", ("good", "bad"))
    return randomise(
        MaskedLM(encoder, MaskedLMConfig(next_sentence=False)) if kind == "masked_lm" else TaskModel(encoder, head)
    ).eval()


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("kind", ["masked_lm", "single"])
def test_a_made_up_family_is_loaded_bit_identical(kind, bias, made_up, tmp_path, tiny_tokenizer):
    model = make_model(kind, encoder_config(tiny_tokenizer.vocab_size, bias=bias))
    save_folder(tmp_path, model, tiny_tokenizer, Notes())
    loaded = load_folder(tmp_path)
    assert (loaded.missing, loaded.model.encoder.config) == ((), model.encoder.config)
    assert_close(loaded.model.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_weights_are_stored_as_the_table_says(made_up, tmp_path, tiny_tokenizer):
    model = make_model("masked_lm", encoder_config(tiny_tokenizer.vocab_size, bias=False))
    save_folder(tmp_path, model, tiny_tokenizer, Notes())
    saved, ours = load_file(tmp_path / "model.safetensors"), model.state_dict()
    layer = "encoder.layers.1"
    assert torch.equal(saved["turned.h.1.c_attn.weight"], ours[f"{layer}.attention.qkv.weight"].T)
    first, second = ours[f"{layer}.feed_forward.inner.weight"].chunk(2)
    assert torch.equal(saved["turned.h.1.up_a.weight"], first.T)
    assert torch.equal(saved["turned.h.1.up_b.weight"], second.T)
    positions, unused = saved["turned.wpe.weight"], model.encoder.config.pad_token_id + 1
    assert torch.equal(positions[unused:], ours["encoder.embeddings.positions.weight"])
    assert not positions[:unused].any()
    assert "words.out.weight" not in saved  # tied to the embeddings
    assert not [name for name in saved if name.startswith("turned.") and name.endswith("bias")]


def test_a_table_describes_shared_layers_and_factorised_embeddings(made_up, tmp_path, tiny_tokenizer):
    shape = {**SHARED.defaults, "embedding_size": 32, "rotary_base": 500.0, "num_layers": 3}
    config = replace(encoder_config(tiny_tokenizer.vocab_size), family="shared", **shape)
    model = make_model("masked_lm", config)
    save_folder(tmp_path, model, tiny_tokenizer, Notes())
    saved, loaded = load_file(tmp_path / "model.safetensors"), load_folder(tmp_path).model.eval()
    assert {name for name in saved if "groups" in name and not name.startswith(GROUP)} == set()
    assert loaded.encoder.config == config
    assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    batch = lay_out(np.arange(5, 25), np.zeros(20, np.int64), np.full(2, 10), packed=False)
    assert torch.equal(loaded.encoder(batch), model.encoder(batch))
    with pytest.raises(UserError, match=r"shared_layers=none: all layers of shared models have the same weights"):
        family_of(replace(config, shared_layers="none"))


def test_config_has_the_family_s_names_and_values(made_up, tmp_path, tiny_tokenizer):
    config = encoder_config(tiny_tokenizer.vocab_size, hidden_dropout=0.2)
    save_folder(tmp_path, make_model("single", config), tiny_tokenizer, Notes())
    values = json.loads((tmp_path / "config.json").read_text())
    expected = {"architectures": ["TurnedForSequenceClassification"], "model_type": "turned", "n_layer": 2}
    expected |= {"afn": "gelu", "resid_pdrop": 0.2, "embd_pdrop": 0.2, "use_bias": True, "max_position_embeddings": 33}
    assert {name: values[name] for name in expected} == expected
    assert not {"num_hidden_layers", "hidden_act", "hidden_dropout_prob"} & values.keys()

    def refused(words: str, **changes) -> None:
        (tmp_path / "config.json").write_text(json.dumps({**values, **changes}))
        with pytest.raises(UserError, match=words):
            load_folder(tmp_path)

    refused("resid_pdrop and embd_pdrop have different values", embd_pdrop=0.1)
    refused("afn 'silu' is not one of gelu, relu, gelu_new", afn="silu")
    refused("n_special = 1 is not supported; only 0 is", n_special=1)
    refused("unknown key 'hidden_act'", hidden_act="gelu")
    refused("the weights lack turned.h.2.c_attn.weight; fix n_layer", n_layer=3)
    refused("the weights have a layer 1, which config.json does not; fix n_layer", n_layer=1)


def test_an_encoder_without_head_and_a_tied_weight_are_loaded(made_up, tmp_path, tiny_tokenizer):
    model = make_model("masked_lm", encoder_config(tiny_tokenizer.vocab_size))
    save_folder(tmp_path, model, tiny_tokenizer, Notes())
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    tied = {"words.out.weight" if name == "turned.wte.weight" else name: value for name, value in whole.items()}
    save_file(tied, path)
    assert_close(load_folder(tmp_path).model.state_dict(), model.state_dict(), rtol=0, atol=0)
    save_file({n.removeprefix("turned."): value for n, value in whole.items() if n.startswith("turned.")}, path)
    alone = load_folder(tmp_path)
    assert_close(alone.model.encoder.state_dict(), model.encoder.state_dict(), rtol=0, atol=0)
    assert "masked_lm.transform.weight" in alone.missing


def test_settings_that_a_family_lacks_are_refused_with_the_reason(made_up, tmp_path, tiny_tokenizer):
    refused = encoder_config(tiny_tokenizer.vocab_size, norm_first=True)
    reason = (
        "model.norm_first=true: turned models normalise after each sublayer; set model.norm_first=false, or "
        "model.family=roberta-prelayernorm or modernbert"
    )
    with pytest.raises(UserError) as caught:
        save_folder(tmp_path / "folder", make_model("masked_lm", refused), tiny_tokenizer, Notes())
    assert str(caught.value) == reason
    with pytest.raises(UserError, match=r"activation=silu: turned models know two activations; set .*=gelu_tanh, or"):
        family_of(replace(refused, norm_first=False, activation="silu"))
    with pytest.raises(UserError, match="direction=right-to-left: turned models have no such setting in transformers"):
        family_of(replace(refused, norm_first=False, direction="right-to-left"))
    model = TaskModel(Encoder(encoder_config(tiny_tokenizer.vocab_size)), HeadConfig("span"))
    with pytest.raises(UserError, match=r"model\.family turned: transformers has no class of it for span"):
        save_folder(tmp_path / "folder", model, tiny_tokenizer, Notes())


def test_settings_that_do_not_fit_the_family_are_refused_before_a_run():
    with pytest.raises(UserError, match=r"norm_first=true: the family bert .* or model.family=roberta-prelayernorm"):
        override(recipe("bert-tiny"), ["model.norm_first=true"])
    with pytest.raises(UserError, match=r"model.num_segments=0: BertModel needs a table of segments"):
        family_of(replace(encoder_config(), family="bert", num_segments=0))
    with pytest.raises(UserError, match=r"'robert' is not one of bert, roberta, .*; did you mean 'roberta'"):
        override(recipe("bert-tiny"), ["model.family=robert"])
    changes = ["model.norm_first=true", "model.family=roberta-prelayernorm"]
    assert override(recipe("bert-tiny"), changes).model.norm_first
    assert override(recipe("quickstart"), ["model.norm_first=false", "model.family=bert"]).model.family == "bert"


@pytest.mark.parametrize(("norm_first", "family"), [(False, "bert"), (True, "roberta-prelayernorm")])
def test_a_configuration_without_family_gets_it_from_norm_first(norm_first, family):
    values = {name: value for name, value in to_dict(EncoderConfig(norm_first=norm_first)).items() if name != "family"}
    assert from_dict(EncoderConfig, values).family == family


def test_the_activation_of_the_head_is_the_family_s() -> None:
    pre_norm = ["model.activation=relu", "model.norm_first=true", "model.family=roberta-prelayernorm"]
    with pytest.raises(UserError, match=r"head_activation=null: RobertaPreLayerNorm.*; set model.head_activation=gelu"):
        override(recipe("bert-tiny"), pre_norm)
    assert override(recipe("bert-tiny"), [*pre_norm, "model.head_activation=gelu"]).model.head_activation == "gelu"
    with pytest.raises(UserError, match=r"head_activation=gelu: BertForMaskedLM .*; set model.head_activation=null"):
        override(recipe("bert-tiny"), ["model.activation=relu", "model.head_activation=gelu"])


def test_a_modernbert_whose_layers_are_all_global_is_read_as_it_was_saved(tmp_path) -> None:
    small = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "vocab_size": 40}
    small |= {"pad_token_id": 0, "max_positions": 32}
    local = replace(recipe("modern-tiny").model, **small)
    for config in (local, replace(local, window=None, global_every=1, local_rotary_base=None)):
        assert config_in(config_out(MaskedLM(Encoder(config), MaskedLMConfig(next_sentence=False))), tmp_path) == config
