"""Every kernel computes the same attention for every reach, in every layout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from bertsmith.batch import Layout, Packed, Padded
from bertsmith.model import kernels, local_attention
from bertsmith.model.config import REACHES, Reach

LENGTHS = [5, 31, 2, 17, 8, 30]
WINDOWS = [Reach(0, 0), Reach(3, 0), Reach(0, 5), Reach(7, 2), Reach(None, 4), Reach(6, None), Reach(64, 64)]
reaches = pytest.mark.parametrize("reach", [*REACHES.values(), *WINDOWS], ids=lambda r: f"{r.before}-{r.after}")


def packed(lengths: list[int]) -> Packed:
    return Packed(torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32), max(lengths))


def padded(lengths: list[int]) -> Padded:
    return Padded(torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])


def random_qkv(lengths: list[int]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(sum(lengths), 2, 8, generator=draw).requires_grad_() for _ in range(3)]


def in_reach(length: int, reach: Reach) -> Tensor:
    """The mask by its definition, key by key."""
    before, after = (length if side is None else side for side in reach)
    return torch.tensor([[i - before <= j <= i + after for j in range(length)] for i in range(length)])


def reference(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], reach: Reach) -> Tensor:
    """Attention inside each sequence, computed one by one, (T, A, D)."""
    outputs = []
    for i, j, w in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        scores = torch.einsum("iad,jad->aij", i, j) / i.shape[-1] ** 0.5
        weights = scores.masked_fill(~in_reach(len(i), reach).to(i.device), -torch.inf).softmax(-1)
        outputs.append(torch.einsum("aij,jad->iad", weights, w))
    return torch.cat(outputs)


def laid_out(x: Tensor, layout: Layout, lengths: list[int]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(x.split(lengths)), True) if isinstance(layout, Padded) else x


def assert_same(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """Assert equal outputs and gradients."""
    assert_close(found, expected, atol=1e-5, rtol=1e-5)
    weight = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    gradients = (torch.autograd.grad(output, inputs, weight, retain_graph=True) for output in (found, expected))
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.isfinite(ours).all()
        assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@reaches
@pytest.mark.parametrize("lengths", [LENGTHS, [8, 8, 8], [1, 1]], ids=["groups", "one length", "one token"])
@pytest.mark.parametrize("make", [packed, padded])
def test_every_kernel_equals_the_reference(reach, lengths, make):
    layout, qkv = make(lengths), random_qkv(lengths)
    expected = reference(*qkv, lengths, reach)
    given = [laid_out(x, layout, lengths) for x in qkv]
    for output in (kernels.attend(*given, layout, 0.0, reach), kernels.attend_explicit(*given, layout, 0.0, reach)[0]):
        assert_same(output if isinstance(layout, Packed) else output[layout.mask], expected, qkv)


@reaches
def test_attention_weights_are_zero_outside_the_reach(reach):
    layout, qkv = packed(LENGTHS), random_qkv(LENGTHS)
    _, weights = kernels.attend_explicit(*qkv, layout, 0.0, reach)
    for row, length in zip(weights, LENGTHS, strict=True):
        seen = in_reach(length, reach)
        assert_close(row[:, :length, :length].sum(-1), torch.ones(2, length))
        assert bool((row[:, :length, :length] > 0).eq(seen).all())
        assert not row[:, length:].any()
        assert not row[:, :, length:].any()


def test_only_a_limited_reach_needs_a_mask(monkeypatch):
    """`both` needs no mask, left-to-right uses `is_causal` of SDPA, and no mask spans the batch."""
    calls = []
    kernel = F.scaled_dot_product_attention

    def spy(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False):
        calls.append((None if attn_mask is None else tuple(attn_mask.shape[-2:]), is_causal))
        return kernel(q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal)

    monkeypatch.setattr(kernels.F, "scaled_dot_product_attention", spy)
    qkv = random_qkv([8, 8, 8])
    found = {}
    for reach in (REACHES["both"], REACHES["left-to-right"], REACHES["right-to-left"], Reach(2, 2)):
        kernels.attend(*qkv, packed([8, 8, 8]), 0.0, reach)
        found[reach] = calls.pop()
    assert list(found.values()) == [(None, False), (None, True), ((8, 8), False), ((8, 8), False)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@reaches
def test_the_variable_length_kernel_equals_the_reference(reach):
    layout, qkv = packed(LENGTHS).map(Tensor.cuda), random_qkv(LENGTHS)
    q, k, v = (torch.cat([x] * 8, -1).detach().cuda().bfloat16() for x in qkv)  # head size 64
    assert kernels.has_varlen(q)
    found = kernels.varlen(q, k, v, layout, reach)
    expected = reference(q.float(), k.float(), v.float(), LENGTHS, reach)
    assert_close(found.float(), expected, atol=3e-2, rtol=0)


@pytest.mark.parametrize("form", [packed, padded])
@pytest.mark.parametrize("reach", [Reach(3, 3), Reach(0, 5), Reach(7, 2), Reach(0, 0)], ids=str)
def test_blocks_give_the_attention_of_all_pairs(reach, form, monkeypatch) -> None:
    """Blocks of four queries, with lengths that are multiples of four, one more and one less."""
    monkeypatch.setattr(local_attention, "BLOCK", 4)
    lengths = [64, 33, 31, 1, 63, 5]
    layout, inputs = form(lengths), random_qkv(lengths)
    used = []
    monkeypatch.setattr(kernels, "local", lambda *args: used.append(0) or local_attention.local(*args))
    q, k, v = (laid_out(x, layout, lengths) for x in inputs)
    found = kernels.attend(q, k, v, layout, reach=reach)
    assert used
    found = found[layout.mask] if isinstance(layout, Padded) else found
    assert_same(found, reference(*inputs, lengths, reach), inputs)


class Largest(TorchDispatchMode):
    """Notes the largest number of elements of a tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for each in output if isinstance(output, tuple | list) else (output,):
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.untyped_storage().nbytes() // each.element_size())
        return output


@pytest.mark.parametrize("form", [packed, padded])
@pytest.mark.parametrize("reach", [Reach(64, 64), Reach(None, None)], ids=["window", "all"])
def test_memory_grows_with_the_length_alone(reach, form) -> None:
    """No tensor of a forward and backward pass has an element for each pair of tokens."""
    found = []
    for length in (1024, 2048):
        lengths = [length, length - 9]
        layout, inputs = form(lengths), random_qkv(lengths)
        with Largest() as largest:
            q, k, v = (laid_out(x, layout, lengths) for x in inputs)
            kernels.attend(q, k, v, layout, reach=reach).sum().backward()
        found.append(largest.elements)
    assert found[1] <= 2.1 * found[0]
    assert found[1] < 2048 * 2048 / 2
