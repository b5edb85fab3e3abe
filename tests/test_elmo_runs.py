"""ELMo from text to predictions: pre-training, resuming, ranks, the saved folder, features, tasks, refusals."""

import json
from pathlib import Path

import numpy as np
import pytest
from runs import cut, on_ranks, shrunk, weights
from safetensors.torch import load_file
from torch.testing import assert_close

import bertsmith
from bertsmith.config import override
from bertsmith.conversion import Options, convert
from bertsmith.corpus.build import build_corpus
from bertsmith.corpus.vocabulary import train_tokenizer
from bertsmith.errors import UserError
from bertsmith.formats.families.table import FAMILIES
from bertsmith.formats.hf import load_folder
from bertsmith.objectives.bidirectional_lm import BidirectionalLM
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.recipes import recipe
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
        ("model.direction=left-to-right", "model.direction=left-to-right"),
    ],
)
def test_settings_that_do_not_fit_are_refused(change: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        override(recipe("elmo"), [change])


def test_masks_cannot_be_filled(run: Path) -> None:
    with pytest.raises(UserError, match="has no masked-word head"):
        bertsmith.fill(run, "the <MASK> of a file", device="cpu")
