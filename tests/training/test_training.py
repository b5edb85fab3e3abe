"""The training loop: gradient accumulation, dropout, weight decay, and resuming with identical bytes."""

import dataclasses
import gc
import json
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from labels import of_task
from runs import cut, settings, weights
from safetensors.torch import load_file

from bertsmith.batch import Batch, Example, collate
from bertsmith.config import override
from bertsmith.errors import UserError
from bertsmith.finetuning.batches import micro_batches
from bertsmith.finetuning.run import FinetuneConfig, finetune
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.pretraining.run import pretrain
from bertsmith.tasks.examples import Examples
from bertsmith.training import checkpoint, fit, optim, runlog
from bertsmith.training.optim import make_optimizers
from bertsmith.training.prefetch import prefetch
from bertsmith.training.run import read_checked, write_checked
from bertsmith.training.schedule import learning_rate_factor
from bertsmith.training.settings import MAY_CHANGE, TrainConfig
from bertsmith.training.steps import gradients, seed_dropout, update

MODEL = EncoderConfig(vocab_size=50, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64, max_positions=40)


def examples(count: int) -> list[Example]:
    rng = np.random.default_rng(0)
    sizes = rng.integers(3, 30, count)
    return [Example(rng.integers(5, 50, n), np.zeros(n, dtype=int), of_task(int(rng.integers(0, 3)))) for n in sizes]


def task_model(dropout: float = 0.0) -> TaskModel:
    torch.manual_seed(0)
    config = dataclasses.replace(MODEL, hidden_dropout=dropout, attention_dropout=dropout)
    return TaskModel(Encoder(config), HeadConfig("single", ("a", "b", "c")))


def train_step(model, optimizers, batches, config, step, steps) -> tuple[dict[str, float], float]:
    """One step as the training loop takes it."""
    counts = {name: sum(b.counts[name] for b in batches) for name in batches[0].counts}
    outcome = gradients(model, batches, counts, config, step)
    update(optimizers, learning_rate_factor(config, step, steps))
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
def test_gradient_accumulation_equals_the_large_batch(micro_batch_size: int) -> None:
    for one, many in zip(parameters_after(12), parameters_after(micro_batch_size), strict=True):
        torch.testing.assert_close(one, many, atol=1e-6, rtol=0)


def test_packed_and_padded_batches_train_the_same_weights() -> None:
    for packed, padded in zip(parameters_after(12), parameters_after(12, packed=False), strict=True):
        torch.testing.assert_close(packed, padded, atol=1e-6, rtol=0)


def test_losses_do_not_depend_on_the_micro_batch_size(world: Path) -> None:
    from bertsmith.corpus.shards import Corpus
    from bertsmith.pretraining.loader import DataConfig, Loader
    from bertsmith.pretraining.segments import PairSource
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


def test_training_lowers_the_loss() -> None:
    model, config = task_model(), TrainConfig(steps=30, batch_size=12, learning_rate=3e-3, warmup=0.1)
    optimizer, batch = make_optimizers(model, config), [collate(examples(12), packed=True)]
    losses = [train_step(model, optimizer, batch, config, step, 30)[0]["task"] for step in range(30)]
    assert losses[-1] < 0.7 * losses[0]


def test_dropout_is_a_function_of_seed_step_and_micro_batch() -> None:
    def loss(seed: int, step: int) -> float:
        model, config = task_model(dropout=0.3), TrainConfig(steps=9, batch_size=4, seed=seed)
        torch.rand(step)  # earlier draws must not matter
        return train_step(model, make_optimizers(model, config), [collate(examples(4), packed=True)], config, step, 9)[
            0
        ]["task"]

    assert loss(1, 2) == loss(1, 2)
    assert loss(1, 2) != loss(1, 3)
    assert loss(1, 2) != loss(2, 2)


def test_every_micro_batch_of_a_step_has_its_own_dropout_mask() -> None:
    config, drawn = TrainConfig(steps=9), []
    for number in (0, 1, 0):
        seed_dropout(config, 2, number)
        drawn.append(torch.rand(8).tolist())
    assert drawn[0] == drawn[2] != drawn[1]


def test_biases_and_norms_have_no_weight_decay() -> None:
    model = task_model()
    groups = make_optimizers(model, TrainConfig(steps=1, weight_decay=0.01))[0].param_groups
    free = {id(p) for g in groups if g["weight_decay"] == 0 for p in g["params"]}
    for name, parameter in model.named_parameters():
        assert (id(parameter) in free) == (name.endswith("bias") or "norm" in name), name


def test_resumed_pretraining_gives_identical_bytes(world: Path, tmp_path: Path) -> None:
    config = settings("train.steps=8", "train.save_every=3", "train.micro_batch_size=3", "train.keep=9")
    pretrain(config, world / "shards", tmp_path / "whole", device="cpu")
    cut(tmp_path / "whole", tmp_path / "cut", 6)
    pretrain(config, world / "shards", tmp_path / "cut", device="cpu", resume=True)
    assert weights(tmp_path / "whole") == weights(tmp_path / "cut")
    steps = [[r["step"] for r in runlog.read(tmp_path / run)] for run in ("whole", "cut")]
    assert steps[0] == steps[1]
    losses = [[r.get("loss") for r in runlog.read(tmp_path / run)] for run in ("whole", "cut")]
    assert losses[0] == losses[1]


def test_resumed_fine_tuning_gives_identical_bytes(world: Path, tmp_path: Path) -> None:
    config = override(
        FinetuneConfig("classify"),
        ["train.epochs=2", "train.batch_size=8", "train.save_every=4", "train.keep=9", "data.max_length=32"],
    )
    finetune(config, world / "run", world / "train.csv", tmp_path / "whole", device="cpu")
    cut(tmp_path / "whole", tmp_path / "cut", 4)
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


def test_equal_seeds_give_identical_bytes_and_other_seeds_do_not(world: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        pretrain(settings("train.steps=2", f"train.seed={seed}"), world / "shards", tmp_path / name, device="cpu")
    assert weights(tmp_path / "a") == weights(tmp_path / "b") != weights(tmp_path / "c")


def test_checkpoints_open_in_transformers_and_only_the_last_are_kept(world: Path, tmp_path: Path) -> None:
    from transformers import BertForPreTraining

    config = settings("train.steps=9", "train.save_every=2", "train.keep=2")
    pretrain(config, world / "shards", tmp_path / "run", device="cpu")
    kept = checkpoint.checkpoints(tmp_path / "run")
    assert [p.name for p in kept] == ["step-00000008", "step-00000009"]
    BertForPreTraining.from_pretrained(kept[0])


def test_run_folder_holds_configuration_and_metrics(world: Path, tmp_path: Path) -> None:
    pretrain(settings("train.steps=3", "train.evaluate_every=1"), world / "shards", tmp_path / "run", device="cpu")
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["recipe"] == "bert-tiny"
    assert stored["train"]["steps"] == 3
    records = runlog.read(tmp_path / "run")
    assert {"loss", "mlm_loss", "nsp_loss", "tokens_per_second", "learning_rate", "gradient_norm"} <= set(records[0])
    assert any("dev_mlm_loss" in r and "dev_nsp_accuracy" in r for r in records)


def test_continued_pretraining_starts_from_the_given_weights(world: Path, tmp_path: Path) -> None:
    config = settings("train.steps=1", "train.learning_rate=0")
    pretrain(config, world / "shards", tmp_path / "more", model=world / "run", device="cpu")
    before, after = (load_file(run / "model" / "model.safetensors") for run in (world / "run", tmp_path / "more"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_without_next_sentence_there_is_no_pair_head(world: Path, tmp_path: Path) -> None:
    scores = pretrain(
        settings("train.steps=2", "objective.next_sentence=false"), world / "shards", tmp_path / "run", device="cpu"
    )
    assert "nsp_accuracy" not in scores
    assert json.loads((tmp_path / "run/model/config.json").read_text())["architectures"] == ["BertForMaskedLM"]


def test_an_epoch_of_fine_tuning_sees_every_row_once() -> None:
    rows, train = Examples.of(examples(10)), TrainConfig(epochs=2, batch_size=4)
    seen = [b.num_tokens for step in range(train.num_steps(10)) for b in micro_batches(rows, step, train, 32)]
    assert train.num_steps(10) == 5
    assert sum(seen) == 2 * sum(len(r.tokens) for r in rows)


OPTIMIZERS = {
    "adamw": ["train.learning_rate=5e-3"],
    "lamb": ["train.learning_rate=1e-2"],
    "muon": ["train.learning_rate=0.02", "train.rest_learning_rate=2e-3"],
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_learns_and_resumes_with_identical_bytes(optimizer: str, world: Path, tmp_path: Path) -> None:
    config = settings(
        *OPTIMIZERS[optimizer],
        f"train.optimizer={optimizer}",
        *("train.steps=30", "train.save_every=13", "train.keep=9", "data.long_length=48", "data.long_share=0.5"),
    )
    pretrain(config, world / "shards", tmp_path / "whole", device="cpu")
    losses = [r["mlm_loss"] for r in runlog.read(tmp_path / "whole") if "loss" in r]
    assert np.mean(losses[-5:]) < np.mean(losses[:3]) - 0.2
    resumed = cut(tmp_path / "whole", tmp_path / "cut", 13)
    pretrain(config, world / "shards", resumed, device="cpu", resume=True)
    assert weights(tmp_path / "whole") == weights(resumed)


@pytest.mark.parametrize("capturable", [False, True], ids=["", "for CUDA graphs"])
def test_lamb_follows_its_paper(capturable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Algorithm 2 of You et al. 2020 with φ(z) = z, against plain arithmetic; the learning rate varies."""
    if capturable:  # the learning rate and the number of the step are tensors
        rates = lambda groups: [{**group, "lr": torch.tensor(group["rate"]).double()} for group in groups]  # noqa: E731
        monkeypatch.setattr(optim, "_on_device", rates)
    draw = np.random.default_rng(0)
    matrix, bias = draw.normal(size=(3, 4)), draw.normal(size=4)
    config = TrainConfig(
        steps=9, optimizer="lamb", learning_rate=0.1, weight_decay=0.05, beta1=0.8, beta2=0.95, adam_eps=1e-4
    )
    model = torch.nn.Linear(4, 3).double()
    model.weight.data, model.bias.data = torch.tensor(matrix), torch.tensor(draw.normal(size=3))
    bias = model.bias.data.numpy().copy()
    (optimizer,) = make_optimizers(model, config)
    assert optimizer.defaults["capturable"] == capturable
    moments = {name: [np.zeros_like(value), np.zeros_like(value)] for name, value in (("w", matrix), ("b", bias))}
    for step in range(1, 6):
        gradients_of = {"w": draw.normal(size=(3, 4)), "b": draw.normal(size=3)}
        rate, decay = 0.1 * step / 5, {"w": 0.05, "b": 0.0}
        for name, value in (("w", matrix), ("b", bias)):
            mean, square = moments[name]
            mean[:] = 0.8 * mean + 0.2 * gradients_of[name]
            square[:] = 0.95 * square + 0.05 * gradients_of[name] ** 2
            ratio = (mean / (1 - 0.8**step)) / (np.sqrt(square / (1 - 0.95**step)) + 1e-4)
            change = ratio + decay[name] * value
            trust = np.linalg.norm(value) / np.linalg.norm(change) if decay[name] else 1.0
            value -= rate * trust * change
        model.weight.grad, model.bias.grad = torch.tensor(gradients_of["w"]), torch.tensor(gradients_of["b"])
        update([optimizer], step / 5)
    np.testing.assert_allclose(model.weight.detach().numpy(), matrix, rtol=0, atol=1e-12)
    np.testing.assert_allclose(model.bias.detach().numpy(), bias, rtol=0, atol=1e-12)


def test_muon_updates_the_matrices_of_the_layers_and_adamw_the_rest() -> None:
    config = TrainConfig(steps=1, optimizer="muon", learning_rate=0.02, rest_learning_rate=3e-4)
    model = MaskedLM(Encoder(MODEL))
    muon, rest = make_optimizers(model, config)
    assert type(muon).__name__ == "Muon"
    assert isinstance(rest, torch.optim.AdamW)
    names = {id(p): name for name, p in model.named_parameters()}
    inner, outer = ({names[id(p)] for g in o.param_groups for p in g["params"]} for o in (muon, rest))
    assert inner == {n for n, p in model.named_parameters() if n.startswith("encoder.layers.") and p.dim() == 2}
    assert inner | outer == set(names.values())
    assert not inner & outer
    assert {g["rate"] for g in muon.param_groups} == {0.02}
    assert {g["rate"] for g in rest.param_groups} == {3e-4}


def test_resume_accepts_settings_that_keep_the_result_and_refuses_others(world: Path, tmp_path: Path) -> None:
    plain = ["train.steps=6", "model.hidden_dropout=0", "model.attention_dropout=0"]  # dropout depends on micro-batches
    config = settings(*plain, "train.save_every=2", "train.keep=9")
    pretrain(config, world / "shards", tmp_path / "whole", device="cpu")
    changed = ["micro_batch_size=3", "keep=1", "save_every=1", "save_minutes=1", "evaluate_every=2"]
    changed += ["gradient_checkpointing=true", "parallel=fsdp"]
    assert {f"train.{c.split('=')[0]}" for c in changed} <= MAY_CHANGE
    run = cut(tmp_path / "whole", tmp_path / "cut", 2)
    for setting, name in (("train.learning_rate=1e-4", "train.learning_rate"), ("data.max_length=40", "max_length")):
        with pytest.raises(UserError, match=f"--resume: .*{name} is .* in .*config.json and .* now"):
            pretrain(settings(*plain, setting), world / "shards", run, device="cpu", resume=True)
    facts = (run / "run.json").read_text()
    write_checked(run / "run.json", {**read_checked(run / "run.json"), "start": "elsewhere"})
    with pytest.raises(UserError, match=r"--resume: start is 'elsewhere' in .*run\.json and '' now"):
        pretrain(config, world / "shards", run, device="cpu", resume=True)
    (run / "run.json").write_text(facts)
    others = override(config, [f"train.{c}" for c in changed])
    pretrain(others, world / "shards", run, device="cpu", resume=True)
    assert [p.name for p in checkpoint.checkpoints(run)][-1] == "step-00000006"
    before, after = (load_file(r / "model" / "model.safetensors") for r in (tmp_path / "whole", run))
    for name, value in before.items():
        torch.testing.assert_close(value, after[name], atol=1e-5, rtol=0)


def test_error_in_a_step_stops_all_workers(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(fit, "gradients", broken)
    with pytest.raises(RuntimeError, match="broken") as found:
        pretrain(settings("train.workers=2"), world / "shards", tmp_path / "run", device="cpu")
    assert not multiprocessing.active_children(), found  # the traceback still references the run


def test_workers_do_not_finalise_objects_of_the_main_process(tmp_path: Path) -> None:
    """A CUDA graph that a worker finalised would ask for a GPU."""
    main_process = os.getpid()

    class Held:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            (tmp_path / str(os.getpid() == main_process)).touch()

    def make(step: int, share: float) -> list[Batch]:
        gc.collect()
        return []

    gc.disable()
    try:
        Held()
        assert list(prefetch(make, [(0, 0.0), (1, 0.5)], torch.device("cpu"), workers=1)) == [[], []]
        gc.collect()
    finally:
        gc.enable()
    assert [path.name for path in tmp_path.iterdir()] == ["True"]


def test_models_of_earlier_runs_in_a_process_are_freed(world: Path, tmp_path: Path) -> None:
    def models() -> int:
        return sum(isinstance(each, TaskModel) for each in gc.get_objects())

    gc.collect()
    gc.disable()  # which may not run for long, since it counts objects and not their size
    try:
        found = []
        for seed in range(3):
            options = {"steps": 1, "seed": seed, "device": "cpu"}
            finetune("classify", world / "run", world / "train.csv", tmp_path / str(seed), **options)
            found.append(models())
    finally:
        gc.enable()
    assert found == [found[0]] * 3
