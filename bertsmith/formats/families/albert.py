"""ALBERT's table (Lan et al. 2020).

A group of layers shares its parameters. We have one group, where all layers share all of them, or one group for each
layer; sublayers that are shared all the same are then written for every layer, and `shared_layers` says which.
"""

from __future__ import annotations

from bertsmith.formats.families.bert import FIELDS, FIXED, bert_embeddings, vocabulary_head
from bertsmith.formats.family import NO_SETTING, Family, Field, HeadDropout, Output
from bertsmith.formats.storage import Names, Stored

LAYER = "albert.encoder.albert_layer_groups.{i}.albert_layers.0"
WORDS: Names = vocabulary_head(
    "masked_lm", "predictions.dense", "predictions.LayerNorm", "predictions.bias", "predictions.decoder"
)
PAIRS: Names = {
    "next_sentence.pooler.dense.*": "albert.pooler.*",
    "next_sentence.output.*": "sop_classifier.classifier.*",
}
POOLED: Names = {"head.pooler.dense.*": "albert.pooler.*", "head.output.*": "classifier.*"}
DROPOUT = HeadDropout("classifier_dropout_prob", 0.1)
ALBERT = Family(
    model_type="albert",
    prefix="albert.",
    encoder_class="AlbertModel",
    encoder={
        **bert_embeddings("albert", "predictions.decoder"),
        "encoder.embeddings.projection.*": "albert.encoder.embedding_hidden_mapping_in.*",
        "encoder.layers.{i}.attention.qkv.*": Stored(
            (f"{LAYER}.attention.query.*", f"{LAYER}.attention.key.*", f"{LAYER}.attention.value.*")
        ),
        "encoder.layers.{i}.attention.output.*": f"{LAYER}.attention.dense.*",
        "encoder.layers.{i}.attention_norm.*": f"{LAYER}.attention.LayerNorm.*",
        "encoder.layers.{i}.feed_forward.inner.*": f"{LAYER}.ffn.*",
        "encoder.layers.{i}.feed_forward.outer.*": f"{LAYER}.ffn_output.*",
        "encoder.layers.{i}.feed_forward_norm.*": f"{LAYER}.full_layer_layer_norm.*",
    },
    vocabulary="unigram",
    outputs={
        "masked_lm": Output("AlbertForMaskedLM", WORDS),
        "masked_lm+next_sentence": Output("AlbertForPreTraining", {**WORDS, **PAIRS}),
        "single": Output("AlbertForSequenceClassification", POOLED, DROPOUT),
        "choice": Output("AlbertForMultipleChoice", POOLED, DROPOUT),
        "tags": Output("AlbertForTokenClassification", {"head.output.*": "classifier.*"}, DROPOUT),
        "span": Output("AlbertForQuestionAnswering", {"head.output.*": "qa_outputs.*"}, NO_SETTING),
    },
    fields={
        **{name: field for name, field in FIELDS.items() if name != "direction"},
        "embedding_size": Field(("embedding_size",), refused=(None,)),
    },
    fixed={**FIXED, "is_decoder": False, "inner_group_num": 1},
    own_fields=("bias", "shared_layers"),
    layer_groups="num_hidden_groups",
    defaults={
        "vocab_size": 30000,
        "embedding_size": 128,
        "hidden_size": 4096,
        "num_heads": 64,
        "intermediate_size": 16384,
        "activation": "gelu_tanh",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "shared_layers": "all",
    },
    reasons={
        "norm_first": "the family albert normalises after each sublayer",
        "head_activation": "AlbertForMaskedLM has the encoder's activation in its head",
        "num_segments": "AlbertModel needs a table of segments",
        "embedding_size": "AlbertModel always has a projection of its embeddings",
        "direction": "AlbertModel sees both directions",
    },
)
