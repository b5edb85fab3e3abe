"""Checks of the lengths of sequences and of a run: errors, and notes on positions that stay untrained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bertsmith.errors import UserError
from bertsmith.model.config import EncoderConfig
from bertsmith.pretraining import held_out
from bertsmith.pretraining.loader import DataConfig
from bertsmith.pretraining.phases import Phases
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.progress import say
from bertsmith.training.schedule import learning_rate_factor

WORSE = 0.3  # nats: positions are not learnt if the loss of long sequences exceeds that of short ones by more
REACH = 4.0  # the distance, in initial standard deviations, that the weights of new positions must be able to move
FULL = 0.6  # the least mean fullness of long sequences at which the last positions are trained


def check_length(max_length: int, model: EncoderConfig, name: str = "data.max_length") -> None:
    """Refuse sequences that are longer than the encoder's positions."""
    if max_length > model.max_positions:
        raise UserError(
            f"{name} {max_length} is longer than the encoder's {model.max_positions} positions; "
            f"set it to {model.max_positions} or less, or model.max_positions={max_length} for a new model"
        )


def check_lengths(config: PretrainConfig) -> None:
    """Refuse a phase whose sequences are longer than the encoder's positions."""
    check_length(config.data.max_length, config.model)
    if config.data.long_length is not None:
        check_length(config.data.long_length, config.model, "data.long_length")


def check_run_length(config: PretrainConfig, steps: int | None, phases: Phases) -> None:
    """Refuse a corpus that does not fill a batch; print notes on short or timed runs and on short documents."""
    data, parts = config.data, phases.parts
    if steps is None:
        say("note: a schedule by the clock depends on the machine's speed: a resumed run is not identical to the bit")
    elif data.long_length is not None and steps * data.long_steps < 1:
        say(f"note: {steps} steps are too few for the phase of {data.long_length} tokens; it is left out")
        parts = parts[:1]
    for source in (phase.loader.source for phase in parts):
        if len(source) < config.train.batch_size:
            raise UserError(
                f"the corpus gives {len(source)} sequences of {source.max_length} tokens, fewer than a batch: "
                f"set train.batch_size={len(source)} or less, or add text"
            )
    if len(parts) > 1 and (full := parts[1].fullness()) < FULL:
        say(
            f"note: sequences of {data.long_length} tokens are {full:.0%} full, since many documents are "
            "shorter: the last positions are seldom learnt, which long input needs. Longer documents fill them, or "
            "data.pairs=full with objective.next_sentence=false"
        )


def note_unreachable_positions(config: PretrainConfig, steps: int) -> None:
    """Print a note if new positions cannot move far: Adam moves a weight by at most the sum of the learning rates."""
    data, train, std = config.data, config.train, config.model.init_std
    rate = {"adamw": train.learning_rate, "muon": train.rest_learning_rate}.get(train.optimizer)
    learned = config.model.positions == "learned"
    if data.long_length is None or not learned or not rate or steps * data.long_steps < 1:
        return
    begin = round(steps * (1 - data.long_share)) if data.long_last else 0
    part = 1.0 if data.long_last else data.long_steps  # of the steps from there on
    moved = rate * part * sum(learning_rate_factor(train, step, steps) for step in range(begin, steps))
    if moved < REACH * std:
        count = round(part * (steps - begin))
        say(
            f"note: the learning rates of the {count:,} steps with {data.long_length} tokens add up to {moved:.2g}, "
            f"and no weight moves further: positions from {data.max_length} on, which start {std:g} from "
            f"0, are hardly learnt. Raise data.long_share ({data.long_share:g} now) or train.steps, or set "
            "train.schedule=stable"
        )


def unlearnt_positions(data: DataConfig, scores: Mapping[str, Any]) -> str:
    """A note if held-out scores show that the phase of long sequences was too short; empty otherwise."""
    pairs = ((name.removeprefix(held_out.LONG), name) for name in scores if name.startswith(held_out.LONG))
    found = next(((short, long) for short, long in pairs if short.endswith("_loss")), None)
    if found is None or scores[found[1]] < scores[found[0]] + WORSE:
        return ""
    short, long = found
    return (
        f"held-out sequences of {data.long_length} tokens have a loss of {scores[long]:.2f}, of "
        f"{data.max_length} {scores[short]:.2f}: the positions from {data.max_length} on are not learnt yet. Give them "
        f"more steps (data.long_share, {data.long_share} now)"
    )
