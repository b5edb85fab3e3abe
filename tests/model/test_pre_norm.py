"""A pre-norm encoder without biases: pre-training, resuming, fine-tuning, prediction."""

import json

import pytest
import torch
from conftest import TINY
from safetensors.torch import load_file

from bertsmith.config import override
from bertsmith.finetuning.run import FinetuneConfig, finetune
from bertsmith.formats.hf import load_folder
from bertsmith.inference.predictor import Predictor
from bertsmith.pretraining.run import pretrain
from bertsmith.recipes import recipe

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_pre_norm_run_is_resumed_fine_tuned_and_predicts(world, tmp_path):
    variant = [
        "model.family=roberta-prelayernorm",
        "model.norm_first=true",
        "model.bias=false",
        "train.save_every=4",
        "train.keep=9",
    ]
    changes = [
        *TINY,
        *variant,
        "train.steps=12",
        "train.batch_size=16",
        "data.max_length=32",
        "train.learning_rate=3e-3",
    ]
    config = override(recipe("bert-tiny"), changes)
    pretrain(config, world / "shards", tmp_path / "run", device="cpu")
    losses = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["mlm_loss"] for line in losses if "mlm_loss" in line]
    assert losses[-1] < losses[0] - 0.3

    model = tmp_path / "run" / "model"
    finished = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    model.rename(tmp_path / "before")
    pretrain(config, world / "shards", tmp_path / "run", device="cpu", resume=True)
    resumed = load_file(model / "model.safetensors")
    assert finished.keys() == resumed.keys()
    assert all(torch.equal(value, resumed[name]) for name, value in finished.items())

    pretrained = load_folder(model)
    assert (pretrained.model.encoder.config.norm_first, pretrained.model.encoder.config.bias) == (True, False)
    assert pretrained.model.next_sentence is not None
    scores = finetune(
        override(FinetuneConfig("classify"), ["train.epochs=12", "train.batch_size=8", "train.learning_rate=3e-3"]),
        model,
        world / "train.csv",
        tmp_path / "classifier",
        dev=world / "dev.csv",
        device="cpu",
    )
    assert scores["accuracy"] > 80
    answers = list(Predictor.load(tmp_path / "classifier", "cpu").predict(["a b about numbers 7", "the c of a file 8"]))
    assert [answer["label"] for answer in answers] == ["numbers", "files"]
