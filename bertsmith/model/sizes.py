"""The published sizes of encoders."""

from __future__ import annotations

from dataclasses import replace

from bertsmith.errors import UserError, nearest_or_all
from bertsmith.model.config import EncoderConfig

SIZES = {  # layers, hidden size; a head has 64 dimensions, the feed-forward layer 4 times the hidden size
    "tiny": (2, 128),
    "mini": (4, 256),
    "small": (4, 512),
    "medium": (8, 512),
    "base": (12, 768),
    "large": (24, 1024),
}
ALBERT_SIZES = {  # layers, hidden size, heads: Table 1 of its paper, the heads of the released models; tiny is ours
    "tiny": (2, 128, 2),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
    "xlarge": (24, 2048, 16),
    "xxlarge": (12, 4096, 64),
}
ELMO_SIZES = {  # layers, hidden size of both directions, cells, filters: the released settings; tiny is ours
    "tiny": (2, 128, 256, ((1, 16), (2, 32), (3, 64), (4, 64))),
    "base": (2, 1024, 4096, ((1, 32), (2, 32), (3, 64), (4, 128), (5, 256), (6, 512), (7, 1024))),
}
ELECTRA_SIZES = {  # layers, hidden size, embedding size (Table 6 of its paper); tiny is ours
    "tiny": (2, 128, 64),
    "small": (12, 256, 128),
    "base": (12, 768, 768),
    "large": (24, 1024, 1024),
}
DEBERTA_V3_SIZES = {  # layers, hidden size: the released models; tiny is ours
    "tiny": (2, 128),
    "small": (6, 768),
    "base": (12, 768),
    "large": (24, 1024),
}
MODERN_SIZES = {  # layers, hidden size, width of the feed-forward layers: Table 4 of ModernBERT's paper; tiny is ours
    "tiny": (4, 128, 192),
    "base": (22, 768, 1152),
    "large": (28, 1024, 2624),
}


def encoder_config(size: str) -> EncoderConfig:
    """The published configuration of a size: tiny, mini, small, medium, base or large."""
    if size not in SIZES:
        raise UserError(f"unknown size {size!r}{nearest_or_all(size, SIZES)}")
    layers, hidden = SIZES[size]
    return EncoderConfig(hidden_size=hidden, num_layers=layers, num_heads=hidden // 64, intermediate_size=4 * hidden)


def albert_config(size: str) -> EncoderConfig:
    """ALBERT's configuration of a size; the released code has the tanh form of GELU, and xxlarge has no dropout."""
    layers, hidden, heads = ALBERT_SIZES[size]
    dropout = 0.0 if size == "xxlarge" else 0.1
    return EncoderConfig(
        family="albert",
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        intermediate_size=4 * hidden,
        embedding_size=min(128, hidden // 2),
        shared_layers="all",
        activation="gelu_tanh",
        hidden_dropout=dropout,
        attention_dropout=dropout,
    )


def electra_config(size: str) -> EncoderConfig:
    """The configuration of ELECTRA's discriminator of a size."""
    layers, hidden, embedding = ELECTRA_SIZES[size]
    return EncoderConfig(
        family="electra",
        hidden_size=hidden,
        num_layers=layers,
        num_heads=hidden // 64,
        intermediate_size=4 * hidden,
        embedding_size=None if embedding == hidden else embedding,
        pooler_activation="gelu",
        pooler_input_dropout=True,
    )


def deberta_config(size: str) -> EncoderConfig:
    """The configuration of the first DeBERTa of a size: relative positions in attention, none in the input."""
    return replace(
        encoder_config(size),
        family="deberta",
        num_segments=0,
        norm_eps=1e-7,
        positions="none",
        relative_terms="both",
        key_bias=False,
        pooler_activation="gelu",
    )


def deberta_v3_config(size: str) -> EncoderConfig:
    """The configuration of DeBERTa v3 of a size: ranges of distances, projected by the matrices of the content."""
    layers, hidden = DEBERTA_V3_SIZES[size]
    return replace(
        deberta_config("base"),
        family="deberta-v2",
        hidden_size=hidden,
        num_layers=layers,
        num_heads=hidden // 64,
        intermediate_size=4 * hidden,
        relative_buckets=32 if size == "tiny" else 256,
        relative_norm=True,
        relative_projections=False,
        key_bias=True,
    )


def modern_config(size: str) -> EncoderConfig:
    """ModernBERT's configuration of a size; the released classifiers pool the mean of all states."""
    layers, hidden, intermediate = MODERN_SIZES[size]
    return EncoderConfig(
        family="modernbert",
        hidden_size=hidden,
        num_layers=layers,
        num_heads=hidden // 64,
        intermediate_size=intermediate,
        max_positions=8192,
        num_segments=0,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        norm_eps=1e-5,
        norm_first=True,
        bias=False,
        positions="rotary",
        rotary_base=160_000.0,
        local_rotary_base=10_000.0,
        window=128,
        global_every=3,
        gated=True,
        first_attention_norm=False,
        pooler_activation="gelu",
        pooling="mean",
        prediction_head=True,
    )


def elmo_config(size: str) -> EncoderConfig:
    """ELMo's configuration of a size; its tokens are words, spelt as characters, and have no positions or segments."""
    layers, hidden, cells, filters = ELMO_SIZES[size]
    return EncoderConfig(
        family="elmo",
        hidden_size=hidden,
        num_layers=layers,
        num_heads=1,
        intermediate_size=cells,
        num_segments=0,
        embedding_norm=False,
        positions="none",
        attention_dropout=0.0,
        head_transform=False,
        layer_type="lstm",
        character_filters=filters,
    )
