"""ModernBERT's table (Warner et al. 2024).

Every head begins with the dense layer, the activation and the norm of the masked-word head, under the same names, so
that fine-tuning starts from them. Two forms of `config.json` are read, and the older one is written, which every
release of `transformers` with ModernBERT opens: the newer one lists the type of every layer (`layer_types`) and has the
bases of both types in one object (`rope_parameters`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bertsmith.errors import UserError
from bertsmith.formats.families.bert import FIELDS, FIXED, vocabulary_head
from bertsmith.formats.family import Family, Field, HeadDropout, Output
from bertsmith.formats.storage import Names, Stored

LAYER = "model.layers.{i}"
HEAD: Names = {
    "head.pooler.dense.*": "head.dense.*",
    "head.pooler.norm.*": "head.norm.*",
    "head.output.*": "classifier.*",
}
DROPOUT = HeadDropout("classifier_dropout", 0.0)
EVERY, WINDOW = "global_attn_every_n_layers", "local_attention"
BASES = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}
UNUSED = ("layer_norm_eps", "position_embedding_type", "rope_scaling")  # released files have them; their class does not


def older_form(values: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Return a `config.json` of either form in the older one, without what no layer uses."""
    if values.get("rope_scaling") is not None:
        raise UserError(f"{where}: rope_scaling = {values['rope_scaling']!r} is not supported; only null is")
    found = {name: value for name, value in values.items() if name not in (*UNUSED, "layer_types", "rope_parameters")}
    if (types := values.get("layer_types")) is not None:
        found[EVERY] = _global_every(types, found.get(EVERY), where)
    for kind, base in (values.get("rope_parameters") or {}).items():
        if kind not in BASES or not isinstance(base, dict) or base.keys() - {"rope_type", "rope_theta"}:
            raise UserError(f"{where}: rope_parameters has {kind} = {base!r}, which is not supported")
        if base.get("rope_type", "default") != "default":
            raise UserError(f"{where}: rope_type {base['rope_type']!r} is not supported; only 'default' is")
        if "rope_theta" in base:
            found[BASES[kind]] = base["rope_theta"]
    if found.get(EVERY) == 1:
        found |= dict.fromkeys((WINDOW, BASES["sliding_attention"]))
    return found


def _global_every(types: Any, given: Any, where: Path) -> int:
    """Every how many layers one is global, from a list with the type of each layer."""
    listed = types if isinstance(types, list) else []
    for every in (given, *range(1, len(listed) + 1)):
        if type(every) is int and every >= 1:
            pattern = ["sliding_attention" if i % every else "full_attention" for i in range(len(listed))]
            if listed and listed == pattern:
                return every
    raise UserError(
        f"{where}: layer_types must have full_attention in every n-th layer, from the first, and sliding_attention in "
        f"the others; it is {types!r}"
    )


MODERNBERT = Family(
    model_type="modernbert",
    prefix="model.",
    encoder_class="ModernBertModel",
    encoder={
        "encoder.embeddings.tokens.weight": Stored(
            ("model.embeddings.tok_embeddings.weight",), tied=("decoder.weight",)
        ),
        "encoder.embeddings.norm.*": "model.embeddings.norm.*",
        "encoder.layers.{i}.attention_norm.*": f"{LAYER}.attn_norm.*",
        "encoder.layers.{i}.attention.qkv.*": f"{LAYER}.attn.Wqkv.*",
        "encoder.layers.{i}.attention.output.*": f"{LAYER}.attn.Wo.*",
        "encoder.layers.{i}.feed_forward_norm.*": f"{LAYER}.mlp_norm.*",
        "encoder.layers.{i}.feed_forward.inner.*": f"{LAYER}.mlp.Wi.*",
        "encoder.layers.{i}.feed_forward.outer.*": f"{LAYER}.mlp.Wo.*",
        "encoder.final_norm.*": "model.final_norm.*",
    },
    vocabulary="bytes",
    outputs={
        "masked_lm": Output(
            "ModernBertForMaskedLM", vocabulary_head("masked_lm", "head.dense", "head.norm", "decoder.bias")
        ),
        "single": Output("ModernBertForSequenceClassification", HEAD, DROPOUT),
        "choice": Output("ModernBertForMultipleChoice", HEAD, DROPOUT),
        "tags": Output("ModernBertForTokenClassification", HEAD, DROPOUT),
        "span": Output("ModernBertForQuestionAnswering", HEAD, DROPOUT),
    },
    fields={
        **{name: FIELDS[name] for name in ("vocab_size", "hidden_size", "num_layers", "num_heads")},
        **{name: FIELDS[name] for name in ("intermediate_size", "max_positions", "init_std", "pad_token_id")},
        "activation": Field(("hidden_activation",), FIELDS["activation"].values, FIELDS["activation"].aliases),
        # Their embedding_dropout and mlp_dropout stand elsewhere in a layer than ours; only training differs.
        "hidden_dropout": Field(("embedding_dropout", "mlp_dropout")),
        "attention_dropout": Field(("attention_dropout",)),
        "norm_eps": Field(("norm_eps",)),
        "bias": Field(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")),
        "head_bias": Field(("decoder_bias",)),
        "pooling": Field(("classifier_pooling",)),
        "window": Field((WINDOW,), none_value=128),  # where all layers are global, their field has a value all the same
        "global_every": Field((EVERY,)),
        "rotary_base": Field((BASES["full_attention"],)),
        "local_rotary_base": Field((BASES["sliding_attention"],), none_as="rotary_base"),
    },
    fixed={**FIXED, "is_decoder": False, "classifier_activation": "gelu"},
    own_fields=("shared_layers",),
    older=older_form,
    frame_ids={"bos_token_id": "first", "cls_token_id": "first", "eos_token_id": "last", "sep_token_id": "last"},
    defaults={
        "vocab_size": 50368,
        "num_layers": 22,
        "intermediate_size": 1152,
        "max_positions": 8192,
        "num_segments": 0,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "norm_eps": 1e-5,
        "pad_token_id": 50283,
        "norm_first": True,
        "bias": False,
        "positions": "rotary",
        "rotary_base": 160_000.0,
        "local_rotary_base": 10_000.0,
        "window": 128,
        "global_every": 3,
        "gated": True,
        "first_attention_norm": False,
        "pooler_activation": "gelu",
        "prediction_head": True,
    },
    reasons={
        "norm_first": "the family modernbert normalises before each sublayer",
        "num_segments": "ModernBertModel has no table of segments",
        "positions": "ModernBertModel rotates queries and keys",
        "gated": "the feed-forward layers of ModernBertModel are gated",
        "direction": "ModernBertModel sees both directions",
        "first_attention_norm": "the first layer of ModernBertModel has no norm before its attention",
        "embedding_norm": "ModernBertModel normalises its embeddings",
        "head_activation": "ModernBertForMaskedLM has GELU in its head, whatever the encoder's activation is",
        "prediction_head": "every head of ModernBERT begins with a dense layer, GELU and a norm",
        "local_rotary_base": "where all layers have one base, local_rotary_base is null",
    },
    head_activation="gelu",
)
