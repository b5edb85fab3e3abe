"""The table of ELMo, which `transformers` has no class for: tensors and settings have our own names."""

from __future__ import annotations

from bertsmith.formats.family import Family, Field, Output
from bertsmith.model.config import MOST_FILTERS

LSTM = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0", "weight_hr_l0")
INPUT = ("filters", "highways")
SETTINGS = (
    *(
        "vocab_size",
        "hidden_size",
        "num_layers",
        "intermediate_size",
        "max_positions",
        "hidden_dropout",
        "pad_token_id",
    ),
    *("character_filters", "character_size", "num_characters", "max_characters", "num_highways", "predicted_words"),
)
NAMES = (
    "encoder.embeddings.characters.weight",
    *(f"encoder.embeddings.{part}.{number}.*" for part in INPUT for number in range(MOST_FILTERS)),
    "encoder.embeddings.projection.*",
    *(f"encoder.layers.{{i}}.{way}.{name}" for way in ("forwards", "backwards") for name in LSTM),
)
ELMO = Family(
    model_type="elmo",
    prefix="elmo.",
    encoder_class="ElmoModel",
    encoder={name: name.replace("encoder.", "elmo.", 1) for name in NAMES},
    outputs={"bidirectional_lm": Output("ElmoForBidirectionalLM", {"bidirectional_lm.*": "bidirectional_lm.*"})},
    fields={name: Field((name,)) for name in SETTINGS},
    fixed={},
    defaults={
        "num_heads": 1,
        "num_segments": 0,
        "embedding_norm": False,
        "positions": "none",
        "attention_dropout": 0.0,
        "head_transform": False,
        "layer_type": "lstm",
    },
    reasons=dict.fromkeys(("num_heads", "attention_dropout", "window"), "ELMo has no attention"),
    vocabulary="words",
    is_own=True,
)
