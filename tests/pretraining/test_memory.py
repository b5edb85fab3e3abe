"""All ranks use one micro-batch size, and a resumed run keeps it, since another would draw other dropout masks."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY
from runs import command, finish, settings, torchrun, weights
from safetensors.torch import load_file

from bertsmith.batch import Example, collate, largest_id
from bertsmith.config import override, read_json
from bertsmith.corpus.shards import Corpus
from bertsmith.errors import UserError
from bertsmith.finetuning.run import FinetuneConfig, finetune
from bertsmith.formats.hf import load_folder
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.pretraining import memory
from bertsmith.pretraining.loader import Loader, split_documents
from bertsmith.pretraining.run import pretrain
from bertsmith.pretraining.segments import segment_source
from bertsmith.recipes import recipe
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training import distributed

DROPOUT = ["train.steps=6", "train.save_every=3", "train.keep=9", "data.long_length=null", "train.batch_size=32"]


def room(monkeypatch: pytest.MonkeyPatch, megabytes: float) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: megabytes * 1e6)


def sizes(run: Path) -> dict[str, int]:
    return dict(read_json(run / "run.json")["micro_batch_sizes"])


def test_a_resumed_run_keeps_its_micro_batches(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room(monkeypatch, 2.5)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    pretrain(settings(*DROPOUT), world / "shards", whole, device="cpu")
    assert sizes(whole)["32"] < 32
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "model")
    shutil.rmtree(cut / "checkpoints" / "step-00000006")
    room(monkeypatch, 1e6)  # here the complete batch would fit
    pretrain(settings(*DROPOUT), world / "shards", cut, device="cpu", resume=True)
    assert sizes(cut) == sizes(whole)
    assert weights(cut) == weights(whole)
    other = tmp_path / "other"
    pretrain(settings(*DROPOUT), world / "shards", other, device="cpu")
    assert sizes(other) == {"32": 32}
    assert weights(other) != weights(whole)  # another size gives other weights


def test_a_configured_size_or_less_memory_overrides_the_stored_size(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config, run = settings(*DROPOUT), tmp_path / "run"
    pretrain(config, world / "shards", run, device="cpu")
    shutil.rmtree(run / "model")
    pretrain(override(config, ["train.micro_batch_size=16"]), world / "shards", run, device="cpu", resume=True)
    assert sizes(run) == {"32": 16}
    shutil.rmtree(run / "model")
    objective = MaskedLM(Encoder(replace(config.model, vocab_size=1000)))
    plan = memory.MicroBatches(objective, config.train, torch.device("cpu"), 32, 0.15)
    room(monkeypatch, 1.15 * plan.memory(8) / 1e6)
    pretrain(config, world / "shards", run, device="cpu", resume=True)
    assert sizes(run) == {"32": 8}
    assert "the run was started with 16 sequences of 32 tokens at once, which do not fit here" in capfd.readouterr().err


def test_the_rank_with_the_least_memory_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(*DROPOUT)
    plan = memory.MicroBatches(MaskedLM(Encoder(config.model)), config.train, torch.device("cpu"), 32, 0.15)
    room(monkeypatch, 1e6)
    most = plan.size()
    monkeypatch.setattr(distributed, "all_reduce_min", lambda value: min(value, 30e6))
    assert plan.size() < most


UNEQUAL = """
import os
from bertsmith.pretraining import memory
from bertsmith.cli import main
memory.free_memory = lambda device: 2.5e6 if os.environ["RANK"] == "1" else 1e12
main()
"""


@pytest.mark.slow
def test_ranks_with_unequal_memory_train_the_weights_of_one_process(world: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "unequal.py").write_text(UNEQUAL)
    changes = [*TINY, *DROPOUT, "train.learning_rate=1e-3", "data.max_length=32"]
    finish(torchrun(command(world, tmp_path / "two", changes), program=(str(tmp_path / "unequal.py"),)))
    room(monkeypatch, 2.5)
    pretrain(override(recipe("bert-tiny"), changes), world / "shards", tmp_path / "one", device="cpu")
    assert sizes(tmp_path / "two") == sizes(tmp_path / "one")
    one, two = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two"))
    assert all(torch.allclose(value, two[name], atol=1e-5) for name, value in one.items())


# --- ids outside the embedding tables


def encoder(**changes: int) -> Encoder:
    sizes = {"vocab_size": 50, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "intermediate_size": 8}
    return Encoder(EncoderConfig(**{**sizes, "max_positions": 16, **changes}))  # type: ignore[arg-type]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("tokens", "segments", "message"),
    [
        ([1, 49, 50], [0, 0, 0], "the token id 50 is not one of the model's 50"),
        ([1, -1, 2], [0, 0, 0], "the token id"),
        ([1, 2, 3], [0, 0, 2], "the input has 3 segments"),
        ([1] * 17, [0] * 17, "a sequence of 17 tokens is longer than the encoder's 16 positions"),
    ],
)
def test_ids_out_of_range_are_refused(tokens: list[int], segments: list[int], message: str, packed: bool) -> None:
    fine = Example(np.array([1, 49]), np.array([0, 1]))
    encoder()(collate([fine], packed=packed))
    bad = collate([fine, Example(np.array(tokens), np.array(segments))], packed=packed)
    with pytest.raises(UserError, match=message):
        encoder()(bad)


def test_largest_id_of_empty_and_negative_arrays() -> None:
    assert largest_id(np.array([3, 7, 0], dtype=np.uint16)) == 7
    assert largest_id(np.zeros(0)) == 0
    assert largest_id(np.array([3, -1], dtype=np.int32)) > 2**60


def test_new_model_has_the_segments_of_its_vocabulary_and_reads_pairs(world: Path, tmp_path: Path) -> None:
    one = [
        "model.num_segments=1",
        "data.pairs=full",
        "objective.next_sentence=false",
        "train.steps=2",
        "data.long_length=null",
    ]
    pretrain(settings(*one), world / "shards", tmp_path / "one", device="cpu")
    (tmp_path / "pairs.csv").write_text("text,pair,label\n" + "a file,a number,yes\nthe list,it,no\n" * 8)
    config = override(FinetuneConfig("pair"), ["train.steps=2"])
    finetune(config, tmp_path / "one", tmp_path / "pairs.csv", tmp_path / "two", device="cpu")
    tuned = load_folder(tmp_path / "two" / "model")
    assert tuned.model.encoder.config.num_segments == 2
    assert tuned.tokenizer.joiner.join([5], [6]).segments.tolist() == [0, 0, 0, 1, 1]


def test_token_ids_beyond_the_vocabulary_are_refused_by_the_loader(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, tokenizer = Corpus.open(world / "shards"), Tokenizer.load(world / "shards")
    config = settings("data.max_length=32").data
    documents, _ = split_documents(corpus.manifest.documents, 0.0)
    loader = Loader.of(segment_source("next", corpus, documents, 32, 0.1, 1), tokenizer, config)
    loader.step(0, 4, 4)
    monkeypatch.setattr(Tokenizer, "vocab_size", property(lambda tokenizer: 500))
    with pytest.raises(
        UserError, match=r"the corpus holds the token id \d+, and its vocabulary 500 entries: a shard is"
    ):
        loader.step(0, 16, 16)
