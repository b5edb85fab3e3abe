"""ELMo's encoder and objective beside a reference in numpy, word by word, from the equations of the papers.

Peters et al. 2018, section 3; Kim et al. 2016 and Jozefowicz et al. 2016 (characters); Srivastava et al. 2015 (highway
layers); Sak et al. 2014 (LSTM with a projection).
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from bertsmith.batch import IGNORE, Example, Label, bucketed, collate
from bertsmith.errors import UserError
from bertsmith.model.cost import forward_flops, parameter_count
from bertsmith.model.encoder import Encoder
from bertsmith.model.sizes import elmo_config
from bertsmith.model.states import hidden_states
from bertsmith.objectives.bidirectional_lm import BidirectionalLM
from bertsmith.pretraining.loader import MASKED, TARGET, next_tokens
from bertsmith.recipes import recipe
from bertsmith.tasks.examples import SPELLING

FILTERS = ((1, 3), (2, 4), (3, 5))
TINY = replace(
    elmo_config("tiny"), vocab_size=30, hidden_size=12, intermediate_size=10, character_filters=FILTERS,
    character_size=4, hidden_dropout=0.0,
)  # fmt: skip
LENGTHS = (5, 1, 7, 2)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


class Reference:
    """The encoder in float64, one word after the other."""

    def __init__(self, encoder: Encoder) -> None:
        self.weights = {name: value.double().numpy() for name, value in encoder.state_dict().items()}
        self.config = encoder.config

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return self.weights[f"{name}.weight"] @ x + self.weights[f"{name}.bias"]

    def word(self, characters: np.ndarray) -> np.ndarray:
        """The vector of one word from its characters."""
        embedded = self.weights["embeddings.characters.weight"][characters]  # (C, E)
        values = []
        for number, (width, count) in enumerate(self.config.character_filters):
            weight = self.weights[f"embeddings.filters.{number}.weight"]  # (count, E, width)
            bias = self.weights[f"embeddings.filters.{number}.bias"]
            for one in range(count):
                places = range(len(characters) - width + 1)
                found = [(weight[one].T * embedded[place : place + width]).sum() + bias[one] for place in places]
                values.append(relu(np.array(max(found))))
        x = np.array(values)
        for number in range(self.config.num_highways):
            new, gate = np.split(self.linear(f"embeddings.highways.{number}", x), 2)
            transform = sigmoid(gate)
            x = transform * relu(new) + (1 - transform) * x
        return self.linear("embeddings.projection", x)

    def direction(self, name: str, inputs: list[np.ndarray]) -> list[np.ndarray]:
        """The states of one LSTM with a projection, in the order of its inputs."""
        weight = {part: self.weights[f"{name}.{part}_l0"] for part in ("weight_ih", "weight_hh", "weight_hr")}
        bias = self.weights[f"{name}.bias_ih_l0"] + self.weights[f"{name}.bias_hh_l0"]
        hidden, cell = np.zeros(self.config.hidden_size // 2), np.zeros(self.config.intermediate_size)
        states = []
        for x in inputs:
            sums = weight["weight_ih"] @ x + weight["weight_hh"] @ hidden + bias
            enter, forget, new, leave = np.split(sums, 4)
            cell = sigmoid(forget) * cell + sigmoid(enter) * np.tanh(new)
            hidden = weight["weight_hr"] @ (sigmoid(leave) * np.tanh(cell))
            states.append(hidden)
        return states

    def layers(self, words: np.ndarray) -> list[np.ndarray]:
        """The states of every layer for one text, (n, H) each; 0 is the character CNN."""
        vectors = [self.word(word) for word in words]
        halves = [vectors, vectors]
        found = [np.concatenate([vectors, vectors], 1)]
        for layer in range(self.config.num_layers):
            ahead = self.direction(f"layers.{layer}.forwards", halves[0])
            back = self.direction(f"layers.{layer}.backwards", halves[1][::-1])[::-1]
            if layer:  # a residual between the layers, not around the first one
                ahead, back = (
                    [new + old for new, old in zip(states, half, strict=True)]
                    for states, half in zip((ahead, back), halves, strict=True)
                )
            halves = [ahead, back]
            found.append(np.concatenate(halves, 1))
        return found


def randomised(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.4, generator=draw)
    return module.eval()


def texts(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[np.ndarray]:
    """Words as characters, (n, 50) for each text; one word occurs twice."""
    rng = np.random.default_rng(seed)
    drawn = [rng.integers(0, 261, (length, 50)).astype(np.int16) for length in lengths]
    drawn[0][-1] = drawn[0][0]
    return drawn


def batch_of(words: list[np.ndarray], packed: bool):
    """A batch that predicts next and previous tokens."""
    rng = np.random.default_rng(1)
    examples = []
    for characters in words:
        tokens = rng.integers(0, 30, len(characters))
        found = next_tokens(tokens, np.array([len(tokens)]), "both")
        labels = {"masked": Label(found.positions, MASKED), "targets": Label(found.targets, TARGET)}
        labels["characters"] = Label(characters, SPELLING)
        examples.append(Example(tokens, np.zeros_like(tokens), labels))
    return collate(examples, packed=packed)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_every_layer_equals_the_equations(packed: bool) -> None:
    encoder = randomised(Encoder(TINY))
    words, batch = texts(), batch_of(texts(), packed)
    reference = Reference(encoder)
    expected = [np.concatenate(layer) for layer in zip(*map(reference.layers, words), strict=True)]
    with torch.no_grad():
        found = hidden_states(encoder, batch, (0, 1, 2))
        last = encoder(batch)
    for layer, states in enumerate(expected):
        ours = found[layer] if packed else found[layer][batch.layout.mask]
        np.testing.assert_allclose(ours.numpy(), states, atol=2e-5, err_msg=f"layer {layer}")
    assert_close(last, found[2])
    rows = torch.tensor([2, 0])
    with torch.no_grad():
        assert_close(encoder(batch, rows=rows), batch.layout.flat(last)[rows])


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_each_direction_predicts_its_next_word(packed: bool) -> None:
    objective = randomised(BidirectionalLM(Encoder(TINY)))
    words, batch = texts(), batch_of(texts(), packed)
    reference = Reference(objective.encoder)
    weight, bias = (p.detach().double().numpy() for p in objective.bidirectional_lm.parameters())
    tokens = batch_of(texts(), True).tokens.numpy()
    sums, begin = {"forward": 0.0, "backward": 0.0}, 0
    for text in words:
        ids, ends = tokens[begin : begin + len(text)], np.split(reference.layers(text)[-1], 2, axis=1)
        begin += len(text)
        for i in range(len(text) - 1):  # word i predicts word i + 1 from the left, and i + 1 predicts i from the right
            for name, state, target in (
                ("forward", ends[0][i], ids[i + 1]),
                ("backward", ends[1][i + 1], ids[i]),
            ):
                scores = weight @ state + bias
                sums[name] += np.log(np.exp(scores).sum()) - scores[target]
    losses = objective(batch)
    assert {name: losses[name].item() for name in sums} == pytest.approx(sums, abs=1e-3)
    assert batch.counts == {}
    measured = objective.measures(batch)
    assert {name: measured[f"{name}_loss"][0].item() for name in sums} == pytest.approx(sums, abs=1e-3)
    right = sum((v.argmax(-1) == t).sum().item() for v, t in _scored(objective, batch))
    assert sum(losses[f"{name}_accuracy"].item() for name in sums) == right


def _scored(objective: BidirectionalLM, batch):
    """The logits of each direction, and what they predict."""
    logits, places = objective.logits(batch), batch.labels["masked"]
    return [(logits["forward"], batch.labels["targets"]), (logits["backward"], batch.tokens.flatten()[places])]


def test_a_direction_sees_nothing_of_what_it_predicts() -> None:
    """Another word changes the first half of the states from there on, and the second half up to there."""
    encoder, changed = randomised(Encoder(TINY)), texts((9,))
    before = encoder(batch_of(texts((9,)), True))
    changed[0][4] = 7
    differs = (encoder(batch_of(changed, True)) != before).view(9, 2, -1).any(-1)
    assert differs.T.tolist() == [[False] * 4 + [True] * 5, [True] * 5 + [False] * 4]


@pytest.mark.parametrize("lengths", [(1, 1, 9), (4,) * 5, tuple(range(2, 20))], ids=["extremes", "equal", "many"])
def test_losses_and_gradients_of_packed_padded_and_bucketed_batches_are_equal(lengths: tuple[int, ...]) -> None:
    objective, results = randomised(BidirectionalLM(Encoder(TINY))), []
    packed = batch_of(texts(lengths), True)
    for batch in (packed, batch_of(texts(lengths), False), bucketed(packed)):
        objective.zero_grad()
        losses = objective(batch)
        (losses["forward"] + losses["backward"]).backward()
        results.append([*losses.values(), *(p.grad.clone() for p in objective.parameters())])
    for other in results[1:]:
        assert_close(other, results[0], atol=1e-3, rtol=1e-4)
    assert (bucketed(packed).labels["targets"] == IGNORE).any()


def test_costs_count_every_matrix() -> None:
    encoder = Encoder(TINY)
    matrices = sum(p.numel() for p in BidirectionalLM(encoder).parameters() if p.dim() > 1)
    assert parameter_count(TINY) == matrices + TINY.vocab_size  # biases of LSTMs and filters are not counted
    published = replace(recipe("elmo").model, vocab_size=793_471, predicted_words=None)
    with torch.device("meta"):
        exact = sum(p.numel() for p in Encoder(published).parameters())
    words = 513 * published.vocab_size
    assert parameter_count(published) - words == pytest.approx(exact, rel=0.01)
    assert exact == pytest.approx(93.6e6, rel=0.01)  # the released model
    assert forward_flops(published, [100], 100) == pytest.approx(100 * 2 * (2 * words + 102e6), rel=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"character_filters": ()}, "layer_type=lstm and character_filters belong together"),
        ({"layer_type": "transformer"}, "layer_type=lstm and character_filters belong together"),
        ({"hidden_size": 13}, "an even hidden_size"),
        ({"intermediate_size": 6}, "more cells than its half"),
        ({"character_filters": ((51, 4),)}, r"\[51, 4\] is not a width of up to 50 and a number"),
        ({"character_filters": ((1, 1),) * 17}, "17 widths; at most 16"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(TINY, **changes)
