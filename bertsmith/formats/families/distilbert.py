"""The table of DistilBERT: half the layers of BERT, without segments and without a pooler in the encoder."""

from __future__ import annotations

from dataclasses import replace

from bertsmith.formats.families.bert import FIELDS, FIXED, vocabulary_head
from bertsmith.formats.family import NO_SETTING, Family, Field, HeadDropout, Output
from bertsmith.formats.storage import Names, Stored

LAYER = "distilbert.transformer.layer.{i}"
POOLED: Names = {"head.pooler.dense.*": "pre_classifier.*", "head.output.*": "classifier.*"}
DROPOUT = HeadDropout("seq_classif_dropout", 0.2)
THEIR_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_layers": "n_layers",
    "num_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "max_positions": "max_position_embeddings",
    "hidden_dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "init_std": "initializer_range",
    "pad_token_id": "pad_token_id",
}
DISTILBERT = Family(
    model_type="distilbert",
    prefix="distilbert.",
    encoder_class="DistilBertModel",
    encoder={
        "encoder.embeddings.tokens.weight": Stored(
            ("distilbert.embeddings.word_embeddings.weight",), tied=("vocab_projector.weight",)
        ),
        "encoder.embeddings.positions.weight": "distilbert.embeddings.position_embeddings.weight",
        "encoder.embeddings.norm.*": "distilbert.embeddings.LayerNorm.*",
        "encoder.layers.{i}.attention.qkv.*": Stored(
            (f"{LAYER}.attention.q_lin.*", f"{LAYER}.attention.k_lin.*", f"{LAYER}.attention.v_lin.*")
        ),
        "encoder.layers.{i}.attention.output.*": f"{LAYER}.attention.out_lin.*",
        "encoder.layers.{i}.attention_norm.*": f"{LAYER}.sa_layer_norm.*",
        "encoder.layers.{i}.feed_forward.inner.*": f"{LAYER}.ffn.lin1.*",
        "encoder.layers.{i}.feed_forward.outer.*": f"{LAYER}.ffn.lin2.*",
        "encoder.layers.{i}.feed_forward_norm.*": f"{LAYER}.output_layer_norm.*",
    },
    vocabulary="wordpiece",
    outputs={
        "masked_lm": Output(
            "DistilBertForMaskedLM",
            vocabulary_head("masked_lm", "vocab_transform", "vocab_layer_norm", "vocab_projector.bias"),
        ),
        "single": Output("DistilBertForSequenceClassification", POOLED, DROPOUT),
        "choice": Output("DistilBertForMultipleChoice", POOLED, DROPOUT),
        "tags": Output("DistilBertForTokenClassification", {"head.output.*": "classifier.*"}, NO_SETTING),
        "span": Output(
            "DistilBertForQuestionAnswering", {"head.output.*": "qa_outputs.*"}, HeadDropout("qa_dropout", 0.1)
        ),
    },
    fields={
        **{ours: Field((theirs,)) for ours, theirs in THEIR_NAMES.items()},
        "activation": replace(FIELDS["activation"], names=("activation",)),
    },
    # Sinusoidal positions are stored in the table as well, so that a file with them is read like any other.
    fixed={**FIXED, "is_decoder": False, "tie_weights_": True},
    own_fields=("bias",),
    defaults={"num_layers": 6, "num_segments": 0, "pooler_activation": "relu"},
    reasons={
        "norm_first": "the family distilbert normalises after each sublayer",
        "norm_eps": "DistilBertModel has no setting for it",
        "head_activation": "DistilBertForMaskedLM has the encoder's activation in its head",
        "num_segments": "DistilBertModel has no table of segments",
        "direction": "DistilBertModel sees both directions",
        "pooler_activation": "DistilBertForSequenceClassification has ReLU before its output layer",
    },
)
