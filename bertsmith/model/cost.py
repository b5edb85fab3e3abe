"""The cost of an encoder: floating-point operations, parameters, and memory in training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bertsmith.model.config import EncoderConfig, Reach


def training_flops(config: EncoderConfig, lengths: Sequence[int], masked: int, *, every_state: bool = False) -> float:
    """Model operations of a training step on sequences of these lengths: three times the forward pass's products."""
    return 3.0 * forward_flops(config, lengths, masked, every_state=every_state)


def forward_flops(config: EncoderConfig, lengths: Sequence[int], masked: int, *, every_state: bool = False) -> int:
    """The operations of a forward pass's products.

    The cost of attention grows with the square of a length, or with the length where a layer has a window. The
    vocabulary head is applied only to the masked positions; in the last layer, the products after the attention are
    applied to these and to the first token of each sequence or, where a loss needs `every_state`, to all tokens.
    """
    tokens = sum(lengths)
    if config.layer_type == "lstm":
        products = config.num_layers * _lstm_weights(config) + _character_products(config)
        return 2 * (tokens * products + 2 * masked * config.hidden_size // 2 * config.num_predicted)
    hidden, table = config.hidden_size, config.table_size
    after_attention = hidden * (hidden + _feed_forward_columns(config))
    layers = config.num_layers * tokens * 2 * (3 * hidden * hidden + after_attention)
    for reach, count in Counter(layer.reach for layer in config.layers).items():
        layers += count * sum(4 * hidden * _token_pairs(length, reach) for length in lengths)
    layers += _relative_products(config, lengths)
    if config.convolution is not None:
        layers += tokens * 2 * config.convolution * hidden * hidden
    unneeded = 0 if every_state else (tokens - masked - len(lengths)) * 2 * after_attention
    head = masked * 2 * table * (hidden * config.head_transform + config.vocab_size)
    projection = 0 if config.embedding_size is None else tokens * 2 * table * hidden
    return projection + layers - max(0, unneeded) + head


def _relative_products(config: EncoderConfig, lengths: Sequence[int]) -> int:
    """The operations of the terms of distances: every token with every distance in its sequence, and their projection.

    A batch projects the table once for each layer.
    """
    terms = config.layers[0].content_to_position + config.layers[0].position_to_content
    rows = [min(2 * config.relative_span, 2 * length - 1) for length in lengths]
    scores = sum(length * count for length, count in zip(lengths, rows, strict=True))
    return terms * config.num_layers * 2 * config.hidden_size * (scores + config.hidden_size * max(rows, default=0))


def _token_pairs(length: int, reach: Reach) -> int:
    """The pairs of tokens that attention scores in a sequence.

    An encoder of one direction counts like one of both, as is the usual convention.
    """
    if reach.before is None or reach.after is None:
        return length * length
    side = min(max(reach.before, reach.after), length - 1)
    return length * (2 * side + 1) - side * (side + 1)


def _feed_forward_columns(config: EncoderConfig) -> int:
    """The rows and columns of size `hidden_size` in the matrices of a feed-forward layer."""
    return (3 if config.gated else 2) * config.intermediate_size


def parameter_count(config: EncoderConfig) -> int:
    """Parameters of the encoder with its masked-word and pair heads, accurate enough for a plan."""
    if config.layer_type == "lstm":
        words = config.num_predicted * (config.hidden_size // 2 + 1)
        return _character_weights(config) + config.num_layers * _lstm_weights(config) + words
    hidden, table = config.hidden_size, config.table_size
    rows = config.vocab_size + config.num_segments + (config.max_positions if config.positions == "learned" else 0)
    attention = 4 * hidden * (hidden + 1) + 2 * hidden + _relative_weights(config)
    columns = _feed_forward_columns(config)
    feed_forward = hidden * columns + columns - config.intermediate_size + 3 * hidden
    shared = {"none": 0, "attention": attention, "feed-forward": feed_forward, "all": attention + feed_forward}
    layers = config.num_layers * (attention + feed_forward) - (config.num_layers - 1) * shared[config.shared_layers]
    projection = 0 if config.embedding_size is None else hidden * (table + 1)
    pooler, words = hidden * config.pooler, config.vocab_size * config.head_bias
    heads = (hidden + 1) * (pooler + table * config.head_transform) + words + 8 * hidden
    distances = 0 if config.relative_terms == "none" else 2 * config.relative_span * hidden
    beside = 0 if config.convolution is None else config.convolution * hidden * hidden + 3 * hidden
    return rows * table + projection + layers + heads + distances + beside


def _relative_weights(config: EncoderConfig) -> int:
    """The matrices by which a layer projects the table of distances, less the biases that keys do not have."""
    layer, hidden = config.layers[0], config.hidden_size
    own = (layer.content_to_position + layer.position_to_content) * layer.relative_projections
    without = 0 if config.key_bias else hidden * (1 + (layer.content_to_position and layer.relative_projections))
    return own * hidden * (hidden + 1) - without


def training_memory(
    config: EncoderConfig, tokens: int, length: int, masked: int, *, half: bool, checkpointing: bool, processes: int = 1
) -> float:
    """Bytes that training needs at about this many tokens at once; `processes` divide weights and moments (FSDP).

    They hold weights, gradients and two moments in float32, the activations that every layer keeps for its backward
    pass, and the vocabulary's logits with their gradient at the masked positions.
    """
    hidden, size = config.hidden_size, 2 if half else 4
    fixed = parameter_count(config) * (16 / processes + (2 if half else 0))
    kept = _kept_by_layer(config, length, half)
    layers = config.num_layers * tokens * kept
    if checkpointing:
        layers = config.num_layers * tokens * hidden * size + tokens * kept
    head = masked * config.num_predicted * (size + 8)
    if config.layer_type == "lstm":
        return fixed + layers + 2 * head + tokens * _kept_by_characters(config, size)
    return fixed + layers + head


def forward_memory(config: EncoderConfig, tokens: int, length: int, masked: int, *, half: bool) -> float:
    """Bytes that a model needs which runs without gradients: weights, the activations of one layer, and the logits."""
    weights = parameter_count(config) * 4
    return weights + tokens * _kept_by_layer(config, length, half) + masked * config.vocab_size * (2 if half else 4)


def _kept_by_layer(config: EncoderConfig, length: int, half: bool) -> int:
    """Bytes that a layer keeps per token until its backward pass."""
    if config.layer_type == "lstm":  # float32: the gates, cells and outputs of both directions
        return 4 * (2 * 6 * config.intermediate_size + 4 * config.hidden_size)
    hidden, inner, size = config.hidden_size, config.intermediate_size, 2 if half else 4
    masks = 2 if config.hidden_dropout else 0  # one byte per element
    widths = 9 * hidden + (4 if config.gated else 2) * inner  # a gate keeps both factors and their product
    if config.positions == "rotary":
        widths += 2 * hidden  # queries and keys once more, rotated
    kept = size * widths + 8 * hidden + masks * hidden  # norms keep float32 inputs
    if config.relative_terms != "none":  # the terms as a bias of the scores, and the weights
        return kept + 3 * size * config.num_heads * length
    if config.attention_dropout and not half:  # scores and their mask, which every kernel in float32 keeps
        kept += (size + 1) * config.num_heads * length
    return kept


def _lstm_weights(config: EncoderConfig) -> int:
    """The matrices of both directions of an LSTM layer, whose cells are projected."""
    half, cells = config.hidden_size // 2, config.intermediate_size
    return 2 * (4 * cells * (half + half) + cells * half)


def _character_sizes(config: EncoderConfig) -> tuple[int, int]:
    """The weights of the character filters, and the number of these filters."""
    weights = config.character_size * sum(width * count for width, count in config.character_filters)
    return weights, sum(count for _, count in config.character_filters)


def _character_weights(config: EncoderConfig) -> int:
    weights, filters = _character_sizes(config)
    return config.num_characters * config.character_size + weights + _after_filters(config, filters)


def _character_products(config: EncoderConfig) -> int:
    """The products for each word; a filter is applied at every character."""
    weights, filters = _character_sizes(config)
    return config.max_characters * weights + _after_filters(config, filters)


def _after_filters(config: EncoderConfig, filters: int) -> int:
    return config.num_highways * 2 * filters * filters + filters * config.hidden_size // 2


def _kept_by_characters(config: EncoderConfig, size: int) -> int:
    """Bytes of a word: embedded characters, the largest filter's output twice, and what the highway layers keep."""
    most = max(count for _, count in config.character_filters)
    filters = _character_sizes(config)[1]
    kept = filters * (8 + (2 + 6 * config.num_highways) * size)
    return config.max_characters * (8 + (config.character_size + 2 * most) * size) + kept
