"""The teacher of a distilled model: opening it, checking that it fits, and the student that it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bertsmith.corpus.shards import Corpus
from bertsmith.errors import UserError
from bertsmith.formats.families.table import FAMILIES
from bertsmith.formats.hf import load_folder
from bertsmith.formats.hub import find_model
from bertsmith.formats.weights import weights_facts
from bertsmith.model.config import EncoderConfig
from bertsmith.objectives.discriminator import Discriminator
from bertsmith.objectives.distillation import Distillation, check_shapes, copy_layers
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.objectives.objective import GENERATOR, Objective
from bertsmith.objectives.settings import DistillationConfig
from bertsmith.pretraining.settings import PretrainConfig

DISTILLED = "distilbert"  # the family of half a BERT


@dataclass(frozen=True, eq=False)
class Teacher:
    """A pre-trained model that another one is distilled from."""

    folder: Path
    model: Objective

    @property
    def config(self) -> EncoderConfig:
        return self.model.encoder.config

    @property
    def facts(self) -> dict[str, str]:
        """What must be the same when a run is resumed."""
        return weights_facts(self.folder)


def with_teacher(config: PretrainConfig, teacher: str | Path) -> PretrainConfig:
    """The configuration with distillation from this teacher as its objective."""
    objective = config.objective if isinstance(config.objective, DistillationConfig) else DistillationConfig()
    return replace(config, objective=replace(objective, teacher=str(teacher)))


def refuse_sizes(config: PretrainConfig, changes: Sequence[str]) -> None:
    """Refuse changes of the encoder where it is to be half of the teacher."""
    if isinstance(config.objective, DistillationConfig) and config.objective.half:
        for change in changes:
            if change.startswith("model.") and not change.partition("=")[0].strip().endswith("_dropout"):
                raise UserError(f"--set {change}: the student is half of its teacher; add objective.half=false")


def find_teacher(config: PretrainConfig, corpus: Corpus) -> Teacher | None:
    """Open the teacher of a run; None if its objective has none. One that cannot teach on this corpus is refused."""
    if not isinstance(config.objective, DistillationConfig):
        return None
    if not config.objective.teacher:
        raise UserError(
            "objective.kind=distillation needs a teacher: --teacher MODEL, a model folder, a run or a hub name; "
            "objective.kind=masked-lm trains the same encoder without one"
        )
    folder = find_model(config.objective.teacher)
    loaded = load_folder(folder)
    model = loaded.model
    if isinstance(model, Discriminator):
        inner = folder / GENERATOR
        generator = f"its generator ({inner})" if inner.is_dir() else "its generator"
        raise UserError(
            f"--teacher {folder} is a detector of replaced tokens: it was trained to find the tokens that were "
            "replaced, and a student learns from the words that its teacher predicts at masks. Give "
            f"{generator}, or a model that was pre-trained on masked words"
        )
    if not isinstance(model, MaskedLM) or model.lacks_token_head(loaded.missing):
        raise UserError(
            f"--teacher {folder} has no masked-word head to learn from; give a model that was pre-trained on masked "
            "words (`bertsmith finetune … --teacher` learns a task from a fine-tuned model)"
        )
    if getattr(model, "mask_decoder", None) is not None:
        raise UserError(
            f"--teacher {folder} predicts masked words through a mask decoder, which a student has not; give a teacher "
            "without one"
        )
    corpus.check_tokenizer(loaded.tokenizer.hash, folder)
    _check_lengths(config, model.encoder.config, folder)
    return Teacher(folder, model)


def _check_lengths(config: PretrainConfig, teacher: EncoderConfig, folder: Path) -> None:
    for name in ("max_length", "long_length"):
        length = getattr(config.data, name) or 0
        if length > teacher.max_positions:
            raise UserError(
                f"data.{name} {length} is longer than the {teacher.max_positions} positions of the teacher {folder}; "
                f"set it to {teacher.max_positions} or less"
            )
    if config.data.pairs != "full" and teacher.num_segments < 2:
        raise UserError(
            f"data.pairs={config.data.pairs} has two segments, and the teacher {folder} knows "
            f"{teacher.num_segments or 'none'}; set data.pairs=full"
        )


def student_of(config: PretrainConfig, teacher: Teacher) -> PretrainConfig:
    """The configuration with half of the teacher as its encoder, if `objective.half` asks for it."""
    assert isinstance(config.objective, DistillationConfig)
    if not config.objective.half:
        return config
    model, layers = config.model, max(1, teacher.config.num_layers // 2)
    half = replace(teacher.config, num_layers=layers, hidden_dropout=model.hidden_dropout)
    half = replace(half, attention_dropout=model.attention_dropout)
    family = FAMILIES[DISTILLED]
    distilled = replace(half, family=DISTILLED, **{**family.defaults, "num_layers": layers})  # type: ignore[arg-type]
    fits = half.family == "bert" and config.data.pairs == "full" and not family.refusal(distilled)
    return replace(config, model=distilled if fits else half)


def teach(objective: Objective, teacher: Teacher, *, starts_alike: bool) -> None:
    """Give a student its teacher; with `starts_alike` it starts with the teacher's layers."""
    assert isinstance(objective, Distillation)
    own, theirs = objective.encoder.config.hidden_size, teacher.config.hidden_size
    if starts_alike:
        check_shapes(objective.encoder.config, teacher.config)
        copy_layers(objective, teacher.model)
    elif objective.config.cosine_weight and own != theirs:
        raise UserError(
            f"the student's states have {own} dimensions and those of its teacher {theirs}, which have no cosine; set "
            f"objective.cosine_weight=0, or model.hidden_size={theirs} for a new student"
        )
    objective.teacher = teacher.model
