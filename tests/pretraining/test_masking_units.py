"""Whole words, spans and n-grams are masked as in their papers; the masks of single tokens have not changed."""

import hashlib

import numpy as np
import pytest
from conftest import KOREAN
from test_pretraining_data import chi_square

from bertsmith import draws
from bertsmith.errors import UserError
from bertsmith.pretraining.masking import (
    Masked,
    MaskPolicy,
    Vocabulary,
    draw_spans,
    find_words,
    mask_tokens,
    span_lengths,
)
from bertsmith.text.tokenizer import Tokenizer

SIZE, INNER = 100, 60  # ids from INNER on are continuations
VOCABULARY = Vocabulary(4, np.arange(SIZE) < 5, np.arange(SIZE) >= INNER)
UNITS = ["token", "word", "span", "n-gram"]


def sequences(count: int, inner: float = 0.3, low: int = 5, high: int = 65, seed: int = 0):
    """Random packed `[CLS] A [SEP] B [SEP]` with a share of continuation tokens, their lengths and keys."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(low, high, size=count)
    rows = []
    for length in lengths:
        inside = rng.random(length) < inner
        row = np.where(inside, rng.integers(INNER, SIZE, size=length), rng.integers(5, INNER, size=length))
        row[[0, length // 2, -1]] = 2, 3, 3
        rows.append(row)
    return np.concatenate(rows), lengths, draws.key(seed, np.arange(count))


def masks(data, unit: str, **changes) -> Masked:
    return mask_tokens(*data, MaskPolicy(unit=unit, **changes), VOCABULARY)


def owners(lengths) -> np.ndarray:
    return np.repeat(np.arange(len(lengths)), lengths)


def words_of(data):
    tokens, lengths, _ = data
    return find_words(VOCABULARY.is_special[tokens], VOCABULARY.continues(tokens), owners(lengths))


def words_by_hand(tokens, lengths) -> list[list[int]]:
    """The positions of each word, found token by token."""
    words: list[list[int]] = []
    firsts, open_word = set((np.cumsum(lengths) - lengths).tolist()), False
    for position, token in enumerate(tokens.tolist()):
        if token < 5:
            open_word = False
            continue
        if token >= INNER and open_word and position not in firsts:
            words[-1].append(position)
        else:
            words.append([position])
        open_word = True
    return words


def budgets(data, rate: float = 0.15) -> list[int]:
    tokens, lengths, _ = data
    ordinary = np.bincount(owners(lengths), tokens > 4, len(lengths)).astype(int).tolist()
    return [min(max(1, round(rate * n)), most) for n, most in zip(lengths.tolist(), ordinary, strict=True)]


def counts(data, masked: Masked) -> list[int]:
    return np.bincount(owners(data[1])[masked.positions], minlength=len(data[1])).tolist()


@pytest.fixture(scope="module")
def data():
    return sequences(2000)


# Single tokens


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(MaskPolicy(), "fcfc1708914a735e"), (MaskPolicy(0.4, 0.5, 0.3), "84e98252724a4042")],
    ids=["paper", "other"],
)
def test_masks_of_single_tokens_have_not_changed(policy, expected):
    lengths = 5 + np.arange(300) * 37 % 90
    tokens = 5 + np.arange(lengths.sum()) * 7919 % 95
    starts = np.cumsum(lengths) - lengths
    tokens[starts], tokens[starts + lengths // 2], tokens[starts + lengths - 1] = 2, 3, 3
    found = mask_tokens(tokens, lengths, draws.key(9, np.arange(300)), policy, VOCABULARY)
    arrays = [np.asarray(a, dtype=np.int64) for a in (found.tokens, found.positions, found.targets)]
    assert hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()[:16] == expected


# Properties of every unit


@pytest.mark.parametrize("unit", UNITS)
def test_masks_depend_only_on_the_key(data, unit):
    tokens, lengths, keys = data
    starts = np.cumsum(lengths) - lengths
    whole = masks(data, unit)
    assert np.array_equal(whole.tokens, masks(data, unit).tokens)
    for i in (0, 7, 600, 1999):
        inside = slice(starts[i], starts[i] + lengths[i])
        alone = masks((tokens[inside], lengths[i : i + 1], keys[i : i + 1]), unit)
        assert np.array_equal(alone.tokens, whole.tokens[inside])
        here = (whole.positions >= inside.start) & (whole.positions < inside.stop)
        assert np.array_equal(alone.positions + starts[i], whole.positions[here])
    others = masks((tokens, lengths, draws.key(1, np.arange(2000))), unit)
    assert not np.array_equal(others.positions, whole.positions)


@pytest.mark.parametrize("unit", UNITS)
def test_targets_are_the_original_tokens_at_the_masked_positions(data, unit):
    tokens = data[0]
    found = masks(data, unit)
    assert (np.diff(found.positions) > 0).all()
    assert np.array_equal(found.targets, tokens[found.positions])
    assert (found.targets > 4).all()
    rest = np.delete(np.arange(len(tokens)), found.positions)
    assert np.array_equal(found.tokens[rest], tokens[rest])


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("inner", [0.0, 0.3, 0.9])
def test_the_number_of_masked_tokens_is_within_the_budget(unit, inner):
    data = sequences(500, inner)
    found, wanted = counts(data, masks(data, unit)), budgets(data)
    if unit == "word":
        assert all(1 <= have <= most for have, most in zip(found, wanted, strict=True))
        assert sum(found) > (0.75 if inner == 0.9 else 0.98) * sum(wanted)
    else:
        assert found == wanted


@pytest.mark.parametrize("rate", [0.01, 0.5, 0.99])
def test_words_and_spans_keep_the_budget_at_other_rates(data, rate):
    assert counts(data, masks(data, "span", rate=rate)) == budgets(data, rate)
    assert all(np.array(counts(data, masks(data, "word", rate=rate))) <= budgets(data, rate))


@pytest.mark.parametrize("unit", UNITS)
def test_shares_of_masked_random_and_kept_tokens_are_right(data, unit):
    data = sequences(8000)
    found = masks(data, unit)
    now = found.tokens[found.positions]
    random = (now != 4) & (now != found.targets)
    count = len(now) / (4 if unit == "span" else 1)  # a span's tokens share one draw
    assert abs(np.mean(now == 4) - 0.8) < 4 * 0.4 / np.sqrt(count)
    assert abs(np.mean(random) - 0.1 * 94 / 95) < 4 * 0.3 / np.sqrt(count)
    assert abs(chi_square(np.bincount(now[random], minlength=SIZE)[5:])) < 6


@pytest.mark.parametrize("unit", UNITS)
def test_one_token_of_the_shortest_sequences_is_masked(unit):
    """Both tokens are masked with equal probability, also where truncation has cut the beginning of a word."""
    keys, lengths = draws.key(3, np.arange(3000)), np.full(3000, 5)
    for row in ([2, 10, 3, 20, 3], [2, 80, 3, 90, 3]):
        found = masks((np.tile(row, 3000), lengths, keys), unit)
        assert np.array_equal(found.positions // 5, np.arange(3000))
        assert abs(np.mean(found.positions % 5 == 1) - 0.5) < 4 * 0.5 / np.sqrt(3000)


@pytest.mark.parametrize("unit", UNITS)
def test_no_special_token_is_masked_in_text_without_other_tokens(unit):
    tokens = np.array([2, 1, 1, 3, 1, 3, 2, 50, 3, 1, 3])
    found = masks((tokens, np.array([6, 5]), draws.key(1, np.arange(2))), unit)
    assert found.positions.tolist() == [7]
    assert len(masks((tokens[:6], np.array([6]), draws.key(1, np.arange(1))), unit).positions) == 0


@pytest.mark.parametrize("unit", UNITS)
def test_korean_words_of_many_pieces_are_masked_within_the_budget(unit, tokenizer_folder):
    """Words of many pieces, from a real vocabulary."""
    tokenizer = Tokenizer.load(tokenizer_folder)
    vocabulary = Vocabulary.of(tokenizer)
    rows = tokenizer.encode(KOREAN.splitlines() * 100, special=True)
    tokens, lengths = np.concatenate(rows), np.array([len(row) for row in rows])
    found = mask_tokens(tokens, lengths, draws.key(2, np.arange(len(rows))), MaskPolicy(unit=unit), vocabulary)
    assert vocabulary.continues(tokens).mean() > 0.2
    per_row = np.bincount(owners(lengths)[found.positions], minlength=len(rows))
    wanted = [max(1, round(0.15 * n)) for n in lengths.tolist()]
    assert (per_row >= 1).all()
    assert (per_row <= wanted).all()
    if unit == "word":
        chosen = np.zeros(len(tokens), dtype=bool)
        chosen[found.positions] = True
        inner = np.flatnonzero(vocabulary.continues(tokens))
        assert np.array_equal(chosen[inner], chosen[inner - 1])
    else:
        assert per_row.tolist() == wanted


def test_continuation_tokens_are_read_from_the_tokenizer(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n##b\n[CLS]\n[SEP]\n[MASK]\na\n#\n##c\n")
    assert np.flatnonzero(Tokenizer.load(tmp_path).is_marked).tolist() == [2, 8]


# Words


@pytest.mark.parametrize("inner", [0.0, 0.3, 0.9, 1.0])
def test_words_equal_those_found_token_by_token(inner):
    data = sequences(300, inner)
    words = words_of(data)
    assert [list(range(a, b)) for a, b in zip(words.begin, words.end, strict=True)] == words_by_hand(*data[:2])
    assert np.array_equal(words.owner, owners(data[1])[words.begin])


def test_a_word_does_not_cross_special_tokens_or_sequences():
    tokens = np.array([2, 70, 71, 10, 72, 3, 73, 11, 3, 74, 12, 75])  # the second sequence begins with 74
    words = find_words(VOCABULARY.is_special[tokens], VOCABULARY.continues(tokens), np.repeat([0, 1], [9, 3]))
    assert list(zip(words.begin, words.end, strict=True)) == [(1, 3), (3, 5), (6, 7), (7, 8), (9, 10), (10, 12)]


def released(words: list[list[int]], budget: int) -> list[int]:
    """The selection of the released code, given the words in their drawn order; it may be empty."""
    chosen: list[int] = []
    for word in words:
        if len(chosen) >= budget:
            break
        if len(chosen) + len(word) > budget:
            continue
        chosen += word
    return sorted(chosen)


@pytest.mark.parametrize("inner", [0.0, 0.3, 0.7, 0.95])
def test_words_are_chosen_as_in_the_released_code(inner):
    data = sequences(200, inner)
    found, owner = masks(data, "word"), owners(data[1])
    starts = np.cumsum(data[1]) - data[1]
    units: list[list[tuple[float, list[int]]]] = [[] for _ in range(200)]
    for word in words_by_hand(*data[:2]):
        i = owner[word[0]]
        units[i].append((float(draws.uniform(data[2][i], word[0] - starts[i], 0)), word))
    cut = 0
    for i, (row, budget) in enumerate(zip(units, budgets(data), strict=True)):
        order = [word for _, word in sorted(row)]
        expected = released(order, budget)
        if not expected:
            expected, cut = order[0][:budget], cut + 1
        assert found.positions[owner[found.positions] == i].tolist() == expected
    assert (cut > 0) == (inner > 0), "where every word is too long, the first is cut"


def test_the_pieces_of_a_word_are_masked_together(data):
    chosen, wanted = np.zeros(len(data[0]), dtype=bool), budgets(data)
    chosen[masks(data, "word").positions] = True
    words, whose = words_by_hand(*data[:2]), owners(data[1])
    for word in words:
        if len(word) <= wanted[whose[word[0]]]:
            assert chosen[word].all() or not chosen[word].any()


def test_each_piece_of_a_word_is_masked_replaced_or_kept_by_its_own_draw(data):
    found = masks(data, "word")
    now = dict(zip(found.positions.tolist(), found.tokens[found.positions].tolist(), strict=True))
    words = [w for w in words_by_hand(*data[:2]) if len(w) > 1 and w[1] in now]
    alike = [(now[w[0]] == 4) == (now[w[1]] == 4) for w in words]
    assert abs(np.mean(alike) - (0.8**2 + 0.2**2)) < 4 * 0.47 / np.sqrt(len(alike))


# Spans


def spans_of(data, rate: float = 0.15):
    return draw_spans(words_of(data), data[2], np.array(budgets(data, rate)), MaskPolicy(unit="span"))


@pytest.mark.parametrize("inner", [0.0, 0.3, 0.9])
def test_all_spans_but_the_last_are_whole_words(inner):
    data = sequences(600, inner)
    words, spans = words_by_hand(*data[:2]), spans_of(data)
    begins, ends = {w[0]: w for w in words}, {w[-1] + 1 for w in words}
    chosen = np.zeros(len(data[0]), dtype=int)
    last = {int(o): int(spans.number[spans.owner == o].max()) for o in np.unique(spans.owner)}
    cut: dict[int, int] = {}
    for begin, end, owner, number in zip(spans.begin, spans.end, spans.owner, spans.number, strict=True):
        assert int(begin) in begins
        assert (data[0][begin:end] > 4).all(), "no special token inside"
        chosen[begin:end] += 1
        if int(end) not in ends:
            assert number == last[int(owner)]
            cut[int(owner)] = int(end - begin)
    assert chosen.max() == 1, "no overlap"
    assert chosen.sum() == sum(budgets(data))
    whose = owners(data[1])
    for word in words:  # a word was cut only if no remaining word fitted
        size = cut.get(int(whose[word[0]]))
        assert size is None or chosen[word].any() or len(word) > size
    assert bool(cut) == (inner > 0)


def test_span_lengths_are_geometric():
    """The first five spans of a long sequence are never cut: at most 50 tokens of a budget of 77."""
    data = sequences(1500, 0.0, 512, 513)
    spans = spans_of(data)
    lengths = (spans.end - spans.begin)[spans.number < 5]
    assert len(lengths) == 5 * 1500
    shares = 0.8 ** np.arange(10) / (0.8 ** np.arange(10)).sum()
    found = np.bincount(lengths, minlength=11)[1:]
    # 27.9 is the 99.9 % quantile at 9 degrees of freedom.
    assert ((found - len(lengths) * shares) ** 2 / (len(lengths) * shares)).sum() < 27.9
    assert abs(lengths.mean() - 3.8) < 0.12, "the paper's mean"


def test_span_lengths_are_counted_in_words():
    data = sequences(600, 0.5, 512, 513)
    words, spans = words_of(data), spans_of(data)
    early = spans.number < 2
    first, last = (np.searchsorted(words.begin, x[early], "right") - 1 for x in (spans.begin, spans.end - 1))
    assert abs((last - first + 1).mean() - 3.8) < 0.25


@pytest.mark.parametrize(
    ("span_p", "span_max", "mean"), [(1.0, 10, 1.0), (0.2, 1, 1.0), (0.5, 3, 11 / 7), (1e-9, 5, 3.0)]
)
def test_span_lengths_follow_span_p_and_span_max(span_p, span_max, mean):
    lengths = span_lengths(draws.uniform(1, np.arange(20_000)), MaskPolicy(span_p=span_p, span_max=span_max))
    assert lengths.min() >= 1
    assert lengths.max() <= span_max
    assert abs(lengths.mean() - mean) < 0.05


def test_n_grams_of_albert():
    """Section 4.1: up to three whole words, with p(n) = (1/n) / (1/1 + 1/2 + 1/3); each token has its own draw."""
    data, policy = sequences(400, 0.3, 200, 201), MaskPolicy(unit="n-gram", span_max=3)
    words = words_of(data)
    spans = draw_spans(words, data[2], np.array(budgets(data)), policy)
    early = spans.number < 4  # the last one may be cut
    first, last = (np.searchsorted(words.begin, x[early], "right") - 1 for x in (spans.begin, spans.end - 1))
    shares = np.bincount(last - first + 1, minlength=4)[1:] / early.sum()
    assert (np.abs(shares - np.array([6, 3, 2]) / 11) < 4 * 0.5 / np.sqrt(early.sum())).all()
    found = mask_tokens(*data, policy, VOCABULARY)
    assert len(found.positions) == sum(budgets(data))
    pairs = spans.begin[spans.end - spans.begin > 1]
    alike = [(found.tokens[i] == 4) == (found.tokens[i + 1] == 4) for i in pairs]
    assert abs(np.mean(alike) - (0.8**2 + 0.2**2)) < 4 * 0.47 / np.sqrt(len(alike))


def test_spans_start_at_every_word_with_equal_probability():
    """The first span of each sequence may start wherever its length fits."""
    tokens, keys = np.array([2, *range(10, 40), 3, *range(10, 26), 3]), draws.key(5, np.arange(15_000))
    data = np.tile(tokens, 15_000), np.full(15_000, len(tokens)), keys
    spans = spans_of(data, rate=0.25)
    first = spans.number == 0
    lengths, starts = (spans.end - spans.begin)[first], spans.begin[first] % len(tokens)
    for length in (1, 4, 10):
        places = [*range(1, 32 - length), *range(32, 49 - length)]
        assert set(starts[lengths == length].tolist()) == set(places)
        assert abs(chi_square(np.bincount(starts[lengths == length])[places])) < 6


def test_the_tokens_of_a_span_share_one_draw(data):
    found, spans = masks(data, "span", mask_share=0.4, random_share=0.3), spans_of(data)
    kinds, same_random = [], 0
    for begin, end in zip(spans.begin, spans.end, strict=True):
        now, before = found.tokens[begin:end], data[0][begin:end]
        assert (now == 4).all() or not (now == 4).any()
        random = not (now == 4).any() and (now != before).mean() > 0.5
        assert random or (now == 4).all() or (now == before).all() or end - begin < 3
        kinds.append(0 if now[0] == 4 else 1 if (now != before).any() else 2)
        same_random += random and end - begin > 2 and len(set(now.tolist())) == 1
    shares = np.bincount(kinds, minlength=3) / len(kinds)
    assert (np.abs(shares - [0.4, 0.3, 0.3]) < 4 * 0.5 / np.sqrt(len(kinds))).all()
    assert same_random == 0, "random tokens are drawn for each token"


def test_masked_spans_form_longer_runs_than_masked_words(data):
    """Neighbours are masked together far more often than by chance."""
    together = {unit: np.mean(np.diff(masks(data, unit).positions) == 1) for unit in UNITS}
    assert together["token"] < together["word"] < together["span"]
    assert together["span"] > 0.5


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"unit": "sentence"}, r"data\.masking\.unit must be one of token, word, span, n-gram, not 'sentence'"),
        ({"span_p": 0.0}, r"data\.masking\.span_p must be above 0 and at most 1, not 0\.0"),
        ({"span_p": 1.1}, r"data\.masking\.span_p must be"),
        ({"span_max": 0}, r"data\.masking\.span_max must be at least 1, not 0"),
    ],
)
def test_policies_out_of_range_are_refused(values, reason):
    with pytest.raises(UserError, match=reason):
        MaskPolicy(**values)
