"""ELMo from text to predictions: pre-training, resuming, ranks, the saved folder, features, tasks, refusals."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from kind_rows import ROWS as TASK_ROWS
from runs import cut, on_ranks, shrunk, weights
from safetensors.torch import load_file
from torch.testing import assert_close

import bertsmith
from bertsmith.batch import Example, Label, collate
from bertsmith.config import override
from bertsmith.conversion import Options, convert
from bertsmith.corpus.build import build_corpus
from bertsmith.corpus.vocabulary import train_tokenizer
from bertsmith.errors import UserError
from bertsmith.extend import extend
from bertsmith.formats.families.table import FAMILIES
from bertsmith.formats.hf import load_folder, save_folder
from bertsmith.inference.features import Features, features
from bertsmith.model.states import hidden_states
from bertsmith.objectives.bidirectional_lm import BidirectionalLM
from bertsmith.pages.view import view
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.recipes import feature_based, recipe
from bertsmith.tasks.examples import SPELLING
from bertsmith.text.spelling import spell
from bertsmith.training import runlog

pytestmark = pytest.mark.usefixtures("one_thread")
RUN = ["train.steps=4", "train.save_every=2", "train.keep=9", "train.batch_size=8", "train.evaluate_every=2"]


def config_of(*changes: str) -> PretrainConfig:
    return shrunk("elmo-tiny", *RUN, *changes)


@pytest.fixture(scope="module")
def shards(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of words."""
    folder = tmp_path_factory.mktemp("words")
    (folder / "text.txt").write_text((world / "text.txt").read_text(encoding="utf-8")[:100_000], encoding="utf-8")
    train_tokenizer([folder / "text.txt"], folder / "tok", vocab_size=900, kind="words")
    build_corpus([folder / "text.txt"], folder / "tok", folder / "shards", workers=1)
    return folder / "shards"


@pytest.fixture(scope="module")
def run(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("elmo") / "run"
    bertsmith.pretrain(config_of(), shards, folder, device="cpu")
    return folder


def test_this_file_has_every_family_that_transformers_has_no_class_for() -> None:
    assert [name for name, family in FAMILIES.items() if family.is_own] == ["elmo"]


def test_the_recipe_has_the_released_sizes() -> None:
    model, train = recipe("elmo").model, recipe("elmo").train
    assert (model.num_layers, model.hidden_size, model.intermediate_size) == (2, 2 * 512, 4096)
    assert model.character_filters == ((1, 32), (2, 32), (3, 64), (4, 128), (5, 256), (6, 512), (7, 1024))
    assert (model.character_size, model.max_characters, model.num_highways, model.hidden_dropout) == (16, 50, 2, 0.1)
    assert train.epochs == 10


def test_a_resumed_run_gives_identical_bytes(run: Path, shards: Path, tmp_path: Path) -> None:
    copy = cut(run, tmp_path / "cut", 2)
    bertsmith.pretrain(config_of(), shards, copy, device="cpu", resume=True)
    assert weights(copy) == weights(run)


def test_losses_of_both_directions_and_their_mean_are_reported(run: Path) -> None:
    for record in runlog.read(run):
        if "forward_loss" in record:
            mean = (record["forward_loss"] + record["backward_loss"]) / 2
            assert record["loss"] == pytest.approx(mean, rel=1e-4)
            assert record["forward_loss"] != record["backward_loss"]
    assert sum("forward_loss" in record for record in runlog.read(run)) >= 4


@pytest.mark.slow
def test_a_run_learns(shards: Path, tmp_path: Path) -> None:
    """Words are predicted better than by their frequencies, from either side."""
    more = ["train.steps=120", "train.learning_rate=1e-2", "train.batch_size=16", "train.save_every=0"]
    scores = bertsmith.pretrain(config_of(*more, "train.evaluate_every=120"), shards, tmp_path / "run", device="cpu")
    corpus = bertsmith.corpus.shards.Corpus.open(shards)
    tokens = np.concatenate([corpus.document(n)[0] for n in range(corpus.manifest.documents)])
    shares = np.bincount(tokens) / len(tokens)
    entropy = -(shares[shares > 0] * np.log(shares[shares > 0])).sum()
    assert scores["forward_loss"] < entropy - 0.2
    assert scores["backward_loss"] < entropy - 0.2


def test_the_folder_says_what_it_is(run: Path) -> None:
    folder = run / "model"
    values, notes = (json.loads((folder / name).read_text()) for name in ("config.json", "bertsmith.json"))
    assert (values["model_type"], values["architectures"]) == ("elmo", ["BertsmithElmoForBidirectionalLM"])
    assert notes["remark"].startswith("transformers has no class for this model")
    card = (folder / "README.md").read_text()
    assert "library_name: bertsmith" in card
    assert "transformers has no class for this model" in card
    assert "| Family | elmo |" in card
    loaded = load_folder(folder)
    assert isinstance(loaded.model, BidirectionalLM)
    assert (loaded.missing, loaded.tokenizer.kind, loaded.tokenizer.spells) == ((), "words", True)
    names = load_file(folder / "model.safetensors").keys()
    assert len(names) == len(loaded.model.state_dict())
    assert all(name.startswith(("elmo.", "bidirectional_lm.")) for name in names)


def test_training_continues_from_a_folder(run: Path, shards: Path, tmp_path: Path) -> None:
    config = config_of("train.steps=1", "train.learning_rate=1e-9")
    bertsmith.pretrain(config, shards, tmp_path / "more", model=run, device="cpu")
    assert_close(load_file(tmp_path / "more/model/model.safetensors"), load_file(run / "model/model.safetensors"))


def test_rare_words_are_read_and_not_predicted(shards: Path, tmp_path: Path) -> None:
    config = config_of("model.predicted_words=50")
    scores = bertsmith.pretrain(config, shards, tmp_path / "run", device="cpu")
    loaded = load_folder(tmp_path / "run" / "model")
    assert loaded.model.bidirectional_lm.out_features == 50
    assert loaded.model.encoder.config.vocab_size == loaded.tokenizer.vocab_size > 800
    assert scores["forward_loss"] < 1.2 * np.log(50)


def two_ranks(shards: Path, folder: Path) -> None:
    config = config_of("train.micro_batch_size=3", "train.parallel=ddp")
    bertsmith.pretrain(config, shards, folder, device="cpu")


@pytest.mark.slow
def test_two_ranks_equal_one(shards: Path, tmp_path: Path) -> None:
    on_ranks(two_ranks, shards, tmp_path / "two")
    bertsmith.pretrain(config_of("train.micro_batch_size=3"), shards, tmp_path / "one", device="cpu")
    one, two = ([r["loss"] for r in runlog.read(tmp_path / name) if "loss" in r] for name in ("one", "two"))
    assert one == pytest.approx(two, abs=1e-5)
    assert_close(
        *(load_file(tmp_path / name / "model/model.safetensors") for name in ("one", "two")), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("kind", ["onnx", "tf1", "sentence-transformers"])
def test_other_formats_are_refused_in_one_line(kind: str, run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"--to {kind}: it has no model of the type elmo.*bertsmith itself opens it"):
        convert(run, tmp_path / "out", kind)


def test_half_precision_is_written(run: Path, tmp_path: Path) -> None:
    convert(run, tmp_path / "half", "hf", Options(dtype="bfloat16"))
    ours, half = (load_folder(place).model.state_dict() for place in (run / "model", tmp_path / "half"))
    assert_close(half, {name: value.bfloat16().float() for name, value in ours.items()})
    with pytest.raises(UserError, match="--verify: transformers has no model of the type elmo"):
        convert(run, tmp_path / "other", "hf", verify=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("objective.kind=masked-lm", "model.family elmo: transformers has no class of it for masked_lm"),
        ("model.family=bert", "model.num_segments=0: BertModel needs a table of segments.*model.family=.*elmo"),
        ("model.num_heads=2", "model.num_heads=2: ELMo has no attention"),
        ("model.direction=left-to-right", "left-to-right: elmo models have no such setting; set model.direction=both"),
    ],
)
def test_settings_that_do_not_fit_are_refused(change: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        override(recipe("elmo"), [change])


# --- the features: vectors of texts and words, and a model of each kind of task on them


def test_unknown_words_are_told_apart_by_their_characters(run: Path, tmp_path: Path) -> None:
    embedder = bertsmith.Embedder.load(run, "cpu", pooling="mean")
    assert load_folder(run / "model").tokenizer.encode(["xylophone"]) == [[1]]
    one, other, again = embedder(["the xylophone", "the zygote", "the xylophone"])
    np.testing.assert_allclose(one, again, atol=1e-6)
    assert np.abs(one - other).max() > 1e-4
    (tmp_path / "text.txt").write_text("the xylophone and the zygote\n")
    features(run, tmp_path / "text.txt", tmp_path / "out", layers="all", dtype="float32", device="cpu")
    (entry,) = Features.open(tmp_path / "out")
    assert entry.words == ["the", "xylophone", "and", "the", "zygote"]
    first = entry.vectors[0]  # without context
    np.testing.assert_array_equal(first[0], first[3])
    assert np.abs(first[1] - first[4]).max() > 1e-4
    np.testing.assert_array_equal(*np.split(first, 2, axis=1))  # both directions begin with one vector


def test_features_equal_the_states_of_every_layer(run: Path, tmp_path: Path) -> None:
    loaded = load_folder(run / "model")
    (tmp_path / "text.txt").write_text("The xylophone of a list.\n")
    features(run, tmp_path / "text.txt", tmp_path / "out", layers="all", dtype="float32", device="cpu")
    (entry,) = Features.open(tmp_path / "out")
    spelt = spell(["The", "xylophone", "of", "a", "list", "."])
    ends = loaded.tokenizer.characters(np.array([2, 3]))
    characters = np.concatenate([ends[:1], spelt, ends[1:]])
    example = Example(np.ones(8, dtype=np.int64), np.zeros(8), {"characters": Label(characters, SPELLING)})
    with torch.no_grad():
        states = hidden_states(loaded.model.encoder.eval(), collate([example], packed=True), (0, 1, 2))
    np.testing.assert_allclose(entry.vectors, torch.stack([states[i] for i in range(3)])[:, 1:-1], atol=1e-6)


TUNED = ["train.steps=4", "train.batch_size=4", "data.max_length=32", "restarts=0", "train.evaluate_every=0"]
TUNED += ["features.hidden_size=8", "features.num_layers=1"]
SEVERAL = [{"text": f"it is {i}", "labels": [name for name in "ab" if i % 2 or name == "b"]} for i in range(14)]
TASKS = {**TASK_ROWS, "several": SEVERAL}
COLUMNS = {"tag": ["tokens"], "answer": ["question", "context"], "choose": ["text", "endings"]}
COLUMNS["pair"] = ["text1", "text2"]


def inputs_of(task: str) -> list:
    """Rows as `Predictor` takes them."""
    rows = [[row[name] for name in COLUMNS.get(task, ["text"])] for row in TASKS[task]]
    return [row[0] if len(row) == 1 else tuple(row) for row in rows]


@pytest.mark.parametrize("task", TASKS)
def test_a_model_of_every_kind_of_task_is_trained_on_the_features(task: str, run: Path, tmp_path: Path) -> None:
    rows, name = TASKS[task], "classify" if task == "several" else task
    more = ["data.stride=8", "data.max_query=8"] if task == "answer" else []
    config = override(feature_based(name, "mix-all"), [*TUNED, *more])
    before = load_file(run / "model" / "model.safetensors")
    scores = bertsmith.finetune(config, run, rows, tmp_path / "run", dev=rows, device="cpu")
    assert "unknown_percent" not in scores  # it reads the characters of any word
    assert np.isfinite([value for value in scores.values() if isinstance(value, float)]).all()
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert all(torch.equal(after[name], before[name]) for name in before if name.startswith("elmo."))
    assert not torch.equal(after["head.mix"], torch.ones(3))
    assert not torch.equal(after["head.scale"], torch.ones(1))
    assert after["head.standard.bias"].any()
    values = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert values["model_type"] == "bertsmith-features-elmo"
    answers = bertsmith.Predictor.load(tmp_path / "run", device="cpu")(inputs_of(task))
    loaded = load_folder(tmp_path / "run" / "model")
    assert (loaded.missing, len(answers)) == ((), len(rows))
    save_folder(tmp_path / "again", loaded.model, loaded.tokenizer, loaded.notes)
    assert bertsmith.Predictor.load(tmp_path / "again", device="cpu")(inputs_of(task)) == answers


ANIMALS = ["zebra", "gnu", "yak", "okapi", "ibex", "lynx", "tapir", "dingo"]  # words outside the vocabulary
LEARNT = {
    "classify": [{"text": f"the {w} is here", "label": "ab"[i % 2]} for i, w in enumerate(ANIMALS)],
    "pair": [{"text1": f"a {w}", "text2": f"a {v}", "label": str(w == v)} for w in ANIMALS for v in ANIMALS[:3]],
    "answer": [
        {"question": "which animal is it", "context": f"the list is a {w} of a file {i}", "answers": [w]}
        for i, w in enumerate(ANIMALS)
    ],
    "choose": [{"text": f"a {w}", "endings": [f"the {w}", "the list", "the class"], "label": 0} for w in ANIMALS],
}


@pytest.mark.slow
@pytest.mark.parametrize("task", LEARNT)
def test_the_model_on_features_learns(task: str, run: Path, tmp_path: Path) -> None:
    steps = {"classify": 150, "pair": 250}.get(task, 60)
    changes = [f"train.steps={steps}", "train.batch_size=8", "train.learning_rate=1e-2", "restarts=0", "dropout=0.0"]
    changes += ["features.hidden_size=32", "features.num_layers=1", "train.evaluate_every=0", "data.max_length=32"]
    changes += ["data.stride=8", "data.max_query=8"] if task == "answer" else []
    config, rows = override(feature_based(task, "mix-all"), changes), LEARNT[task]
    scores = bertsmith.finetune(config, run, rows, tmp_path / "run", dev=rows, device="cpu")
    assert scores["f1" if task == "answer" else "accuracy"] > 95


def test_standardised_features_are_learnt_quickly(run: Path, tmp_path: Path) -> None:
    """On the states as they are, the same 20 steps do not leave the constant answer; the saved model is the same."""
    changes = ["train.steps=20", "train.batch_size=8", "train.learning_rate=1e-2", "restarts=0", "dropout=0.0"]
    changes += ["features.hidden_size=32", "features.num_layers=1", "train.evaluate_every=0", "data.max_length=32"]
    config, rows = override(feature_based("classify", "mix-all"), changes), LEARNT["classify"]
    scores = bertsmith.finetune(config, run, rows, tmp_path / "run", dev=rows, device="cpu")
    assert scores["accuracy"] > 95
    predictor = bertsmith.Predictor.load(tmp_path / "run", device="cpu")
    assert [answer["label"] for answer in predictor([row["text"] for row in rows])] == [row["label"] for row in rows]
    values = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert values["features"]["standardise"] is True
    off = override(config, ["features.standardise=false", "train.steps=1"])
    bertsmith.finetune(off, run, rows, tmp_path / "off", dev=rows, device="cpu")
    assert not [name for name in load_file(tmp_path / "off/model/model.safetensors") if "standard" in name]


def test_resumed_training_on_features_is_identical(run: Path, tmp_path: Path) -> None:
    config = override(feature_based("pair", "mix-all"), [*TUNED, "train.save_every=2", "train.keep=9"])
    data = {"dev": TASKS["pair"], "device": "cpu"}
    bertsmith.finetune(config, run, TASKS["pair"], tmp_path / "whole", **data)
    bertsmith.finetune(config, run, TASKS["pair"], cut(tmp_path / "whole", tmp_path / "cut", 2), resume=True, **data)
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")
    assert load_file(tmp_path / "cut" / "model" / "model.safetensors")["head.standard.bias"].any()


def test_an_elmo_is_not_fine_tuned_whole(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is an ELMo, .* add --features mix-all"):
        bertsmith.finetune("classify", run, TASKS["classify"], tmp_path / "run", device="cpu")


def test_what_needs_attention_or_a_table_of_tokens_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has LSTM layers, and the page shows attention"):
        view(run, "a list", None, tmp_path / "page.html", device="cpu")
    with pytest.raises(UserError, match="int8 is for Transformer layers"):
        bertsmith.Predictor.load(run, device="cpu", precision="int8")
    with pytest.raises(UserError, match="only WordPiece can be extended"):
        extend(run, tmp_path / "out", words=["xylophone"])


def test_masks_cannot_be_filled(run: Path) -> None:
    with pytest.raises(UserError, match="has no masked-word head"):
        bertsmith.fill(run, "the <MASK> of a file", device="cpu")
