"""BiLSTMs on packed sequences: the capturable form for a GPU gives the states of nn.LSTM for each sequence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from labels import of_task
from torch import Tensor, nn

from bertsmith.batch import Example, Packed, bucketed, collate
from bertsmith.model import recurrent
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.model.recurrent import FeatureConfig, bilstm, capturable_bilstm

LENGTHS = [3, 0, 7, 1, 5, 0]


def inputs(layers: int) -> tuple[nn.LSTM, Tensor, Packed]:
    torch.manual_seed(layers)
    starts = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32)
    return nn.LSTM(6, 4, layers, bidirectional=True), torch.randn(sum(LENGTHS), 6), Packed(starts, 9)


@pytest.mark.parametrize("layers", [1, 2])
def test_the_capturable_form_gives_the_same_states_and_gradients(layers: int) -> None:
    lstm, x, layout = inputs(layers)
    results = []
    for function in (bilstm, capturable_bilstm):
        given = x.clone().requires_grad_()
        states = function(lstm, given, layout)
        lstm.zero_grad()
        (states * torch.arange(states.numel()).view_as(states)).sum().backward()
        results.append([states.detach(), given.grad, *(p.grad.clone() for p in lstm.parameters())])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)
    alone = lstm(x[3:10, None])[0][:, 0]  # the sequence of seven tokens
    assert torch.allclose(results[1][0][3:10], alone, atol=1e-6)


def test_dropout_is_applied_between_the_layers_only() -> None:
    lstm, x, layout = inputs(1)
    lstm.dropout = 0.5
    assert torch.equal(capturable_bilstm(lstm, x, layout), capturable_bilstm(lstm, x, layout))
    lstm, x, layout = inputs(2)
    lstm.dropout = 0.5
    assert not torch.equal(capturable_bilstm(lstm, x, layout), capturable_bilstm(lstm, x, layout))
    lstm.eval()
    assert torch.allclose(capturable_bilstm(lstm, x, layout), bilstm(lstm, x, layout), atol=1e-6)


def test_padding_sequences_do_not_change_the_loss_of_a_tagger_on_features() -> None:
    encoder = Encoder(EncoderConfig(vocab_size=50, hidden_size=8, num_layers=2, num_heads=2, intermediate_size=16))
    head = HeadConfig("tags", ("O", "B-X"), features=FeatureConfig("last", hidden_size=4))
    model, rng = TaskModel(encoder, head).eval(), np.random.default_rng(1)
    rows = [
        Example(
            np.zeros(n, int),
            np.zeros(n, int),
            of_task(tags=rng.integers(0, 2, n), states=rng.normal(size=(n, 1, 8)).astype(np.float16)),
        )
        for n in (4, 9, 2)
    ]
    batch = collate(rows, packed=True)
    filled = bucketed(batch)
    assert filled.labels["states"].shape == (256, 1, 8)
    assert filled.counts == batch.counts
    assert torch.allclose(model(filled)["task"], model(batch)["task"], atol=1e-5)


def test_sentences_are_padded_to_the_longest_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A document has many sentences; padding each to the document's length would need too much memory."""
    encoder = Encoder(EncoderConfig(vocab_size=50, hidden_size=8, num_layers=2, num_heads=2, intermediate_size=16))
    head = HeadConfig("tags", ("O", "B-X"), features=FeatureConfig("last", hidden_size=4))
    model, none, seen = TaskModel(encoder, head).eval(), np.zeros(40, int), []
    monkeypatch.setattr(recurrent, "bilstm", lambda *given: seen.append(given[2]) or bilstm(*given))
    row = Example(none, none, of_task(None, none, np.arange(1, 39), np.array([1, 6, 18, 30])))
    model(collate([row], packed=True))
    assert [layout.max_length for layout in seen] == [12]
    assert seen[0].starts.tolist() == [0, 5, 17, 29, 38]


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_text_is_classified_from_the_last_state_of_each_direction(packed: bool) -> None:
    """The forward direction ends at the last token, the backward direction at the first."""
    torch.manual_seed(1)
    config = EncoderConfig(vocab_size=50, hidden_size=8, num_layers=1, num_heads=2, intermediate_size=16)
    model = TaskModel(Encoder(config), HeadConfig("single", ("a", "b", "c"), bilstm_layers=2)).eval()
    for parameter in model.head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    rows = [Example(np.arange(5, 5 + n), np.zeros(n, int)) for n in (4, 9, 1)]
    scores = model.scores(collate(rows, packed=packed))
    for row, found in zip(rows, scores, strict=True):
        hidden = model.encoder(collate([row], packed=False))[0]
        _, (last, _) = model.head.lstm(hidden[:, None])  # (2 layers × 2 directions, 1, H / 2)
        ends = torch.cat([last[-2, 0], last[-1, 0]])
        assert torch.allclose(found, model.head.top(ends), atol=1e-5)
