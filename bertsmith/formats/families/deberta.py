"""The tables of DeBERTa (He et al. 2021) and of its versions 2 and 3, which have one `model_type`.

The head of the masked words has the names of the released models (`legacy` false in `transformers`); those of
`transformers`' older head are read as well. The position table of the mask decoder, the detector of replaced tokens and
the table that a discriminator adds to its generator's have the names of the authors' code, and `transformers` ignores
them, as it does the head of the segment pairs, whose pooler has the name of a classifier's.
"""

from __future__ import annotations

from dataclasses import replace

from bertsmith.formats.families.bert import FIELDS, FIXED
from bertsmith.formats.family import NO_SETTING, Family, Field, HeadDropout, Output
from bertsmith.formats.storage import Names, Row, Stored

LAYER = "deberta.encoder.layer.{i}"
ATTENTION = f"{LAYER}.attention.self"
ACTIVATIONS = {"gelu": "gelu", "tanh": "tanh", "relu": "relu"}
WORDS: Names = {
    "masked_lm.transform.*": Stored(("lm_predictions.lm_head.dense.*",), tied=("cls.predictions.transform.dense.*",)),
    "masked_lm.norm.*": Stored(
        ("lm_predictions.lm_head.LayerNorm.*",), tied=("cls.predictions.transform.LayerNorm.*",)
    ),
    "masked_lm.decoder.bias": Stored(
        ("lm_predictions.lm_head.bias",), tied=("cls.predictions.bias", "cls.predictions.decoder.bias")
    ),
    "mask_decoder.positions.weight": "deberta.embeddings.position_embeddings.weight",
}
DETECTOR: Names = {
    "encoder.embeddings.delta": "deberta.embeddings.word_embeddings._weight",
    "detector.norm.*": "mask_predictions.LayerNorm.*",
    "detector.dense.*": "mask_predictions.dense.*",
    "detector.output.*": "mask_predictions.classifier.*",
}
PAIRS: Names = {"next_sentence.pooler.dense.*": "pooler.dense.*", "next_sentence.output.*": "next_sentence.*"}
POOLED: Names = {"head.pooler.dense.*": "pooler.dense.*", "head.output.*": "classifier.*"}
DROPOUT = HeadDropout("cls_dropout")


def deberta_encoder() -> dict[str, Row]:
    """The names of the encoder that all versions have."""
    return {
        "encoder.embeddings.tokens.weight": Stored(
            ("deberta.embeddings.word_embeddings.weight",), tied=("cls.predictions.decoder.weight",)
        ),
        "encoder.embeddings.segments.weight": "deberta.embeddings.token_type_embeddings.weight",
        "encoder.embeddings.positions.weight": "deberta.embeddings.position_embeddings.weight",
        "encoder.embeddings.norm.*": "deberta.embeddings.LayerNorm.*",
        "encoder.relative.table.weight": "deberta.encoder.rel_embeddings.weight",
        "encoder.layers.{i}.attention.output.*": f"{LAYER}.attention.output.dense.*",
        "encoder.layers.{i}.attention_norm.*": f"{LAYER}.attention.output.LayerNorm.*",
        "encoder.layers.{i}.feed_forward.inner.*": f"{LAYER}.intermediate.dense.*",
        "encoder.layers.{i}.feed_forward.outer.*": f"{LAYER}.output.dense.*",
        "encoder.layers.{i}.feed_forward_norm.*": f"{LAYER}.output.LayerNorm.*",
    }


def deberta_outputs(classes: str) -> dict[str, Output]:
    """The classes of a version; there is none for the detector, whose folder is opened as its encoder.

    A detector that also fills masks is opened as what fills them.
    """
    return {
        "masked_lm": Output(f"{classes}ForMaskedLM", WORDS),
        "detector": Output(f"{classes}Model", DETECTOR),
        "detector+masked_lm": Output(f"{classes}ForMaskedLM", {**DETECTOR, **WORDS}),
        "detector+next_sentence": Output(f"{classes}Model", {**DETECTOR, **PAIRS}),
        "detector+masked_lm+next_sentence": Output(f"{classes}ForMaskedLM", {**DETECTOR, **WORDS, **PAIRS}),
        "single": Output(f"{classes}ForSequenceClassification", POOLED, DROPOUT),
        "choice": Output(f"{classes}ForMultipleChoice", POOLED, DROPOUT),
        "tags": Output(f"{classes}ForTokenClassification", {"head.output.*": "classifier.*"}, NO_SETTING),
        "span": Output(f"{classes}ForQuestionAnswering", {"head.output.*": "qa_outputs.*"}, NO_SETTING),
    }


FIRST_FIELDS = {
    **{name: field for name, field in FIELDS.items() if name != "direction"},
    "num_segments": Field(("type_vocab_size",)),
    "positions": Field(("position_biased_input",), values={"learned": True, "none": False}),
    "relative_terms": Field(
        ("pos_att_type",),
        values={"both": "c2p|p2c", "content-to-position": "c2p", "position-to-content": "p2c", "none": "none"},
        aliases={"p2c|c2p": "both", "": "none"},
        is_list=True,
    ),
    "relative_reach": Field(("max_relative_positions",), none_value=-1, aliases={0: None}),
    "pooler_activation": Field(("pooler_hidden_act",), values=ACTIVATIONS),
}
REASONS = {
    "norm_first": "DeBERTa normalises after each sublayer",
    "bias": "the classes of DeBERTa always have biases",
    "direction": "the classes of DeBERTa see both directions",
    "embedding_size": "embeddings of another width are not supported, since DeBERTa projects them before their norm",
    "head_activation": "the head of DeBERTa's masked words has the encoder's activation",
    "key_bias": "keys have no bias in the family deberta, and one in deberta-v2",
    "shared_layers": "the layers of DeBERTa have parameters of their own",
}
V2_SETTINGS = ("relative_buckets", "relative_norm", "relative_projections", "convolution")
REASONS |= dict.fromkeys(V2_SETTINGS, "the first DeBERTa has no such setting")
DEFAULTS = {"vocab_size": 50265, "num_segments": 0, "norm_eps": 1e-7, "pooler_activation": "gelu"}
DEBERTA = Family(
    model_type="deberta",
    prefix="deberta.",
    encoder_class="DebertaModel",
    encoder={
        **deberta_encoder(),
        "encoder.layers.{i}.attention.qkv.weight": Stored((f"{ATTENTION}.in_proj.weight",), by_head=True),
        "encoder.layers.{i}.attention.query_bias": f"{ATTENTION}.q_bias",
        "encoder.layers.{i}.attention.value_bias": f"{ATTENTION}.v_bias",
        "encoder.layers.{i}.attention.relative_keys.weight": f"{ATTENTION}.pos_proj.weight",
        "encoder.layers.{i}.attention.relative_queries.*": f"{ATTENTION}.pos_q_proj.*",
    },
    vocabulary="bytes",
    outputs={
        **deberta_outputs("Deberta"),
        "choice": Output("DebertaForMultipleChoice", POOLED, DROPOUT, own=True),
    },
    fields=FIRST_FIELDS,
    fixed={**FIXED, "is_decoder": False, "pooler_dropout": 0, "talking_head": False},
    defaults={**DEFAULTS, "key_bias": False},
    reasons=REASONS,
    flags={"relative_attention": ("relative_terms", "none")},
    equals={"pooler_hidden_size": "hidden_size", "attention_head_size": "head_size", "embedding_size": "table_size"},
    written={"legacy": False},
)
DEBERTA_V2 = replace(
    DEBERTA,
    model_type="deberta-v2",
    encoder_class="DebertaV2Model",
    encoder={
        **deberta_encoder(),
        "encoder.layers.{i}.attention.qkv.*": Stored(
            (f"{ATTENTION}.query_proj.*", f"{ATTENTION}.key_proj.*", f"{ATTENTION}.value_proj.*")
        ),
        "encoder.layers.{i}.attention.relative_keys.*": f"{ATTENTION}.pos_key_proj.*",
        "encoder.layers.{i}.attention.relative_queries.*": f"{ATTENTION}.pos_query_proj.*",
        "encoder.relative.norm.*": "deberta.encoder.LayerNorm.*",
        "encoder.layers.0.convolution.conv.*": "deberta.encoder.conv.conv.*",
        "encoder.layers.0.convolution.norm.*": "deberta.encoder.conv.LayerNorm.*",
    },
    vocabulary="unigram",
    outputs=deberta_outputs("DebertaV2"),
    fields={
        **FIRST_FIELDS,
        "relative_buckets": Field(("position_buckets",), none_value=-1, aliases={0: None}),
        "relative_norm": Field(("norm_rel_ebd",), values={True: "layer_norm", False: "none"}),
        "relative_projections": Field(("share_att_key",), values={True: False, False: True}),
        "convolution": Field(("conv_kernel_size",), none_value=0),
        "convolution_activation": Field(("conv_act",), values=ACTIVATIONS),
    },
    fixed={**FIXED, "is_decoder": False, "pooler_dropout": 0, "conv_groups": 1},
    defaults={
        **DEFAULTS,
        "vocab_size": 128_100,
        "hidden_size": 1536,
        "num_layers": 24,
        "num_heads": 24,
        "intermediate_size": 6144,
    },
)
