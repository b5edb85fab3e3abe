"""`transformers` opens our folders and we open theirs; damaged folders are refused."""

import json
import unicodedata
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from conftest import LABELS
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from variants import KINDS, VARIANTS, our_cases, randomise, their_cases, their_class, their_model, without_repeats

from bertsmith.batch import lay_out
from bertsmith.errors import UserError
from bertsmith.formats.hf import Notes, load_folder, save_folder
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.objectives.settings import MaskedLMConfig
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
PROBLEMS = {
    "single": "single_label_classification",
    "multi": "multi_label_classification",
    "regression": "regression",
}
MASKED_LM = tuple(
    f"masked_lm.{name}" for name in ("transform.weight", "transform.bias", "norm.weight", "norm.bias", "decoder.bias")
)
POOLER = ("head.pooler.dense.weight", "head.pooler.dense.bias")
CLASSIFIER = ("head.output.weight", "head.output.bias")
NOTES = Notes(task="classify", columns={"text": "sentence"}, max_length=20, recipe="bert")
theirs_of_all = pytest.mark.parametrize("case", without_repeats(their_cases(KINDS)), ids="-".join)


def make_model(kind: str, vocab_size: int, variant: str = "bert"):
    encoder = Encoder(EncoderConfig(vocab_size, 64, 2, 4, 128, max_positions=32, **VARIANTS[variant].ours))
    model = (
        TaskModel(encoder, HEADS[kind])
        if kind in HEADS
        else MaskedLM(encoder, MaskedLMConfig(next_sentence=kind == "mlm+nsp"))
    )
    return randomise(model).eval()


@pytest.fixture
def their_folder(tmp_path, tiny_tokenizer):
    """Makes a model of `transformers` and the folder in which they save it."""

    def make(kind: str, variant: str = "bert", **changes):
        theirs, folder = their_model(variant, kind, tiny_tokenizer.vocab_size, **changes), tmp_path / "theirs"
        theirs.save_pretrained(folder)
        tiny_tokenizer.save(folder)
        return theirs, folder

    return make


@torch.no_grad()
def same_outputs(model, theirs) -> None:
    """Assert equal logits on four sequences of nine tokens, at every token for token heads."""
    tokens = np.random.default_rng(0).integers(5, model.encoder.config.vocab_size, 36)
    segments = np.arange(36) % min(2, max(1, model.encoder.config.num_segments))
    batch = lay_out(tokens, segments, np.full(4, 9), packed=False)
    batch.labels["masked"] = torch.arange(36)
    inputs = {"input_ids": batch.tokens, "token_type_ids": batch.segments}
    if "ModernBert" in type(theirs).__name__:  # its multiple choice cannot pool the mean without a mask
        inputs["attention_mask"] = torch.ones_like(batch.tokens)
    if type(theirs).__name__.endswith("ForMultipleChoice"):
        inputs = {name: values.view(-1, CHOICES, 9) for name, values in inputs.items()}
    ours, expected = model.logits(batch), list(theirs(**inputs).to_tuple())
    if isinstance(ours, dict):  # a class without next sentence gives only the first output
        ours, expected[0] = list(ours.values())[: len(expected)], expected[0].flatten(0, 1)
    elif type(theirs).__name__.endswith("ForQuestionAnswering"):
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


@dataclass(frozen=True)
class Saved:
    """A model of ours and its folder."""

    variant: str
    kind: str
    model: TaskModel | MaskedLM
    folder: Path


@pytest.fixture(scope="module", params=without_repeats(our_cases(KINDS)), ids="-".join)
def saved(request, tmp_path_factory, tiny_tokenizer) -> Saved:
    variant, kind = request.param
    model, folder = make_model(kind, tiny_tokenizer.vocab_size, variant), tmp_path_factory.mktemp("saved")
    save_folder(folder, model, tiny_tokenizer, NOTES)
    return Saved(variant, kind, model, folder)


def test_transformers_opens_our_folder(saved):
    variant, kind, model = saved.variant, saved.kind, saved.model
    architecture = their_class(variant, kind)
    theirs, info = architecture.from_pretrained(saved.folder, output_loading_info=True)
    unexpected = info.pop("unexpected_keys")
    assert not any(info.values()), info
    assert bool(unexpected) == (kind == "mlm+nsp" and not VARIANTS[variant].pretraining)
    assert theirs.config.architectures == [architecture.__name__]
    assert theirs.config.problem_type == PROBLEMS.get(kind)
    if kind in HEADS and HEADS[kind].labels:
        assert theirs.config.id2label == LABELS
        assert theirs.config.label2id == {name: i for i, name in LABELS.items()}
    assert theirs.config.num_labels == {"regression": 1}.get(kind, len(theirs.config.id2label))
    same_outputs(model, theirs.eval())


@torch.no_grad()
def test_next_sentence_logits_follow_from_their_pooler_where_they_have_no_class(tmp_path, tiny_tokenizer):
    model = make_model("mlm+nsp", tiny_tokenizer.vocab_size, "pre-norm")
    save_folder(tmp_path, model, tiny_tokenizer, Notes())
    batch = lay_out(np.arange(5, 35), np.arange(30) % 2, np.full(3, 10), packed=True)
    batch.labels["masked"] = torch.arange(3)
    theirs = transformers.AutoModel.from_pretrained(tmp_path)
    pooled = theirs(batch.tokens.view(3, 10), token_type_ids=batch.segments.view(3, 10)).pooler_output
    output = model.next_sentence.output
    assert_close(model.logits(batch)["nsp"], pooled @ output.weight.T + output.bias, atol=1e-5, rtol=0)


def test_a_folder_saved_again_by_transformers_loads_as_the_same_model(saved, tmp_path, tiny_tokenizer):
    variant, model = saved.variant, saved.model
    their_class(variant, saved.kind).from_pretrained(saved.folder).save_pretrained(tmp_path / "theirs")
    tiny_tokenizer.save(tmp_path / "theirs")
    again = load_folder(tmp_path / "theirs").model
    assert again.encoder.config == model.encoder.config
    assert getattr(again, "head_config", None) == getattr(model, "head_config", None)
    lost = "next_sentence." if not VARIANTS[variant].pretraining else "nothing"
    assert_close(again.state_dict(), {n: v for n, v in model.state_dict().items() if not n.startswith(lost)})


@pytest.mark.parametrize("variant", ["bert", "pre-norm"])
@pytest.mark.parametrize("options", [{}, {"jamo": True}, {"cased": True}], ids=["uncased", "jamo", "cased"])
def test_transformers_opens_our_tokenizer(options, variant, tmp_path):
    texts = ["The École of 東京, 한국어 서울", "", "a [MASK] over 7 crèmes", unicodedata.normalize("NFD", "école 한국")]
    tokenizer = train_wordpiece(texts * 3, 150, **options)
    model = make_model("mlm", tokenizer.vocab_size, variant)
    save_folder(tmp_path, model, tokenizer, Notes())
    theirs, ids = transformers.AutoTokenizer.from_pretrained(tmp_path), tokenizer.encode(texts, special=True)
    assert theirs(texts)["input_ids"] == ids == Tokenizer.load(tmp_path).encode(texts, special=True)
    assert not any(tokenizer.id("[UNK]") in row for row in ids[:3])
    pair = theirs(texts[0], texts[2])
    assert pair["input_ids"] == ids[0] + ids[2][1:]
    assert pair["token_type_ids"] == [0] * len(ids[0]) + [1] * (len(ids[2]) - 1)
    assert (theirs.pad_token, theirs.mask_token, theirs.model_max_length) == (
        "[PAD]",
        "[MASK]",
        model.encoder.config.max_positions,
    )


@theirs_of_all
def test_we_open_the_folders_of_transformers(case, their_folder):
    variant, kind = case
    theirs, folder = their_folder(kind, variant)
    loaded = load_folder(folder, HEADS["choice"] if kind == "choice" else None)
    assert loaded.missing == ()
    if kind in HEADS:
        assert loaded.model.head_config == HEADS[kind]
    else:
        assert (loaded.model.next_sentence is not None) == (kind == "mlm+nsp")
    same_outputs(loaded.model.eval(), theirs)


def test_a_multiple_choice_folder_takes_any_number_of_choices(their_folder):
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
def test_labels_are_read_from_their_config(changes, head, their_folder):
    changes = {"label2id": {name: i for i, name in (changes["id2label"] or {}).items()} or None, **changes}
    _, folder = their_folder("single", **changes)
    assert load_folder(folder).model.head_config == head


def test_save_load_save_gives_the_same_bytes(saved, tmp_path):
    loaded = load_folder(saved.folder)
    assert loaded.missing == ()
    save_folder(tmp_path, loaded.model, loaded.tokenizer, loaded.notes)
    files = sorted(path.name for path in saved.folder.iterdir())
    assert {"model.safetensors", "config.json", "bertsmith.json", "tokenizer.json", "vocab.txt"} <= set(files)
    assert files == sorted(path.name for path in tmp_path.iterdir())
    for name in files:
        assert (saved.folder / name).read_bytes() == (tmp_path / name).read_bytes(), name


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
        lambda f: edit_config(f, model_type="xlnet"),
        ["config.json", "model_type", "'xlnet'", "'bert'", "'roberta-prelayernorm'"],
    ),
    "dropout": (lambda f: edit_config(f, classifier_dropout=1.5), ["config.json", "classifier_dropout", "1.5"]),
    "dropout in words": (
        lambda f: edit_config(f, classifier_dropout="a"),
        ["config.json", "classifier_dropout", "'a'"],
    ),
    "biases": (lambda f: edit_config(f, bias=False), ["theirs", "LayerNorm.bias", "not zero", "bias = false"]),
    "bias in words": (lambda f: edit_config(f, bias="no"), ["config.json", "bias", "'no'"]),
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


NEW_PARTS = {
    "no change": ({}, MASKED_LM),
    "mlm": ({"objective": MaskedLMConfig(next_sentence=False)}, MASKED_LM),
    "mlm+nsp": (
        {"objective": MaskedLMConfig()},
        (*MASKED_LM, "next_sentence.output.weight", "next_sentence.output.bias"),
    ),
    **{kind: ({"head": head}, CLASSIFIER) for kind, head in HEADS.items()},
}


@pytest.fixture(scope="module")
def their_encoder(tmp_path_factory, tiny_tokenizer):
    """Gives an encoder of `transformers` alone and the folder in which they saved it, made once for each variant."""
    made = {}

    def make(variant: str):
        if variant not in made:
            theirs, folder = (
                their_model(variant, "encoder", tiny_tokenizer.vocab_size),
                tmp_path_factory.mktemp("theirs"),
            )
            theirs.save_pretrained(folder)
            tiny_tokenizer.save(folder)
            made[variant] = theirs, folder
        return made[variant]

    return make


@pytest.mark.parametrize(("variant", "part"), our_cases(list(NEW_PARTS)))
def test_an_encoder_without_head_loads_and_lists_missing_weights(part, variant, their_encoder):
    theirs, folder = their_encoder(variant)
    assert not any(name.startswith(f"{theirs.base_model_prefix}.") for name in load_file(folder / "model.safetensors"))
    options, missing = NEW_PARTS[part]
    loaded = load_folder(folder, **options)
    pooler = getattr(getattr(loaded.model, "head", None) or loaded.model.next_sentence, "pooler", None)
    in_encoder = VARIANTS[variant].pooler
    wanted = {*missing, *(POOLER if pooler and not in_encoder else ())}
    wanted |= {"head.pooler.norm.weight", "head.pooler.norm.bias"}  # of heads that have a norm
    assert set(loaded.missing) == wanted & loaded.model.state_dict().keys()
    batch = lay_out(np.arange(5, 35), np.zeros(30, dtype=np.int64), np.full(3, 10), packed=False)
    hidden, expected = loaded.model.eval().encoder(batch), theirs(batch.tokens)
    assert_close(hidden, expected.last_hidden_state, atol=1e-5, rtol=0)
    if pooler and in_encoder:
        assert_close(pooler(hidden[:, 0]), expected.pooler_output, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "head",
    [HeadConfig("single", ("a", "b", "c")), HeadConfig("single", ("a", "b", "c", "d")), HeadConfig("tags", COLOURS)],
    ids=["fewer classes", "other classes", "other kind"],
)
@pytest.mark.parametrize("variant", ["bert", "pre-norm"])
def test_a_new_head_is_initialised_on_a_fine_tuned_model(head, variant, their_folder):
    theirs, folder = their_folder("single", variant)
    loaded = load_folder(folder, head)
    assert set(loaded.missing) == set(CLASSIFIER)
    weight, old = loaded.model.head.output.weight, getattr(theirs.classifier, "out_proj", theirs.classifier).weight
    assert weight.shape != old.shape or not torch.equal(weight, old)


@pytest.mark.parametrize(("variant", "saved"), our_cases(["mlm+nsp", "single", "choice"]))
def test_the_pooler_is_loaded_into_another_head(saved, variant, tmp_path, tiny_tokenizer):
    model = make_model(saved, tiny_tokenizer.vocab_size, variant)
    save_folder(tmp_path, model, tiny_tokenizer, Notes())
    pooler = model.next_sentence.pooler if saved == "mlm+nsp" else model.head.pooler
    fresh = load_folder(tmp_path, HeadConfig("multi", ("a", "b"))).model.head.pooler
    assert_close(fresh.state_dict(), pooler.state_dict())
    if VARIANTS[variant].pairs:
        pretraining = load_folder(tmp_path, objective=MaskedLMConfig()).model.next_sentence.pooler
        assert_close(pretraining.state_dict(), pooler.state_dict())


def test_weights_with_more_layers_than_the_config_are_refused(their_folder):
    _, folder = their_folder("single")
    edit_config(folder, num_hidden_layers=1)
    with pytest.raises(UserError, match="have a layer 1, which config"):
        load_folder(folder)


def test_a_model_without_head_weights_does_not_predict(their_folder):
    from bertsmith.inference.predictor import Predictor

    _, folder = their_folder("single")
    rename_weights(folder, lambda name: name.replace("classifier", "something"))
    with pytest.raises(UserError, match="has no weights for head"):
        list(Predictor.load(folder, "cpu").predict(["a text"]))
    edit_config(folder, architectures=["BertModel"])
    with pytest.raises(UserError, match="has no masked-word head"):
        Predictor.load(folder, "cpu").fill("a [MASK]")


def test_a_head_has_the_dropout_of_their_config(tmp_path, their_folder):
    for kind in ("single", "tags"):
        theirs, folder = their_folder(kind, classifier_dropout=0.3)
        assert theirs.dropout.p == 0.3
        loaded = load_folder(folder)
        assert loaded.model.head.dropout.p == 0.3
        save_folder(tmp_path / kind, loaded.model, loaded.tokenizer, loaded.notes)
        assert json.loads((tmp_path / kind / "config.json").read_text())["classifier_dropout"] == 0.3
        assert load_folder(folder, HEADS["multi"]).model.head.dropout.p == 0.3  # also in a new head
        assert load_folder(folder, HeadConfig("multi", COLOURS, dropout=0.2)).model.head.dropout.p == 0.2
        edit_config(folder, classifier_dropout=None)
        assert load_folder(folder).model.head.dropout.p == theirs.config.hidden_dropout_prob


def test_the_heads_of_distilbert_have_dropouts_of_their_own(tmp_path, tiny_tokenizer):
    """A pre-trained folder need not state them: their defaults are the published ones, and are not the encoder's."""
    save_folder(tmp_path / "words", make_model("mlm", tiny_tokenizer.vocab_size, "distilbert"), tiny_tokenizer, Notes())
    for kind, name, rate in (("single", "seq_classif_dropout", 0.2), ("span", "qa_dropout", 0.1)):
        loaded = load_folder(tmp_path / "words", HEADS[kind])
        assert loaded.model.head.dropout.p == rate
        save_folder(tmp_path / kind, loaded.model, tiny_tokenizer, Notes())
        assert json.loads((tmp_path / kind / "config.json").read_text())[name] == rate
        edit_config(tmp_path / kind, **{name: 0.45})
        assert load_folder(tmp_path / kind).model.head.dropout.p == 0.45
    assert load_folder(tmp_path / "words", HEADS["tags"]).model.head.dropout.p == 0.1  # the encoder's


def test_config_fields_that_the_model_does_not_use_are_kept(tmp_path, their_folder):
    _, folder = their_folder("mlm")
    kept = {"language": "de", "classifier_dropout": 0.4, "sep_token_id": 3, "use_cache": False}
    edit_config(folder, **kept, torch_dtype="float16", _name_or_path="elsewhere")
    loaded = load_folder(folder)
    save_folder(tmp_path / "again", loaded.model, loaded.tokenizer, loaded.notes)
    values = json.loads((tmp_path / "again" / "config.json").read_text())
    assert {name: values.get(name) for name in kept} == kept
    assert not values.keys() & {"torch_dtype", "dtype", "_name_or_path"}  # these describe the old file
    assert load_folder(tmp_path / "again").notes == loaded.notes


def test_save_folder_writes_a_given_state_dict(tmp_path, tiny_tokenizer):
    model = make_model("mlm+nsp", tiny_tokenizer.vocab_size)
    state = {name: value + 1 for name, value in model.state_dict().items()}
    save_folder(tmp_path, model, tiny_tokenizer, Notes(), state)
    assert_close(load_folder(tmp_path).model.state_dict(), state)


def test_an_incomplete_state_dict_is_refused(tmp_path, tiny_tokenizer):
    model = make_model("mlm", tiny_tokenizer.vocab_size)
    state = {name: value for name, value in model.state_dict().items() if name != "encoder.embeddings.norm.bias"}
    with pytest.raises(KeyError, match=r"embeddings\.norm\.bias"):
        save_folder(tmp_path, model, tiny_tokenizer, Notes(), state)


def test_biases_that_the_encoder_lacks_are_saved_as_zeros(tmp_path, tiny_tokenizer):
    for variant in ("bert without bias", "pre-norm without bias"):
        save_folder(tmp_path, make_model("mlm", tiny_tokenizer.vocab_size, variant), tiny_tokenizer, Notes())
        weights = load_file(tmp_path / "model.safetensors")
        biases = [value for name, value in weights.items() if name.endswith("bias") and ".encoder.layer." in name]
        assert len(biases) == 2 * 8
        assert not any(bias.any() for bias in biases)


@pytest.mark.parametrize("kind", ["mlm+nsp", "single"])
def test_loading_a_complete_folder_draws_no_random_numbers(kind, their_folder):
    _, folder = their_folder(kind)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    model = load_folder(folder).model
    assert torch.equal(torch.get_rng_state(), before)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert all(parameter.requires_grad for parameter in model.parameters())
    if kind == "mlm+nsp":
        assert model.masked_lm.decoder.weight is model.encoder.embeddings.tokens.weight


def test_missing_weights_are_initialised_from_the_seed(their_folder):
    _, folder = their_folder("encoder")
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(load_folder(folder, objective=MaskedLMConfig()).model.state_dict())
    first, again, other = states
    assert_close(first, again, atol=0, rtol=0)
    drawn = {name for name in first if not torch.equal(first[name], other[name])}
    assert drawn == {"masked_lm.transform.weight", "next_sentence.output.weight"}
    assert first["masked_lm.transform.weight"].std() == pytest.approx(0.0175, rel=0.05)  # truncated at 2 × 0.02
    assert first["masked_lm.transform.weight"].abs().max() <= 0.04
    assert torch.equal(first["masked_lm.norm.weight"], torch.ones(64))
    assert not first["masked_lm.decoder.bias"].any()
