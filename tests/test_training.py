"""The loop: accumulation changes nothing, resuming changes nothing to the bit, the schedule and decay are right."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY

from bertsmith.batch import Example, collate
from bertsmith.config import override
from bertsmith.errors import UserError
from bertsmith.finetune import FinetuneConfig, finetune, micro_batches
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.pretrain import pretrain
from bertsmith.recipes import recipe
from bertsmith.training import checkpoint, runlog
from bertsmith.training.fit import gradients, update
from bertsmith.training.optim import make_optimizers
from bertsmith.training.schedule import rate_share
from bertsmith.training.settings import TrainConfig

SMALL = [*TINY, "train.batch_size=8", "data.max_length=32", "train.learning_rate=1e-3", "train.warmup=0.1"]
MODEL = EncoderConfig(vocab_size=50, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64, max_positions=40)


def settings(*changes: str):
    return override(recipe("bert-tiny"), [*SMALL, *changes])


def weights(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


def examples(count: int) -> list[Example]:
    rng = np.random.default_rng(0)
    sizes = rng.integers(3, 30, count)
    return [Example(rng.integers(5, 50, n), np.zeros(n, dtype=int), int(rng.integers(0, 3))) for n in sizes]


def task_model(dropout: float = 0.0) -> TaskModel:
    torch.manual_seed(0)
    config = dataclasses.replace(MODEL, hidden_dropout=dropout, attention_dropout=dropout)
    return TaskModel(Encoder(config), HeadConfig("single", ("a", "b", "c")))


def train_step(model, optimizers, batches, config, step, steps) -> tuple[dict[str, float], float]:
    """One step as the loop does it."""
    counts = {name: sum(b.counts[name] for b in batches) for name in batches[0].counts}
    outcome = gradients(model, batches, counts, config, step)
    update(optimizers, rate_share(config, step, steps))
    for optimizer in optimizers:
        optimizer.zero_grad()
    return outcome


def parameters_after(micro_batch_size: int, packed: bool = True) -> list[torch.Tensor]:
    config, model, rows = TrainConfig(steps=3, batch_size=12, learning_rate=1e-3), task_model(), examples(36)
    optimizer = make_optimizers(model, config)
    for step in range(3):
        chosen = rows[12 * step : 12 * step + 12]
        batches = [collate(chosen[i : i + micro_batch_size], packed=packed) for i in range(0, 12, micro_batch_size)]
        train_step(model, optimizer, batches, config, step, 3)
    return list(model.parameters())


@pytest.mark.parametrize("micro_batch_size", [1, 5, 6])
def test_accumulation_equals_the_large_batch(micro_batch_size: int) -> None:
    for one, many in zip(parameters_after(12), parameters_after(micro_batch_size), strict=True):
        torch.testing.assert_close(one, many, atol=1e-6, rtol=0)


def test_packed_trains_like_padded() -> None:
    for packed, padded in zip(parameters_after(12), parameters_after(12, packed=False), strict=True):
        torch.testing.assert_close(packed, padded, atol=1e-6, rtol=0)


def test_losses_with_counts_of_their_own_do_not_depend_on_the_division(world: Path) -> None:
    from bertsmith.data.loader import DataConfig, Loader
    from bertsmith.data.segments import PairSource
    from bertsmith.data.shards import Corpus
    from bertsmith.text.tokenizer import Tokenizer

    corpus, tokenizer = Corpus.open(world / "shards"), Tokenizer.load(world / "tok")
    loader = Loader.of(PairSource(corpus, np.arange(20), 40), tokenizer, DataConfig(max_length=40, short_share=0.5))
    results = []
    for micro in (10, 3):
        torch.manual_seed(0)
        config = dataclasses.replace(MODEL, vocab_size=tokenizer.vocab_size, hidden_dropout=0, attention_dropout=0)
        model, train = MaskedLM(Encoder(config)), TrainConfig(steps=2, batch_size=10, learning_rate=1e-3)
        optimizer = make_optimizers(model, train)
        losses, _ = train_step(model, optimizer, loader.step(0, 10, micro), train, 0, 2)
        results.append((losses, list(model.parameters())))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-6)
    for one, many in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(one, many, atol=1e-6, rtol=0)


def test_a_step_lowers_the_loss() -> None:
    model, config = task_model(), TrainConfig(steps=30, batch_size=12, learning_rate=3e-3, warmup=0.1)
    optimizer, batch = make_optimizers(model, config), [collate(examples(12), packed=True)]
    losses = [train_step(model, optimizer, batch, config, step, 30)[0]["task"] for step in range(30)]
    assert losses[-1] < 0.7 * losses[0]


def test_dropout_is_a_function_of_seed_step_and_micro_batch() -> None:
    def loss(seed: int, step: int) -> float:
        model, config = task_model(dropout=0.3), TrainConfig(steps=9, batch_size=4, seed=seed)
        torch.rand(step)  # what was drawn before must not matter
        return train_step(model, make_optimizers(model, config), [collate(examples(4), packed=True)], config, step, 9)[
            0
        ]["task"]

    assert loss(1, 2) == loss(1, 2)
    assert loss(1, 2) != loss(1, 3)
    assert loss(1, 2) != loss(2, 2)


def test_the_rate_rises_and_falls_in_a_line() -> None:
    config = TrainConfig(steps=100, learning_rate=1.0, warmup=0.1)
    rates = [rate_share(config, step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx(np.arange(1, 11) / 10)
    assert rates[10:] == pytest.approx(np.arange(90, 0, -1) / 90)
    assert rate_share(dataclasses.replace(config, schedule="constant"), 99, 100) == 1.0


def test_no_decay_on_biases_and_norms() -> None:
    model = task_model()
    groups = make_optimizers(model, TrainConfig(steps=1, weight_decay=0.01))[0].param_groups
    free = {id(p) for g in groups if g["weight_decay"] == 0 for p in g["params"]}
    for name, parameter in model.named_parameters():
        assert (id(parameter) in free) == (name.endswith("bias") or "norm" in name), name


def test_resumed_pre_training_is_identical_to_the_bit(world: Path, tmp_path: Path) -> None:
    config = settings("train.steps=8", "train.save_every=3", "train.micro_batch_size=3")
    pretrain(config, world / "shards", tmp_path / "whole", device="cpu")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "model")  # as if it had been killed in step 8
    assert [p.name for p in checkpoint.checkpoints(tmp_path / "cut")] == ["step-00000003", "step-00000006"]
    pretrain(config, world / "shards", tmp_path / "cut", device="cpu", resume=True)
    assert weights(tmp_path / "whole") == weights(tmp_path / "cut")
    steps = [[r["step"] for r in runlog.read(tmp_path / run)] for run in ("whole", "cut")]
    assert steps[0] == steps[1]
    losses = [[r.get("loss") for r in runlog.read(tmp_path / run)] for run in ("whole", "cut")]
    assert losses[0] == losses[1]


def test_a_damaged_checkpoint_is_passed_over(world: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = settings("train.steps=8", "train.save_every=3")
    pretrain(config, world / "shards", tmp_path / "whole", device="cpu")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "model")
    damaged = tmp_path / "cut" / "checkpoints" / "step-00000006" / "optimizer.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    pretrain(config, world / "shards", tmp_path / "cut", device="cpu", resume=True)
    assert "step-00000006" in capfd.readouterr().err
    assert weights(tmp_path / "whole") == weights(tmp_path / "cut")


def test_resumed_fine_tuning_is_identical_to_the_bit(world: Path, tmp_path: Path) -> None:
    config = override(
        FinetuneConfig("classify"), ["train.epochs=2", "train.batch_size=8", "train.save_every=4", "data.max_length=32"]
    )
    finetune(config, world / "run", world / "train.csv", tmp_path / "whole", device="cpu")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "model")
    finetune(config, world / "run", world / "train.csv", tmp_path / "cut", device="cpu", resume=True)
    assert weights(tmp_path / "whole") == weights(tmp_path / "cut")


def test_resume_refuses_other_settings_and_leaves_a_finished_run_alone(world: Path, tmp_path: Path) -> None:
    config = settings("train.steps=2")
    pretrain(config, world / "shards", tmp_path / "run", device="cpu")
    first = weights(tmp_path / "run")
    again = pretrain(config, world / "shards", tmp_path / "run", device="cpu", resume=True)
    assert "mlm_loss" in again
    assert weights(tmp_path / "run") == first
    with pytest.raises(UserError, match="--resume"):
        pretrain(config, world / "shards", tmp_path / "run", device="cpu")
    with pytest.raises(UserError, match=r"train.steps is 2 .* and 3 now"):
        pretrain(settings("train.steps=3"), world / "shards", tmp_path / "run", device="cpu", resume=True)


def test_the_same_seed_gives_the_same_run_and_another_one_another(world: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        pretrain(settings("train.steps=2", f"train.seed={seed}"), world / "shards", tmp_path / name, device="cpu")
    assert weights(tmp_path / "a") == weights(tmp_path / "b") != weights(tmp_path / "c")


def test_checkpoints_open_as_models_and_only_the_last_are_kept(world: Path, tmp_path: Path) -> None:
    from transformers import BertForPreTraining

    config = settings("train.steps=9", "train.save_every=2", "train.keep=2")
    pretrain(config, world / "shards", tmp_path / "run", device="cpu")
    kept = checkpoint.checkpoints(tmp_path / "run")
    assert [p.name for p in kept] == ["step-00000006", "step-00000008"]
    BertForPreTraining.from_pretrained(kept[0])


def test_a_run_folder_says_what_it_is(world: Path, tmp_path: Path) -> None:
    pretrain(settings("train.steps=3", "train.evaluate_every=1"), world / "shards", tmp_path / "run", device="cpu")
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["recipe"] == "bert-tiny"
    assert stored["train"]["steps"] == 3
    records = runlog.read(tmp_path / "run")
    assert {"loss", "mlm_loss", "nsp_loss", "tokens_per_second", "learning_rate", "gradient_norm"} <= set(records[0])
    assert any("dev_mlm_loss" in r and "dev_nsp_accuracy" in r for r in records)


def test_continued_pre_training_starts_from_the_weights(world: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    config = settings("train.steps=1", "train.learning_rate=0")
    pretrain(config, world / "shards", tmp_path / "more", model=world / "run", device="cpu")
    before, after = (load_file(run / "model" / "model.safetensors") for run in (world / "run", tmp_path / "more"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_without_next_sentence_the_pair_head_is_gone(world: Path, tmp_path: Path) -> None:
    scores = pretrain(
        settings("train.steps=2", "next_sentence=false"), world / "shards", tmp_path / "run", device="cpu"
    )
    assert "nsp_accuracy" not in scores
    assert json.loads((tmp_path / "run/model/config.json").read_text())["architectures"] == ["BertForMaskedLM"]


def test_an_epoch_of_fine_tuning_sees_every_row_once() -> None:
    rows, train = examples(10), TrainConfig(epochs=2, batch_size=4)
    seen = [b.num_tokens for step in range(train.num_steps(10)) for b in micro_batches(rows, step, train, 32)]
    assert train.num_steps(10) == 5
    assert sum(seen) == 2 * sum(len(r.tokens) for r in rows)


def test_a_loss_that_is_not_a_number_stops_the_run(world: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Lower train\.learning_rate"):
        pretrain(
            settings("train.steps=20", "train.learning_rate=1e30"), world / "shards", tmp_path / "run", device="cpu"
        )
