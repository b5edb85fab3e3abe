"""The list of recipes that `bertsmith recipes` prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from bertsmith.objectives.settings import DistillationConfig
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.recipes import RECIPES, left_to_right, masked, no_nsp, recipe, right_to_left, sized
from bertsmith.training.settings import TrainConfig

START = {  # the recipes to start with, and when to choose each: what docs/families.md has measured supports it
    "quickstart": "For a first try",
    "speedrun": "For a small corpus and a GPU",
    "speedrun-small": "For a small encoder in minutes",
    "modern-base": "For long documents",
    "distilbert": "For predictions on a CPU",
    "bert-base": "To compare with papers",
    "demo": "To see what `bertsmith demo` runs",
}
EXAMPLES = ("quickstart", "speedrun", "speedrun-small", "demo")  # recipes that are no family's
ABLATIONS = (no_nsp, left_to_right, right_to_left, sized, masked)  # rows of the tables in BERT's paper


def describe() -> dict[str, str]:
    """Every recipe's name with a line on what it is."""
    return {name: f"{_purpose(name)}; {_size(name)}" for name in RECIPES}


def grouped() -> dict[str, dict[str, str]]:
    """The recipes to print: one line on when to start with which, then what our own, the families and ablations are."""
    families: dict[str, list[str]] = {}
    ablations: dict[str, list[str]] = {}
    for name in RECIPES:
        if _maker(name) in ABLATIONS:
            ablations.setdefault(_maker(name).__name__.replace("_", "-"), []).append(name)
        elif name not in EXAMPLES:
            families.setdefault(name.split("-")[0], []).append(name)
    return {
        "To start with (layers × width, length of the training)": {
            name: f"{when}: {_shape(name)}" for name, when in START.items()
        },
        "Our own recipes": {name: f"{_purpose(name)}; {_size(name)}" for name in EXAMPLES},
        "Families": {family: _line(names) for family, names in families.items()},
        "Ablations of BERT's paper": {ablation: _line(names) for ablation, names in ablations.items()},
    }


def _line(names: Sequence[str]) -> str:
    """What recipes of one kind are, in the words of the published one, and all their names."""
    return f"{_purpose(next((n for n in names if n.endswith('-base')), names[0]))}; {', '.join(names)}"


def _maker(name: str) -> Callable[..., PretrainConfig]:
    """The function that makes a recipe, for all sizes."""
    made_by = RECIPES[name]
    return made_by.func if isinstance(made_by, partial) else made_by


def _purpose(name: str) -> str:
    words = _maker(name).__doc__ or ""
    return words.splitlines()[0].rstrip(".")


def _shape(name: str) -> str:
    """Layers and width of a recipe, and how long it trains: short enough for one line of a terminal."""
    made = recipe(name)
    if isinstance(made.objective, DistillationConfig) and made.objective.half:
        return f"half the teacher's layers, {_length(made.train)}"
    return f"{made.model.num_layers} × {made.model.hidden_size}, {_length(made.train)}"


def _length(train: TrainConfig) -> str:
    """How long a recipe trains."""
    if train.steps:
        return f"{train.steps:,} steps"
    if not train.hours:
        return f"{train.epochs:g} epochs"
    return f"{train.hours:g} h" if train.hours >= 1 else f"{60 * train.hours:g} minutes"


def _size(name: str) -> str:
    made = recipe(name)
    model, length = made.model, _length(made.train)
    if isinstance(made.objective, DistillationConfig) and made.objective.half:
        return f"half of the teacher's layers, {length}"
    inner = f"{model.num_heads} heads" if model.layer_type == "transformer" else f"{model.intermediate_size} cells"
    return f"{model.num_layers} layers, {model.hidden_size} wide, {inner}, {length}"
