"""The table of ELECTRA: the discriminator that is kept (`ElectraForPreTraining`), and its generator (`ForMaskedLM`)."""

from __future__ import annotations

from bertsmith.formats.families.bert import FIELDS, FIXED, OWN_FIELDS, bert_encoder, vocabulary_head
from bertsmith.formats.family import NO_SETTING, Family, Field, HeadDropout, Output
from bertsmith.formats.storage import Names

VOCABULARY = ("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head.bias")
WORDS = vocabulary_head("masked_lm", *VOCABULARY)
DETECTOR: Names = {
    "detector.dense.*": "discriminator_predictions.dense.*",
    "detector.output.*": "discriminator_predictions.dense_prediction.*",
}
PAIRS: Names = {  # `transformers` has no class with them; the pooler has the name of a classifier's
    "next_sentence.pooler.dense.*": "classifier.dense.*",
    "next_sentence.output.*": "next_sentence.*",
}
ELECTRA = Family(
    model_type="electra",
    prefix="electra.",
    encoder_class="ElectraModel",
    encoder={
        **bert_encoder("electra", "generator_lm_head"),
        "encoder.embeddings.projection.*": "electra.embeddings_project.*",
    },
    vocabulary="wordpiece",
    outputs={
        "detector": Output("ElectraForPreTraining", DETECTOR),
        "detector+masked_lm": Output("ElectraForPreTraining", {**DETECTOR, **WORDS}),
        "detector+next_sentence": Output("ElectraForPreTraining", {**DETECTOR, **PAIRS}),
        "detector+masked_lm+next_sentence": Output("ElectraForPreTraining", {**DETECTOR, **WORDS, **PAIRS}),
        "masked_lm": Output("ElectraForMaskedLM", WORDS),
        "causal_lm": Output("ElectraForCausalLM", vocabulary_head("causal_lm", *VOCABULARY)),
        "single": Output(
            "ElectraForSequenceClassification",
            {"head.pooler.dense.*": "classifier.dense.*", "head.output.*": "classifier.out_proj.*"},
        ),
        "choice": Output(
            "ElectraForMultipleChoice",
            {"head.pooler.dense.*": "sequence_summary.summary.*", "head.output.*": "classifier.*"},
            HeadDropout("summary_last_dropout", 0.1),
        ),
        "tags": Output("ElectraForTokenClassification", {"head.output.*": "classifier.*"}),
        "span": Output("ElectraForQuestionAnswering", {"head.output.*": "qa_outputs.*"}, NO_SETTING),
    },
    fields={**FIELDS, "embedding_size": Field(("embedding_size",), none_as="hidden_size")},
    fixed={**FIXED, "summary_type": "first", "summary_use_proj": True, "summary_activation": "gelu"},
    own_fields=OWN_FIELDS,
    defaults={
        "embedding_size": 128,
        "hidden_size": 256,
        "num_heads": 4,
        "intermediate_size": 1024,
        "pooler_activation": "gelu",
        "pooler_input_dropout": True,
    },
    reasons={
        "norm_first": "the family electra normalises after each sublayer",
        "head_activation": "ElectraForMaskedLM has GELU in its head, whatever the encoder's activation is",
        "num_segments": "ElectraModel needs a table of segments",
        "embedding_size": "ElectraModel does not project embeddings of hidden_size, which are null here",
        "pooler_activation": "ElectraForSequenceClassification has GELU before its output layer",
        "pooler_input_dropout": "ElectraForSequenceClassification has dropout before its dense layer as well",
    },
    head_activation="gelu",
)
