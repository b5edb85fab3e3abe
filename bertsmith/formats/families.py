"""The families of `transformers`: what each calls our parts, one table a family. Foreign names live here alone.

In a row, ours stands left and theirs right. `{i}` is the layer and `*` a weight and its bias; several names on the
right are the parts in which they keep one of our matrices.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertsmith.errors import UserError, suggestion
from bertsmith.model.config import EncoderConfig, HeadKind

Names = Mapping[str, str | tuple[str, ...]]

CONFIG_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "num_segments": "type_vocab_size",
    "activation": "hidden_act",
    "hidden_dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "norm_eps": "layer_norm_eps",
    "init_std": "initializer_range",
    "pad_token_id": "pad_token_id",
}
# What `transformers` has no field for; it keeps what it does not know. Written where it is not the default.
OWN_FIELDS = ("bias", "direction")
# What `transformers` has no class for must not be opened as one that it has: a `model_type` and a class of our own.
FEATURE_TAGGER, OWN_CLASS = "BertsmithFeatureTagger", "Bertsmith"
OWN_TYPE = re.compile(r"bertsmith-(features|bilstm|two-encoders|right-to-left)-")
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu"}
ACTIVATIONS_IN = {
    **{theirs: ours for ours, theirs in ACTIVATIONS.items()},
    "gelu_pytorch_tanh": "gelu_tanh",
    "swish": "silu",
}
# Fields with one value that we compute; another value would change the mathematics.
FIXED = {
    "position_embedding_type": "absolute",
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "is_encoder_decoder": False,
    "tie_word_embeddings": True,
}
# Fields that do not change what an encoder computes. The first are of the file or the head, and written anew; the
# others are kept and written back.
WRITTEN_ANEW = frozenset(
    """architectures id2label label2id num_labels _num_labels problem_type num_choices finetuning_task model_type
    transformers_version torch_dtype dtype _name_or_path name_or_path attn_implementation _attn_implementation_autoset
    tokenizer_class features bilstm_layers beside is_decoder pooled""".split()
)
KEPT = frozenset(
    """classifier_dropout use_cache gradient_checkpointing directionality pooler_fc_size pooler_type
    pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_hidden_act output_past output_attentions
    output_hidden_states return_dict bos_token_id eos_token_id sep_token_id decoder_start_token_id
    chunk_size_feed_forward task_specific_params torchscript use_bfloat16 prefix pruned_heads model_name language
    keys_to_ignore_at_inference max_length min_length""".split()
)


@dataclass(frozen=True)
class Family:
    """What one `model_type` calls our parts, and what it says about an encoder by its name alone."""

    model_type: str
    prefix: str  # of an encoder's names; a file of the bare encoder does without
    settles: Mapping[str, Any]  # fields of our configuration that have one value in this family
    reasons: Mapping[str, str]  # why another value is refused
    encoder: Names
    masked_lm: Names  # with next sentence
    pretraining: tuple[str, str]  # their classes for masked words: without next sentence, and with
    causal: str  # their class for the next word
    heads: Mapping[str, tuple[HeadKind, Names]]  # their class: our kind of head and its names
    config_names: Mapping[str, str] = field(default_factory=lambda: CONFIG_NAMES)
    fixed: Mapping[str, Any] = field(default_factory=lambda: FIXED)
    defaults: Mapping[str, Any] = field(default_factory=dict)  # what their configuration leaves out, where ours differs
    pad_in_positions: bool = False  # the first position has the number pad_token_id + 1, and no row before it is used

    def unused_positions(self, pad_token_id: int) -> int:
        """The number of rows in their position table that stand before the first position's."""
        return pad_token_id + 1 if self.pad_in_positions else 0

    @property
    def causal_lm(self) -> Names:
        """The names of the layer that predicts the next word: those of the masked words'."""
        words = {ours: theirs for ours, theirs in self.masked_lm.items() if ours.startswith("masked_lm.")}
        return {ours.replace("masked_lm.", "causal_lm."): theirs for ours, theirs in words.items()}

    @property
    def config_keys(self) -> set[str]:
        """Every field of their configuration that is not refused."""
        return {*self.config_names.values(), *self.fixed, *OWN_FIELDS, *WRITTEN_ANEW, *KEPT}


def bert_encoder(prefix: str) -> dict[str, str | tuple[str, ...]]:
    """The encoder's names in BERT and in the families that took them over."""
    layer = f"{prefix}.encoder.layer.{{i}}"
    return {
        "encoder.embeddings.tokens.weight": f"{prefix}.embeddings.word_embeddings.weight",
        "encoder.embeddings.segments.weight": f"{prefix}.embeddings.token_type_embeddings.weight",
        "encoder.embeddings.positions.weight": f"{prefix}.embeddings.position_embeddings.weight",
        "encoder.embeddings.norm.*": f"{prefix}.embeddings.LayerNorm.*",
        "encoder.layers.{i}.attention.qkv.*": (
            f"{layer}.attention.self.query.*",
            f"{layer}.attention.self.key.*",
            f"{layer}.attention.self.value.*",
        ),
        "encoder.layers.{i}.attention.output.*": f"{layer}.attention.output.dense.*",
        "encoder.layers.{i}.attention_norm.*": f"{layer}.attention.output.LayerNorm.*",
        "encoder.layers.{i}.feed_forward.inner.*": f"{layer}.intermediate.dense.*",
        "encoder.layers.{i}.feed_forward.outer.*": f"{layer}.output.dense.*",
        "encoder.layers.{i}.feed_forward_norm.*": f"{layer}.output.LayerNorm.*",
    }


BERT_NAMES: Names = bert_encoder("bert")
MASKED_LM_NAMES: Names = {
    "masked_lm.transform.*": "cls.predictions.transform.dense.*",
    "masked_lm.norm.*": "cls.predictions.transform.LayerNorm.*",
    "masked_lm.decoder.bias": "cls.predictions.bias",
    "next_sentence.pooler.dense.*": "bert.pooler.dense.*",
    "next_sentence.output.*": "cls.seq_relationship.*",
}
BERT_POOLED: Names = {"head.pooler.dense.*": "bert.pooler.dense.*", "head.output.*": "classifier.*"}
BERT = Family(
    model_type="bert",
    prefix="bert.",
    settles={"norm_first": False},
    reasons={"norm_first": "the family bert normalises after each sublayer"},
    encoder=BERT_NAMES,
    masked_lm=MASKED_LM_NAMES,
    pretraining=("BertForMaskedLM", "BertForPreTraining"),
    causal="BertLMHeadModel",
    heads={
        "BertForSequenceClassification": ("single", BERT_POOLED),
        "BertForMultipleChoice": ("choice", BERT_POOLED),
        "BertForTokenClassification": ("tags", {"head.output.*": "classifier.*"}),
        "BertForQuestionAnswering": ("span", {"head.output.*": "qa_outputs.*"}),
    },
)

# The pre-norm encoder. It has no class for next sentence: that output layer has a name of its own, `next_sentence`,
# which `transformers` passes over.
ROBERTA_PRELAYERNORM = Family(
    model_type="roberta-prelayernorm",
    prefix="roberta_prelayernorm.",
    settles={"norm_first": True},
    reasons={"norm_first": "the family roberta-prelayernorm normalises before each sublayer"},
    encoder={
        **bert_encoder("roberta_prelayernorm"),
        "encoder.layers.{i}.attention_norm.*": "roberta_prelayernorm.encoder.layer.{i}.attention.LayerNorm.*",
        "encoder.layers.{i}.feed_forward_norm.*": "roberta_prelayernorm.encoder.layer.{i}.intermediate.LayerNorm.*",
        "encoder.final_norm.*": "roberta_prelayernorm.LayerNorm.*",
    },
    masked_lm={
        "masked_lm.transform.*": "lm_head.dense.*",
        "masked_lm.norm.*": "lm_head.layer_norm.*",
        "masked_lm.decoder.bias": "lm_head.bias",
        "next_sentence.pooler.dense.*": "roberta_prelayernorm.pooler.dense.*",
        "next_sentence.output.*": "next_sentence.*",
    },
    pretraining=("RobertaPreLayerNormForMaskedLM", "RobertaPreLayerNormForMaskedLM"),
    causal="RobertaPreLayerNormForCausalLM",
    heads={
        "RobertaPreLayerNormForSequenceClassification": (
            "single",
            {"head.pooler.dense.*": "classifier.dense.*", "head.output.*": "classifier.out_proj.*"},
        ),
        "RobertaPreLayerNormForMultipleChoice": (
            "choice",
            {"head.pooler.dense.*": "roberta_prelayernorm.pooler.dense.*", "head.output.*": "classifier.*"},
        ),
        "RobertaPreLayerNormForTokenClassification": ("tags", {"head.output.*": "classifier.*"}),
        "RobertaPreLayerNormForQuestionAnswering": ("span", {"head.output.*": "qa_outputs.*"}),
    },
    defaults={"vocab_size": 50265, "pad_token_id": 1},
    pad_in_positions=True,
)

FAMILIES = {family.model_type: family for family in (BERT, ROBERTA_PRELAYERNORM)}


def family_named(values: Mapping[str, Any], where: Path) -> Family:
    """The family of a saved configuration, or an error that lists those that are supported.

    Old releases wrote no `model_type`; then the class says it, and a configuration without either is BERT's.
    """
    listed = values.get("architectures") or [BERT.pretraining[0]]
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise UserError(f"{where}: architectures is not a list of names: {listed!r}")
    stem = listed[0].removeprefix(OWN_CLASS).split("For")[0].removesuffix("Model").removesuffix("LMHead")
    name = values.get("model_type") or (BERT.model_type if stem in ("Bert", "") else stem)
    name = OWN_TYPE.sub("", str(name))
    if name not in FAMILIES:
        raise UserError(f"{where}: model_type {name!r} is not supported yet; {' and '.join(map(repr, FAMILIES))} are")
    return FAMILIES[name]


def family_of(config: EncoderConfig) -> Family:
    """The family that an encoder is saved as."""
    check_family(config)
    return FAMILIES[config.family]


def check_family(config: EncoderConfig) -> None:
    """Refuse an encoder that its family cannot express, with the reason and the fix."""
    if config.family not in FAMILIES:
        near = suggestion(config.family, FAMILIES)
        raise UserError(f"model.family {config.family!r} is not one of {', '.join(FAMILIES)}{near}")
    family = FAMILIES[config.family]
    for name, value in family.settles.items():
        if getattr(config, name) != value:
            able = [other.model_type for other in FAMILIES.values() if other.settles.get(name) != value]
            given, own = json.dumps(getattr(config, name)), json.dumps(value)
            raise UserError(
                f"model.{name}={given}: {family.reasons[name]}; set model.{name}={own}"
                + (f", or model.family={able[0]}" if able else "")
            )


def expand(rows: Names, layers: range) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The rows of a table, with every layer, weight and bias by its own name."""
    for ours, theirs in rows.items():
        parts = (theirs,) if isinstance(theirs, str) else theirs
        for layer in layers if "{i}" in ours else range(1):
            for end in ("weight", "bias") if ours.endswith("*") else ("",):
                fill = lambda name: name.replace("{i}", str(layer)).replace("*", end)  # noqa: E731, B023
                yield fill(ours), tuple(fill(part) for part in parts)
