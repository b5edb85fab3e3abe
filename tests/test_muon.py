"""Muon takes the steps of torch's own, all matrices of a shape at once."""

import pytest
import torch
from torch import nn

from bertsmith.training.muon import Muon, orthogonalise

SHAPES = [(24, 8), (8, 24), (24, 8), (16, 16), (24, 8)]


def matrices(seed: int = 0) -> list[nn.Parameter]:
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def test_the_steps_of_torch() -> None:
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
        assert (mine - other).norm() < 0.01 * moved  # both iterate in bfloat16


@pytest.mark.parametrize("shape", [(3, 12, 12), (2, 12, 40), (2, 40, 12)])
def test_singular_values_come_near_one(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_a_matrix_does_not_depend_on_its_company() -> None:
    torch.manual_seed(0)
    stack = torch.randn(4, 16, 24)
    torch.testing.assert_close(orthogonalise(stack)[2], orthogonalise(stack[2:3])[0])


def test_no_gradient_no_step() -> None:
    parameters = matrices()
    parameters[0].grad = torch.ones_like(parameters[0])
    Muon([{"params": parameters}], lr=0.1, weight_decay=0.1, momentum=0.9).step()
    before = matrices()
    assert not torch.equal(parameters[0], before[0])
    assert all(torch.equal(p, b) for p, b in zip(parameters[1:], before[1:], strict=True))
