"""Muon takes the steps of `torch.optim.Muon`, with all matrices of a shape in one batch."""

import pytest
import torch
from torch import nn

from bertsmith.training import muon
from bertsmith.training.muon import Muon, orthogonalise

SHAPES = [(24, 8), (8, 24), (24, 8), (16, 16), (24, 8)]


def matrices(seed: int = 0) -> list[nn.Parameter]:
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.01), (torch.float32, 0.03)])
def test_steps_equal_those_of_torch_muon(dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.optim.Muon` iterates in bfloat16."""
    monkeypatch.setattr(muon, "iteration_dtype", lambda device: dtype)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)  # torch turns it off on a CPU without bfloat16
    ours, theirs = matrices(), matrices()
    values = {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.9}
    optimizers = Muon([{"params": ours}], **values), torch.optim.Muon(theirs, **values)
    for step in range(4):
        torch.manual_seed(step)
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for start, mine, other in zip(matrices(), ours, theirs, strict=True):
        moved = (other - start).norm()
        assert (mine - other).norm() < tolerance * moved


@pytest.mark.parametrize("shape", [(3, 12, 12), (2, 12, 40), (2, 40, 12)])
def test_orthogonalised_singular_values_are_near_one(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_result_does_not_depend_on_the_other_matrices_of_a_batch() -> None:
    torch.manual_seed(0)
    stack = torch.randn(4, 16, 24)
    torch.testing.assert_close(orthogonalise(stack)[2], orthogonalise(stack[2:3])[0])


def test_parameters_without_gradient_are_not_updated() -> None:
    parameters = matrices()
    parameters[0].grad = torch.ones_like(parameters[0])
    Muon([{"params": parameters}], lr=0.1, weight_decay=0.1, momentum=0.9).step()
    before = matrices()
    assert not torch.equal(parameters[0], before[0])
    assert all(torch.equal(p, b) for p, b in zip(parameters[1:], before[1:], strict=True))


@pytest.mark.slow
def test_triton_kernels_take_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of a GPU, run by Triton's interpreter."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("runs on the interpreter")
    from bertsmith.training import muon_kernels

    monkeypatch.setattr(muon_kernels, "TILE", (16, 16, 16, 4, 1))
    plain, fused = matrices(), matrices()
    for parameters, kernels in ((plain, None), (fused, muon_kernels)):
        monkeypatch.setattr(muon, "fused_kernels", lambda *_, kernels=kernels: kernels)
        group = {"params": parameters, "lr": torch.tensor(0.05)}
        optimizer = Muon([group], lr=0.05, weight_decay=0.1, momentum=0.9)
        for step in range(3):
            torch.manual_seed(step)
            for p in parameters:
                p.grad = torch.randn_like(p)
            optimizer.step()
    for start, mine, other in zip(matrices(), fused, plain, strict=True):
        assert (mine - other).norm() < 1e-4 * (other - start).norm()


def test_triton_product_equals_torch() -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("runs on the interpreter")
    from bertsmith.training import muon_kernels

    a, b, c = torch.randn(2, 40, 24), torch.randn(2, 24, 30), torch.randn(2, 40, 30)
    expected = muon.product(a, b, c, 0.5, 2.0)
    torch.testing.assert_close(muon_kernels.product(a, b, c, 0.5, 2.0), expected, atol=1e-5, rtol=1e-5)
    square = muon_kernels.product(a, a.mT, symmetric=True)
    torch.testing.assert_close(square, a @ a.mT, atol=1e-5, rtol=1e-5)
