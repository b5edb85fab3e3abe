"""The saved folder is one that `transformers` opens, and theirs are ones that we open; damaged ones are refused."""

import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from conftest import LABELS, REFERENCES, randomise, reference
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from bertsmith.batch import lay_out
from bertsmith.errors import UserError
from bertsmith.formats.hf import Notes, load_folder, save_folder
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.text.tokenizer import Tokenizer, train_wordpiece

pytestmark = pytest.mark.usefixtures("one_thread")
COLOURS = tuple(LABELS.values())
CHOICES = 2
HEADS = {
    "single": HeadConfig("single", COLOURS),
    "multi": HeadConfig("multi", COLOURS),
    "regression": HeadConfig("regression"),
    "tags": HeadConfig("tags", COLOURS),
    "span": HeadConfig("span"),
    "choice": HeadConfig("choice", num_choices=CHOICES),
}
KINDS = ["mlm+nsp", "mlm", *HEADS]
PROBLEMS = {
    "single": "single_label_classification",
    "multi": "multi_label_classification",
    "regression": "regression",
}
MASKED_LM = tuple(
    f"masked_lm.{name}" for name in ("transform.weight", "transform.bias", "norm.weight", "norm.bias", "decoder.bias")
)
CLASSIFIER = ("head.output.weight", "head.output.bias")
kinds = pytest.mark.parametrize("kind", KINDS)


def make_model(kind: str, vocab_size: int):
    encoder = Encoder(EncoderConfig(vocab_size, 64, 2, 4, 128, max_positions=32))
    model = TaskModel(encoder, HEADS[kind]) if kind in HEADS else MaskedLM(encoder, next_sentence=kind == "mlm+nsp")
    return randomise(model).eval()


@pytest.fixture
def their_folder(tmp_path, tiny_tokenizer):
    """Makes a model of theirs and the folder that they save it in."""

    def make(kind: str, **changes):
        theirs, folder = reference(kind, tiny_tokenizer.vocab_size, **changes), tmp_path / "theirs"
        theirs.save_pretrained(folder)
        tiny_tokenizer.save(folder)
        return theirs, folder

    return make


@torch.no_grad()
def same_outputs(model, theirs) -> None:
    """Equal scores on four sequences of nine tokens, at every token where there are such."""
    tokens = np.random.default_rng(0).integers(5, model.encoder.config.vocab_size, 36)
    batch = lay_out(tokens, np.arange(36) % 2, np.full(4, 9), packed=False)
    batch.labels["masked"] = torch.arange(36)
    inputs = {"input_ids": batch.tokens, "token_type_ids": batch.segments}
    if isinstance(theirs, transformers.BertForMultipleChoice):
        inputs = {name: values.view(-1, CHOICES, 9) for name, values in inputs.items()}
    ours, expected = model.logits(batch), list(theirs(**inputs).to_tuple())
    if isinstance(ours, dict):
        ours, expected[0] = list(ours.values()), expected[0].flatten(0, 1)
    elif isinstance(theirs, transformers.BertForQuestionAnswering):
        ours = list(ours.unbind(-1))
    assert_close(ours if isinstance(ours, list) else [ours], expected, atol=1e-5, rtol=0)


def edit_config(folder: Path, **changes) -> None:
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**values, **changes}), encoding="utf-8")


def rename_weights(folder: Path, rename) -> None:
    path = folder / "model.safetensors"
    save_file({rename(name): value for name, value in load_file(path).items()}, path, metadata={"format": "pt"})


def cut(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


@kinds
def test_they_open_ours(kind, tmp_path, tiny_tokenizer):
    model = make_model(kind, tiny_tokenizer.vocab_size)
    save_folder(tmp_path, model, tiny_tokenizer, Notes())
    architecture = getattr(transformers, REFERENCES[kind][0])
    theirs, info = architecture.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert theirs.config.architectures == [architecture.__name__]
    assert theirs.config.problem_type == PROBLEMS.get(kind)
    if kind in HEADS and HEADS[kind].labels:
        assert theirs.config.id2label == LABELS
        assert theirs.config.label2id == {name: i for i, name in LABELS.items()}
    assert theirs.config.num_labels == {"regression": 1}.get(kind, len(theirs.config.id2label))
    same_outputs(model, theirs.eval())


@pytest.mark.parametrize("options", [{}, {"jamo": True}, {"cased": True}], ids=["uncased", "jamo", "cased"])
def test_they_open_our_tokenizer(options, tmp_path):
    texts = ["The École of 東京, 한국어 서울", "", "a [MASK] over 7 crèmes", unicodedata.normalize("NFD", "école 한국")]
    tokenizer = train_wordpiece(texts * 3, 150, **options)
    save_folder(tmp_path, make_model("mlm", tokenizer.vocab_size), tokenizer, Notes())
    theirs, ids = transformers.AutoTokenizer.from_pretrained(tmp_path), tokenizer.encode(texts, special=True)
    assert theirs(texts)["input_ids"] == ids == Tokenizer.load(tmp_path).encode(texts, special=True)
    assert not any(tokenizer.id("[UNK]") in row for row in ids[:3])
    assert theirs(texts[0], texts[2])["token_type_ids"] == [0] * len(ids[0]) + [1] * (len(ids[2]) - 1)
    assert (theirs.pad_token, theirs.mask_token, theirs.model_max_length) == ("[PAD]", "[MASK]", 512)


@kinds
def test_we_open_theirs(kind, their_folder):
    theirs, folder = their_folder(kind)
    loaded = load_folder(folder, HEADS["choice"] if kind == "choice" else None)
    assert loaded.missing == ()
    if kind in HEADS:
        assert loaded.model.head_config == HEADS[kind]
    else:
        assert (loaded.model.next_sentence is not None) == (kind == "mlm+nsp")
    same_outputs(loaded.model.eval(), theirs)


def test_their_multiple_choice_folder_says_nothing_of_the_number_of_choices(their_folder):
    theirs, folder = their_folder("choice")
    model, tokens = load_folder(folder).model.eval(), np.arange(5, 35)
    batch = lay_out(tokens, np.zeros(30, dtype=np.int64), np.full(3, 10), packed=True)
    expected = theirs(torch.from_numpy(tokens).view(1, 3, 10)).logits  # one question, three endings
    assert_close(model.logits(batch).view(1, 3), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("changes", "head"),
    [
        (
            {"id2label": None, "num_labels": 3, "problem_type": None},
            HeadConfig("single", ("LABEL_0", "LABEL_1", "LABEL_2")),
        ),
        ({"id2label": None, "num_labels": 1, "problem_type": None}, HeadConfig("regression")),
        ({"id2label": {i: f"n{i}" for i in range(12)}}, HeadConfig("single", tuple(f"n{i}" for i in range(12)))),
    ],
    ids=["unnamed", "one output", "twelve in order"],
)
def test_labels_come_from_their_config(changes, head, their_folder):
    changes = {"label2id": {name: i for i, name in (changes["id2label"] or {}).items()} or None, **changes}
    _, folder = their_folder("single", **changes)
    assert load_folder(folder).model.head_config == head


@kinds
def test_save_load_save_gives_the_same_bytes(kind, tmp_path, tiny_tokenizer):
    notes = Notes(task="classify", columns={"text": "sentence"}, max_length=20, recipe="bert")
    save_folder(tmp_path / "1", make_model(kind, tiny_tokenizer.vocab_size), tiny_tokenizer, notes)
    loaded = load_folder(tmp_path / "1")
    save_folder(tmp_path / "2", loaded.model, loaded.tokenizer, loaded.notes)
    files = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert {"model.safetensors", "config.json", "bertsmith.json", "tokenizer.json", "vocab.txt"} <= set(files)
    assert files == sorted(path.name for path in (tmp_path / "2").iterdir())
    for name in files:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes(), name


DAMAGES = {
    "no config": (lambda f: (f / "config.json").unlink(), ["config.json"]),
    "half a config": (lambda f: cut(f / "config.json", 0.5), ["config.json", "JSON"]),
    "a list": (lambda f: (f / "config.json").write_text("[]"), ["config.json", "object"]),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ["model.safetensors"]),
    "weights cut": (lambda f: cut(f / "model.safetensors", 0.9), ["model.safetensors"]),
    "weights cut in the header": (lambda f: cut(f / "model.safetensors", 0.001), ["model.safetensors"]),
    "empty weights": (lambda f: cut(f / "model.safetensors", 0), ["model.safetensors"]),
    "other weights": (lambda f: (f / "model.safetensors").write_text("not weights " * 99), ["model.safetensors"]),
    "misspelt key": (
        lambda f: edit_config(f, hidden_sise=64),
        ["config.json", "'hidden_sise'", "did you mean 'hidden_size'"],
    ),
    "unknown key": (lambda f: edit_config(f, zzz=1), ["config.json", "'zzz'", "remove it"]),
    "other family": (
        lambda f: edit_config(f, model_type="roberta"),
        ["config.json", "model_type", "'roberta'", "'bert'"],
    ),
    "relative positions": (
        lambda f: edit_config(f, position_embedding_type="relative_key"),
        ["config.json", "position_embedding_type", "'relative_key'", "'absolute'"],
    ),
    "decoder": (lambda f: edit_config(f, is_decoder=True), ["config.json", "is_decoder", "True"]),
    "untied": (lambda f: edit_config(f, tie_word_embeddings=False), ["config.json", "tie_word_embeddings", "False"]),
    "activation": (lambda f: edit_config(f, hidden_act="mish"), ["config.json", "hidden_act", "'mish'", "gelu"]),
    "a text for a number": (lambda f: edit_config(f, num_hidden_layers="3"), ["config.json", "num_layers", "'3'"]),
    "heads": (lambda f: edit_config(f, num_attention_heads=5), ["num_heads", "64", "5"]),
    "vocabulary": (lambda f: edit_config(f, vocab_size=101), ["theirs", "word_embeddings", "(101, 64)"]),
    "shape": (
        lambda f: edit_config(f, intermediate_size=96),
        ["theirs", "intermediate.dense.weight", "(128, 64)", "(96, 64)"],
    ),
    "number of classes": (
        lambda f: edit_config(f, id2label={"0": "a", "1": "b"}),
        ["theirs", "classifier.weight", "(4, 64)", "(2, 64)"],
    ),
    "more layers": (lambda f: edit_config(f, num_hidden_layers=4), ["theirs", "lack", "encoder.layer.3"]),
    "lost layer": (
        lambda f: rename_weights(f, lambda name: name.replace("layer.1", "lair.1")),
        ["theirs", "lack", "encoder.layer.1"],
    ),
    "tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), ["tokenizer.json"]),
    "no tokenizer": (
        lambda f: [(f / name).unlink() for name in ("tokenizer.json", "vocab.txt")],
        ["theirs", "tokenizer.json", "vocab.txt"],
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folders_are_refused(damage, their_folder):
    _, folder = their_folder("single")
    load_folder(folder)
    break_it, words = DAMAGES[damage]
    break_it(folder)
    with pytest.raises(UserError) as caught:
        load_folder(folder)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


class Malicious:
    """Creates a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


@pytest.mark.parametrize("safe_weights", [True, False])
def test_pickles_are_not_opened(safe_weights, tmp_path, their_folder):
    theirs, folder = their_folder("single")
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "tf_model.h5"):
        torch.save(Malicious(tmp_path / "owned"), folder / name)
    if safe_weights:
        same_outputs(load_folder(folder).model.eval(), theirs)
    else:
        (folder / "model.safetensors").unlink()
        with pytest.raises(UserError, match=r"model\.safetensors"):
            load_folder(folder)
    assert not (tmp_path / "owned").exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "owned").exists()  # it would have struck


def test_a_pickle_under_the_name_of_safe_weights_is_refused(tmp_path, their_folder):
    _, folder = their_folder("single")
    torch.save(Malicious(tmp_path / "owned"), folder / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors"):
        load_folder(folder)
    assert not (tmp_path / "owned").exists()


def test_old_names_of_norms_load(their_folder):
    theirs, folder = their_folder("mlm+nsp")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    rename_weights(folder, lambda name: next((name.replace(new, o) for new, o in old.items() if new in name), name))
    assert any(name.endswith("gamma") for name in load_file(folder / "model.safetensors"))
    loaded = load_folder(folder)
    assert loaded.missing == ()
    same_outputs(loaded.model.eval(), theirs)


def test_half_precision_weights_load(their_folder):
    theirs, folder = their_folder("single")
    theirs.half().save_pretrained(folder)
    model = load_folder(folder).model.eval()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    same_outputs(model, theirs.float())


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({}, MASKED_LM),
        ({"next_sentence": False}, MASKED_LM),
        ({"next_sentence": True}, (*MASKED_LM, "next_sentence.output.weight", "next_sentence.output.bias")),
        *[({"head": head}, CLASSIFIER) for head in HEADS.values()],
    ],
    ids=["as it is", "mlm", "mlm+nsp", *HEADS],
)
def test_a_bare_encoder_loads_and_says_what_it_lacks(options, missing, their_folder):
    theirs, folder = their_folder("encoder")
    assert not any(name.startswith("bert.") for name in load_file(folder / "model.safetensors"))
    loaded = load_folder(folder, **options)
    assert set(loaded.missing) == set(missing)
    batch = lay_out(np.arange(5, 35), np.zeros(30, dtype=np.int64), np.full(3, 10), packed=False)
    hidden, expected = loaded.model.eval().encoder(batch), theirs(batch.tokens)
    assert_close(hidden, expected.last_hidden_state, atol=1e-5, rtol=0)
    if pooler := getattr(getattr(loaded.model, "head", None) or loaded.model.next_sentence, "pooler", None):
        assert_close(pooler(hidden, batch.layout), expected.pooler_output, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "head",
    [HeadConfig("single", ("a", "b", "c")), HeadConfig("single", ("a", "b", "c", "d")), HeadConfig("tags", COLOURS)],
    ids=["fewer classes", "other classes", "other kind"],
)
def test_a_new_head_starts_anew_on_a_fine_tuned_model(head, their_folder):
    theirs, folder = their_folder("single")
    loaded = load_folder(folder, head)
    assert set(loaded.missing) == set(CLASSIFIER)
    weight = loaded.model.head.output.weight
    assert weight.shape != theirs.classifier.weight.shape or not torch.equal(weight, theirs.classifier.weight)


def test_weights_with_more_layers_than_the_config_are_refused(their_folder):
    _, folder = their_folder("single")
    edit_config(folder, num_hidden_layers=1)
    with pytest.raises(UserError, match="have a layer 1, which config"):
        load_folder(folder)


def test_no_answer_comes_out_of_weights_that_were_never_trained(their_folder):
    from bertsmith.predict import Predictor

    _, folder = their_folder("single")
    rename_weights(folder, lambda name: name.replace("classifier", "something"))
    with pytest.raises(UserError, match="has no weights for head"):
        list(Predictor.load(folder, "cpu").predict(["a text"]))
    edit_config(folder, architectures=["BertModel"])
    with pytest.raises(UserError, match="has no weights for masked_lm"):
        Predictor.load(folder, "cpu").fill("a [MASK]")
