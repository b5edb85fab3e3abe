"""The table of OpenAI GPT (Radford et al. 2018), a left-to-right encoder.

Matrices are stored with their inputs first, queries, keys and values as one. `transformers` has no class for labels of
tokens and for answers; such heads are saved under names of our own.
"""

from __future__ import annotations

from bertsmith.formats.families.bert import FIXED
from bertsmith.formats.family import NO_SETTING, Family, Field, HeadDropout, Output
from bertsmith.formats.storage import Stored

LAYER = "transformer.h.{i}"


def _conv(name: str) -> Stored:
    """A layer whose matrix has its inputs first, as in the Conv1D of `transformers`."""
    return Stored((f"{LAYER}.{name}.*",), transposed=True)


OPENAI_GPT = Family(
    model_type="openai-gpt",
    prefix="transformer.",
    encoder_class="OpenAIGPTModel",
    encoder={
        "encoder.embeddings.tokens.weight": Stored(("transformer.tokens_embed.weight",), tied=("lm_head.weight",)),
        "encoder.embeddings.positions.weight": "transformer.positions_embed.weight",
        "encoder.layers.{i}.attention.qkv.*": _conv("attn.c_attn"),
        "encoder.layers.{i}.attention.output.*": _conv("attn.c_proj"),
        "encoder.layers.{i}.attention_norm.*": f"{LAYER}.ln_1.*",
        "encoder.layers.{i}.feed_forward.inner.*": _conv("mlp.c_fc"),
        "encoder.layers.{i}.feed_forward.outer.*": _conv("mlp.c_proj"),
        "encoder.layers.{i}.feed_forward_norm.*": f"{LAYER}.ln_2.*",
    },
    vocabulary="bpe",
    outputs={
        "causal_lm": Output("OpenAIGPTLMHeadModel", {}),
        "single": Output("OpenAIGPTForSequenceClassification", {"head.output.*": "score.*"}, NO_SETTING),
        "choice": Output(
            "OpenAIGPTDoubleHeadsModel",
            {"head.output.*": "multiple_choice_head.summary.*"},
            HeadDropout("summary_first_dropout", 0.1),
        ),
        "tags": Output("OpenAIGPTForTokenClassification", {"head.output.*": "classifier.*"}, NO_SETTING, own=True),
        "span": Output("OpenAIGPTForQuestionAnswering", {"head.output.*": "qa_outputs.*"}, NO_SETTING, own=True),
    },
    fields={
        "vocab_size": Field(("vocab_size",)),
        "hidden_size": Field(("n_embd",)),
        "num_layers": Field(("n_layer",)),
        "num_heads": Field(("n_head",)),
        "max_positions": Field(("n_positions",)),
        "activation": Field(
            ("afn",), values={"gelu_tanh": "gelu", "relu": "relu", "silu": "silu"}, aliases={"swish": "silu"}
        ),
        "hidden_dropout": Field(("resid_pdrop", "embd_pdrop")),
        "attention_dropout": Field(("attn_pdrop",)),
        "norm_eps": Field(("layer_norm_epsilon",)),
        "init_std": Field(("initializer_range",)),
        "pad_token_id": Field(("pad_token_id",)),
    },
    fixed={
        **FIXED,
        "is_decoder": False,
        "n_special": 0,
        "predict_special_tokens": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "summary_activation": None,
        "summary_proj_to_labels": True,
    },
    own_fields=("bias", "shared_layers"),
    language_model=0.5,  # section 4.1
    both_orders=True,  # section 3.3
    multiples={"intermediate_size": ("hidden_size", 4)},
    defaults={
        "vocab_size": 40478,
        "num_segments": 0,
        "activation": "gelu_tanh",
        "norm_eps": 1e-5,
        "direction": "left-to-right",
        "embedding_norm": False,
        "head_transform": False,
        "head_bias": False,
        "pooler": False,
    },
    reasons={
        "norm_first": "the family openai-gpt normalises after each sublayer",
        "num_segments": "OpenAIGPTModel has no table of segments",
        "direction": "OpenAIGPTModel reads left to right",
        "intermediate_size": "OpenAIGPTModel has feed-forward layers of 4 times its width",
        "embedding_norm": "OpenAIGPTModel does not normalise its embeddings",
        "head_transform": "OpenAIGPTLMHeadModel has no layer before its scores",
        "head_bias": "OpenAIGPTLMHeadModel has no bias for its words",
        "pooler": "OpenAIGPTForSequenceClassification has no layer before its output",
        "activation": "OpenAIGPTModel has the tanh form of GELU, ReLU and SiLU",
    },
)
