"""The objective is a section of the configuration: chosen by its kind, a row of a table, and read from older runs."""

import dataclasses
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_type_hints

import pytest
from conftest import TINY
from runs import cut
from torch import Tensor

from bertsmith import config as configurations
from bertsmith.config import dotted_keys, from_dict, load, override, read_json, to_dict
from bertsmith.errors import UserError
from bertsmith.formats.hf import load_folder
from bertsmith.model.encoder import Encoder
from bertsmith.objectives import kinds
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.objectives.objective import Objective
from bertsmith.objectives.settings import (
    BIDIRECTIONAL_LM,
    CausalLMConfig,
    DistillationConfig,
    MaskedLMConfig,
    ReplacedTokenConfig,
)
from bertsmith.pages.report.runs import read_runs
from bertsmith.pretraining import settings
from bertsmith.pretraining.run import pretrain
from bertsmith.pretraining.settings import PretrainConfig, upgrade
from bertsmith.recipes import RECIPES, recipe

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK = [*TINY, "train.steps=6", "train.batch_size=8", "train.save_every=2", "data.max_length=16", "train.workers=0"]
QUICK += ["data.long_length=null"]
NO_PAIRS = MaskedLMConfig(next_sentence=False)


def test_recipes_set_the_objective() -> None:
    found = {recipe(name).objective for name in RECIPES}
    sizes = [ReplacedTokenConfig(generator_size=size) for size in (1 / 2, 1 / 3, 1 / 4)]
    v3 = ReplacedTokenConfig(
        generator_size=1.0, generator_layers=0.5, disentangled=True, context=True, mask_decoder=True
    )
    assert found == {
        MaskedLMConfig(),
        NO_PAIRS,
        CausalLMConfig(),
        BIDIRECTIONAL_LM,
        DistillationConfig(),
        DistillationConfig(half=True),
        *sizes,
        replace(NO_PAIRS, mask_decoder=True),  # DeBERTa
        v3,
        replace(v3, fill_every=4),  # speedrun-small
    }
    assert recipe("bert-tiny-no-nsp").objective == recipe("quickstart").objective == NO_PAIRS
    assert recipe("bert-tiny-right-to-left").objective == CausalLMConfig()
    assert {kinds.objective_class(config) for config in found} == set(kinds.OBJECTIVES.values())


def test_set_changes_the_kind_or_a_field() -> None:
    bert = recipe("bert-tiny")
    assert override(bert, ["objective.next_sentence=false"]).objective == NO_PAIRS
    one_way = override(bert, ["objective.kind=causal-lm", "model.direction=left-to-right"])
    assert one_way.objective == CausalLMConfig()
    assert one_way == replace(recipe("bert-tiny-left-to-right"), recipe="bert-tiny")
    back = override(one_way, ["objective.kind=masked-lm", "model.direction=both"])
    assert back == bert
    assert {"objective.kind", "objective.next_sentence"} <= set(dotted_keys(PretrainConfig))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("bert-tiny", "next_sentence=false", "unknown setting; did you mean 'objective.next_sentence'"),
        (
            "bert-tiny",
            "objective.kind=electra",
            "'electra' is not a kind; one of: masked-lm, causal-lm, bidirectional-lm, distillation, replaced-token",
        ),
        ("bert-tiny", "objective.kind=causal-lm", "set model.direction=left-to-right"),
        ("bert-tiny", "objective.kind=replaced-token", "set model.family=electra"),
        ("electra-tiny", "objective.temperature=0", "objective.temperature must be above 0"),
        ("bert-tiny", "data.pairs=full", "set objective.next_sentence=false"),
        ("bert-tiny", "model.num_segments=1", "data.pairs=full with objective.next_sentence=false"),
        ("bert-tiny-left-to-right", "model.direction=both", "which an encoder with model.direction=both sees"),
        (
            "bert-tiny-left-to-right",
            "objective.next_sentence=true",
            "the kind causal-lm has no setting 'next_sentence'",
        ),
        ("bert-tiny-no-nsp", "model.direction=right-to-left", "set objective.kind=causal-lm, or model.direction=both"),
    ],
)
def test_contradictory_settings_are_refused_with_the_fix(name: str, change: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        override(recipe(name), [change])
    assert words in str(error.value)


def older(config: PretrainConfig) -> dict[str, Any]:
    """The configuration as versions before the section `objective` wrote it."""
    values = to_dict(config)
    objective = values.pop("objective")
    return {**values, "next_sentence": objective.get("next_sentence", False)}


@pytest.mark.parametrize(
    "name", ["bert-tiny", "bert-tiny-no-nsp", "bert-tiny-left-to-right", "bert-tiny-right-to-left"]
)
def test_configurations_of_older_versions_are_read(name: str, tmp_path: Path) -> None:
    config = recipe(name)
    assert from_dict(PretrainConfig, older(config)) == config
    (tmp_path / "config.json").write_text(json.dumps(older(config)))
    assert recipe(str(tmp_path / "config.json")) == config
    assert upgrade(to_dict(config)) == to_dict(config)
    with pytest.raises(UserError, match="unknown key 'next_sentence'"):
        from_dict(PretrainConfig, {**to_dict(config), "next_sentence": True})


@pytest.mark.parametrize("name", ["bert-tiny", "bert-tiny-left-to-right"])
def test_a_run_of_an_older_version_is_resumed_and_reported(name: str, world: Path, tmp_path: Path) -> None:
    config = override(recipe(name), QUICK)
    pretrain(config, world / "shards", tmp_path / "whole", device="cpu")
    run = cut(tmp_path / "whole", tmp_path / "old", 4)
    stored = load(PretrainConfig, run / "config.json")
    (run / "config.json").write_text(json.dumps(older(stored)))
    (shown,) = read_runs([run])
    assert shown.setting("objective", "kind") == config.objective.kind
    pretrain(config, world / "shards", run, device="cpu", resume=True)
    whole, resumed = (folder / "model" / "model.safetensors" for folder in (tmp_path / "whole", run))
    assert resumed.read_bytes() == whole.read_bytes()
    other = override(recipe("bert-tiny-no-nsp"), QUICK)
    with pytest.raises(UserError, match=r"--resume: (objective|model)\."):
        pretrain(other, world / "shards", run, device="cpu", resume=True)


def test_starting_from_a_model_of_another_direction_is_refused(world: Path, tmp_path: Path) -> None:
    config = override(recipe("bert-tiny-left-to-right"), QUICK)
    with pytest.raises(UserError, match=r"set model\.direction=left-to-right"):
        pretrain(config, world / "shards", tmp_path / "run", model=world / "run", device="cpu")


@dataclass(frozen=True)
class TwinsConfig:
    """A made-up objective: two encoders learn the same masked words."""

    kind: Literal["twins"] = "twins"
    second_layers: int = 1


class Twins(Objective):
    targets = "masked"
    token_loss = "first"
    token_head = "first.masked_lm"
    folders = {"": "first", "second": "second"}

    def __init__(self, encoder: Encoder, config: TwinsConfig) -> None:
        super().__init__()
        self.config = config
        self.first = MaskedLM(encoder, NO_PAIRS)
        self.second = MaskedLM(Encoder(replace(encoder.config, num_layers=config.second_layers)), NO_PAIRS)

    @property
    def encoder(self) -> Encoder:  # type: ignore[override]
        return self.first.encoder

    @property
    def encoders(self) -> list[Encoder]:
        return [self.first.encoder, self.second.encoder]

    @staticmethod
    def counts(config: TwinsConfig) -> dict[str, str]:
        return {"first": "targets", "second": "targets"}

    @classmethod
    def saved(cls, model, config: TwinsConfig):
        return [(model, "masked_lm"), (replace(model, num_layers=config.second_layers), "masked_lm")]

    def logits(self, batch) -> dict[str, Tensor]:
        return {name: getattr(self, name).logits(batch)["mlm"] for name in ("first", "second")}

    def forward(self, batch) -> dict[str, Tensor]:
        outputs = {}
        for name in ("first", "second"):
            found = getattr(self, name)(batch)
            outputs |= {name: found["mlm"], f"{name}_accuracy": found["mlm_accuracy"]}
        return outputs


def test_a_made_up_objective_needs_one_row_and_one_module(world: Path, tmp_path: Path, monkeypatch) -> None:
    """It is configured, trained, evaluated, saved in two folders, and resumed bit-identically."""
    monkeypatch.setitem(kinds.OBJECTIVES, "twins", Twins)
    monkeypatch.setattr(settings, "ObjectiveConfig", MaskedLMConfig | TwinsConfig)
    monkeypatch.setattr(configurations, "_hints", get_type_hints)  # the settings are read again
    config = override(recipe("bert-tiny"), [*QUICK, "objective.kind=twins", "objective.second_layers=3"])
    assert config.objective == TwinsConfig(second_layers=3)
    scores = pretrain(config, world / "shards", tmp_path / "whole", device="cpu")
    assert {"first_loss", "first_perplexity", "first_accuracy", "second_accuracy"} <= set(scores)
    assert read_json(tmp_path / "whole" / "config.json")["objective"] == dataclasses.asdict(config.objective)
    folder = tmp_path / "whole" / "model"
    sizes = [load_folder(path).model.encoder.config.num_layers for path in (folder, folder / "second")]
    assert sizes == [2, 3]
    run = cut(tmp_path / "whole", tmp_path / "cut", 4)
    pretrain(config, world / "shards", run, device="cpu", resume=True)
    for name in ("model/model.safetensors", "model/second/model.safetensors"):
        assert (run / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
