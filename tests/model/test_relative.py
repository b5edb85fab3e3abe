"""Relative positions and the convolution of DeBERTa: compared with its equations and with `transformers`."""

import pytest
import torch
from comparison import VOCAB, draw_batch, same
from test_layer_fields import DEBERTA_V1, DEBERTA_V2, encoder_of, one_segment, renamed, same_at_tokens, their_states
from test_parity import layouts
from torch import Tensor
from variants import randomise

from bertsmith.model.config import EncoderConfig
from bertsmith.model.kernels import attend, attend_explicit
from bertsmith.model.relative import RelativeTable, RelativeTerms

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTHS = ((5, 31, 2, 17, 8, 30), (40, 1, 3), (12, 12))
NAMES = {
    "embeddings.word_embeddings": "embeddings.tokens",
    "embeddings.position_embeddings": "embeddings.positions",
    "embeddings.LayerNorm": "embeddings.norm",
    "encoder.rel_embeddings": "relative.table",
    "encoder.LayerNorm": "relative.norm",
    "encoder.conv.LayerNorm": "layers.0.convolution.norm",
    "encoder.conv.": "layers.0.convolution.",
    "encoder.layer.": "layers.",
    "attention.output.dense": "attention.output",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "feed_forward.inner",
    "output.LayerNorm": "feed_forward_norm",
    "output.dense": "feed_forward.outer",
    "attention.self.pos_key_proj": "attention.relative_keys",
    "attention.self.pos_query_proj": "attention.relative_queries",
    "attention.self.pos_proj": "attention.relative_keys",
    "attention.self.pos_q_proj": "attention.relative_queries",
    "attention.self.q_bias": "attention.query_bias",
    "attention.self.v_bias": "attention.value_bias",
    "attention.self.in_proj": "attention.qkv",
}


def score_by_equation(q: Tensor, k: Tensor, terms: RelativeTerms) -> Tensor:
    """Equation 4 of the paper for one head (L, D), one pair of tokens after another."""
    rows, length, count = terms.rows, (len(terms.rows) + 1) // 2, 1
    scores = torch.zeros(len(q), len(k))
    for i in range(len(q)):
        for j in range(len(k)):
            row = rows[i - j + length - 1]
            scores[i, j] = q[i] @ k[j]
            count = 1
            for table, vector in ((terms.keys, q[i]), (terms.queries, k[j])):
                if table is not None:
                    scores[i, j] += vector @ table[0, row]
                    count += 1
    return scores / (count * q.shape[-1]) ** 0.5


@pytest.mark.parametrize("has", [(True, True), (True, False), (False, True)], ids=["both", "c2p", "p2c"])
def test_scores_are_those_of_the_equation(has) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 7, 1, 6, generator=draw) for _ in "qkv")
    keys, queries = (torch.randn(1, 5, 6, generator=draw) if on else None for on in has)
    terms = RelativeTerms(keys, queries, (torch.arange(19) - 9 + 2).clamp(0, 4))  # made for lengths up to 10
    weights = score_by_equation(q[0, :, 0], k[0, :, 0], terms).softmax(-1)
    batch = draw_batch("single", packed=True, lengths=(7,))
    mixed, found = attend_explicit(q[0], k[0], v[0], batch.layout, relative=terms)
    same(found[0, 0], weights)
    same(mixed[:, 0], weights @ v[0, :, 0])
    same(attend(q[0], k[0], v[0], batch.layout, relative=terms), mixed)


def test_buckets_are_those_of_transformers() -> None:
    from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

    for buckets, positions, length in ((256, 512, 512), (256, 512, 700), (16, 40, 40), (32, 512, 11), (6, 9, 9)):
        config = EncoderConfig(relative_terms="both", relative_buckets=buckets, max_positions=positions)
        states = torch.zeros(1, length, 4)
        expected = build_relative_position(states, states, buckets, positions)[0] + buckets
        relative = RelativeTable(config)(length, torch.device("cpu"))
        place = torch.arange(length)
        found = relative.rows[place[:, None] - place + length - 1]
        begin = 0 if len(relative.table) == 2 * buckets else buckets - length + 1
        assert torch.equal(found + begin, expected.clamp(0, 2 * buckets - 1))


def their_encoder(version: str, ours: dict, changes: dict):
    """A model of `transformers` with random weights, and its state under our names."""
    import transformers

    config_class, model_class = (getattr(transformers, f"Deberta{version}{end}") for end in ("Config", "Model"))
    config = config_class(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=40, relative_attention=True,
        **{"pos_att_type": ["p2c", "c2p"], "position_biased_input": False, **changes},
    )  # fmt: skip
    theirs = randomise(model_class(config)).eval()
    state = renamed(theirs.state_dict(), NAMES)
    for i in range(4):
        name = f"layers.{i}.attention"
        if version:
            for end in ("weight", "bias"):
                parts = [state.pop(f"{name}.self.{part}_proj.{end}") for part in ("query", "key", "value")]
                state[f"{name}.qkv.{end}"] = torch.cat(parts)
        else:  # each head has its queries, keys and values in a row
            rows = state[f"{name}.qkv.weight"].unflatten(0, (4, 3, 8))
            state[f"{name}.qkv.weight"] = rows.transpose(0, 1).flatten(0, 2)
    model = encoder_of({"intermediate_size": 48, **ours})
    model.load_state_dict(state)
    return theirs, model


V2 = {"position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True}
CONVOLVED = {"conv_kernel_size": 3, "conv_act": "gelu"}
ONE_TERM = {"relative_terms": "content-to-position"}
OTHERS = {"relative_buckets": None, "relative_norm": False, "relative_projections": True, "convolution": None}
CASES = {
    "v1": ("", DEBERTA_V1, {}),
    "v1, near distances, positions": (
        "",
        {**DEBERTA_V1, "relative_reach": 7, "positions": "learned"},
        {"max_relative_positions": 7, "position_biased_input": True},
    ),
    "v2": ("V2", DEBERTA_V2, {**V2, **CONVOLVED}),
    "v2, one term": ("V2", {**DEBERTA_V2, **ONE_TERM}, {**V2, **CONVOLVED, "pos_att_type": "c2p"}),
    "v2, own projections": ("V2", {**DEBERTA_V2, **OTHERS, "convolution_activation": "tanh"}, {}),
    "v3": ("V2", {**DEBERTA_V2, "convolution": None}, V2),
}


@layouts
@pytest.mark.parametrize("case", CASES)
def test_the_encoder_equals_deberta(case, packed) -> None:
    version, ours, changes = CASES[case]
    theirs, model = their_encoder(version, ours, changes)
    for lengths in LENGTHS:
        padded, batch = (one_segment(draw_batch("single", form, lengths)) for form in (False, packed))
        same_at_tokens(model(batch), their_states(theirs, padded), padded, batch)
