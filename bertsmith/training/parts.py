"""The parts of a model: which are its layers, and which are not trained.

A model that `fit` trains may have three attributes. `encoders` are its modules with an attribute `layers`, from bottom
to top; what an encoder registers before its layers, such as embeddings, is below them. The layers of an encoder whose
`shares_layers` is true have parameters in common, and are not sharded one by one. `untrained` are modules that
keep their weights, as a teacher does: they have no gradients and no optimiser state, and stay in evaluation mode.
`loss_weights` are the weights of its losses, by name, in the sum that is minimised; other losses have the weight 1.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


def layer_stacks(model: nn.Module) -> list[tuple[nn.Module, list[nn.Module]]]:
    """The encoders of a model that are trained, each with its layers from bottom to top."""
    frozen = untrained_parameters(model)
    encoders = [encoder for encoder in getattr(model, "encoders", []) if not frozen.issuperset(encoder.parameters())]
    return [(encoder, list(encoder.layers)) for encoder in encoders]


def separate_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that are trained and share no parameters with each other."""
    stacks = [layers for encoder, layers in layer_stacks(model) if not getattr(encoder, "shares_layers", False)]
    return list(dict.fromkeys(layer for layers in stacks for layer in layers))


def untrained(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that are not trained."""
    return list(getattr(model, "untrained", []))


def untrained_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of the modules that are not trained."""
    return {parameter for part in untrained(model) for parameter in part.parameters()}


def is_untrained(model: nn.Module, name: str) -> bool:
    """Whether a tensor of the state dict, by its name, belongs to a module that is not trained."""
    parts = [model.get_submodule(".".join(name.split(".")[:depth])) for depth in range(1, name.count(".") + 1)]
    return any(part is frozen for part in parts for frozen in untrained(model))


def loss_weights(model: nn.Module) -> Mapping[str, float]:
    """The weights of the losses that have one other than 1."""
    return getattr(model, "loss_weights", {})


def freeze(model: nn.Module) -> None:
    """Exclude the parameters of the modules that are not trained from the backward pass."""
    for part in untrained(model):
        part.requires_grad_(False)


def train_mode(model: nn.Module) -> None:
    """Put a model into training mode, and the modules that are not trained into evaluation mode."""
    frozen = untrained(model)
    if model.training and not any(part.training for part in frozen):  # setting a mode visits all modules
        return
    model.train()
    for part in frozen:
        part.eval()
