"""The families that we read and write, one table each. Names of `transformers` are only in this file.

In the rows of names, ours is on the left and theirs on the right; see `storage.py` for how a row is written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bertsmith.errors import UserError, suggestion
from bertsmith.formats.family import Family, Field, Output
from bertsmith.formats.storage import Names, Row, Stored
from bertsmith.model.config import EncoderConfig

# A model that `transformers` has no class for must not be opened as another one: it has a `model_type` and a class of
# our own.
FEATURE_TAGGER, OWN_CLASS = "BertsmithFeatureTagger", "Bertsmith"
OWN_TYPE = re.compile(r"bertsmith-(features|bilstm|two-encoders|right-to-left)-")
FIELDS = {
    "vocab_size": Field(("vocab_size",)),
    "hidden_size": Field(("hidden_size",)),
    "num_layers": Field(("num_hidden_layers",)),
    "num_heads": Field(("num_attention_heads",)),
    "intermediate_size": Field(("intermediate_size",)),
    "max_positions": Field(("max_position_embeddings",)),
    "num_segments": Field(("type_vocab_size",), refused=(0,)),
    "activation": Field(
        ("hidden_act",),
        values={"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu"},
        aliases={"gelu_pytorch_tanh": "gelu_tanh", "swish": "silu"},
    ),
    "hidden_dropout": Field(("hidden_dropout_prob",)),
    "attention_dropout": Field(("attention_probs_dropout_prob",)),
    "norm_eps": Field(("layer_norm_eps",)),
    "init_std": Field(("initializer_range",)),
    "pad_token_id": Field(("pad_token_id",)),
    "direction": Field(("is_decoder",), values={"both": False, "left-to-right": True}),
}
# `transformers` keeps fields that it does not know: its classes always have biases, which are written as zeros.
OWN_FIELDS = ("bias", "direction")
FIXED = {
    "position_embedding_type": "absolute",
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "is_encoder_decoder": False,
    "tie_word_embeddings": True,
}


def bert_encoder(prefix: str, decoder: str) -> dict[str, Row]:
    """The encoder's names in BERT and in the families that took them over; the decoder has the token embeddings."""
    layer = f"{prefix}.encoder.layer.{{i}}"
    return {
        "encoder.embeddings.tokens.weight": Stored(
            (f"{prefix}.embeddings.word_embeddings.weight",), tied=(f"{decoder}.weight",)
        ),
        "encoder.embeddings.segments.weight": f"{prefix}.embeddings.token_type_embeddings.weight",
        "encoder.embeddings.positions.weight": f"{prefix}.embeddings.position_embeddings.weight",
        "encoder.embeddings.norm.*": f"{prefix}.embeddings.LayerNorm.*",
        "encoder.layers.{i}.attention.qkv.*": Stored(
            (
                f"{layer}.attention.self.query.*",
                f"{layer}.attention.self.key.*",
                f"{layer}.attention.self.value.*",
            )
        ),
        "encoder.layers.{i}.attention.output.*": f"{layer}.attention.output.dense.*",
        "encoder.layers.{i}.attention_norm.*": f"{layer}.attention.output.LayerNorm.*",
        "encoder.layers.{i}.feed_forward.inner.*": f"{layer}.intermediate.dense.*",
        "encoder.layers.{i}.feed_forward.outer.*": f"{layer}.output.dense.*",
        "encoder.layers.{i}.feed_forward_norm.*": f"{layer}.output.LayerNorm.*",
    }


def vocabulary_head(head: str, transform: str, norm: str, bias: str, decoder: str) -> dict[str, Row]:
    """The names of the head that scores the vocabulary: `masked_lm` or `causal_lm`."""
    return {
        f"{head}.transform.*": f"{transform}.*",
        f"{head}.norm.*": f"{norm}.*",
        f"{head}.decoder.bias": Stored((bias,), tied=(f"{decoder}.bias",)),
    }


BERT_VOCABULARY = (
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "cls.predictions.bias",
    "cls.predictions.decoder",
)
BERT_WORDS: Names = vocabulary_head("masked_lm", *BERT_VOCABULARY)
BERT_PAIRS: Names = {
    "next_sentence.pooler.dense.*": "bert.pooler.dense.*",
    "next_sentence.output.*": "cls.seq_relationship.*",
}
BERT_POOLED: Names = {"head.pooler.dense.*": "bert.pooler.dense.*", "head.output.*": "classifier.*"}
BERT = Family(
    model_type="bert",
    prefix="bert.",
    encoder_class="BertModel",
    encoder=bert_encoder("bert", "cls.predictions.decoder"),
    outputs={
        "masked_lm": Output("BertForMaskedLM", BERT_WORDS),
        "masked_lm+next_sentence": Output("BertForPreTraining", {**BERT_WORDS, **BERT_PAIRS}),
        "causal_lm": Output("BertLMHeadModel", vocabulary_head("causal_lm", *BERT_VOCABULARY)),
        "single": Output("BertForSequenceClassification", BERT_POOLED),
        "choice": Output("BertForMultipleChoice", BERT_POOLED),
        "tags": Output("BertForTokenClassification", {"head.output.*": "classifier.*"}),
        "span": Output("BertForQuestionAnswering", {"head.output.*": "qa_outputs.*"}),
    },
    fields=FIELDS,
    fixed=FIXED,
    own_fields=OWN_FIELDS,
    reasons={
        "norm_first": "the family bert normalises after each sublayer",
        "head_activation": "BertForMaskedLM has the encoder's activation in its head",
        "num_segments": "BertModel needs a table of segments",
    },
)

PRELAYERNORM_VOCABULARY = ("lm_head.dense", "lm_head.layer_norm", "lm_head.bias", "lm_head.decoder")
PRELAYERNORM_WORDS: Names = vocabulary_head("masked_lm", *PRELAYERNORM_VOCABULARY)
# The family has no class for next sentence: `transformers` ignores this output layer, which has a name of our own.
PRELAYERNORM_PAIRS: Names = {
    "next_sentence.pooler.dense.*": "roberta_prelayernorm.pooler.dense.*",
    "next_sentence.output.*": "next_sentence.*",
}
ROBERTA_PRELAYERNORM = Family(
    model_type="roberta-prelayernorm",
    prefix="roberta_prelayernorm.",
    encoder_class="RobertaPreLayerNormModel",
    encoder={
        **bert_encoder("roberta_prelayernorm", "lm_head.decoder"),
        "encoder.embeddings.positions.weight": Stored(
            ("roberta_prelayernorm.embeddings.position_embeddings.weight",), pad_rows=True
        ),
        "encoder.layers.{i}.attention_norm.*": "roberta_prelayernorm.encoder.layer.{i}.attention.LayerNorm.*",
        "encoder.layers.{i}.feed_forward_norm.*": "roberta_prelayernorm.encoder.layer.{i}.intermediate.LayerNorm.*",
        "encoder.final_norm.*": "roberta_prelayernorm.LayerNorm.*",
    },
    outputs={
        "masked_lm": Output("RobertaPreLayerNormForMaskedLM", PRELAYERNORM_WORDS),
        "masked_lm+next_sentence": Output(
            "RobertaPreLayerNormForMaskedLM", {**PRELAYERNORM_WORDS, **PRELAYERNORM_PAIRS}
        ),
        "causal_lm": Output("RobertaPreLayerNormForCausalLM", vocabulary_head("causal_lm", *PRELAYERNORM_VOCABULARY)),
        "single": Output(
            "RobertaPreLayerNormForSequenceClassification",
            {"head.pooler.dense.*": "classifier.dense.*", "head.output.*": "classifier.out_proj.*"},
        ),
        "choice": Output(
            "RobertaPreLayerNormForMultipleChoice",
            {"head.pooler.dense.*": "roberta_prelayernorm.pooler.dense.*", "head.output.*": "classifier.*"},
        ),
        "tags": Output("RobertaPreLayerNormForTokenClassification", {"head.output.*": "classifier.*"}),
        "span": Output("RobertaPreLayerNormForQuestionAnswering", {"head.output.*": "qa_outputs.*"}),
    },
    fields=FIELDS,
    fixed=FIXED,
    own_fields=OWN_FIELDS,
    defaults={"vocab_size": 50265, "pad_token_id": 1, "norm_first": True},
    reasons={
        "norm_first": "the family roberta-prelayernorm normalises before each sublayer",
        "head_activation": "RobertaPreLayerNormForMaskedLM has GELU in its head, whatever the encoder's activation is",
        "num_segments": "RobertaPreLayerNormModel needs a table of segments",
    },
    head_activation="gelu",
)

FAMILIES = {family.model_type: family for family in (BERT, ROBERTA_PRELAYERNORM)}


def family_named(values: Mapping[str, Any], where: Path) -> Family:
    """The family of a saved configuration, or an error that lists those that are supported.

    Old releases wrote no `model_type`; then the class decides, and a configuration without either is BERT's.
    """
    listed = values.get("architectures") or [BERT.encoder_class]
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise UserError(f"{where}: architectures is not a list of names: {listed!r}")
    stem = listed[0].removeprefix(OWN_CLASS).split("For")[0].removesuffix("Model").removesuffix("LMHead")
    name = values.get("model_type") or (BERT.model_type if stem in ("Bert", "") else stem)
    name = OWN_TYPE.sub("", str(name))
    if name not in FAMILIES:
        raise UserError(f"{where}: model_type {name!r} is not supported yet; {' and '.join(map(repr, FAMILIES))} are")
    return FAMILIES[name]


def family_of(config: EncoderConfig) -> Family:
    """The family that an encoder is saved as; an encoder that the family cannot express is refused, with the fix."""
    if config.family not in FAMILIES:
        near = suggestion(config.family, FAMILIES)
        raise UserError(f"model.family {config.family!r} is not one of {', '.join(FAMILIES)}{near}")
    family = FAMILIES[config.family]
    if refusal := family.refusal(config):
        name = family.refused(config)
        able = [other.model_type for other in FAMILIES.values() if other.accepts(name, getattr(config, name))]
        raise UserError(refusal + (f", or model.family={' or '.join(able)}" if able else ""))
    return family
