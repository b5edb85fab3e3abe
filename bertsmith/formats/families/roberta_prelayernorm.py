"""The table of RoBERTa with a norm before each sublayer (`roberta-prelayernorm`): our pre-norm encoders."""

from __future__ import annotations

from bertsmith.formats.families.bert import FIELDS, FIXED, OWN_FIELDS, bert_encoder, vocabulary_head
from bertsmith.formats.family import Family, Output
from bertsmith.formats.storage import Names, Stored

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
