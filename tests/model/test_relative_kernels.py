"""Attention with terms of distances in fused kernels computes the same as plain code, on Triton's interpreter."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the fused kernels are written in Triton")
import triton
import triton.language as tl
from test_fused import CONFIGS, assert_alike, assert_same, drawn_seed, kept, losses_and_gradients, masked_batch, random

from bertsmith.batch import Packed
from bertsmith.model import encoder as encoders
from bertsmith.model.config import EncoderConfig, RelativeTermNames
from bertsmith.model.encoder import Encoder
from bertsmith.model.fused import distances, layer, relative_attention
from bertsmith.model.fused import operations as ops
from bertsmith.model.fused.weights import RelativeTables
from bertsmith.model.fused_choice import Choice
from bertsmith.model.relative import RelativeTable
from bertsmith.objectives.masked_lm import MaskedLM

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs on the interpreter; test_gpu.py runs on the GPU"
)
HEADS, SIZE = 2, 16
DEBERTA = dataclasses.replace(
    CONFIGS["bert"], positions="none", num_segments=0, relative_terms="both", key_bias=False, max_positions=64
)
V3 = dataclasses.replace(
    DEBERTA, relative_buckets=8, relative_norm=True, relative_projections=False, key_bias=True, family=""
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16 positions and few programs, since the interpreter takes a time for each."""
    monkeypatch.setattr(distances, "LARGEST", 16)
    monkeypatch.setattr(distances, "TABLE_PROGRAMS", 1)
    monkeypatch.setattr(distances, "ROWS_COLUMNS", 32)


def attention(
    qkv: Tensor, tables: RelativeTables, rows: Tensor, starts: list[int], longest: int, seed: int, dropout: float
) -> Tensor:
    """Attention in explicit steps, one sequence after the other."""
    outputs = []
    for start, end in pairwise(starts):
        q, k, v = qkv[start:end].unflatten(1, (3, HEADS, SIZE)).unbind(1)
        place = torch.arange(end - start)
        row = rows[place[:, None] - place + longest - 1]  # of the distance from query i to key j
        scores = torch.einsum("iad,jad->aij", q, k)
        if tables.keys is not None:
            scores = scores + torch.einsum("iad,ijad->aij", q, tables.keys.unflatten(1, (HEADS, SIZE))[row])
        if tables.queries is not None:
            scores = scores + torch.einsum("jad,ijad->aij", k, tables.queries.unflatten(1, (HEADS, SIZE))[row])
        weights = (scores * tables.scale).softmax(-1)
        lines = torch.arange(start, end)[None, :, None] * HEADS + torch.arange(HEADS)[:, None, None]
        weights = weights * kept(lines, place[None, None], seed, dropout)
        outputs.append(torch.einsum("aij,jad->iad", weights, v).flatten(1))
    return torch.cat(outputs)


def row_map(longest: int, buckets: int | None, reach: int) -> tuple[Tensor, int]:
    """The row of every distance, and the number of rows."""
    config = dataclasses.replace(DEBERTA, relative_buckets=buckets, relative_reach=reach)
    relative = RelativeTable(config)(longest, torch.device("cpu"))
    return relative.rows, len(relative.table)


def compare(lengths: list[int], buckets: int | None, reach: int, terms: str, dropout: float) -> None:
    longest, width = max(lengths), HEADS * SIZE
    rows, count = row_map(longest, buckets, reach)
    keys = random(count, width) if "keys" in terms else None
    queries = random(count, width) if "queries" in terms else None
    scale = (SIZE * (1 + sum(table is not None for table in (keys, queries)))) ** -0.5
    tables = RelativeTables(keys, queries, *distances.rows_of(rows, count, longest), scale)
    qkv, bias = random(sum(lengths), 3 * width), torch.zeros(3 * width, requires_grad=True)
    starts = [0, *np.cumsum(lengths).tolist()]
    seed = drawn_seed(dropout)
    layout = Packed(torch.tensor(starts, dtype=torch.int32), longest)
    ours = ops.attend_with_distances(qkv + bias.detach(), bias, layout, HEADS, tables, dropout)
    theirs = attention(qkv + bias, tables, rows, starts, longest, seed, dropout)
    assert_same(ours, theirs, [x for x in (qkv, bias, keys, queries) if x is not None])


@pytest.mark.parametrize(
    ("lengths", "buckets", "reach", "terms", "dropout"),
    [
        pytest.param([5, 0, 16], None, 64, "keys, queries", 0.3, id="one block"),
        pytest.param([19, 3], 8, 20, "keys, queries", 0.0, id="buckets"),
        pytest.param([3, 33], 8, 20, "keys, queries", 0.3, id="three blocks", marks=pytest.mark.slow),
        pytest.param([37], None, 8, "keys, queries", 0.0, id="beyond the table", marks=pytest.mark.slow),
        pytest.param([20], 8, 20, "keys", 0.3, id="content-to-position", marks=pytest.mark.slow),
        pytest.param([20], 8, 20, "queries", 0.3, id="position-to-content", marks=pytest.mark.slow),
    ],
)
def test_attention(lengths: list[int], buckets: int | None, reach: int, terms: str, dropout: float) -> None:
    compare(lengths, buckets, reach, terms, dropout)


@pytest.mark.parametrize(
    ("terms", "dropout"),
    [
        ("keys, queries", 0.3),
        pytest.param("keys, queries", 0.0, marks=pytest.mark.slow),
        pytest.param("keys", 0.3, marks=pytest.mark.slow),
        pytest.param("queries", 0.3, marks=pytest.mark.slow),
    ],
)
def test_weights_of_longer_sequences_are_recomputed(
    terms: str, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relative_attention, "KEPT_LENGTH", 18)
    compare([19, 3], 8, 20, terms, dropout)


@pytest.mark.parametrize(
    ("kept_length", "trained", "kept"), [(19, True, True), (18, True, False), (19, False, False)],
    ids=["short", "longer", "without gradients"],
)  # fmt: skip
def test_weights_are_kept_for_the_gradients_of_short_sequences_alone(
    kept_length: int, trained: bool, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of all 22 tokens, with as many blocks of keys as the longest sequence has."""
    found = []
    forward = relative_attention.relative_attention_forward
    monkeypatch.setattr(relative_attention, "KEPT_LENGTH", kept_length)
    monkeypatch.setattr(
        relative_attention, "relative_attention_forward", lambda *given: found.append(forward(*given)) or found[-1]
    )
    rows, count = row_map(19, 8, 20)
    layout = Packed(torch.tensor([0, 19, 22], dtype=torch.int32), 19)
    with torch.set_grad_enabled(trained):
        qkv = random(22, 3 * HEADS * SIZE) * 1.0
        tables = RelativeTables(random(count, HEADS * SIZE), None, *distances.rows_of(rows, count, 19), SIZE**-0.5)
        ops.attend_with_distances(qkv, random(3 * HEADS * SIZE), layout, HEADS, tables, 0.0)
    [(_, _, (weights, peaks))] = found
    assert [None if x is None else x.shape for x in (weights, peaks)] == (
        [(22, HEADS, 32), (HEADS, 2, 22)] if kept else [None, None]
    )


@triton.jit
def _shifted(x_ptr, out_ptr, SIGN: tl.constexpr, BLOCK: tl.constexpr, PAIRED: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tile = place[:, None] * BLOCK + place[None, :]
    tl.store(out_ptr + tile, relative_attention.shifted(tl.load(x_ptr + tile), SIGN, BLOCK, PAIRED))


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_are_shifted_by_their_positions(dtype: torch.dtype, sign: int, paired: bool) -> None:
    """Numbers of 16 bits move in pairs, and no bit of them changes."""
    x = torch.randn(64, 64).to(dtype)
    moved = torch.full_like(x, torch.nan)
    _shifted[(1,)](x, moved, SIGN=sign, BLOCK=64, PAIRED=paired)
    place = torch.arange(64)
    column = place.view(2, 32).t().flatten() if paired else place
    assert torch.equal(moved, x.gather(1, (sign * (place[:, None] - column)) % 64))


@pytest.mark.slow
def test_attention_in_16_bits_is_close_to_float32() -> None:
    """In float16, since the interpreter's products are wrong in bfloat16."""
    rows, count = row_map(20, 8, 20)
    width = HEADS * SIZE
    inputs = [random(23, 3 * width), random(count, width), random(count, width)]
    layout = Packed(torch.tensor([0, 20, 23], dtype=torch.int32), 20)

    def run(dtype: torch.dtype) -> list[Tensor]:
        qkv, keys, queries = (x.detach().to(dtype).requires_grad_() for x in inputs)
        tables = RelativeTables(keys, queries, *distances.rows_of(rows, count, 20), (3 * SIZE) ** -0.5)
        out = ops.attend_with_distances(qkv, None, layout, HEADS, tables, 0.0)
        gradients = torch.autograd.grad(out, (qkv, keys, queries), torch.ones_like(out).cumsum(1))
        return [x.float() for x in (out, *gradients)]

    for found, exact in zip(run(torch.float16), run(torch.float32), strict=True):
        assert (found - exact).norm() < 0.005 * exact.norm()


@pytest.mark.parametrize(
    "config",
    [pytest.param(DEBERTA, id="v1", marks=pytest.mark.slow), pytest.param(V3, id="v3", marks=pytest.mark.slow)],
)
def test_a_pretraining_model(config: EncoderConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = MaskedLM(Encoder(config))
    batch = masked_batch([2, 18])
    expected = losses_and_gradients(model, batch)
    assert any("relative" in name for name in expected)
    monkeypatch.setattr(encoders, "choose_now", lambda config, device, layout: Choice())
    monkeypatch.setattr(layer, "DTYPE", torch.float32)
    assert_alike(losses_and_gradients(model, batch), expected)


@pytest.mark.parametrize("terms", ["both", "content-to-position"])
@pytest.mark.parametrize(
    "norm_first", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["post-norm", "pre-norm"]
)
def test_states_that_ask_in_place_of_a_layers_input(
    norm_first: bool, terms: RelativeTermNames, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask decoder's states ask a layer that reads other states (DeBERTa, section 3.2)."""
    torch.manual_seed(0)
    config = dataclasses.replace(V3, norm_first=norm_first, relative_terms=terms)
    encoder, batch = Encoder(config), masked_batch([9, 2])
    block = encoder.layers[0]
    states, asking, rows = random(11, 32), random(3, 32), torch.tensor([1, 7, 10])
    monkeypatch.setattr(layer, "DTYPE", torch.float32)
    found = []
    for fused in (True, False):
        relative = encoder._relative(9, states.device, fused)
        out = block(states, batch.layout, None, rows, fused, {}, relative, asking)
        gradients = torch.autograd.grad(out, [states, asking, *block.parameters()], torch.ones_like(out).cumsum(1))
        found.append([out, *gradients])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)
