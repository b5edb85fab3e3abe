"""Packed attention on a CPU: in padded groups with a backward pass, sequence by sequence without one."""

import numpy as np
import pytest
import torch

from bertsmith.batch import Packed
from bertsmith.model import kernels
from bertsmith.model.kernels import RUN, grouped


@pytest.mark.parametrize("lengths", [[40, 40, 30, 25, 25, 60], [2 * RUN] * 3 + [0], [3, 2, 90, 1]], ids=str)
def test_attention_without_a_backward_pass_equals_attention_with_one(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32))
    layout = Packed(starts, max(lengths), num_padding=lengths.count(0))
    q, k, v = torch.randn(3, sum(lengths), 2, 8, generator=torch.Generator().manual_seed(0))
    expected = grouped(q, k, v, layout)
    monkeypatch.setattr(kernels, "_Spread", None)  # nothing is copied
    with torch.no_grad():
        found = grouped(q, k, v, Packed(starts, max(lengths), num_padding=lengths.count(0)))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_short_sequences_are_copied_into_fewer_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [5, 6, 7, 8] * 4
    layout = Packed(torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32), 8)
    q, k, v = torch.randn(3, sum(lengths), 2, 8, generator=torch.Generator().manual_seed(0))
    expected = grouped(q, k, v, layout)
    calls = []
    dense = kernels.dense
    monkeypatch.setattr(kernels, "dense", lambda *given: calls.append(1) or dense(*given))  # type: ignore[func-returns-value]
    with torch.no_grad():
        torch.testing.assert_close(grouped(q, k, v, layout), expected)
    assert len(calls) < len(lengths) / 2
