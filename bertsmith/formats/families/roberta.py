"""The tables of RoBERTa (Liu et al. 2019) and of the families with its classes: XLM-RoBERTa, CamemBERT and pre-norm."""

from __future__ import annotations

from dataclasses import replace

from bertsmith.formats.families.bert import FIELDS, FIXED, OWN_FIELDS, bert_encoder, vocabulary_head
from bertsmith.formats.family import NO_SETTING, Family, Output
from bertsmith.formats.storage import Names, Stored
from bertsmith.text.tokenizer import Kind

VOCABULARY = ("lm_head.dense", "lm_head.layer_norm", "lm_head.bias", "lm_head.decoder")
WORDS: Names = vocabulary_head("masked_lm", *VOCABULARY)


def roberta_outputs(classes: str, prefix: str) -> dict[str, Output]:
    """The classes of a family like RoBERTa, given the first word of their names and the prefix of its tensors.

    There is none for next sentence: `transformers` ignores that output layer, which has a name of our own.
    """
    pairs = {"next_sentence.pooler.dense.*": f"{prefix}.pooler.dense.*", "next_sentence.output.*": "next_sentence.*"}
    single = {"head.pooler.dense.*": "classifier.dense.*", "head.output.*": "classifier.out_proj.*"}
    choice = {"head.pooler.dense.*": f"{prefix}.pooler.dense.*", "head.output.*": "classifier.*"}
    return {
        "masked_lm": Output(f"{classes}ForMaskedLM", WORDS),
        "masked_lm+next_sentence": Output(f"{classes}ForMaskedLM", {**WORDS, **pairs}),
        "causal_lm": Output(f"{classes}ForCausalLM", vocabulary_head("causal_lm", *VOCABULARY)),
        "single": Output(f"{classes}ForSequenceClassification", single),
        "choice": Output(f"{classes}ForMultipleChoice", choice, NO_SETTING),
        "tags": Output(f"{classes}ForTokenClassification", {"head.output.*": "classifier.*"}),
        "span": Output(f"{classes}ForQuestionAnswering", {"head.output.*": "qa_outputs.*"}, NO_SETTING),
    }


def roberta_family(
    model_type: str, classes: str, vocab_size: int, vocabulary: Kind | None, prefix: str = "roberta"
) -> Family:
    """A family with RoBERTa's names; its position table has unused rows up to the padding token's."""
    positions = f"{prefix}.embeddings.position_embeddings.weight"
    return Family(
        model_type=model_type,
        prefix=f"{prefix}.",
        encoder_class=f"{classes}Model",
        encoder={
            **bert_encoder(prefix, "lm_head.decoder"),
            "encoder.embeddings.positions.weight": Stored((positions,), pad_rows=True),
        },
        outputs=roberta_outputs(classes, prefix),
        fields=FIELDS,
        fixed=FIXED,
        own_fields=(*OWN_FIELDS, "pooler_input_dropout"),  # training alone differs
        defaults={"vocab_size": vocab_size, "pad_token_id": 1, "pooler_input_dropout": True},
        reasons={
            "norm_first": f"the family {model_type} normalises after each sublayer",
            "head_activation": f"{classes}ForMaskedLM has GELU in its head, whatever the encoder's activation is",
            "num_segments": f"{classes}Model needs a table of segments; that of RoBERTa has one row",
        },
        vocabulary=vocabulary,
        head_activation="gelu",
    )


ROBERTA = roberta_family("roberta", "Roberta", 50265, "bytes")
XLM_ROBERTA = roberta_family("xlm-roberta", "XLMRoberta", 30522, "unigram")
CAMEMBERT = roberta_family("camembert", "Camembert", 30522, "unigram")
_POST_NORM = roberta_family("roberta-prelayernorm", "RobertaPreLayerNorm", 50265, None, "roberta_prelayernorm")
_LAYER = "roberta_prelayernorm.encoder.layer.{i}"
ROBERTA_PRELAYERNORM = replace(
    _POST_NORM,
    encoder={
        **_POST_NORM.encoder,
        "encoder.layers.{i}.attention_norm.*": f"{_LAYER}.attention.LayerNorm.*",
        "encoder.layers.{i}.feed_forward_norm.*": f"{_LAYER}.intermediate.LayerNorm.*",
        "encoder.final_norm.*": "roberta_prelayernorm.LayerNorm.*",
    },
    defaults={"vocab_size": 50265, "pad_token_id": 1, "norm_first": True},
    reasons={**_POST_NORM.reasons, "norm_first": "the family roberta-prelayernorm normalises before each sublayer"},
)
