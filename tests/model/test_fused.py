"""The fused kernels compute the same as plain code; Triton's interpreter runs them on a machine without a GPU."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from labels import of_pretraining, of_task
from torch import Tensor, nn

from bertsmith import batch as batches
from bertsmith.batch import IGNORE, Batch, Example, Label, Packed, bucketed, collate, lay_out
from bertsmith.model import encoder as encoders
from bertsmith.model import fused_choice
from bertsmith.model.activation import activate
from bertsmith.model.attention import Trace
from bertsmith.model.config import REACHES, Activation, Direction, EncoderConfig, Reach
from bertsmith.model.encoder import Encoder, norm_weights
from bertsmith.model.fused.weights import NormWeights, Sampling
from bertsmith.model.fused_choice import Choice, choose, choose_for_run, choose_now, plain_kernels
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.model.kernels import visible
from bertsmith.model.rotary import rotate, rotation
from bertsmith.model.soft_targets import word_losses
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.objectives.replaced_token import ReplacedToken, corrupt
from bertsmith.objectives.settings import ReplacedTokenConfig
from bertsmith.pretraining.loader import ORIGINAL

pytest.importorskip("triton", reason="the fused kernels are written in Triton")
import triton
import triton.language as tl

from bertsmith.model.fused import (
    attention,
    distances,
    gate,
    layer,
    long_attention,
    lookup,
    relative_attention,
    rows,
    taught,
)
from bertsmith.model.fused import loss as loss_kernel
from bertsmith.model.fused import operations as ops
from bertsmith.training import muon_kernels

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs on the interpreter; test_gpu.py runs on the GPU"
)
ROOT = Path(__file__).parents[2]
WORD = (1 << 32) - 1
DROPOUTS = pytest.mark.parametrize("dropout", [0.0, 0.3])


def hashed(index: Tensor, seed: int) -> Tensor:
    x = (index * 0x9E3779B1 + (seed & WORD)) & WORD
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & WORD
    return x ^ (x >> 16)


def column_numbers(count: int) -> Tensor:
    numbers = rows.column_numbers(count, torch.tensor(0))
    assert numbers is not None
    return numbers.long() & WORD


def kept(rows: Tensor, columns: Tensor, seed: int, dropout: float) -> Tensor:
    """The factors of dropout, 0 or 1 / (1 - dropout), for the elements of these rows and columns."""
    slope, level = hashed(rows, seed), hashed(rows, seed ^ 0x2545F491)
    numbers = column_numbers(1024)[columns]
    keep = ((slope * numbers + level) & WORD) >= round(dropout * (1 << 32))
    return keep / (1 - dropout)


def drawn_seed(dropout: float) -> int:
    torch.manual_seed(7)
    seed = ops.draw_seed(torch.device("cpu"), dropout)
    torch.manual_seed(7)
    return 0 if seed is None else int(seed)


def grid(shape: tuple[int, int], dropout: float) -> Tensor:
    seed = drawn_seed(dropout)
    return kept(torch.arange(shape[0])[:, None], torch.arange(shape[1])[None], seed, dropout)


def assert_same(ours: Tensor, theirs: Tensor, inputs: list[Tensor]) -> None:
    """Outputs and all gradients agree to float32's precision."""
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    weight = torch.randn_like(theirs)
    for mine, other in zip(
        torch.autograd.grad(ours, inputs, weight), torch.autograd.grad(theirs, inputs, weight), strict=True
    ):
        torch.testing.assert_close(mine, other, atol=2e-5 * max(1.0, float(other.abs().max())), rtol=1e-5)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def random_norm(size: int) -> tuple[nn.LayerNorm, NormWeights]:
    norm = nn.LayerNorm(size, eps=1e-12)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return norm, norm_weights(norm)


@DROPOUTS
def test_add_and_norm(dropout: float) -> None:
    x, y, bias, (norm, weights) = random(37, 48), random(37, 48), random(48), random_norm(48)
    mask = grid((37, 48), dropout)
    ours = ops.add_norm(x, y, bias, weights, dropout)
    assert_same(ours, norm(x + (y + bias) * mask), [x, y, bias, norm.weight, norm.bias])


def test_norm_and_residual() -> None:
    x, (norm, weights) = random(19, 40), random_norm(40)
    normed, same = ops.norm_and_residual(x, weights)
    assert_same(normed * 2 + same.sin(), norm(x) * 2 + x.sin(), [x, norm.weight, norm.bias])


@pytest.mark.parametrize("columns", [1300, 24])
@pytest.mark.parametrize("name", get_args(Activation))
def test_activations(name: Activation, columns: int) -> None:
    x, bias = random(171 if columns < 100 else 11, columns), random(columns)
    assert_same(ops.activated(4 * x, bias, name), activate(4 * x + bias, name), [x, bias])
    tails = torch.cat([torch.linspace(-12, 12, 2001), torch.tensor([-1e4, 0.0, 1e4])])[None].requires_grad_()
    assert_same(ops.activated(tails, None, name), activate(tails.double(), name).float(), [tails])
    assert ops.activated(torch.tensor([[torch.nan]]), None, name).isnan().all()  # a diverged run is noticed


@pytest.mark.parametrize(("columns", "has_bias"), [(192, False), (24, True), (130, True)])
def test_gates(columns: int, has_bias: bool) -> None:
    x, bias = random(71, 2 * columns), random(2 * columns) if has_bias else None
    for name in ("gelu", "silu"):
        inner, gate = (4 * x if bias is None else 4 * x + bias).chunk(2, -1)
        assert_same(ops.gated(4 * x, bias, name), activate(inner, name) * gate, [x, *([] if bias is None else [bias])])


@pytest.mark.parametrize("has_bias", [True, False])
def test_rotation(has_bias: bool) -> None:
    """The gradients of queries, keys and the bias are those before the rotation."""
    qkv, bias = random(37, 3 * 4 * 16), random(3 * 4 * 16) if has_bias else None
    by = rotation(torch.arange(37) % 20, 16, 100.0)
    ours = ops.rotated(qkv + (0 if bias is None else bias.detach()), bias, 4, by)
    q, k, v = (qkv if bias is None else qkv + bias).unflatten(-1, (3, 4, 16)).unbind(1)
    expected = torch.stack([rotate(q, by), rotate(k, by), v], 1).flatten(1)
    assert_same(ours * 1, expected, [qkv, *([] if bias is None else [bias])])  # the gradient is changed in place


@pytest.mark.parametrize("dropout", [0.3, pytest.param(0.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("segments", "normalised"), [(0, True), (1, True), (2, True), (0, False), (2, False)])
def test_embeddings(segments: int, normalised: bool, dropout: float) -> None:
    """Of RoBERTa with one segment, of DistilBERT with no table of them, of BERT with two, of GPT without a norm."""
    words, parts, places = random(50, 48), random(segments, 48), random(16, 48)
    tokens, segment, positions = (torch.randint(max(1, len(t)), (29,)) for t in (words, parts, places))
    (norm, weights), mask = random_norm(48), grid((29, 48), dropout)
    tables = words, parts if segments else None, places
    ours = ops.embed(tokens, segment, positions, tables, weights if normalised else None, dropout, torch.float32)
    plain = words[tokens] + places[positions] + (parts[segment] if segments else 0)
    inputs = [words, *([parts] if segments else []), places, *(norm.parameters() if normalised else [])]
    assert_same(ours, (norm(plain) if normalised else plain) * mask, inputs)


def test_matrix_products() -> None:
    x, weight = random(13, 20), random(8, 20)
    product, same = ops.linear_and_residual(x, weight)
    assert_same(product.sum() * 2 + (same**3).sum(), F.linear(x, weight).sum() * 2 + (x**3).sum(), [x, weight])
    assert_same(ops.linear(x, weight), F.linear(x, weight), [x, weight])
    bias = random(8)
    assert_same(ops.linear(x, weight, bias), F.linear(x, weight, bias), [x, weight, bias])


def test_shared_weights_are_converted_once() -> None:
    """A weight that several layers share is kept once in bfloat16; its gradient is a sum in float32."""
    x, weight = torch.randn(5, 16, dtype=torch.bfloat16), random(16, 16)
    with ops.one_copy_of_each_weight():
        first = ops.linear(x, weight)
        second = ops.linear(first, weight)
    kept = [y.grad_fn.saved_tensors[1].data_ptr() for y in (first, second)]  # type: ignore[union-attr]
    assert kept[0] == kept[1] != ops.linear(x, weight).grad_fn.saved_tensors[1].data_ptr()  # type: ignore[union-attr]
    second.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    half = weight.detach().bfloat16()
    ones = torch.ones_like(second)
    parts = ones.float().T @ first.detach().float(), (ones @ half).float().T @ x.float()
    torch.testing.assert_close(weight.grad, parts[0] + parts[1])


@pytest.mark.parametrize("has_bias", [True, False])
def test_masked_lm_loss(has_bias: bool) -> None:
    hidden, weight, bias = random(9, 32), random(5001, 32), random(5001) if has_bias else None
    targets = torch.randint(5001, (9, 2))[:, 0]  # not contiguous: every second entry
    scores = F.linear(hidden, weight, bias)
    targets[0], targets[1], targets[2] = scores[0].argmax(), scores[1].argmax(), IGNORE
    loss, right, _ = ops.masked_words(hidden, weight, bias, targets)
    assert int(right) == int((scores.argmax(-1) == targets).sum()) >= 2
    inputs = [hidden, weight, *([] if bias is None else [bias])]
    assert_same(loss, F.cross_entropy(scores, targets, reduction="sum"), inputs)
    with torch.no_grad():
        torch.testing.assert_close(ops.masked_words(hidden, weight, bias, targets)[0], loss)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_losses_with_a_teacher(temperature: float) -> None:
    hidden, weight, bias = random(9, 32), random(2101, 32), random(2101)
    taught, targets = torch.randn(9, 2200) * 3, torch.randint(2101, (9,))
    scores = F.linear(hidden, weight, bias)
    targets[0], targets[1] = scores[0].argmax(), IGNORE
    soft, hard, right = ops.taught_words(hidden, weight, bias, taught, targets, temperature)
    expected = word_losses(scores, taught[:, :2101], targets, temperature)
    assert int(right) == int((scores.argmax(-1) == targets).sum()) >= 1
    assert_same(torch.stack([soft, hard]), torch.stack(expected), [hidden, weight, bias])


@triton.jit
def noise_of_rows(seed_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    noise = loss_kernel.gumbel(column, rows.hashed(row.to(tl.int64), tl.load(seed_ptr)))
    tl.store(out_ptr + row * columns + column, noise, column < columns)


def test_words_are_drawn_from_the_softmax() -> None:
    """A draw is the word with the highest sum of score and noise, whose distribution is Gumbel's."""
    seed, columns = torch.tensor([7], dtype=torch.int32), 2112  # two blocks of the loss kernel
    noise, scores = torch.empty(6, columns), torch.randn(6, columns, generator=torch.Generator().manual_seed(0))
    noise_of_rows[(6,)](seed, noise, columns, BLOCK=4096)
    below = torch.exp(-torch.exp(-noise.flatten())).sort().values  # uniform if the noise is Gumbel's
    assert (below - torch.arange(below.numel()) / below.numel()).abs().max() < 1.95 / below.numel() ** 0.5
    for sampling in (Sampling(), Sampling(0.5, disallow_correct=True)):
        luck = (scores / sampling.temperature + noise)[:, :2070]  # the rest is padding, which is never drawn
        targets = luck.argmax(-1)
        *_, drawn = loss_kernel.cross_entropy(scores.clone(), 2070, targets, True, seed, sampling)
        assert torch.equal(drawn, luck.topk(2).indices[:, int(sampling.disallow_correct)])


def test_accuracy_takes_the_first_of_equal_logits() -> None:
    scores = torch.zeros(2, 64)
    _, right, _ = loss_kernel.cross_entropy(scores, 60, torch.tensor([0, 1]), False)
    assert right.tolist() == [1, 0]


def compare_attention(lengths: list[int], reach: Reach, dropout: float) -> None:
    heads, size = 2, 16
    qkv = random(sum(lengths), 3 * heads * size)
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    seed, outputs = drawn_seed(dropout), []
    bias = torch.zeros(3 * heads * size, requires_grad=True)
    ours = ops.attend(qkv + bias.detach(), bias, Packed(starts, max(lengths)), heads, reach, dropout)
    for start, end in pairwise(starts.tolist()):
        q, k, v = (qkv + bias)[start:end].unflatten(1, (3, heads, size)).unbind(1)
        scores = torch.einsum("iad,jad->aij", q, k) / size**0.5
        if (seen := visible(None, end - start, scores.device, reach)) is not None:
            scores = scores.masked_fill(~seen[0], -torch.inf)
        weights = scores.softmax(-1)
        rows = torch.arange(start, end)[None, :, None] * heads + torch.arange(heads)[:, None, None]
        weights = weights * kept(rows, torch.arange(end - start)[None, None], seed, dropout)
        outputs.append(torch.einsum("aij,jad->iad", weights, v).flatten(1))
    assert_same(ours, torch.cat(outputs), [qkv, bias])


@pytest.mark.parametrize(
    ("direction", "dropout"),
    [
        *((direction, 0.3) for direction in get_args(Direction)),
        ("both", 0.0),
        *(pytest.param(direction, 0.0, marks=pytest.mark.slow) for direction in get_args(Direction)[1:]),
    ],
)
@pytest.mark.parametrize("lengths", [[5, 16, 0, 11], [128, 3], [160, 1]], ids=["short", "tile", "long"])
def test_attention(lengths: list[int], direction: Direction, dropout: float) -> None:
    compare_attention(lengths, REACHES[direction], dropout)


WINDOWS = [Reach(0, 0), Reach(3, 0), Reach(0, 5), Reach(7, 2), Reach(None, 4), Reach(6, None), Reach(40, 600)]
NARROW = [Reach(3, 0), Reach(0, 5)]


@pytest.mark.parametrize("dropout", [0.3, pytest.param(0.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("reach", WINDOWS, ids=str)
def test_windows_in_one_tile(reach: Reach, dropout: float) -> None:
    compare_attention([5, 16, 0, 11], reach, dropout)


@pytest.mark.parametrize(
    ("reach", "dropout"),
    [
        *(pytest.param(reach, 0.3, marks=pytest.mark.slow if reach in NARROW else ()) for reach in WINDOWS),
        (Reach(7, 2), 0.0),
        (Reach(100, 70), 0.3),
    ],
)
def test_windows_block_by_block(reach: Reach, dropout: float) -> None:
    compare_attention([150, 3], reach, dropout)


@pytest.mark.parametrize(("near", "far"), [((0, 128), (320, 384)), ((256, 384), (0, 64))], ids=["before", "after"])
@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_blocks_outside_the_reach_are_skipped(near: tuple[int, int], far: tuple[int, int]) -> None:
    """None of the three kernels reads them, so that NaN there does not spread and the time is linear in the length."""
    qkv = torch.randn(384, 3 * 16)
    qkv[slice(*far)] = torch.nan
    qkv.requires_grad_()
    layout = Packed(torch.tensor([0, 384], dtype=torch.int32), 384)
    out = ops.attend(qkv, None, layout, 1, Reach(8, 8), 0.0)
    (gradient,) = torch.autograd.grad(out, qkv, torch.ones_like(out))
    for found in (out, gradient):
        assert torch.isfinite(found[slice(*near)]).all()
        assert not torch.isfinite(found[slice(*far)]).any()


def test_dropout_is_uniform_and_independent() -> None:
    rate, size = 0.1, 1024
    kept_places = [torch.from_numpy(np.asarray(places)) > 0 for places in (_dropped(1, size), _dropped(2, size))]
    for places in kept_places:
        assert abs(float(places.double().mean()) - (1 - rate)) < 0.002
        z = (places.double() - 1 + rate) / (rate * (1 - rate)) ** 0.5
        for correlated in (z @ z.T / size**0.5, z.T @ z / size**0.5):  # between rows, and between columns
            others = correlated - correlated.diag().diag()
            assert abs(float(others.std()) - 1) < 0.02
            assert float(others.abs().max()) < 8
    both = (kept_places[0] & kept_places[1]).double().mean()
    assert abs(float(both) - (1 - rate) ** 2) < 0.002


def _dropped(seed: int, size: int) -> Tensor:
    index = torch.arange(size)
    return kept(index[:, None], index[None], seed, 0.1)


# --- complete models


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused kernels on a CPU, in float32, and batches that are rounded up to 32 tokens instead of 256."""
    monkeypatch.setattr(batches, "_step", lambda size, parts: 32)
    monkeypatch.setattr(encoders, "choose_now", lambda config, device, layout: Choice())
    monkeypatch.setattr(layer, "DTYPE", torch.float32)


CONFIGS = {
    "bert": EncoderConfig(
        vocab_size=100, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=64, max_positions=256,
        hidden_dropout=0.0, attention_dropout=0.0,
    )
}  # fmt: skip
CONFIGS["pre-norm without biases"] = dataclasses.replace(CONFIGS["bert"], norm_first=True, bias=False)
CONFIGS["pre-norm"] = dataclasses.replace(CONFIGS["bert"], norm_first=True)
CONFIGS["windows, shared layers"] = dataclasses.replace(
    CONFIGS["bert"], num_layers=2, window=8, global_every=2, shared_layers="all"
)
CONFIGS["long sequences"] = CONFIGS["bert"]
CONFIGS["albert"] = dataclasses.replace(
    CONFIGS["bert"], num_layers=2, embedding_size=16, shared_layers="all", activation="gelu_tanh", num_segments=0
)
CONFIGS["modern"] = dataclasses.replace(
    CONFIGS["bert"], num_layers=2, norm_first=True, bias=False, num_segments=0, positions="rotary",
    rotary_base=160_000.0, local_rotary_base=10_000.0, window=8, global_every=2, gated=True,
    first_attention_norm=False, prediction_head=True, pooling="mean",
)  # fmt: skip
CONFIGS["rotary with biases"] = dataclasses.replace(CONFIGS["bert"], positions="rotary", gated=True, activation="silu")
CONFIGS["gpt"] = dataclasses.replace(
    CONFIGS["bert"], embedding_norm=False, num_segments=0, direction="left-to-right", activation="gelu_tanh",
    head_transform=False, head_bias=False, pooler=False,
)  # fmt: skip


def masked_batch(lengths: list[int]) -> Batch:
    rng = np.random.default_rng(0)
    total = sum(lengths)
    batch = lay_out(rng.integers(5, 100, total), rng.integers(0, 2, total), np.array(lengths), packed=True)
    masked = np.sort(rng.choice(total, 7, replace=False))
    return batch.with_labels(of_pretraining(masked, rng.integers(5, 100, 7), rng.integers(0, 2, len(lengths))))


def losses_and_gradients(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    losses = model(batch)
    sum(v for n, v in losses.items() if not n.endswith("accuracy")).backward()
    found = {n: v.detach().float() for n, v in losses.items()}
    return {**found, **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=2e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


SLOW = {*CONFIGS} - {"bert", "modern"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CONFIGS])
def test_a_pretraining_model(name: str, request: pytest.FixtureRequest) -> None:
    torch.manual_seed(0)
    model = MaskedLM(Encoder(CONFIGS[name]))
    short = {
        "bert": [14, 3, 9],
        "long sequences": [20, 150, 3],
        "windows, shared layers": [14, 3],
        "albert": [9, 2],
        "gpt": [9, 2],
        "modern": [14, 3],
    }
    batch = masked_batch(short.get(name, [20, 3, 30]))
    expected = losses_and_gradients(model, batch)
    request.getfixturevalue("fused")
    assert_alike(losses_and_gradients(model, batch), expected)
    if name not in ("albert", "gpt", "modern"):  # padding sequences do not change the result
        assert_alike(losses_and_gradients(model, bucketed(batch)), expected)


@pytest.mark.parametrize("disentangled", [False, True])
def test_a_detector_that_fills_and_learns_pairs(disentangled: bool, request: pytest.FixtureRequest) -> None:
    """Words that were drawn beforehand, since the kernels draw others; every second mask is left to be filled."""
    torch.manual_seed(0)
    config = ReplacedTokenConfig(generator_size=1.0, disentangled=disentangled, fill_every=2, next_sentence=True)
    model, batch = ReplacedToken(Encoder(CONFIGS["bert"]), config), masked_batch([14, 3, 9])
    batch = batch.with_labels({"original": Label(batch.tokens.numpy(), ORIGINAL)})
    drawn = corrupt(batch, torch.randint(5, 100, (7,)), config.fill_every)

    def judged() -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        losses = {name: value for name, (value, _) in model._judge(drawn).items() if name.endswith("loss")}
        sum(losses.values()).backward()
        found = {name: value.detach() for name, value in losses.items()}
        return {**found, **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}

    expected = judged()
    request.getfixturevalue("fused")
    found = judged()
    assert {"fill_loss", "nsp_loss"} <= expected.keys()
    assert_alike(found, expected)


@pytest.mark.parametrize(
    ("kind", "labels"),
    [
        ("single", ("a", "b")),
        pytest.param("tags", ("O", "B"), marks=pytest.mark.slow),
        pytest.param("span", (), marks=pytest.mark.slow),
    ],
)
def test_a_task_with_padding_sequences(kind: str, labels: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    torch.manual_seed(0)
    model = TaskModel(Encoder(CONFIGS["bert"]), HeadConfig(kind, labels))  # type: ignore[arg-type]
    label = {"single": 1, "tags": None, "span": (1, 3)}[kind]
    tags = np.array([0, 1, 0, IGNORE, 1]) if kind == "tags" else None
    batch = collate([Example(np.arange(5, 10), np.zeros(5, int), of_task(label, tags))] * 3, packed=True)
    expected = losses_and_gradients(model, batch)
    assert_alike(losses_and_gradients(model, bucketed(batch)), expected)
    request.getfixturevalue("fused")
    assert_alike(losses_and_gradients(model, batch), expected)
    assert_alike(losses_and_gradients(model, bucketed(batch)), expected)


def test_bucketed_batches_have_few_sizes() -> None:
    sizes = set()
    for length in range(100, 128):
        batch = bucketed(masked_batch([length] * 40))
        assert isinstance(batch.layout, Packed)
        assert int(batch.layout.starts[-1]) == len(batch.tokens)
        assert int(batch.layout.starts.diff().max()) <= batch.layout.max_length
        assert batch.num_tokens == 40 * length
        assert batch.layout.lengths.tolist() == [length] * 40
        sizes.add((len(batch.tokens), len(batch.layout.starts), batch.layout.max_length, len(batch.labels["masked"])))
    assert len(sizes) <= 6


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that could compile the kernels."""
    monkeypatch.setattr(fused_choice, "_device_reason", lambda device: "")


def test_fused_kernels_run_for_packed_batches_in_bfloat16_on_a_gpu(gpu: None) -> None:
    packed = masked_batch([4, 3]).layout
    assert choose(CONFIGS["bert"], CUDA, torch.bfloat16, packed) == Choice("")
    assert Choice("").fused
    for name, config in CONFIGS.items():
        assert choose(config, CUDA, torch.bfloat16).fused, name
    for direction in get_args(Direction):
        assert choose(dataclasses.replace(CONFIGS["bert"], direction=direction), CUDA, torch.bfloat16).fused


def test_the_choice_of_plain_code_has_a_reason(gpu: None) -> None:
    config, packed = CONFIGS["bert"], masked_batch([4, 3]).layout
    padded = lay_out(np.arange(7), np.zeros(7, int), np.array([4, 3]), packed=False).layout
    odd = dataclasses.replace(config, hidden_size=48)
    reasons = {
        "the device is cpu, not cuda": choose(config, CPU, torch.bfloat16),
        "matrix products are not autocast; the fused kernels take bfloat16": choose(config, CUDA, None, packed),
        "matrix products are float16; the fused kernels take bfloat16": choose(config, CUDA, torch.float16),
        "the batch is padded": choose(config, CUDA, torch.bfloat16, padded),
        "head size 24 has no tile; 16, 32, 64 and 128 have": choose(odd, CUDA, torch.bfloat16),
    }
    assert {reason: choice.reason for reason, choice in reasons.items()} == {reason: reason for reason in reasons}
    with torch.autocast("cpu", torch.bfloat16):
        assert not choose_now(config, CPU, packed).fused
    with plain_kernels():
        assert choose(config, CUDA, torch.bfloat16).reason == "plain kernels were asked for"


OTHER_VALUES: dict[str, dict[str, object]] = {  # fields of which the fused kernels support one value
    "layer_type": {"layer_type": "lstm", "character_filters": ((1, 4),), "num_segments": 0},
    "relative_terms": {"relative_terms": "both", "direction": "left-to-right"},
    "convolution": {"convolution": 3},
}
KNOWN = {  # fields whose values the fused kernels all support, or that do not concern them
    "vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size", "max_positions", "activation",
    "hidden_dropout", "attention_dropout", "norm_eps", "init_std", "pad_token_id", "norm_first", "bias", "direction",
    "family", "shared_layers", "head_activation", "pooler_activation", "pooler_input_dropout", "window", "global_every",
    "num_segments", "embedding_size", "embedding_norm", "head_transform", "head_bias", "pooler",
    "positions", "rotary_base", "local_rotary_base", "gated", "first_attention_norm", "pooling", "prediction_head",
    "character_filters", "character_size", "num_characters", "max_characters", "num_highways",  # only with LSTM layers
    "predicted_words",  # the same
    "relative_reach", "relative_buckets", "relative_norm", "relative_projections", "key_bias",
    "convolution_activation",  # only with a convolution
}  # fmt: skip


def test_every_configuration_field_is_supported_or_gives_a_reason(gpu: None) -> None:
    """A new field belongs to KNOWN once the kernels compute it, and before that to `fused_choice.UNSUPPORTED`."""
    assert {field.name for field in dataclasses.fields(EncoderConfig)} == KNOWN | set(OTHER_VALUES)
    reasons = {
        name: choose(dataclasses.replace(CONFIGS["bert"], **values), CUDA, torch.bfloat16).reason  # type: ignore[arg-type]
        for name, values in OTHER_VALUES.items()
    }
    assert all(reasons.values()), reasons
    assert len(set(reasons.values())) == len(reasons)
    assert reasons["layer_type"] == "LSTM layers run on cuDNN"


def test_the_active_autocast_decides(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = masked_batch([4, 3]).layout
    assert not choose_now(CONFIGS["bert"], CUDA, packed).fused
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device_type: torch.bfloat16)
    assert choose_now(CONFIGS["bert"], CUDA, packed).fused


def test_a_run_on_a_gpu_notes_once_why_it_uses_plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setattr(fused_choice, "say", notes.append)
    monkeypatch.setattr(fused_choice, "_device_reason", lambda device: "this one is too old")
    fused_choice._note.cache_clear()
    for _ in range(2):
        assert not choose_for_run(CONFIGS["bert"], CUDA, torch.bfloat16).fused
        assert not choose_for_run(CONFIGS["bert"], CPU, torch.bfloat16).fused  # no note for a CPU
    assert notes == ["note: training on this GPU takes plain kernels: this one is too old"]


def test_the_kernels_of_a_forward_pass_are_chosen_once(fused: None, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[torch.device] = []
    encoder, batch, trace = Encoder(CONFIGS["pre-norm"]), masked_batch([4, 7]), Trace()

    def choose_counted(config: EncoderConfig, device: torch.device, layout: object) -> Choice:
        devices.append(device)
        return Choice()

    monkeypatch.setattr(encoders, "choose_now", choose_counted)
    encoder(batch)
    assert len(devices) == 1
    encoder(batch, trace)  # plain code: the fused kernels keep no attention weights
    assert len(devices) == 1
    assert len(trace.attention) == 1


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu() -> None:
    command = [sys.executable, str(Path(__file__).with_name("compile_kernels.py"))]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    parts = (
        attention,
        gate,
        long_attention,
        relative_attention,
        distances,
        lookup,
        loss_kernel,
        rows,
        taught,
        muon_kernels,
    )
    started = {
        name for part in parts for name in re.findall(r"\b(_[a-z_]+)\[\(", Path(part.__file__).read_text("utf-8"))
    }
    assert len(started) >= 15
    assert started <= set(done.stdout.split())
