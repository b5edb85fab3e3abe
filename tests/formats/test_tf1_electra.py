"""TensorFlow 1 checkpoints of ELECTRA become a discriminator's folder with its generator's inside."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch.testing import assert_close
from variants import randomise

from bertsmith.conversion import Options, convert
from bertsmith.errors import UserError
from bertsmith.formats.hf import load_folder
from bertsmith.formats.tensor_bundle import write_bundle
from bertsmith.formats.tf1_convert import tf1_to_hf
from bertsmith.objectives.replaced_token import ReplacedToken
from bertsmith.objectives.settings import ReplacedTokenConfig

for library in ("google_crc32c", "cramjam"):
    pytest.importorskip(library, reason="of the extra tf1")
pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"intermediate_size": 96, "max_position_embeddings": 40, "type_vocab_size": 2}
SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 1, **SIZES}  # 1 head for each 64
BASE = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, **SIZES}


def tf_name(name: str, scope: str, tables: str) -> str:
    """The released code's name of a weight of `transformers`, by rules instead of a table."""
    name = re.sub(r"LayerNorm\.weight$", "LayerNorm.gamma", name)
    name = re.sub(r"LayerNorm\.bias$", "LayerNorm.beta", name)
    name = re.sub(r"_embeddings\.weight$", "_embeddings", name)
    name = name.replace("generator_lm_head.bias", "generator_predictions.output_bias")
    name = name.replace("dense_prediction", "dense_1")
    name = re.sub(r"^electra\.embeddings\.", f"{tables}.embeddings.", name)
    name = re.sub(r"^electra\.(encoder|embeddings_project)\b", rf"{scope}.\1", name)
    return re.sub(r"\.weight$", ".kernel", name).replace("layer.", "layer_").replace(".", "/")


def variables_of(model, scope: str = "electra", tables: str = "electra") -> dict[str, np.ndarray]:
    """The variables that TensorFlow would hold for a model of `transformers`."""
    state = {n: v.numpy() for n, v in model.state_dict().items() if n != "generator_lm_head.weight"}
    names = {name: tf_name(name, scope, tables) for name in state}
    return {names[n]: value.T if names[n].endswith("/kernel") else value for n, value in state.items()}


def make(kind: str, vocab_size: int, seed: int, **sizes):
    architecture = getattr(transformers, f"ElectraFor{kind}")
    config = transformers.ElectraConfig(vocab_size=vocab_size, **{"embedding_size": 48, **SMALL, **sizes})
    return randomise(architecture(config), seed).eval()


def released(folder: Path, variables: dict[str, np.ndarray], tokenizer, name: str = "electra_small") -> Path:
    """Write a folder in the released layout, which has no file of settings, with what training leaves behind."""
    folder.mkdir()
    slots = {
        f"{n}/adam_{m}": np.zeros_like(v) for n, v in variables.items() for m in "mv" if n.startswith("electra/enc")
    }
    extra = {**slots, "global_step": np.array(7, np.int64)}
    write_bundle(folder / name, sorted({**variables, **extra}.items()))
    (folder / "vocab.txt").write_bytes(tokenizer.files()["vocab.txt"])
    return folder


def share_embeddings(model, other) -> None:
    """Give a generator the tables and the norm of its discriminator."""
    model.electra.embeddings.load_state_dict(other.electra.embeddings.state_dict())


@torch.no_grad()
def same(folder: Path, model) -> None:
    """`transformers` opens the folder without a missing weight and computes the same; so do we."""
    other, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    tokens = torch.arange(36).view(4, 9) % 90 + 5
    inputs = {"input_ids": tokens, "token_type_ids": tokens % 2}
    assert_close(other.eval()(**inputs).to_tuple(), model(**inputs).to_tuple(), atol=0, rtol=0)
    loaded = load_folder(folder)
    own = dict(model.named_parameters())["electra.encoder.layer.1.output.dense.weight"]
    assert torch.equal(loaded.model.encoder.layers[1].feed_forward.outer.weight, own)
    assert loaded.model.encoder.config.num_heads == model.config.num_attention_heads


@pytest.mark.parametrize(
    ("sizes", "generator_sizes", "untied"),
    [
        (SMALL, SMALL, False),  # as electra_small, whose generator has the size of the discriminator
        ({**BASE, "embedding_size": 128}, SMALL | {"embedding_size": 128}, False),  # as electra_base
        (SMALL, SMALL | {"embedding_size": 64}, True),
    ],
    ids=["small", "base", "untied embeddings"],
)
def test_discriminator_and_generator_become_folders(sizes, generator_sizes, untied, tmp_path, tiny_tokenizer):
    discriminator = make("PreTraining", tiny_tokenizer.vocab_size, 1, **sizes)
    generator = make("MaskedLM", tiny_tokenizer.vocab_size, 2, **generator_sizes)
    if not untied:
        share_embeddings(generator, discriminator)
    of_generator = variables_of(generator, "generator", "generator" if untied else "electra")
    variables = {**of_generator, **variables_of(discriminator)}
    report = tf1_to_hf(released(tmp_path / "electra_uncased", variables, tiny_tokenizer), tmp_path / "hf")
    same(tmp_path / "hf", discriminator)
    same(tmp_path / "hf" / "generator", generator)
    parts = {
        "discriminator": load_folder(tmp_path / "hf").model,
        "generator": load_folder(tmp_path / "hf/generator").model,
    }
    continued = ReplacedToken.of_parts(ReplacedTokenConfig(tied_embeddings=not untied), parts)
    assert continued.generator.encoder.config.num_layers == generator.config.num_hidden_layers
    convert(tmp_path / "hf", tmp_path / "half", "hf", Options(dtype="bfloat16"))
    half = load_folder(tmp_path / "half" / "generator").model.encoder.embeddings.tokens.weight
    assert_close(half, generator.electra.embeddings.word_embeddings.weight, atol=2e-3, rtol=1e-2)
    assert report["architecture"] == "ElectraForPreTraining"
    assert report["beside"]["generator"]["architecture"] == "ElectraForMaskedLM"
    assert (report["left_out"], report["missing"], report["ignored"]["counters"]) == ([], [], 1)
    assert report["ignored"]["optimiser slots"] > 10
    assert any("attention head has 64 dimensions" in note for note in report["notes"])
    assert json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())["do_lower_case"] is True


def test_a_model_of_masked_words_alone_and_a_fine_tuned_one(tmp_path, tiny_tokenizer):
    model = make("MaskedLM", tiny_tokenizer.vocab_size, 3)
    variables = variables_of(model)
    convert(released(tmp_path / "mlm", variables, tiny_tokenizer), tmp_path / "a", verify=True)
    same(tmp_path / "a", model)
    assert not (tmp_path / "a" / "generator").exists()
    tuned = {n: v for n, v in variables.items() if not n.startswith("generator_predictions")}
    tuned["task_specific/cola/dense/kernel"] = np.ones((64, 2), np.float32)
    report = tf1_to_hf(released(tmp_path / "tuned", tuned, tiny_tokenizer), tmp_path / "b")
    assert (report["architecture"], report["left_out"]) == ("ElectraModel", ["task_specific/cola/dense/kernel"])


def test_settings_beside_the_checkpoint_are_used_and_have_to_agree(tmp_path, tiny_tokenizer):
    model = make("PreTraining", tiny_tokenizer.vocab_size, 4, num_attention_heads=4, hidden_act="relu")
    source = released(tmp_path / "own", variables_of(model), tiny_tokenizer)
    (source / "bert_config.json").write_text(json.dumps({"num_attention_heads": 4, "hidden_act": "relu"}))
    tf1_to_hf(source, tmp_path / "hf")
    same(tmp_path / "hf", model)
    (source / "bert_config.json").write_text(json.dumps({"hidden_size": 256}))
    with pytest.raises(UserError, match="has hidden_size = 64, and the settings beside it say 256"):
        tf1_to_hf(source, tmp_path / "other")


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ("electra/encoder/layer_1/output/dense/kernel", "lacks electra/encoder/layer_1/output/dense/kernel"),
        ("discriminator_predictions/dense_1/bias", "lacks discriminator_predictions/dense_1/bias"),
        ("electra/embeddings/word_embeddings", "a part of an ELECTRA: electra/embeddings is missing"),
    ],
)
def test_incomplete_checkpoints_are_refused(lost, words, tmp_path, tiny_tokenizer):
    variables = variables_of(make("PreTraining", tiny_tokenizer.vocab_size, 5))
    del variables[lost]
    with pytest.raises(UserError, match=words):
        tf1_to_hf(released(tmp_path / "tf", variables, tiny_tokenizer), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
