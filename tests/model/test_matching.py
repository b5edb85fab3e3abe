"""The BiLSTM model with attention on features, beside a reference that goes word by word."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import randomise
from torch.nn.functional import softmax
from torch.testing import assert_close

from bertsmith.batch import Example, bucketed, collate
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.model.recurrent import FeatureConfig, Standardised, combined
from bertsmith.model.states import hidden_states

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG = EncoderConfig(vocab_size=50, hidden_size=16, num_layers=3, num_heads=2, intermediate_size=32, max_positions=64)
LENGTHS = ((4, 6), (3, 0), (1, 8), (7, 2))  # of the first and the second text; 0: there is none


def model_of(kind: str, variant: str = "mix-all") -> TaskModel:
    labels = ("a", "b", "c") if kind in ("single", "multi") else ()
    head = HeadConfig(kind, labels, 2 if kind == "choice" else 0, features=FeatureConfig(variant, 8, 1))
    return randomise(TaskModel(Encoder(CONFIG), head)).eval()


def batch_of(packed: bool, lengths: tuple[tuple[int, int], ...] = LENGTHS):
    rng = np.random.default_rng(0)
    examples = [Example(rng.integers(5, 50, sum(pair)), np.repeat([0, 1], pair)) for pair in lengths]
    return collate(examples, packed=packed)


def one_way(lstm: torch.nn.LSTM, suffix: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The states of one direction of an LSTM, step by step."""
    weights = [getattr(lstm, f"{name}_l0{suffix}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    hidden = cell = torch.zeros(lstm.hidden_size)
    states = []
    for x in inputs[::-1] if suffix else inputs:
        enter, forget, new, leave = (weights[0] @ x + weights[2] + weights[1] @ hidden + weights[3]).chunk(4)
        cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
        hidden = leave.sigmoid() * cell.tanh()
        states.append(hidden)
    return states[::-1] if suffix else states


def both_ways(lstm: torch.nn.LSTM, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    ahead, back = one_way(lstm, "", inputs), one_way(lstm, "_reverse", inputs)
    return [torch.cat(pair) for pair in zip(ahead, back, strict=True)]


def reference(model: TaskModel, features: torch.Tensor, texts: list[int]) -> torch.Tensor:
    """The logits of one sequence (K,) or, for spans, of its tokens (n, K), from their features (n, H)."""
    head = model.head
    states = both_ways(head.lstm, list(features))
    compared = []
    for state, own in zip(states, texts, strict=True):
        others = [s for s, text in zip(states, texts, strict=True) if text != own] or states
        shares = softmax(torch.stack([state @ other for other in others]) / len(state) ** 0.5, 0)
        seen = sum(share * other for share, other in zip(shares, others, strict=True))
        compared.append(head.compare(torch.cat([state, seen, state - seen, state * seen])).relu())
    composed = [old + new for old, new in zip(states, both_ways(head.compose, compared), strict=True)]
    if head.dense is None:
        return torch.stack([head.output(state) for state in composed])
    pooled = []
    for number in (0, 1):
        own = [state for state, text in zip(composed, texts, strict=True) if text == number]
        zeros = torch.zeros_like(composed[0])
        pooled += [torch.stack(own).mean(0), torch.stack(own).amax(0)] if own else [zeros, zeros]
    return head.output(head.dense(torch.cat(pooled)).tanh())


@torch.no_grad()
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", ["single", "regression", "span"])
def test_logits_equal_the_reference(kind: str, packed: bool) -> None:
    model, batch, flat = model_of(kind), batch_of(packed), batch_of(True)
    states = hidden_states(model.encoder, flat, (0, 1, 2, 3))
    shares = softmax(model.head.mix, 0)
    features = model.head.scale * sum(shares[layer] * states[layer] for layer in range(4))  # Peters et al., equation 1
    found, begin = model.logits(batch), 0
    for row, pair in zip(found, LENGTHS, strict=True):
        end = begin + sum(pair)
        expected = reference(model, features[begin:end], np.repeat([0, 1], pair).tolist())
        assert_close(row[: len(expected)], expected, atol=1e-5, rtol=1e-4)
        assert kind != "span" or row[len(expected) :].isneginf().all()
        begin = end


@pytest.mark.parametrize("kind", ["single", "choice", "span"])
def test_packed_padded_and_bucketed_batches_give_the_same_gradients(kind: str) -> None:
    model, results = model_of(kind), []
    for batch in (batch_of(True), batch_of(False), bucketed(batch_of(True))):
        model.zero_grad()
        logits = model.logits(batch)
        logits[logits.isfinite()].cos().sum().backward()
        results.append([p.grad.clone() for p in model.head.parameters()])
        assert all(p.grad is None for p in model.encoder.parameters())
    for other in results[1:]:
        assert_close(other, results[0], atol=1e-5, rtol=1e-4)


def test_a_pair_is_read_as_a_pair() -> None:
    """The second text changes the logits, and so does its number."""
    model, batch = model_of("single"), batch_of(True, ((4, 6),))
    with torch.no_grad():
        logits = model.logits(batch)
        alone = model.logits(replace(batch, segments=torch.zeros_like(batch.segments)))
    assert (logits - alone).abs().max() > 1e-3


def test_states_are_standardised_by_what_was_measured() -> None:
    """A component that all words share becomes zero, and states that were not measured stay as they are."""
    states = 3 + torch.randn(50, 2, 4) * torch.tensor([0.1, 1.0, 5.0, 0.0])
    standard = Standardised(8)
    assert standard(states).equal(states)
    standard.measure([states[:20], states[20:]])
    found = standard(states)
    assert_close(found.mean(0), torch.zeros(2, 4), atol=1e-3, rtol=0)
    assert_close(found.std(0, correction=0), torch.tensor([1.0, 1.0, 1.0, 0.0]).expand(2, 4), atol=1e-3, rtol=0)
    assert standard.is_measured


@torch.no_grad()
def test_standardised_states_are_what_is_combined() -> None:
    head = HeadConfig("single", ("a", "b"), features=FeatureConfig("mix-all", 8, 1, standardise=True))
    model, batch = randomise(TaskModel(Encoder(CONFIG), head)).eval(), batch_of(True)
    states = torch.stack([*hidden_states(model.encoder, batch, (0, 1, 2, 3)).values()], -2)
    model.head.standard.measure([states])
    standardised = (states - states.mean(0)) / states.std(0, correction=0)
    features = combined(standardised, model.head.mix, model.head.scale)
    assert_close(model.logits(batch), model.head(features, batch.layout, batch.segments), atol=1e-4, rtol=1e-4)


def test_layers_are_mixed_as_the_paper_says() -> None:
    states, mix = torch.randn(5, 3, 4), torch.tensor([0.3, -1.0, 2.0])
    weights = mix.exp() / mix.exp().sum()
    expected = sum(weights[i] * states[:, i] for i in range(3))
    assert_close(combined(states, mix, None), expected)
    assert_close(combined(states, mix, torch.tensor([2.5])), 2.5 * expected)
    assert_close(combined(states, None, None), states.reshape(5, 12))
