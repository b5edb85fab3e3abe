"""Folders of other programs: their settings are kept, and invalid values are refused fast, with a one-line error."""

import json
import os
import resource
import time
from pathlib import Path

import pytest
import torch
import transformers
from conftest import LABELS, reference
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from variants import ELECTRA, randomise

from bertsmith.config import read_json
from bertsmith.conversion import Options, convert
from bertsmith.errors import UserError
from bertsmith.extend import extend
from bertsmith.formats.hf import Notes, load_folder, save_folder
from bertsmith.formats.hub import find_model
from bertsmith.formats.sentence_folder import Pooling, read_pooling, write_pooling
from bertsmith.inference.embedder import Embedder
from bertsmith.inference.predictor import Predictor
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.objectives.settings import MaskedLMConfig
from bertsmith.text.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def saved(tmp_path, tiny_tokenizer):
    """Saves a small model of `transformers` as a folder."""

    def save(kind: str = "mlm", **changes) -> Path:
        reference(kind, tiny_tokenizer.vocab_size, **changes).save_pretrained(tmp_path / "theirs")
        tiny_tokenizer.save(tmp_path / "theirs")
        return tmp_path / "theirs"

    return save


def edit(path: Path, **changes) -> None:
    values = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**values, **changes}), encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        ('{"label": "\\ud800"}', "not valid JSON.*surrogates"),
        ('{"label": "\xff"}', "not valid JSON"),
        ("[]", "expected a JSON object, found list"),
    ],
    ids=["deep", "surrogate", "latin-1", "list"],
)
def test_invalid_json_is_an_error_in_one_line(text, words, tmp_path):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=words) as caught:
        read_json(tmp_path / "config.json")
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pipe_and_a_device_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    for name in ("pipe.json", "zero.json"):
        with pytest.raises(UserError, match=f"{name} is not a regular file"):
            read_json(tmp_path / name)
    with pytest.raises(UserError, match="no such file"):
        read_json(tmp_path / "none.json")


def test_escaped_characters_are_read(tmp_path):
    (tmp_path / "a.json").write_text('{"label": "\\ud83d\\ude00 \\u00e9"}')
    assert read_json(tmp_path / "a.json") == {"label": "😀 é"}


def test_prompts_of_a_sentence_folder_are_read_and_written(tmp_path):
    pooling = Pooling("cls", True, 32, True, {"query": "query: ", "passage": ""}, "query", include_prompt=False)
    write_pooling(tmp_path, pooling, 64)
    assert read_pooling(tmp_path) == pooling
    assert (pooling.prompt, Pooling().prompt) == ("query: ", "")
    edit(tmp_path / "config_sentence_transformers.json", default_prompt_name="other")
    with pytest.raises(UserError, match="default_prompt_name 'other' is not one of the prompts query, passage"):
        read_pooling(tmp_path)
    edit(tmp_path / "config_sentence_transformers.json", prompts=["query: "])
    with pytest.raises(UserError, match="prompts is not an object of texts"):
        read_pooling(tmp_path)


def test_max_length_of_a_sentence_folder_is_read_from_its_tokenizer(tmp_path):
    write_pooling(tmp_path, Pooling(), 64)
    for length, expected in ((10**30, None), (32, 32)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": length}))
        assert read_pooling(tmp_path).max_length == expected
    edit(tmp_path / "sentence_bert_config.json", max_seq_length="long")
    with pytest.raises(UserError, match="the length 'long' is not a whole number"):
        read_pooling(tmp_path)


HOSTILE = {
    "hidden size": ({"hidden_size": 10**5, "num_attention_heads": 1}, "asks for .*100000"),
    "very large hidden size": ({"hidden_size": 10**9, "num_attention_heads": 1}, "hidden_size"),
    "layers": ({"num_hidden_layers": 999}, "the weights lack bert.encoder.layer.998"),
    "very many layers": ({"num_hidden_layers": 100_000}, "num_"),
    "intermediate size": ({"intermediate_size": 10**18}, "intermediate"),
    "positions": ({"max_position_embeddings": 10**15}, "position"),
    "segments": ({"type_vocab_size": 10**15}, "segments|token_type"),
    "labels": ({"id2label": None, "num_labels": 10**9}, "num_labels must be .* not 1000000000"),
    "labels in words": ({"id2label": None, "num_labels": "three"}, "num_labels must be .* not 'three'"),
    "a list of labels": ({"id2label": ["a", "b"]}, "id2label is not an object of names by number"),
    "labels without numbers": ({"id2label": {"a": "b"}}, "id2label is not an object of names by number"),
    "classes": ({"architectures": "BertModel"}, "architectures is not a list of names: 'BertModel'"),
    "class of numbers": ({"architectures": [3]}, "architectures is not a list of names"),
    "activation": ({"hidden_act": ["gelu"]}, "hidden_act .* is not one of"),
    "NaN": ({"layer_norm_eps": float("nan")}, "layer_norm_eps|norm_eps"),
    "infinity": ({"initializer_range": float("inf")}, "initializer_range|init_std"),
    "label": ({"id2label": {**LABELS, "2": "\ud800"}}, "not valid JSON: .*surrogates"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_configuration_is_refused_fast_and_in_little_memory(case, saved):
    changes, words = HOSTILE[case]
    folder = saved("single")
    load_folder(folder)
    edit(folder / "config.json", **changes)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(UserError, match=words) as caught:
        load_folder(folder)
    assert time.process_time() - began < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_a_pipe_or_a_device_in_a_model_folder_is_refused(name, saved):
    folder = saved("single")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(UserError, match=f"{name} is not a regular file"):
        load_folder(folder)
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    with pytest.raises(UserError, match=f"{name} is not a regular file"):
        load_folder(folder)


def test_a_folder_without_model_type_is_read_as_bert_if_its_class_is_bert(saved):
    folder = saved("single")
    values = {name: value for name, value in read_json(folder / "config.json").items() if name != "model_type"}
    expected = load_folder(folder).model.state_dict()
    (folder / "config.json").write_text(json.dumps(values))
    found = load_folder(find_model(folder)).model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    edit(folder / "config.json", architectures=["XLNetForSequenceClassification"])
    with pytest.raises(UserError, match=r"'XLNet' is not supported yet; 'bert', 'roberta', .* are"):
        load_folder(find_model(folder))


@pytest.mark.parametrize("family", ["funnel", "xlnet", "mobilebert"])
def test_an_unsupported_family_is_refused_without_suggesting_bert(family, saved):
    folder = saved()
    edit(folder / "config.json", model_type=family)
    with pytest.raises(UserError, match=f"model_type '{family}' is not supported yet") as caught:
        load_folder(folder)
    assert "did you mean" not in str(caught.value)


def test_a_tokenizer_that_is_larger_than_the_model_is_refused(saved, tmp_path):
    folder = saved("single")
    with (folder / "vocab.txt").open("a", encoding="utf-8") as file:
        file.write("neverseen\n")
    (folder / "tokenizer.json").unlink()
    size = Tokenizer.load(folder).vocab_size
    for use in (
        lambda: Predictor.load(folder, "cpu"),
        lambda: Embedder(Predictor.load(folder, "cpu")),
        lambda: convert(folder, tmp_path / "out", "hf"),
    ):
        with pytest.raises(UserError, match=f"ids up to {size - 1}, and config.json has vocab_size = {size - 1}"):
            use()


def gappy(folder: Path) -> None:
    """A vocabulary with an empty and a doubled line, as `vocab.txt` alone."""
    lines = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    lines[20:20] = ["", lines[30]]
    (folder / "vocab.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (folder / "tokenizer.json").unlink()


def test_a_vocabulary_with_an_empty_and_a_doubled_line_keeps_its_ids(saved, tmp_path, tiny_tokenizer):
    folder = saved("single")
    gappy(folder)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.vocab_size == tiny_tokenizer.vocab_size + 2
    reference("single", tokenizer.vocab_size).save_pretrained(folder)
    texts = ["the quick brown fox jumps over the lazy dogs", "and 0123456789"]
    expected = tokenizer.encode(texts, special=True)
    assert max(map(max, expected)) < tokenizer.vocab_size
    loaded = load_folder(folder)
    save_folder(tmp_path / "saved", loaded.model, loaded.tokenizer, loaded.notes)
    convert(folder, tmp_path / "converted", "hf")
    for name in ("saved", "converted"):
        assert Tokenizer.load(tmp_path / name).encode(texts, special=True) == expected
        (tmp_path / name / "tokenizer.json").unlink()  # now vocab.txt alone is read
        assert Tokenizer.load(tmp_path / name).encode(texts, special=True) == expected


def test_tokenizer_settings_are_kept_by_convert_and_extend(saved, tmp_path):
    folder = saved("single")
    theirs = transformers.AutoTokenizer.from_pretrained(
        folder, padding_side="left", truncation_side="left", model_max_length=32, extra_special_tokens=["fox", "dog"]
    )
    theirs.save_pretrained(folder)
    load_folder(folder)
    convert(folder, tmp_path / "out", "hf")
    extend(folder, tmp_path / "extended", words=["barking"])
    for name in ("out", "extended"):
        again = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        assert (again.padding_side, again.truncation_side, again.model_max_length) == ("left", "left", 32)
        assert set(theirs.all_special_tokens) == set(again.all_special_tokens)
        assert again("the fox jumps")["input_ids"] == theirs("the fox jumps")["input_ids"]


def test_saved_model_max_length_is_the_number_of_positions(saved, tmp_path):
    folder = saved("single")  # the model has 48 positions, its tokenizer a maximum of 512
    assert read_json(folder / "tokenizer_config.json")["model_max_length"] == 512
    convert(folder, tmp_path / "hf", "hf")
    extend(folder, tmp_path / "extended", words=["barking"])
    edit(folder / "tokenizer_config.json", model_max_length=10**30)
    convert(folder, tmp_path / "unlimited", "hf")
    for name in ("hf", "extended", "unlimited"):
        assert read_json(tmp_path / name / "tokenizer_config.json")["model_max_length"] == 48


def test_a_renamed_separator_is_placed_as_in_transformers(saved, tmp_path):
    folder = saved("single")
    lines = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    (folder / "vocab.txt").write_text("".join(f"{'<end>' if t == '[SEP]' else t}\n" for t in lines), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    transformers.BertTokenizer(vocab=str(folder / "vocab.txt"), sep_token="<end>").save_pretrained(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    convert(folder, tmp_path / "out", "hf")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again.sep_token == theirs.sep_token == "<end>"
    expected = theirs("the fox", "dogs bark")["input_ids"]
    assert again("the fox", "dogs bark")["input_ids"] == expected
    with torch.no_grad():
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
        scores = model(**theirs("the fox", "dogs bark", return_tensors="pt")).logits.softmax(-1)[0]
    (answer,) = Predictor.load(folder, "cpu").predict([("the fox", "dogs bark")])
    assert list(answer["scores"].values()) == pytest.approx(scores.tolist(), abs=1e-5)


def test_a_left_to_right_classifier_saved_by_transformers_gives_a_warning(saved, tmp_path, capsys):
    folder = saved("single", is_decoder=True)
    edit(folder / "config.json", pooled="last")
    load_folder(folder)
    assert "was saved by transformers, whose class pools the first token" in capsys.readouterr().err
    loaded = load_folder(folder)
    save_folder(tmp_path / "ours", loaded.model, loaded.tokenizer, loaded.notes)
    capsys.readouterr()
    load_folder(tmp_path / "ours")
    assert capsys.readouterr().err == ""


def test_weights_too_large_for_float16_are_refused(saved, tmp_path):
    folder = saved("single")
    weights = load_file(folder / "model.safetensors")
    weights["classifier.weight"][0, 0] = 1e6
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"--dtype float16: classifier.weight has values up to 1e\+06"):
        convert(folder, tmp_path / "out", "hf", Options(dtype="float16"))
    assert not (tmp_path / "out").exists()
    assert convert(folder, tmp_path / "out", "hf", Options(dtype="bfloat16"))["dtype"] == "bfloat16"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinite_weights_are_named(value, saved):
    folder = saved("single")
    weights = load_file(folder / "model.safetensors")
    weights["bert.encoder.layer.1.output.dense.weight"][3, 3] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"layer.1.output.dense.weight holds NaN or infinite values"):
        load_folder(folder)


def test_large_finite_weights_are_accepted(saved):
    folder = saved("single")
    weights = load_file(folder / "model.safetensors")
    weights["classifier.bias"][:] = 3e38  # finite, while their sum overflows float32
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert load_folder(folder).model.head.output.bias[0].item() == pytest.approx(3e38)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"limits": {"strides": 3}}, "bertsmith.json: limits: unknown key 'strides'; did you mean 'stride'"),
        ({"limits": {"stride": 2.5}}, "bertsmith.json: limits: stride"),
        ({"columns": {"txt": "a"}}, "bertsmith.json: columns: unknown key 'txt'"),
        ({"limits": [1]}, "bertsmith.json: limits: expected an object"),
        ({"task": "clasify"}, "clasify"),
    ],
)
def test_invalid_notes_are_an_error_in_one_line(changes, words, saved):
    folder = saved("single")
    (folder / "bertsmith.json").write_text(json.dumps({"task": "classify", **changes}))

    def use() -> list[object]:
        predictor = Predictor.load(folder, "cpu")
        return [predictor.task, predictor.columns, predictor.limits]

    with pytest.raises(UserError, match=words):
        use()


def larger_model(folder: Path, tokenizer, nested: dict, rename) -> Encoder:
    """Write the folder of a program with an ELECTRA in it; returns the encoder as ours."""
    config = EncoderConfig(tokenizer.vocab_size, 32, 2, 2, 64, max_positions=24, embedding_size=16, **ELECTRA)
    model = randomise(MaskedLM(Encoder(config), MaskedLMConfig(next_sentence=False)))
    save_folder(folder, model, tokenizer, Notes())
    weights = {rename(name): value for name, value in load_file(folder / "model.safetensors").items()}
    save_file({**weights, "tagger.weight": torch.ones(3, 32)}, folder / "model.safetensors")
    values = read_json(folder / "config.json") | {"num_beams": 1, "temperature": 1.0, "xla_device": None}
    (folder / "config.json").write_text(json.dumps({"heads": {"tagger": 3}, **nested, "model": {"inner": values}}))
    return model.encoder


def test_an_encoder_inside_a_larger_model_is_read(tmp_path, tiny_tokenizer, capsys):
    """Its configuration is nested, and its tensors have a prefix of that program."""
    rename = lambda name: f"backbone.{name.removeprefix('electra.')}"  # noqa: E731
    encoder = larger_model(tmp_path / "m", tiny_tokenizer, {}, rename)
    loaded = load_folder(find_model(tmp_path / "m"))
    assert "m holds a larger model, of which backbone is read, without its tagger" in capsys.readouterr().err
    assert loaded.model.encoder.config == encoder.config
    assert_close(loaded.model.encoder.state_dict(), encoder.state_dict(), rtol=0, atol=0)
    convert(tmp_path / "m", tmp_path / "hf", "hf")
    assert capsys.readouterr().err.count("holds a larger model") == 1
    theirs, info = transformers.ElectraModel.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"]
    table = theirs.embeddings.word_embeddings.weight
    assert torch.equal(table, encoder.embeddings.tokens.weight)


def test_a_prefix_before_all_names_is_dropped_with_the_heads_kept(tmp_path, tiny_tokenizer):
    encoder = larger_model(tmp_path / "m", tiny_tokenizer, {}, lambda name: f"module.{name}")
    loaded = load_folder(tmp_path / "m")
    assert loaded.missing == ()
    assert_close(loaded.model.encoder.state_dict(), encoder.state_dict(), rtol=0, atol=0)


def test_two_encoders_in_a_larger_model_are_refused(tmp_path, tiny_tokenizer):
    nested = {"other": {"model_type": "bert"}}
    larger_model(tmp_path / "m", tiny_tokenizer, nested, lambda name: f"backbone.{name}")
    with pytest.raises(UserError, match=r"holds no model: no config.json of a model in it"):
        find_model(tmp_path / "m")
