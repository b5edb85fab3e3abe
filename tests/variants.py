"""The encoders that can be saved, with their classes of `transformers`: a new one is tested by a line here."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import transformers
from conftest import LABELS, REFERENCES

from bertsmith.formats.hf import Loaded, Notes
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.objectives.settings import MaskedLMConfig

KINDS = ["mlm+nsp", "mlm", "single", "multi", "regression", "tags", "span", "choice"]
POSITIONS = 48


@dataclass(frozen=True)
class Variant:
    """One of our encoders, and the classes of `transformers` that compute the same."""

    classes: str  # the prefix of their names
    ours: dict[str, object] = field(default_factory=dict)  # fields of our configuration
    theirs: dict[str, object] = field(default_factory=dict)  # fields of theirs; None: the family has no such field
    pretraining: bool = True  # whether `transformers` has a class with a pair loss
    pairs: bool = True  # whether we save a model with next-sentence prediction
    pooler: bool = True  # whether their encoder alone has a pooler
    without: tuple[str, ...] = ()  # heads that `transformers` has no class for
    pair_label: str = "next_sentence_label"  # what the class with a pair loss calls its label and its logits
    pair_logits: str = "seq_relationship_logits"

    @property
    def segments(self) -> int:
        """The number of segments, 1 without a table."""
        return max(1, int(self.ours.get("num_segments", 2)))


PRE_NORM = {"pad_token_id": 0, "max_position_embeddings": POSITIONS + 1}
DISTILBERT = {"family": "distilbert", "num_segments": 0, "pooler_activation": "relu"}
DISTILBERT_SIZES = {"intermediate_size": None, "hidden_dim": 128, "seq_classif_dropout": 0.1, "qa_dropout": 0.0}
ELECTRA = {"family": "electra", "pooler_activation": "gelu", "pooler_input_dropout": True}
ROBERTA = {"family": "roberta", "num_segments": 1, "pooler_input_dropout": True}
ALBERT = {"family": "albert", "embedding_size": 24, "activation": "gelu_tanh"}
THEIR_ALBERT = {"embedding_size": 24, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
MODERN = {
    "family": "modernbert", "norm_first": True, "bias": False, "num_segments": 0, "norm_eps": 1e-5, "gated": True,
    "positions": "rotary", "rotary_base": 160_000.0, "local_rotary_base": 10_000.0, "window": 8, "global_every": 3,
    "first_attention_norm": False, "pooler_activation": "gelu", "prediction_head": True,
}  # fmt: skip
THEIR_MODERN = {"pad_token_id": 0, "local_attention": 8, "global_attn_every_n_layers": 3}
WITH_BIAS = dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True)
SENTENCE_ORDER = {"pair_label": "sentence_order_label", "pair_logits": "sop_logits"}
DEBERTA = {"num_segments": 0, "norm_eps": 1e-7, "positions": "none", "relative_terms": "both"}
DEBERTA |= {"pooler_activation": "gelu"}
V2 = {"relative_buckets": 16, "relative_norm": True, "relative_projections": False}
V2 |= {"convolution": 3, "convolution_activation": "gelu"}
THEIR_DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
THEIR_DEBERTA |= {"legacy": False}
THEIR_V2 = {"position_buckets": 16, "norm_rel_ebd": "layer_norm", "share_att_key": True, "conv_kernel_size": 3}
THEIR_V2 |= {"conv_act": "gelu"}
VARIANTS = {
    "bert": Variant("Bert"),
    "bert without bias": Variant("Bert", {"bias": False}, {"bias": False}),
    "pre-norm": Variant("RobertaPreLayerNorm", {"norm_first": True}, PRE_NORM, pretraining=False),
    "pre-norm without bias": Variant(
        "RobertaPreLayerNorm", {"norm_first": True, "bias": False}, {**PRE_NORM, "bias": False}, pretraining=False
    ),
    "distilbert": Variant("DistilBert", DISTILBERT, DISTILBERT_SIZES, False, False, pooler=False),
    "electra": Variant(
        "Electra", {**ELECTRA, "embedding_size": 16}, {"embedding_size": 16}, False, False, pooler=False
    ),
    "roberta": Variant("Roberta", ROBERTA, {**PRE_NORM, "type_vocab_size": 1}, pretraining=False),
    "albert": Variant("Albert", {**ALBERT, "shared_layers": "all"}, THEIR_ALBERT, **SENTENCE_ORDER),
    "deberta": Variant(
        "Deberta",
        {**DEBERTA, "family": "deberta", "key_bias": False},
        THEIR_DEBERTA,
        *(False, False, False, ("choice",)),
    ),
    "deberta-v2": Variant(
        "DebertaV2",
        {**DEBERTA, "family": "deberta-v2", **V2},
        {**THEIR_DEBERTA, **THEIR_V2},
        *(False, False, False),
    ),
    "deberta-v2 with segments and positions": Variant(
        "DebertaV2",
        {**DEBERTA, "family": "deberta-v2", "num_segments": 2, "positions": "learned", "relative_reach": 20},
        {**THEIR_DEBERTA, "type_vocab_size": 2, "position_biased_input": True, "max_relative_positions": 20},
        *(False, False, False),
    ),
    "albert without sharing": Variant("Albert", ALBERT, {**THEIR_ALBERT, "num_hidden_groups": 3}, **SENTENCE_ORDER),
    "modern": Variant("ModernBert", MODERN, THEIR_MODERN, False, False, pooler=False),
    "modern with mean and bias": Variant(
        "ModernBert",
        {**MODERN, "bias": True, "pooling": "mean"},
        {**THEIR_MODERN, **WITH_BIAS, "classifier_pooling": "mean"},
        *(False, False),
        pooler=False,
    ),
}


def their_cases(kinds: list[str]) -> list[tuple[str, str]]:
    """Every variant with the kinds of head that `transformers` has for it."""
    return [(name, kind) for name, kind in our_cases(kinds) if VARIANTS[name].pretraining or kind != "mlm+nsp"]


def our_cases(kinds: list[str]) -> list[tuple[str, str]]:
    """Every variant with the kinds of head that we save it with."""
    cases = [(name, kind) for name, v in VARIANTS.items() for kind in kinds if kind not in v.without]
    return [(name, kind) for name, kind in cases if VARIANTS[name].pairs or kind != "mlm+nsp"]


def without_repeats(cases: list[tuple[str, str]]) -> list:
    """These cases, where those of a class of `transformers` that another case has run with the slow tests."""
    same_class = {case for case in cases if case[0] != "bert" and case[1] in ("multi", "regression")}  # as "single"
    return [pytest.param(case, marks=pytest.mark.slow if case in same_class else ()) for case in cases]


def their_class(variant: str, kind: str):
    """The class of `transformers` that opens a folder of ours."""
    known = VARIANTS[variant]
    name, _ = REFERENCES["mlm" if kind == "mlm+nsp" and not known.pretraining else kind]
    return getattr(transformers, name.replace("Bert", known.classes))


def their_model(variant: str, kind: str, vocab_size: int, **changes):
    """A small model of `transformers` with random weights, in evaluation mode."""
    architecture, values = their_class(variant, kind), REFERENCES[kind][1]
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
    if "id2label" in values:
        changes.setdefault("label2id", {name: i for i, name in LABELS.items()})
    fields = {"vocab_size": vocab_size, "max_position_embeddings": POSITIONS, **sizes, **values}
    fields |= {**VARIANTS[variant].theirs, **changes}
    config = architecture.config_class(**{name: value for name, value in fields.items() if value is not None})
    model = randomise(architecture(config)).eval()
    if not VARIANTS[variant].theirs.get("bias", True):
        with torch.no_grad():
            for name, parameter in model.base_model.named_parameters():
                if name.endswith("bias") and not name.startswith("pooler"):
                    parameter.zero_()
    return model


@torch.no_grad()
def randomise(model, seed: int = 0):
    """Draw all parameters, also biases and norms, more widely than an initialisation does, so that each one matters."""
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.normal_(0.0, 0.15, generator=draw)
        if name.endswith("weight") and parameter.dim() == 1:  # the weight of a norm
            parameter.add_(1.0)
    return model


def make(kind: str, tokenizer, **changes) -> Loaded:
    """A small model with large random weights."""
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 64, "max_positions": 48}
    encoder = Encoder(EncoderConfig(**{"vocab_size": tokenizer.vocab_size, **sizes, **changes}))
    if kind in ("mlm", "mlm+nsp"):
        model = MaskedLM(encoder, MaskedLMConfig(next_sentence=kind == "mlm+nsp"))
    else:
        labels = ("red", "green", "blue") if kind in ("single", "multi", "tags") else ()
        model = TaskModel(encoder, HeadConfig(kind, labels, 4 if kind == "choice" else 0))
    return Loaded(Path("here"), randomise(model).eval(), tokenizer, Notes())
