"""Fine-tuning layer by layer: lower learning rates in lower layers, reinitialised layers, frozen layers."""

import shutil
from pathlib import Path

import pytest
import torch
from runs import finish, torchrun
from safetensors.torch import load_file

from bertsmith.config import override, read_json
from bertsmith.errors import UserError
from bertsmith.finetuning.model import check_layers
from bertsmith.finetuning.run import FinetuneConfig, finetune
from bertsmith.formats.hf import load_folder
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.training.optim import learning_rate_factors, make_optimizers
from bertsmith.training.settings import TrainConfig

QUICK = ["train.steps=6", "train.batch_size=8", "train.learning_rate=1e-3", "data.max_length=16"]
EMBEDDINGS, LAYER, OUTPUT = "bert.embeddings.", "bert.encoder.layer.{}.", "classifier."


def tune(world: Path, out: Path, *changes: str, **options) -> Path:
    config = override(FinetuneConfig("classify"), [*QUICK, *changes])
    finetune(config, world / "run", world / "train.csv", out, dev=world / "dev.csv", device="cpu", **options)
    return out


def weights(folder: Path, part: str = "") -> dict[str, torch.Tensor]:
    return {n: t for n, t in load_file(folder / "model" / "model.safetensors").items() if n.startswith(part)}


def same(first: Path, second: Path, part: str) -> bool:
    one, other = weights(first, part), weights(second, part)
    assert one
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def test_learning_rates_decay_layer_by_layer_and_are_lowest_in_the_embeddings(world) -> None:
    model = load_folder(world / "run" / "model", HeadConfig("single", ("a", "b"))).model
    shares = {n: learning_rate_factors(model, 0.5)[p] for n, p in model.named_parameters()}
    assert {shares[n] for n in shares if n.startswith("encoder.embeddings.")} == {0.25}
    assert {shares[n] for n in shares if n.startswith("encoder.layers.0.")} == {0.5}
    assert {shares[n] for n in shares if n.startswith(("encoder.layers.1.", "head."))} == {1.0}
    for optimizer in ("adamw", "lamb", "muon"):
        made = make_optimizers(model, TrainConfig(optimizer=optimizer, learning_rate=0.1, layer_decay=0.5))
        groups = [g for o in made for g in o.param_groups]
        assert {g["rate"] for g in groups} == {0.1, 0.05, 0.025}
        assert sum(len(g["params"]) for g in groups) == len(shares)
        for group in groups:
            assert {0.1 * learning_rate_factors(model, 0.5)[p] for p in group["params"]} == {group["rate"]}
    (plain,) = make_optimizers(model, TrainConfig())
    assert [g["weight_decay"] for g in plain.param_groups] == [0.01, 0.0]


def test_dropout_may_differ_from_pre_training(world, tmp_path) -> None:
    head = HeadConfig("single", ("a", "b"), bilstm_layers=2)
    model = load_folder(world / "run" / "model", head, dropout=0.3).model
    shares = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
    assert shares == {0.3, 0.0}  # BERT has none before its pooler
    assert {block.attention.attention_dropout for block in model.encoder.layers} == {model.head.lstm.dropout} == {0.3}
    assert load_folder(world / "run" / "model", head).model.encoder.config.hidden_dropout == 0.1
    plain, more = tune(world, tmp_path / "plain"), tune(world, tmp_path / "more", "dropout=0.3")
    assert not same(plain, more, "")
    config = read_json(more / "model" / "config.json")
    assert config["hidden_dropout_prob"] == config["attention_probs_dropout_prob"] == 0.3
    for value in ("1", "-0.1"):
        with pytest.raises(UserError, match=f"dropout must be at least 0 and under 1, not {value}"):
            override(FinetuneConfig("classify"), [f"dropout={value}"])


def test_learning_rates_decay_in_both_of_two_encoders() -> None:
    config = EncoderConfig(num_layers=2, hidden_size=8, num_heads=2, vocab_size=10, direction="left-to-right")
    model = TaskModel(Encoder(config), HeadConfig("single", ("a", "b"), beside=True))
    shares = {n: learning_rate_factors(model, 0.5)[p] for n, p in model.named_parameters()}
    for encoder in ("encoder", "beside"):
        assert {shares[n] for n in shares if n.startswith(f"{encoder}.embeddings.")} == {0.25}
        assert {shares[n] for n in shares if n.startswith(f"{encoder}.layers.0.")} == {0.5}
        assert {shares[n] for n in shares if n.startswith(f"{encoder}.layers.1.")} == {1.0}
    assert {shares[n] for n in shares if n.startswith("head.")} == {1.0}


def test_a_step_is_as_large_as_the_layers_learning_rate(world, tmp_path) -> None:
    settings = ["train.steps=1", "train.weight_decay=0", "train.warmup=0", "train.layer_decay=0.1"]
    start = tune(world, tmp_path / "start", *settings, "train.learning_rate=0")
    moved = tune(world, tmp_path / "moved", *settings)
    for part, expected in ((LAYER.format(1), 1e-3), (LAYER.format(0), 1e-4), (EMBEDDINGS, 1e-5)):
        before, after = weights(start, part), weights(moved, part)
        largest = max(float((after[name] - before[name]).abs().max()) for name in before)
        assert largest == pytest.approx(expected, rel=0.01)  # Adam's first step


def test_the_top_layers_are_reinitialised(world, tmp_path) -> None:
    settings = ["train.steps=1", "train.learning_rate=0"]
    plain = tune(world, tmp_path / "plain", *settings)
    changed = tune(world, tmp_path / "changed", *settings, "reinit_layers=1")
    assert same(plain, changed, EMBEDDINGS)
    assert same(plain, changed, LAYER.format(0))
    for name, tensor in weights(changed, LAYER.format(1)).items():
        assert not torch.equal(tensor, weights(plain)[name]) or tensor.dim() == 1
        if "LayerNorm.weight" in name:
            assert torch.equal(tensor, torch.ones_like(tensor))
    assert not same(plain, changed, "bert.pooler.dense.weight")
    assert same(changed, tune(world, tmp_path / "again", *settings, "reinit_layers=1"), "")


@pytest.mark.parametrize(("layers", "kept"), [(0, [EMBEDDINGS]), (1, [EMBEDDINGS, LAYER.format(0)])])
def test_frozen_layers_keep_their_weights(world, tmp_path, layers: int, kept: list[str]) -> None:
    start = tune(world, tmp_path / "start", "train.steps=1", "train.learning_rate=0")
    frozen = tune(world, tmp_path / "frozen", f"frozen_layers={layers}", "train.gradient_checkpointing=true")
    for part in (EMBEDDINGS, LAYER.format(0), LAYER.format(1), OUTPUT):
        assert same(start, frozen, part) == (part in kept)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["reinit_layers=3"], "the model has 2 layers"),
        (["frozen_layers=3"], "the model has 2 layers"),
        (["reinit_layers=1", "frozen_layers=2"], "never be trained"),
        (["random_start=true", "frozen_layers=0"], "never be trained"),
        (["frozen_layers=-1"], "frozen_layers must be at least 0, not -1"),
        (["train.layer_decay=0"], "above 0 and at most 1"),
        (["train.layer_decay=1.1"], "above 0 and at most 1"),
    ],
)
def test_contradictory_settings_are_refused(world, tmp_path, changes: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tune(world, tmp_path / "out", *changes)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", ["reinit_layers=1", "frozen_layers=1", "train.layer_decay=0.9"])
def test_per_layer_settings_are_refused_for_shared_layers(change: str) -> None:
    shared = EncoderConfig(shared_layers="all")
    with pytest.raises(UserError, match=r"is .*, and the layers of the model share their parameters; leave it out"):
        check_layers(override(FinetuneConfig("classify"), [change]), shared)
    check_layers(override(FinetuneConfig("classify"), ["frozen_layers=0"]), shared)


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "muon"])
def test_a_resumed_run_is_bit_identical(world, tmp_path, optimizer: str) -> None:
    changes = [
        *("train.save_every=3", "train.layer_decay=0.8", "frozen_layers=1", "reinit_layers=1"),
        f"train.optimizer={optimizer}",
    ]
    whole = tune(world, tmp_path / "whole", *changes)
    resumed = shutil.copytree(whole, tmp_path / "resumed")
    shutil.rmtree(resumed / "model")
    shutil.rmtree(resumed / "checkpoints" / "step-00000006")
    tune(world, resumed, *changes, resume=True)
    assert same(whole, resumed, "")


@pytest.mark.slow  # a fast test is in test_distributed_finetuning
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_train_the_same_weights(world, tmp_path, parallel: str) -> None:
    changes = [*QUICK, "train.layer_decay=0.8", "frozen_layers=1", "train.micro_batch_size=4", "train.optimizer=adamw"]
    alone = tune(world, tmp_path / "alone", *changes)
    flags = [part for change in [*changes, f"train.parallel={parallel}"] for part in ("--set", change)]
    data = ["--model", world / "run", "--data", world / "train.csv", "--dev", world / "dev.csv", "--device", "cpu"]
    finish(torchrun(["finetune", "classify", *map(str, data), "--out", str(tmp_path / "two"), *flags]))
    one, two = weights(alone), weights(tmp_path / "two")
    assert all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)
