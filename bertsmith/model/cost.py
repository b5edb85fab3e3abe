"""What an encoder costs: floating-point operations, and memory while it is trained."""

from __future__ import annotations

from collections.abc import Sequence

from bertsmith.model.config import EncoderConfig


def training_flops(config: EncoderConfig, lengths: Sequence[int], masked: int) -> float:
    """Model operations of a training step on sequences of these lengths: three times the forward pass's products.

    Attention costs by the square of a length. The vocabulary head sees the masked positions alone, and so does what
    follows the attention in the last layer, with the first token of each sequence.
    """
    tokens = sum(lengths)
    hidden, inner = config.hidden_size, config.intermediate_size
    layer = tokens * 2 * hidden * (4 * hidden + 2 * inner) + sum(4 * n * n * hidden for n in lengths)
    head = masked * 2 * hidden * (hidden + config.vocab_size)
    unneeded = (tokens - masked - len(lengths)) * 2 * hidden * (hidden + 2 * inner)
    return 3.0 * (config.num_layers * layer - max(0, unneeded) + head)


def parameter_count(config: EncoderConfig) -> int:
    """Parameters of the encoder with its masked-word and pair heads, near enough for a plan."""
    hidden, inner = config.hidden_size, config.intermediate_size
    layer = 4 * hidden * (hidden + 1) + 2 * hidden * inner + inner + 5 * hidden
    rows = config.vocab_size + config.max_positions + config.num_segments
    return rows * hidden + config.num_layers * layer + 2 * hidden * (hidden + 1) + config.vocab_size + 8 * hidden


def training_memory(
    config: EncoderConfig, tokens: int, length: int, masked: int, *, half: bool, checkpointing: bool, processes: int = 1
) -> float:
    """Bytes that training needs at about this many tokens at once; `processes` divide weights and moments (FSDP).

    Weights, gradients and two moments in float32; what every layer keeps for its backward pass; the vocabulary's
    scores with their gradient at the masked positions.
    """
    hidden, inner, size = config.hidden_size, config.intermediate_size, 2 if half else 4
    fixed = parameter_count(config) * (16 / processes + (2 if half else 0))
    masks = 2 if config.hidden_dropout else 0  # a byte a place
    kept = size * (9 * hidden + 2 * inner) + 8 * hidden + masks * hidden  # norms keep float32 inputs
    if config.attention_dropout and not half:  # scores and their mask, which no kernel of float32 leaves out
        kept += (size + 1) * config.num_heads * length
    layers = config.num_layers * tokens * kept
    if checkpointing:
        layers = config.num_layers * tokens * hidden * size + tokens * kept
    head = masked * config.vocab_size * (size + 8)
    return fixed + layers + head
