"""The model that fine-tuning starts from: a pre-trained encoder with a new output layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import nn

from bertsmith import draws
from bertsmith.errors import UserError
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.formats.families.table import family_named
from bertsmith.formats.hf import Loaded, load_folder
from bertsmith.formats.hub import find_model
from bertsmith.formats.saved_config import CONFIG, architecture, config_in, head_in, read_config
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder, init_parameter, init_weights
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.objectives.objective import GENERATOR
from bertsmith.progress import say
from bertsmith.tasks.description import Task

HEAD_WEIGHTS = 105  # the stream of draws that initialises the output layer
OUTPUT_WEIGHT = ".output.weight"
LARGE, SMALL = 10.0, 0.05  # the mean or spread of numbers that an output layer does not reach, or that it overshoots
VOCABULARY_TENSORS = ("encoder.embeddings.tokens.weight", "causal_lm.decoder.weight", "causal_lm.decoder.bias")


def start_model(source: Path, head: HeadConfig, config: FinetuneConfig) -> Loaded:
    """Load the pre-trained encoder and give it a new output layer; the pooler is kept if the folder has one."""
    _refuse_whole(source, head)
    torch.manual_seed(draws.seed(config.train.seed, HEAD_WEIGHTS))
    loaded = load_folder(source, head, dropout=config.dropout)
    if not loaded.tokenizer.frame.size(1) and head.features is None:
        loaded = _with_task_tokens(loaded)
    model = loaded.model
    assert isinstance(model, TaskModel)
    check_layers(config, model.encoder.config)
    _note_generator(source)
    if loaded.notes.caution:
        say(f"note: {source}: {loaded.notes.caution}")
    if config.beside:
        _load_beside(model, loaded, load_folder(find_model(config.beside), dropout=config.dropout))
    if config.random_start:
        model = TaskModel(Encoder(model.encoder.config), head)
    elif config.reinit_layers:
        _reinitialise(model, config.reinit_layers)
    return replace(loaded, model=model)


def with_settings_of_family(head: HeadConfig, task: Task, config: FinetuneConfig, source: Path) -> HeadConfig:
    """A head with the settings that differ between families: as configured, or as the family has them.

    These are the language model's weight, the orders of pairs, and whether states that are features are standardised.
    """
    values = read_config(source)
    family, encoder = family_named(values, source / CONFIG), config_in(values, source)
    trained_alone = head.features is None and not head.bilstm_layers and not head.beside
    weight = family.language_model * trained_alone if config.language_model is None else config.language_model
    both = family.both_orders and task.symmetric and trained_alone
    both = both if config.both_orders is None else config.both_orders
    if weight and encoder.direction == "both":
        raise UserError(
            f"language_model {weight:g} needs an encoder that reads in one direction, and {source} sees what it would "
            "predict; leave it out"
        )
    if both and (encoder.pooler or not head.is_of_sequence):
        raise UserError(
            f"both_orders adds the logits of two sequences, which needs a label or a number of a pair and an output "
            f"layer without a bias, as openai-gpt has; {source} is {family.model_type}; leave it out"
        )
    features = head.features
    if features is not None and features.standardise is None and encoder.layer_type == "lstm":
        features = replace(features, standardise=True)
    return replace(head, language_model=weight, both_orders=both, features=features)


def _with_task_tokens(loaded: Loaded) -> Loaded:
    """Add the special tokens of tasks, with new embeddings (OpenAI GPT, section 3.3)."""
    model, tokenizer = loaded.model, loaded.tokenizer.for_tasks()
    assert isinstance(model, TaskModel)
    config = model.encoder.config
    rows = max(0, tokenizer.vocab_size - config.vocab_size)
    tensors = model.state_dict()
    for name in (name for name in tensors if name in VOCABULARY_TENSORS):
        new = torch.empty(rows, *tensors[name].shape[1:])
        init_parameter(name, new, config.init_std)
        tensors[name] = torch.cat([tensors[name], new])
    with torch.device("meta"):
        larger = TaskModel(Encoder(replace(config, vocab_size=config.vocab_size + rows)), model.head_config)
    larger.load_state_dict(tensors, assign=True)
    larger.tie_weights()
    return replace(loaded, model=larger, tokenizer=tokenizer)


def _refuse_whole(source: Path, head: HeadConfig) -> None:
    """Refuse to fine-tune an encoder of LSTMs: as in its paper, a new model is trained on its states."""
    if head.features is None and config_in(read_config(source), source).layer_type == "lstm":
        raise UserError(f"{source} is an ELMo, whose states are features of a new model; add --features mix-all")


def _note_generator(source: Path) -> None:
    """Say that a folder holds a generator, where its family keeps another network for fine-tuning.

    The masked-word class of a family whose detector has no class of its own (DeBERTa) may be the model itself: there, a
    generator is known by the folder that it is saved to.
    """
    values = read_config(source)
    family = family_named(values, source / CONFIG)
    outputs = family.outputs
    if "detector" not in outputs or architecture(values) != outputs["masked_lm"].class_name:
        return
    if outputs["detector"].class_name != family.encoder_class or source.name == GENERATOR:
        kept = outputs["detector"].class_name
        say(f"note: {source} holds {architecture(values)}, a generator; the model to fine-tune is its {kept}")


def check_layers(config: FinetuneConfig, encoder: EncoderConfig) -> None:
    """Refuse layers that the model does not have on their own, and random layers that would stay frozen."""
    anew, frozen, layers = config.reinit_layers, config.frozen_layers, encoder.num_layers
    decay = 0.0 if config.train.layer_decay == 1.0 else config.train.layer_decay
    for name, value in (("reinit_layers", anew), ("frozen_layers", frozen), ("train.layer_decay", decay)):
        if value and encoder.shared_layers != "none":
            raise UserError(f"{name} is {value}, and the layers of the model share their parameters; leave it out")
    for name, value in (("reinit_layers", anew), ("frozen_layers", frozen)):
        if (value or 0) > layers:
            raise UserError(f"{name} is {value}, and the model has {layers} layers")
    if frozen is not None and (config.random_start or anew + frozen > layers):
        which = "random_start" if config.random_start else f"reinit_layers {anew}"
        raise UserError(f"{which} and frozen_layers {frozen}: random layers would never be trained; leave one out")


def start_at_numbers(loaded: Loaded, numbers: Sequence[float]) -> str:
    """Let the new output layer of a regression start at the mean of what it learns; return a note on the numbers.

    A layer that starts at 0 spends its first steps on the mean, and changes the encoder for it: on 400 rows of STS-B,
    whose mean is 2.7, it ends far lower (docs/experiments.md). Numbers in the thousands it would never reach, because
    Adam changes a weight by about the learning rate in a step.
    """
    output = _new_output(loaded)
    if output is None:
        return ""
    mean, spread = float(np.mean(numbers)), float(np.std(numbers))
    described, is_large = f"(mean {mean:,.6g}, standard deviation {spread:,.6g})", max(abs(mean), spread) > LARGE
    if output.bias is not None:
        with torch.no_grad():
            output.bias.fill_(mean)
            if is_large:
                output.weight.mul_(max(spread, 1.0))
    if 0 < spread < SMALL:
        return f"the numbers differ little {described}, which is learnt slowly; multiply them by {1 / spread:,.1g}"
    if not is_large:
        return ""
    if output.bias is None:
        return f"the numbers are large {described}, which is learnt slowly; scale them to between -1 and 1"
    return f"the numbers are large {described}, so that predictions start at their mean"


def _new_output(loaded: Loaded) -> nn.Linear | None:
    """The output layer, if it starts at random."""
    names = [name for name in loaded.missing if name.startswith("head.") and name.endswith(OUTPUT_WEIGHT)]
    return cast(nn.Linear, loaded.model.get_submodule(names[0].removesuffix(".weight"))) if names else None


def _load_beside(model: TaskModel, loaded: Loaded, other: Loaded) -> None:
    """Load the second encoder, which has to equal the first one except for its direction."""
    assert model.beside is not None
    if other.model.encoder.config != model.beside.config or other.tokenizer.hash != loaded.tokenizer.hash:
        raise UserError(
            f"beside: {other.folder} is not the same encoder as {loaded.folder}, read the other way: the size, the "
            f"vocabulary or the direction ({other.model.encoder.config.direction}) differs"
        )
    model.beside.load_state_dict(other.model.encoder.state_dict())


def _reinitialise(model: TaskModel, layers: int) -> None:
    """Initialise the top layers and the pooler again (Zhang et al. 2021)."""
    parts = [part for e in model.encoders for part in (*e.layers[-layers:], e.final_norm)]
    for part in (*parts, getattr(model.head, "pooler", None)):
        if part is not None:
            init_weights(part, model.encoder.config.init_std)


def start_task(loaded: Loaded) -> str:
    """The task that the starting model was trained for: `pretrain`, or an empty string if it is not known."""
    saved = head_in(read_config(loaded.folder), loaded.folder)
    return loaded.notes.task or ("" if saved is None else "an unnamed task")


def freeze(network: TaskModel, layers: int | None) -> None:
    """Freeze the embeddings and the lowest layers."""
    if layers is not None:
        for encoder in network.encoders:
            encoder.embeddings.requires_grad_(False)
            encoder.layers[:layers].requires_grad_(False)
