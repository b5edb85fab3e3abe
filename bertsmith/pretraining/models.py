"""The model of a run: how it starts, and the folders that it is saved in and restored from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from bertsmith import draws
from bertsmith.corpus.shards import Corpus
from bertsmith.errors import UserError
from bertsmith.formats.families.table import family_of, output_named
from bertsmith.formats.hf import Loaded, Notes, load_folder, save_folder
from bertsmith.formats.hub import find_model
from bertsmith.formats.saved_config import Model, architecture_of, config_in, read_config
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.objectives.discriminator import Discriminator
from bertsmith.objectives.kinds import build_objective, objective_class
from bertsmith.objectives.objective import Objective
from bertsmith.objectives.settings import ObjectiveConfig
from bertsmith.pretraining.checks import check_lengths
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.pretraining.teacher import find_teacher, student_of, teach
from bertsmith.progress import say
from bertsmith.text.spelling import NUM_CHARACTERS, WORD_LENGTH
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training.parts import is_untrained

WEIGHTS = 104  # a stream of draws


def random_model(config: PretrainConfig, tokenizer: Tokenizer) -> tuple[Objective, PretrainConfig]:
    """A new model, and the configuration with what the tokenizer decides."""
    config = replace(config, model=fitted(config.model, tokenizer))
    check_lengths(config)
    torch.manual_seed(draws.seed(config.train.seed, WEIGHTS))
    return build_objective(Encoder(config.model), config.objective), config


def fitted(model: EncoderConfig, tokenizer: Tokenizer) -> EncoderConfig:
    """The configuration of a new encoder for this tokenizer: its entries, its padding, and rows for its segments.

    Every kind of vocabulary works in every family. A table of segments gets at least as many rows as the tokenizer
    has segments, so that RoBERTa reads pairs of a WordPiece vocabulary as well.
    """
    segments = max(model.num_segments, 1 + max(tokenizer.frame.segments)) if model.num_segments else 0
    published = family_of(model).vocabulary
    if published is not None and tokenizer.kind != published:
        rows = f", and model.num_segments={segments}" if segments != model.num_segments else ""
        say(
            f"note: {model.family} was published with a vocabulary of `tokenizer train --kind {published}`; this run "
            f"takes the corpus' own ({tokenizer.kind}), which works as well{rows}"
        )
    if model.reads_characters:
        model = replace(model, num_characters=NUM_CHARACTERS, max_characters=WORD_LENGTH)
    return replace(model, vocab_size=tokenizer.vocab_size, pad_token_id=tokenizer.pad_id, num_segments=segments)


def saved_model(config: PretrainConfig, folder: Path, corpus: Corpus) -> tuple[Objective, PretrainConfig]:
    """A saved model to continue from, and the configuration with its encoder."""
    config = replace(config, model=config_in(read_config(folder), folder))
    check_lengths(config)
    torch.manual_seed(draws.seed(config.train.seed, WEIGHTS))  # for heads that the folder lacks
    if len(objective_class(config.objective).folders) > 1:
        return _saved_parts(config, folder, corpus)
    loaded = _opened(folder, corpus, config.objective)
    return cast(Objective, loaded.model), config


def _saved_parts(config: PretrainConfig, folder: Path, corpus: Corpus) -> tuple[Objective, PretrainConfig]:
    """An objective of several networks from the folders that hold them, and the configuration with their sizes."""
    kind, parts = objective_class(config.objective), dict[str, Objective]()
    outputs = [output for _, output in kind.saved(config.model, config.objective)]
    for (name, part), output in zip(kind.folders.items(), outputs, strict=True):
        expected = output_named(family_of(config.model), output).class_name
        if name and not (folder / name).is_dir():
            raise UserError(
                f"{folder} has no folder {name!r}, and objective.kind={config.objective.kind} trains that network too: "
                f"put the folder of its {expected} there, as {folder / name}"
            )
        detects = output.startswith(Discriminator.token_head)
        loaded = _opened(folder / name, corpus, detects=detects)
        is_detector = detects and isinstance(loaded.model, Discriminator)  # with a masked-word head or without
        if not is_detector and (saved := architecture_of(loaded.model)) != expected:
            raise UserError(
                f"{folder / name} holds {saved}, and objective.kind={config.objective.kind} continues {expected}: give "
                f"a folder of {expected}"
                + ("" if name else f", with the {', '.join(list(kind.folders)[1:])} inside it")
            )
        parts[part] = cast(Objective, loaded.model)
    objective = kind.of_parts(config.objective, parts)
    return objective, replace(config, objective=objective.config)


def _opened(folder: Path, corpus: Corpus, objective: ObjectiveConfig | None = None, detects: bool = False) -> Loaded:
    """A saved model whose tokenizer is the corpus's; heads that it lacks start at random, with a note."""
    loaded = load_folder(folder, objective=objective, detects=detects)
    corpus.check_tokenizer(loaded.tokenizer.hash, folder)
    if loaded.missing:
        lacking = sorted({name.split(".")[0] for name in loaded.missing})
        say(f"note: {folder} has no weights for {', '.join(lacking)}; they start at random")
    return loaded


def start_model(
    config: PretrainConfig, corpus: Corpus, tokenizer: Tokenizer, start: str | Path | None
) -> tuple[Objective, PretrainConfig, dict[str, Any]]:
    """The model of a run with its teacher where it has one, the whole configuration, and the facts to resume with."""
    teacher = find_teacher(config, corpus)
    if teacher is not None:
        config = student_of(config, teacher)
    if start is None:
        objective, config = random_model(config, tokenizer)
    else:
        objective, config = saved_model(config, find_model(start), corpus)
    if teacher is not None:
        teach(objective, teacher, starts_alike=start is None and config.objective.init == "teacher")  # type: ignore[union-attr]
    return objective, config, {"start": str(start or ""), **({"teacher": teacher.facts} if teacher else {})}


def restore(objective: Objective, folder: Path) -> None:
    """Load the state of a model from a checkpoint; modules that are not trained are not in it."""
    kept = {name: value for name, value in objective.state_dict().items() if is_untrained(objective, name)}
    objective.load_state_dict({**kept, **load_tensors(folder, objective.config)})


def save_model(
    folder: Path, objective: Objective, tokenizer: Tokenizer, notes: Notes, tensors: Mapping[str, Tensor]
) -> None:
    """Write the model folder of an objective, with the folders inside it where the objective saves several models."""
    for name, part in objective.folders.items():
        own = objective.tensors_of(part, tensors)
        save_folder(folder / name, cast(Model, objective.get_submodule(part)), tokenizer, notes, own)


def load_tensors(folder: Path, config: ObjectiveConfig) -> dict[str, Tensor]:
    """The state of an objective from a model folder that `save_model` wrote."""
    tensors: dict[str, Tensor] = {}
    for name, part in objective_class(config).folders.items():
        loaded = load_folder(folder / name, objective=None if part else config)
        prefix = f"{part}." if part else ""
        tensors |= {f"{prefix}{key}": tensor for key, tensor in loaded.model.state_dict().items()}
    return tensors
