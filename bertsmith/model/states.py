"""Hidden states of any layers of an encoder (section 5.3), and the notation for layers (`--layers`).

`…` stands for (B, L) or (T,), as the batch is laid out; H hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from torch import Tensor

from bertsmith.batch import Batch
from bertsmith.errors import UserError
from bertsmith.model.attention import Trace
from bertsmith.model.encoder import Encoder

RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")


def hidden_states(encoder: Encoder, batch: Batch, layers: Collection[int]) -> dict[int, Tensor]:
    """The outputs of these layers (…, H), where 0 is the embeddings; threads may share the encoder.

    The last layer's output is the encoder's, after the final norm where it has one.
    """
    trace = Trace(only=frozenset(layers))
    encoder(batch, trace)
    return dict(zip(sorted(set(layers)), trace.hidden, strict=True))


def layer_number(layer: int, num_layers: int, option: str = "--layer") -> int:
    """The index of a layer, where 0 is the embeddings; negative numbers count from the last layer, -1."""
    if not -num_layers - 1 <= layer <= num_layers:
        raise UserError(
            f"{option} {layer}: the model has layers 0 (embeddings) to {num_layers}; -1 is the last, -2 the one before"
        )
    return layer % (num_layers + 1)


def parse_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """The indices of the layers that `-1`, `-4..-1`, `0,6,12` or `all` name, in this order."""
    if text.strip() == "all":
        return tuple(range(num_layers + 1))
    layers: list[int] = []
    for part in text.split(","):
        ends = RANGE.fullmatch(part.strip())
        single = re.fullmatch(r"-?\d+", part.strip())
        if not ends and not single:
            raise UserError(f"--layers {text!r}: {part.strip()!r} is not a layer; write -1, -4..-1, 0,6,12 or all")
        first, last = (int(n) for n in (ends.groups() if ends else (part, part)))
        first, last = (layer_number(n, num_layers, "--layers") for n in (first, last))
        if first > last:
            raise UserError(f"--layers {text!r}: {part.strip()} runs from layer {first} down to {last}; swap the two")
        layers += range(first, last + 1)
    if len(set(layers)) < len(layers):
        twice = next(layer for layer in layers if layers.count(layer) > 1)
        raise UserError(f"--layers {text!r} names layer {twice} twice")
    return tuple(layers)
