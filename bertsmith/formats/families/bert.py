"""BERT's table, and the names and settings that the families after it took over.

In the rows of names, ours is on the left and theirs on the right; see `storage.py` for how a row is written.
"""

from __future__ import annotations

from bertsmith.formats.family import NO_SETTING, Family, Field, Output
from bertsmith.formats.storage import Names, Row, Stored

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
# `transformers` keeps fields that it does not know. Its classes always have biases, which are written as zeros, and
# layers of their own, so that sublayers that are shared here are written for every layer.
OWN_FIELDS = ("bias", "direction", "shared_layers")
FIXED = {
    "position_embedding_type": "absolute",
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "is_encoder_decoder": False,
    "tie_word_embeddings": True,
}


def bert_embeddings(prefix: str, decoder: str) -> dict[str, Row]:
    """The names of the embeddings in BERT and in the families after it; the decoder has the token embeddings."""
    tokens = Stored((f"{prefix}.embeddings.word_embeddings.weight",), tied=(f"{decoder}.weight",))
    return {
        "encoder.embeddings.tokens.weight": tokens,
        "encoder.embeddings.segments.weight": f"{prefix}.embeddings.token_type_embeddings.weight",
        "encoder.embeddings.positions.weight": f"{prefix}.embeddings.position_embeddings.weight",
        "encoder.embeddings.norm.*": f"{prefix}.embeddings.LayerNorm.*",
    }


def bert_encoder(prefix: str, decoder: str) -> dict[str, Row]:
    """The encoder's names in BERT and in the families that took them over."""
    layer = f"{prefix}.encoder.layer.{{i}}"
    return {
        **bert_embeddings(prefix, decoder),
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


def vocabulary_head(head: str, transform: str, norm: str, bias: str, decoder: str = "") -> dict[str, Row]:
    """The names of the head that scores the vocabulary: `masked_lm` or `causal_lm`."""
    return {
        f"{head}.transform.*": f"{transform}.*",
        f"{head}.norm.*": f"{norm}.*",
        f"{head}.decoder.bias": Stored((bias,), tied=(f"{decoder}.bias",) if decoder else ()),
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
    vocabulary="wordpiece",
    outputs={
        "masked_lm": Output("BertForMaskedLM", BERT_WORDS),
        "masked_lm+next_sentence": Output("BertForPreTraining", {**BERT_WORDS, **BERT_PAIRS}),
        "causal_lm": Output("BertLMHeadModel", vocabulary_head("causal_lm", *BERT_VOCABULARY)),
        "single": Output("BertForSequenceClassification", BERT_POOLED),
        "choice": Output("BertForMultipleChoice", BERT_POOLED),
        "tags": Output("BertForTokenClassification", {"head.output.*": "classifier.*"}),
        "span": Output("BertForQuestionAnswering", {"head.output.*": "qa_outputs.*"}, NO_SETTING),
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
