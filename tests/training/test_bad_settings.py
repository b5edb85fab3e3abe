"""Bad settings are refused before the first step: the error names the value and a fix, and nothing is written."""

import dataclasses
import re
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import settings

from bertsmith.config import dotted_keys, override, read_json
from bertsmith.corpus.build import BuildConfig
from bertsmith.errors import UserError
from bertsmith.finetuning.run import FinetuneConfig, finetune
from bertsmith.model.encoder import Encoder
from bertsmith.objectives.kinds import build_objective
from bertsmith.pretraining import memory
from bertsmith.pretraining.memory import MicroBatches
from bertsmith.pretraining.run import pretrain
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.recipes import recipe
from bertsmith.training.settings import pick_device

REFUSED = [
    (["train.steps=0"], "train.steps must be at least 1, not 0"),
    (["train.steps=null"], "the run has no length: set train.steps, train.epochs or train.hours"),
    (["train.hours=0"], "train.hours must be above 0"),
    (["train.hours=-1"], "train.hours must be above 0"),
    (["train.hours=NaN"], "train.hours must be a finite number"),
    (["train.epochs=0"], "train.epochs must be above 0"),
    (["train.batch_size=0"], "train.batch_size must be at least 1"),
    (["train.micro_batch_size=0"], "train.micro_batch_size must be at least 1"),
    (["train.keep=0"], "train.keep must be at least 1"),
    (["train.save_minutes=0"], "train.save_minutes must be above 0"),
    (["train.save_every=-1"], "train.save_every must be at least 0, not -1"),
    (["train.learning_rate=-1"], "train.learning_rate must be at least 0, not -1"),
    (["train.learning_rate=Infinity"], "train.learning_rate must be a finite number"),
    (["train.adam_eps=-1"], "train.adam_eps must be at least 0"),
    (["train.warmup=1.5"], "train.warmup must be at least 0 and at most 1, not 1.5"),
    (["train.decay=-0.1"], "train.decay must be at least 0 and at most 1"),
    (["train.schedule=stable", "train.warmup=0.5", "train.decay=0.6"], "are together longer than the run"),
    (["train.schedule=linar"], "train.schedule: 'linar' is not one of"),
    (
        ["train.layer_decay=0.9", "model.shared_layers=all", "model.family=albert", "model.embedding_size=16"],
        "train.layer_decay is 0.9, and the layers of the model share",
    ),
    (["train.optimizer=adam"], "train.optimizer: 'adam' is not one of 'adamw', 'lamb', 'muon'"),
    (["train.beta2=1"], "train.beta2 must be at least 0 and under 1"),
    (["train.seed=-1"], "train.seed must be at least 0"),
    (["data.long_length=1024"], "data.long_length 1024 is longer than the encoder's 512 positions"),
    (["data.long_length=null", "data.max_length=513"], "data.max_length 513 is longer than the encoder's 512"),
    (["data.long_length=32"], "data.long_length 32 is not longer than data.max_length 32"),
    (["data.long_length=64", "data.long_share=0"], "data.long_share must be above 0 and under 1"),
    (["data.long_length=64", "data.long_share=1"], "data.long_share must be above 0 and under 1"),
    (["train.batch_size=100000"], r"the corpus gives \d+ sequences of 32 tokens, fewer than a batch: set train.batch"),
    (["data.pairs=full"], "data.pairs=full has no pairs to learn from: set objective.next_sentence=false"),
    (["data.held_out=1"], "data.held_out must be at least 0 and under 1"),
    (["model.num_heads=5"], "num_heads"),
    (["model.num_heads=0"], "num_heads must be at least 1, not 0"),
    (["model.hidden_size=1e30"], "hidden_size must be at most 131,072"),
    (["model.init_std=-1"], "init_std must be above 0, not -1"),
    (["model.init_std=NaN"], "init_std must be a finite number, not nan"),
    (["model.num_segments=-1"], "num_segments must be at least 0, not -1"),
    (["model.num_segments=1"], "data.pairs=next needs two segments, and model.num_segments is 1; set it to 2"),
    (["model.norm_eps=-1"], "norm_eps must be above 0 and at most 1, not -1"),
    (["model.pad_token_id=1"], "--set model.pad_token_id: the tokenizer of the corpus decides it; leave it out"),
    (["model.vocab_size=10"], "--set model.vocab_size: the tokenizer of the corpus decides it; leave it out"),
    (["recipe=foo"], "--set recipe: the command names the recipe; leave it out"),
]


def numbers(cls: Any, prefix: str = "") -> list[str]:
    """The dotted keys of all settings that are numbers."""
    found: list[str] = []
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            found += numbers(hint, f"{prefix}{name}.")
        elif {int, float} & {hint, *typing.get_args(hint)}:
            found.append(prefix + name)
    return found


CONFIGS: list[tuple[Any, Any]] = [
    (PretrainConfig, recipe("bert-tiny")),
    (FinetuneConfig, FinetuneConfig("classify")),
    (BuildConfig, BuildConfig()),
]
NUMBERS = [(start, key) for cls, start in CONFIGS for key in numbers(cls) if key in dotted_keys(cls)]


@pytest.mark.parametrize("value", ["NaN", "-1e30", "1e30"])
@pytest.mark.parametrize(("start", "key"), NUMBERS, ids=[f"{type(s).__name__}-{k}" for s, k in NUMBERS])
def test_every_number_has_bounds(start: Any, key: str, value: str) -> None:
    """A new setting without bounds fails this test."""
    given = f'{{"a": {value}}}' if key == "data.class_weights" else value
    with pytest.raises(UserError, match=re.escape(key.split(".")[-1])):
        override(start, [f"{key}={given}"])


def test_numeric_settings_of_every_section_are_covered() -> None:
    assert len(NUMBERS) > 60
    assert {"train.learning_rate", "model.norm_eps", "data.masking.rate", "clean.min_length", "dropout"} <= {
        key for _, key in NUMBERS
    }


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[c[-1] for c, _ in REFUSED])
def test_bad_settings_are_refused_before_anything_is_written(
    changes: list[str], message: str, world: Path, tmp_path: Path
) -> None:
    def start() -> None:
        pretrain(settings("train.steps=4", *changes), world / "shards", tmp_path / "new" / "run", device="cpu")

    with pytest.raises(UserError, match=message):
        start()
    assert not (tmp_path / "new").exists()


def test_bfloat16_is_refused_on_a_cpu_without_it(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertsmith.training.settings.has_bfloat16", lambda: False)
    config = settings("train.steps=4", "train.precision=bfloat16")
    with pytest.raises(UserError, match="this CPU has no products in bfloat16; choose float32"):
        pretrain(config, world / "shards", tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_second_phase_that_does_not_fill_a_batch_is_refused(world: Path, tmp_path: Path) -> None:
    changes = ["train.steps=20", "data.long_length=512", "train.batch_size=700"]
    with pytest.raises(UserError, match=r"the corpus gives \d+ sequences of 512 tokens, fewer than a batch"):
        pretrain(settings(*changes), world / "shards", tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_continued_pretraining_is_limited_to_the_positions_of_the_model(world: Path, tmp_path: Path) -> None:
    config = settings("train.steps=20", "model.max_positions=1024", "data.long_length=600")
    with pytest.raises(UserError, match=r"data\.long_length 600 is longer than the encoder's 512 positions"):
        pretrain(config, world / "shards", tmp_path / "run", model=world / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def limit_memory(monkeypatch: pytest.MonkeyPatch, megabytes: float) -> None:
    """Make the machine look as if it had this much free memory."""
    monkeypatch.setattr(memory, "free_memory", lambda device: megabytes * 1e6)


def planned(*changes: str, length: int = 128) -> MicroBatches:
    config = override(recipe("bert-tiny"), [*BASE, *changes])
    with torch.device("meta"):
        objective = build_objective(Encoder(replace(config.model, vocab_size=1000)), config.objective)
    return MicroBatches(objective, config.train, pick_device("cpu"), length, 0.15)


BASE = ["train.steps=2", "train.batch_size=256", "data.max_length=128", "data.long_length=null"]


def refusal(world: Path, out: Path, *changes: str) -> str:
    with pytest.raises(UserError) as caught:
        pretrain(override(recipe("bert-tiny"), [*BASE, *changes]), world / "shards", out, device="cpu")
    assert not out.exists()
    return str(caught.value)


def test_micro_batch_that_does_not_fit_is_refused_with_a_size_that_does(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_memory(monkeypatch, 200)
    found = re.fullmatch(
        r"256 sequences of 128 tokens at once need about ([\d.]+) GB; cpu has 0.2 GB; "
        r"set train.micro_batch_size=(\d+): (\d+) of them make a batch, and the result is equal",
        refusal(world, tmp_path / "run", "train.micro_batch_size=256"),
    )
    assert found is not None
    need, size, count = float(found[1]), int(found[2]), int(found[3])
    assert need > 0.2
    assert count == -(-256 // size)
    plan = planned(f"train.micro_batch_size={size}")
    assert plan.size() == size
    assert plan.memory(size + 1) > 0.9 * 200e6  # the suggested size is the largest that fits


def test_memory_of_the_second_phase_is_checked_too(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_memory(monkeypatch, 200)
    message = refusal(
        world,
        tmp_path / "run",
        "data.long_length=512",
        "train.steps=20",
        "train.batch_size=64",
        "train.micro_batch_size=16",
    )
    assert message.startswith("16 sequences of 512 tokens at once need about")


def test_error_gives_advice_when_no_micro_batch_fits(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_memory(monkeypatch, 5)
    for changes in ([], ["train.micro_batch_size=8"]):
        message = refusal(world, tmp_path / "run", *changes)
        assert (
            "cpu has 0.0 GB; set train.gradient_checkpointing=true, set train.parallel=fsdp on several GPUs" in message
        )
    message = refusal(world, tmp_path / "run", "train.gradient_checkpointing=true")
    assert "cpu has 0.0 GB; set train.parallel=fsdp on several GPUs, or take a smaller model" in message


def test_default_micro_batch_size_fits_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, sizes = planned(), []
    for megabytes in (1e6, 100, 30):
        limit_memory(monkeypatch, megabytes)
        sizes.append(plan.size())
        assert plan.memory(sizes[-1]) <= 0.9 * megabytes * 1e6
    assert sizes[0] == 64
    assert sizes[0] > sizes[1] > sizes[2] >= 1


def test_smaller_micro_batch_gives_the_same_loss(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradient accumulation that was chosen for lack of memory equals the large batch."""
    plain = ["data.long_length=null", "train.steps=3", "train.batch_size=32"]
    plain += ["model.hidden_dropout=0", "model.attention_dropout=0"]
    config = settings(*plain)
    large = pretrain(config, world / "shards", tmp_path / "large", device="cpu")
    limit_memory(monkeypatch, 2.5)
    small = pretrain(config, world / "shards", tmp_path / "small", device="cpu")
    assert read_json(tmp_path / "large" / "run.json")["micro_batch_sizes"] == {"32": 32}
    assert read_json(tmp_path / "small" / "run.json")["micro_batch_sizes"]["32"] < 32
    assert small["mlm_loss"] == pytest.approx(large["mlm_loss"], abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["train.batch_size=0"], "train.batch_size must be at least 1"),
        (["train.batch_size=99999999999"], "train.batch_size must be at most 1,048,576"),
        ([f"train.seed={10**25}"], "train.seed must be at most"),
        (["train.workers=-2"], "train.workers must be at least 0, not -2"),
        (['data.class_weights={"nmbers":2}'], "data.class_weights: label 'nmbers' is not one of"),
        (["data.max_length=600"], "data.max_length 600 is longer than the encoder's 512 positions"),
    ],
)
def test_bad_settings_of_fine_tuning_are_refused(changes: list[str], message: str, world: Path, tmp_path: Path) -> None:
    def start() -> None:
        config = override(FinetuneConfig("classify"), changes)
        finetune(config, world / "run", world / "train.csv", tmp_path / "run", device="cpu")

    with pytest.raises(UserError, match=message):
        start()
    assert not (tmp_path / "run").exists()
