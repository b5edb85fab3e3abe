"""Draws are uniform, segment pairs and masks are as in the paper, and the data of a step depends only on the step."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from labels import of_task

from bertsmith import draws
from bertsmith.batch import Example, collate, lay_out, split_for_rank
from bertsmith.corpus.readers import ReadErrors
from bertsmith.corpus.shards import Corpus, Tokens, pack_shard, read_written, shard_name, write_manifest
from bertsmith.corpus.store import Store
from bertsmith.errors import UserError
from bertsmith.objectives.settings import MaskedLMConfig
from bertsmith.pretraining.loader import DataConfig, Loader, split_documents
from bertsmith.pretraining.masking import MaskPolicy, Vocabulary, mask_tokens
from bertsmith.pretraining.segments import Pair, PairSource, Sample, truncate
from bertsmith.text.frame import WORDPIECE
from bertsmith.text.tokenizer import Tokenizer

FIRST = len(WORDPIECE.special_tokens)  # the id of the first ordinary token
VOCABULARY = Vocabulary(4, np.arange(100) < FIRST, np.zeros(100, dtype=bool))


# Draws


@pytest.mark.parametrize("size", [*range(1, 51), 1000, 65_537])
def test_permute_is_a_permutation(size):
    assert np.array_equal(np.sort(draws.permute(np.arange(size), size, 3, 1)), np.arange(size))


def test_permute_depends_only_on_the_key():
    whole = draws.permute(np.arange(1000), 1000, 3, 1)
    assert [int(draws.permute(i, 1000, 3, 1)) for i in range(0, 1000, 97)] == whole[::97].tolist()
    for key in [(3, 2), (4, 1), (1, 3)]:
        assert (draws.permute(np.arange(1000), 1000, *key) == whole).mean() < 0.02


def test_permute_does_not_keep_neighbours():
    moved = draws.permute(np.arange(10_000), 10_000, 5)
    assert abs(np.corrcoef(np.arange(10_000), moved)[0, 1]) < 0.05
    assert np.mean(np.diff(moved) == 1) < 0.01


def chi_square(counts: np.ndarray) -> float:
    """The distance of the statistic from its expectation, in standard deviations."""
    expected, freedom = counts.sum() / counts.size, counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize("parts", [("n",), (7, "n"), ("n", 7), (7, 0, "n", 3), (2**40, "n")], ids=str)
def test_uniform_is_uniform(parts):
    numbers = draws.uniform(*(np.arange(100_000) if p == "n" else p for p in parts))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(chi_square(np.histogram(numbers, 100, (0, 1))[0])) < 6


@pytest.mark.parametrize(("one", "other"), [((1, 0), (1, 1)), ((0, 1), (1, 0)), ((1, 5), (2, 5)), ((3,), (3, 0))])
def test_streams_are_independent(one, other):
    index = np.arange(50_000)
    a, b = draws.uniform(*one, index), draws.uniform(*other, index)
    assert abs(chi_square(np.histogram2d(a, b, 10, ((0, 1), (0, 1)))[0])) < 6
    assert abs(chi_square(np.histogram2d(a[1:], b[:-1], 10, ((0, 1), (0, 1)))[0])) < 6


@pytest.mark.parametrize("limit", [1, 2, 7, 1000])
def test_below_is_in_range_and_uniform(limit):
    numbers = draws.below(limit, 3, np.arange(50_000))
    assert numbers.min() == 0
    assert numbers.max() == limit - 1
    assert limit == 1 or abs(chi_square(np.bincount(numbers, minlength=limit))) < 6


def test_below_takes_one_limit_per_element():
    limits = np.arange(1, 2000)
    numbers = draws.below(limits, 3, limits)
    assert (numbers >= 0).all()
    assert (numbers < limits).all()


def test_all_bits_of_a_key_part_count():
    assert len({int(draws.key(1, part)) for part in (1, 2**32 + 1, 2**33 + 1, 2**63 + 1)}) == 4


def test_keys_have_not_changed():
    """A run resumed by a later version gets the same data; single and vectorised keys are equal."""
    parts = [0, 1, 2**32 - 1, 2**32 + 1, 2**63 + 1]
    expected = [3086681396, 2085254608, 2146738012, 2232188005, 1536619631]
    assert draws.key(3, np.array(parts, dtype=np.uint64), 7).tolist() == expected
    assert [int(draws.key(3, part, 7)) for part in parts] == expected


def test_torch_seeds_are_distinct_and_in_range():
    seeds = [draws.seed(1, step) for step in range(1000)]
    assert len(set(seeds)) == 1000
    assert all(0 <= s < 2**63 for s in seeds)


# Segment pairs, on corpora in which every token has its own id, which shows its origin


def corpus_of(folder: Path, documents: list[list[int]]) -> Corpus:
    """A corpus of documents given by the lengths of their sentences; its tokens are numbered consecutively."""
    store, begin = Store(str(folder)), FIRST
    vocab_size = FIRST + sum(map(sum, documents))
    middle = len(documents) // 2
    for number, part in enumerate([documents[:middle], documents[middle:]]):
        sentences = np.array([n for d in part for n in d], dtype=np.int64)
        tokens = np.arange(begin, begin + sentences.sum())
        begin += len(tokens)
        held = Tokens(tokens, sentences, np.array([len(d) for d in part]))
        store.write_sealed(shard_name(number), pack_shard(held, vocab_size, {}, ReadErrors()))
    written = [read_written(store, shard_name(number)) for number in range(2)]
    write_manifest(store, "made here", vocab_size, written)
    return Corpus.open(folder)


def source_of(corpus: Corpus, max_length: int = 64, **changes) -> PairSource:
    return PairSource(corpus, np.arange(corpus.manifest.documents), max_length, **changes)


def drawn(source: PairSource, epochs: int = 1) -> list[Pair]:
    """All pairs of some epochs."""
    size = len(source)
    return source.pairs(np.repeat(np.arange(epochs), size), np.tile(np.arange(size), epochs))


def documents_of(corpus: Corpus, tokens) -> np.ndarray:
    """The document of each token."""
    return np.searchsorted(np.cumsum(corpus.document_tokens), np.asarray(tokens, dtype=np.int64) - FIRST, side="right")


def is_contiguous(tokens) -> bool:
    return bool((np.diff(np.asarray(tokens, dtype=np.int64)) == 1).all())


def same(one: list[Pair], other: list[Pair]) -> bool:
    def plain(pairs):
        return [(p.first.tolist(), p.second.tolist(), p.is_next) for p in pairs]

    return plain(one) == plain(other)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 21, size=rng.integers(1, 60)).tolist() for _ in range(80)]
    return corpus_of(tmp_path_factory.mktemp("numbered"), [*documents, [2], [512, 3, 200], [1, 1]])


@pytest.fixture(scope="module")
def source(corpus: Corpus) -> PairSource:
    return source_of(corpus)


@pytest.fixture(scope="module")
def pairs(source: PairSource) -> list[Pair]:
    return drawn(source, 6)


def test_pairs_are_a_pure_function(source, pairs):
    size, rng = len(source), np.random.default_rng(1)
    order = rng.permutation(len(pairs))[:700]
    epochs, indices = np.divmod(order, size)
    assert same(source.pairs(epochs, indices), [pairs[i] for i in order])
    alone = [source.pairs(epochs[i : i + 1], indices[i : i + 1])[0] for i in range(100)]
    assert same(alone, [pairs[i] for i in order[:100]])
    assert same(source_of(source.corpus).pairs(epochs[:100], indices[:100]), alone)


def test_another_seed_gives_different_pairs(corpus, pairs):
    others = drawn(source_of(corpus, seed=1), 1)
    assert sum(same([a], [b]) for a, b in zip(others, pairs, strict=False)) < 0.1 * len(others)


def test_the_number_of_chunks_follows_from_the_tokens(source):
    assert len(source) == sum(-(-int(n) // 61) for n in source.corpus.document_tokens)


def test_labels_are_balanced(pairs):
    share = np.mean([p.is_next for p in pairs])
    assert abs(share - 0.5) < 4 * 0.5 / np.sqrt(len(pairs))


def test_segments_are_contiguous_not_empty_and_fit_the_length(pairs):
    for pair in pairs:
        assert min(len(pair.first), len(pair.second)) > 0
        assert len(pair.first) + len(pair.second) + 3 <= 64
        assert is_contiguous(pair.first)
        assert is_contiguous(pair.second)


def test_the_next_segment_follows_in_the_same_document(corpus, pairs):
    follows = [p for p in pairs if p.is_next]
    ends = np.array([(p.first[-1], p.second[0], len(p.first) + len(p.second)) for p in follows], dtype=np.int64)
    assert all(len(set(documents_of(corpus, [*p.first, *p.second]))) == 1 for p in follows)
    gaps = ends[:, 1] - ends[:, 0] - 1
    assert (gaps >= 0).all()
    assert (gaps < 512).all(), "what truncation takes is less than a sentence"
    assert (gaps <= 20)[documents_of(corpus, ends[:, 0]) != 81].all()
    assert (gaps == 0).any()


def test_text_that_fits_is_not_truncated(tmp_path):
    corpus = corpus_of(tmp_path, [[5, 7, 9]] * 50)
    for pair in drawn(source_of(corpus, short_share=0.0), 4):
        assert len(pair.first) in (5, 12)
        assert not pair.is_next or np.array_equal(np.diff(np.concatenate([pair.first, pair.second])), [1] * 20)


def test_the_random_segment_is_from_another_document(corpus, pairs):
    drawn_from = []
    for pair in (p for p in pairs if not p.is_next):
        first, second = set(documents_of(corpus, pair.first)), set(documents_of(corpus, pair.second))
        assert len(first) == len(second) == 1
        assert first != second
        drawn_from += second
    assert set(drawn_from) == set(range(corpus.manifest.documents)), "every document is drawn from"


def test_every_epoch_reads_every_document(corpus, source, pairs):
    size = len(source)
    for epoch in range(6):
        reached = {int(documents_of(corpus, p.first)[0]) for p in pairs[epoch * size : (epoch + 1) * size]}
        assert reached == set(range(corpus.manifest.documents))


def test_another_epoch_gives_different_chunks(tmp_path):
    source = source_of(corpus_of(tmp_path, [[5] * 400] * 3))
    starts = [[int(p.first[0]) for p in source.pairs(np.full(len(source), e), np.arange(len(source)))] for e in (0, 1)]
    assert np.mean(np.array(starts[0]) == np.array(starts[1])) < 0.2


@pytest.fixture(scope="module")
def long_pairs(tmp_path_factory: pytest.TempPathFactory) -> list[Pair]:
    """Pairs of documents so long that their ends have little effect."""
    return drawn(source_of(corpus_of(tmp_path_factory.mktemp("long"), [[7, 3, 12, 1] * 1500] * 3), max_length=43), 3)


def test_a_tenth_of_the_sequences_is_short(long_pairs):
    lengths = np.array([len(p.first) + len(p.second) for p in long_pairs if p.is_next])
    short = lengths[lengths < 40]
    expected = 0.1 * 38 / 39  # a short target may be as long as a full one
    assert abs(len(short) / len(lengths) - expected) < 4 * np.sqrt(0.09 / len(lengths)) + 0.003
    assert set(short) == set(range(2, 40))
    assert abs(short.mean() - 20.5) < 4 * 11 / np.sqrt(len(short))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_short_share_sets_the_share_of_short_sequences(tmp_path, share):
    source = source_of(corpus_of(tmp_path, [[4] * 3000] * 2), short_share=share)
    lengths = [len(p.first) + len(p.second) for p in drawn(source) if p.is_next]
    assert (np.mean(np.array(lengths) == 61) > 0.95) == (share == 0.0)


@pytest.mark.parametrize("length", [2, 9, 60, 300])
def test_labels_of_single_sentences_are_balanced(tmp_path, length):
    found = drawn(source_of(corpus_of(tmp_path, [[length]] * 100)), 12)
    assert abs(np.mean([p.is_next for p in found]) - 0.5) < 4 * 0.5 / np.sqrt(len(found))
    assert all(min(len(p.first), len(p.second)) > 0 for p in found)
    assert all(is_contiguous(p.first) and is_contiguous(p.second) for p in found)


def test_documents_of_one_token_have_no_next_segment(tmp_path):
    found = drawn(source_of(corpus_of(tmp_path, [[1]] * 20)), 3)
    assert all(len(p.first) == len(p.second) == 1 and not p.is_next for p in found)


@pytest.mark.parametrize("max_length", [5, 6, 16, 512])
def test_pairs_fit_any_maximum_length(corpus, max_length):
    for pair in drawn(source_of(corpus, max_length)):
        assert min(len(pair.first), len(pair.second)) > 0
        assert len(pair.first) + len(pair.second) + 3 <= max_length


def test_segment_boundaries_do_not_reveal_the_label(corpus, pairs):
    """Both kinds of second segments are cut by the same rule; otherwise the cuts would reveal the label."""
    sentences = np.concatenate([np.diff(shard.sentences) for shard in corpus.shards])
    bounds = FIRST + np.cumsum([0, *sentences])
    shares = {}
    for label in (True, False):
        begins = [int(p.second[0]) for p in pairs if p.is_next == label]
        ends = [int(p.second[-1]) + 1 for p in pairs if p.is_next == label]
        shares[label] = np.isin(begins, bounds).mean(), np.isin(ends, bounds).mean()
    assert np.abs(np.subtract(shares[True], shares[False])).max() < 0.15


def test_segment_lengths_do_not_reveal_the_label(long_pairs):
    lengths = {
        k: np.mean([(len(p.first), len(p.second)) for p in long_pairs if p.is_next == k], 0) for k in (True, False)
    }
    assert np.abs(lengths[True] - lengths[False]).max() < 0.8


@pytest.mark.parametrize("chunks", [2, 3, 2.4, 2.95])
def test_the_end_of_a_document_is_read_as_often_as_its_beginning(tmp_path, chunks):
    size = round(chunks * 61)
    corpus = corpus_of(tmp_path, [[5] * (size // 5) + [size % 5] * (size % 5 > 0)] * 40)
    seen = np.zeros(size)
    for pair in drawn(source_of(corpus), 30):
        for segment in (pair.first, pair.second):
            seen[(segment.astype(np.int64) - FIRST) % size] += 1
    fifth = size // 5
    assert 0.5 < seen[-fifth:].mean() / seen[:fifth].mean() < 2


def one_at_a_time(first: int, second: int, limit: int) -> tuple[int, int]:
    """The released code's loop: drop a token from the longer segment, from the second if both are equal."""
    while first + second > limit:
        if first > second:
            first -= 1
        else:
            second -= 1
    return first, second


@pytest.mark.parametrize("limit", [2, 3, 10, 11, 61])
def test_truncation_gives_the_lengths_of_dropping_one_at_a_time(limit):
    for first in range(1, 40):
        for second in range(1, 40):
            found = truncate(np.arange(first), np.arange(100, 100 + second), limit, 0x5A5A5A5A5A5A5A5A5A5A)
            assert tuple(map(len, found)) == one_at_a_time(first, second, limit)
            assert is_contiguous(found[0])
            assert is_contiguous(found[1])


def test_truncation_drops_from_front_and_back_equally_often():
    rng = np.random.default_rng(0)
    front = np.zeros(2)
    for _ in range(2000):
        coins = int.from_bytes(rng.bytes(128), "little")
        first, second = truncate(np.arange(60), np.arange(60), 80, coins)  # each loses 20
        front += first[0], second[0]
    assert (np.abs(front / 40_000 - 0.5) < 4 * 0.5 / np.sqrt(40_000)).all()


def test_both_segments_are_truncated_by_independent_draws():
    """With the same draws both segments would lose the same number of tokens at the front."""
    fronts = []
    for coins in np.random.default_rng(5).integers(0, 2**62, 2000).tolist():
        first, second = truncate(np.arange(40), np.arange(40), 40, coins)  # each loses 20
        fronts.append((first[0], second[0]))
    assert abs(np.corrcoef(np.array(fronts).T)[0, 1]) < 0.1


def test_truncation_of_pairs_drops_from_front_and_back_equally_often(tmp_path):
    """Documents have one sentence, so that all missing tokens were truncated."""
    found = [p for p in drawn(source_of(corpus_of(tmp_path, [[300]] * 60), short_share=0.0), 4) if p.is_next]
    front = sum(int(p.first[0] - FIRST) % 300 for p in found)
    back = sum(299 - int(p.second[-1] - FIRST) % 300 for p in found)
    assert abs(front / (front + back) - 0.5) < 0.05


@pytest.mark.parametrize("documents", [[[5, 5]], []])
def test_one_document_is_refused(tmp_path, documents):
    corpus = corpus_of(tmp_path, [[5, 5], [6]])
    with pytest.raises(UserError, match=f"gives {len(documents)} document.*another document: separate .* blank line"):
        PairSource(corpus, np.arange(len(documents)), 64)


def test_length_without_room_is_refused(corpus):
    with pytest.raises(UserError, match=r"data\.max_length 4 leaves no room"):
        source_of(corpus, max_length=4)


def test_only_the_given_documents_are_used(corpus):
    chosen = np.array([3, 17, 40, 66])
    found = drawn(PairSource(corpus, chosen, 32), 5)
    assert {int(d) for p in found for d in documents_of(corpus, [*p.first, *p.second])} == set(chosen.tolist())


# Masking


def sequences(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random packed `[CLS] A [SEP] B [SEP]` with their lengths and keys."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, 65, size=count)
    rows = [rng.integers(FIRST, 100, size=n) for n in lengths]
    for row in rows:
        row[[0, len(row) // 2, -1]] = 2, 3, 3
    return np.concatenate(rows), lengths, draws.key(seed, np.arange(count))


@pytest.fixture(scope="module")
def unmasked():
    return sequences(2000)


@pytest.fixture(scope="module")
def masked(unmasked):
    return mask_tokens(*unmasked, MaskPolicy(), VOCABULARY)


def test_the_number_of_masked_tokens_of_each_sequence_is_exact(unmasked, masked):
    owner = np.repeat(np.arange(2000), unmasked[1])
    counts = np.bincount(owner[masked.positions], minlength=2000)
    assert counts.tolist() == [max(1, round(0.15 * int(n))) for n in unmasked[1]]


@pytest.mark.parametrize("rate", [0.01, 0.4, 0.99])
def test_other_masking_rates_are_exact(unmasked, rate):
    tokens, lengths, keys = unmasked
    found = mask_tokens(tokens, lengths, keys, MaskPolicy(rate=rate), VOCABULARY)
    counts = np.bincount(np.repeat(np.arange(2000), lengths)[found.positions], minlength=2000)
    assert counts.tolist() == [min(max(1, round(rate * int(n))), int(n) - 3) for n in lengths]


def test_special_tokens_are_never_masked(unmasked, masked):
    assert not np.isin(unmasked[0][masked.positions], range(5)).any()


def test_unknown_tokens_are_never_masked():
    tokens = np.array([2, 1, 1, 3, 1, 3, 2, 50, 3, 1, 3])
    found = mask_tokens(tokens, np.array([6, 5]), draws.key(1, np.arange(2)), MaskPolicy(), VOCABULARY)
    assert found.positions.tolist() == [7]


def test_targets_are_the_original_tokens_and_the_rest_is_unchanged(unmasked, masked):
    tokens = unmasked[0]
    assert np.array_equal(masked.targets, tokens[masked.positions])
    rest = np.ones(len(tokens), dtype=bool)
    rest[masked.positions] = False
    assert np.array_equal(masked.tokens[rest], tokens[rest])
    assert (np.diff(masked.positions) > 0).all()


def test_eight_of_ten_masked_one_random_one_kept(unmasked, masked):
    now = masked.tokens[masked.positions]
    count = len(now)
    share_masked, share_kept = np.mean(now == 4), np.mean(now == masked.targets)
    assert abs(share_masked - 0.8) < 4 * 0.4 / np.sqrt(count)
    assert abs(share_kept - (0.1 + 0.1 / 95)) < 4 * 0.3 / np.sqrt(count)  # a random token may equal the original
    random = now[(now != 4) & (now != masked.targets)]
    assert random.min() >= FIRST
    assert abs(chi_square(np.bincount(random, minlength=100)[FIRST:])) < 6


def test_every_position_is_masked_with_equal_probability(unmasked):
    tokens, lengths, keys = np.arange(FIRST, 45), np.full(1, 40), draws.key(5, np.arange(4000))
    many = mask_tokens(np.tile(tokens, 4000), np.repeat(lengths, 4000), keys, MaskPolicy(), VOCABULARY)
    assert abs(chi_square(np.bincount(many.positions % 40, minlength=40))) < 6


@pytest.mark.parametrize(
    ("mask_share", "random_share"), [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0)], ids=["mask", "random", "keep"]
)
def test_other_shares_of_masked_and_random_tokens(unmasked, mask_share, random_share):
    policy = MaskPolicy(mask_share=mask_share, random_share=random_share)
    found = mask_tokens(*unmasked, policy, VOCABULARY)
    now = found.tokens[found.positions]
    assert (now == 4).all() == (mask_share == 1)
    assert (now >= FIRST).all() == (mask_share == 0)
    assert np.array_equal(now, found.targets) == (mask_share + random_share == 0)


def test_masks_do_not_depend_on_the_other_sequences(unmasked):
    tokens, lengths, keys = (part.copy() for part in unmasked)
    starts = np.cumsum(lengths) - lengths
    whole = mask_tokens(tokens, lengths, keys, MaskPolicy(), VOCABULARY)
    for i in (0, 7, 1999):
        inside = slice(starts[i], starts[i] + lengths[i])
        alone = mask_tokens(tokens[inside], lengths[i : i + 1], keys[i : i + 1], MaskPolicy(), VOCABULARY)
        assert np.array_equal(alone.tokens, whole.tokens[inside])
        chosen = whole.positions[(whole.positions >= inside.start) & (whole.positions < inside.stop)]
        assert np.array_equal(alone.positions + starts[i], chosen)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"rate": 0.0}, "rate must be above 0 and under 1, not 0.0"),
        ({"rate": 1.0}, "rate must be above 0 and under 1, not 1.0"),
        ({"mask_share": 0.95}, "are more than all"),
        ({"random_share": -0.1}, "must be at least 0 and at most 1"),
    ],
)
def test_policies_out_of_range_are_refused(values, reason):
    with pytest.raises(UserError, match=reason):
        MaskPolicy(**values)


# The loader


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Tokenizer:
    """A tokenizer with as many entries as the corpus has tokens."""
    folder = tmp_path_factory.mktemp("words")
    words = [f"w{i}" for i in range(corpus.manifest.vocab_size - FIRST)]
    (folder / "vocab.txt").write_text("\n".join([*WORDPIECE.special_tokens, *words]))
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def loader(source: PairSource, tokenizer: Tokenizer) -> Loader:
    return Loader.of(source, tokenizer, DataConfig(max_length=64, copies=0))


def rows(batch) -> list[list]:
    """Each sequence of a batch: tokens, segments, positions, the target of each masked position, and the label."""
    targets = torch.full_like(batch.tokens, -1)
    batch.layout.flat(targets)[batch.labels["masked"]] = batch.labels["targets"]
    real = batch.layout.pad(torch.ones_like(batch.tokens)).bool()
    columns = [batch.layout.pad(c) for c in (batch.tokens, batch.segments, batch.positions, targets)]
    return [[*(c[i][real[i]].tolist() for c in columns), int(label)] for i, label in enumerate(batch.labels["next"])]


def all_rows(batches) -> list[list]:
    return [row for batch in batches for row in rows(batch)]


def test_batches_hold_the_pairs_of_the_source(loader, source, tokenizer):
    epochs, indices = np.zeros(20, dtype=np.int64), np.arange(20)
    batch = loader.batch(epochs, indices)
    original = batch.tokens.clone()
    original[batch.labels["masked"]] = batch.labels["targets"]
    expected, segments = [], []
    for pair in source.pairs(epochs, indices):
        expected += [2, *pair.first, 3, *pair.second, 3]
        segments += [0] * (len(pair.first) + 2) + [1] * (len(pair.second) + 1)
    assert original.tolist() == expected
    assert batch.segments.tolist() == segments
    assert batch.labels["next"].tolist() == [int(not p.is_next) for p in source.pairs(epochs, indices)]
    assert batch.counts == {"mlm": len(batch.labels["masked"]), "nsp": 20}
    assert batch.num_tokens == len(expected)


def test_packed_and_padded_batches_hold_the_same_sequences(loader):
    packed = loader.step(3, 24, 8)
    padded = replace(loader, packed=False).step(3, 24, 8)
    assert all_rows(packed) == all_rows(padded)
    for a, b in zip(packed, padded, strict=True):
        flat = [x.layout.flat(x.tokens)[x.labels["masked"]].tolist() for x in (a, b)]
        assert flat[0] == flat[1]
        assert a.labels["targets"].tolist() == b.labels["targets"].tolist()
        assert a.counts == b.counts
        assert a.num_tokens == b.num_tokens == int(b.layout.mask.sum())


def test_the_data_of_a_step_is_reproducible(loader, corpus, tokenizer):
    before = [all_rows(loader.step(n, 16, 16)) for n in range(6)]
    again = Loader.of(source_of(corpus), tokenizer, loader.config)
    assert [all_rows(again.step(n, 16, 16)) for n in reversed(range(6))] == before[::-1]
    assert before[0] != before[1]


@pytest.mark.parametrize("micro_batch_size", [1, 5, 8, 16, 100])
def test_the_micro_batch_size_does_not_change_the_data(loader, micro_batch_size):
    assert all_rows(loader.step(2, 16, micro_batch_size)) == all_rows(loader.step(2, 16, 16))


def test_the_batch_size_does_not_change_the_order_of_samples(loader):
    assert all_rows(loader.step(1, 12, 12)) == all_rows(loader.step(2, 6, 6) + loader.step(3, 6, 6))


def test_every_chunk_is_read_once_per_epoch(loader, monkeypatch):
    monkeypatch.setattr(Loader, "batch", lambda self, epochs, indices: (epochs, indices))
    size, orders = len(loader.source), []
    batches = [b for step in range(-(-3 * size // 7)) for b in loader.step(step, 7, 4)]
    epochs, indices = (np.concatenate(column)[: 3 * size] for column in zip(*batches, strict=True))
    assert np.array_equal(epochs, np.repeat([0, 1, 2], size))
    for epoch in range(3):
        orders.append(indices[epochs == epoch])
        assert np.array_equal(np.sort(orders[-1]), np.arange(size))
    assert (orders[0] == orders[1]).mean() < 0.05
    assert (orders[0] == np.arange(size)).mean() < 0.05


def test_batches_hold_the_indices_of_their_chunks(loader):
    epochs, indices = np.zeros(5, dtype=np.int64), np.array([4, 1, 9, 3, 11])
    assert loader.batch(epochs, indices).to(torch.device("cpu")).indices.tolist() == indices.tolist()
    assert lay_out(np.arange(4), np.zeros(4), np.array([4]), packed=True).indices is None
    examples = [Example(np.arange(3), np.zeros(3), of_task(0))] * 2
    assert collate(examples, packed=True).indices is None
    assert collate(examples, packed=True, indices=np.array([7, 8])).indices.tolist() == [7, 8]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("batch_size", [24, 22])
def test_ranks_divide_the_micro_batches_of_a_step(loader, monkeypatch, ranks, batch_size):
    alone = loader.step(2, batch_size, 4)
    built = []
    make = Loader.batch
    monkeypatch.setattr(Loader, "batch", lambda self, *chunks: built.append(len(chunks[1])) or make(self, *chunks))
    shares = [loader.step(2, batch_size, 4, rank, ranks) for rank in range(ranks)]
    assert {len(own) for own in shares} == {-(-6 // ranks)}
    assert len(built) == ranks * -(-6 // ranks), "each builds its own, no more"
    working = [batch for turn in zip(*shares, strict=True) for batch in turn if batch.num_tokens]
    assert all_rows(working) == all_rows(alone)
    assert [b.indices.tolist() for b in working] == [b.indices.tolist() for b in alone]
    everyone = [batch for own in shares for batch in own]
    for name in ("mlm", "nsp"):
        assert sum(b.counts[name] for b in everyone) == sum(b.counts[name] for b in alone)
    assert sum(b.num_tokens for b in everyone) == sum(b.num_tokens for b in alone)
    for batch in (b for b in everyone if not b.num_tokens):
        assert batch.counts == {"mlm": 0, "nsp": 0}
        assert len(batch.indices) == 0
        assert rows(batch) == rows(alone[0])


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_split_for_rank_pads_with_idle_items(ranks):
    items = list("abcdefg")
    shares = [split_for_rank(items, rank, ranks) for rank in range(ranks)]
    assert {len(own) for own in shares} == {-(-7 // ranks)}
    assert sorted(item for own in shares for item, idle in own if not idle) == items
    assert all(item == "a" for own in shares for item, idle in own if idle)
    assert split_for_rank([], 0, ranks) == []


@pytest.mark.parametrize(("copies", "repeats"), [(2, [True, False, True, False]), (0, [True, False, False, False])])
def test_the_number_of_copies_sets_when_data_repeats(loader, copies, repeats):
    config = replace(loader.config, copies=copies)
    found = [rows(replace(loader, config=config).batch(np.full(30, e), np.arange(30))) for e in range(4)]
    assert [epoch == found[0] for epoch in found] == repeats


@dataclass(frozen=True)
class SameText:
    """A source that gives the same sequence in every epoch."""

    seed: int = 1
    max_length: int = 64

    def __len__(self) -> int:
        return 50

    def samples(self, epochs, indices):
        return [Sample((np.arange(FIRST, FIRST + 40),), (0,)) for _ in indices]


@pytest.mark.parametrize(("copies", "repeats"), [(3, [3, 6, 9]), (1, range(1, 10)), (0, [])])
def test_the_same_text_is_masked_differently_in_each_copy(loader, copies, repeats):
    """Masks repeat after the number of copies, or never without copies, and differ between sequences."""
    objective = MaskedLMConfig(next_sentence=False)
    found = replace(loader, source=SameText(), objective=objective, config=replace(loader.config, copies=copies))
    masks = [found.batch(np.full(4, epoch), np.arange(4)).labels["masked"].tolist() for epoch in range(10)]
    assert [epoch for epoch in range(1, 10) if masks[epoch] == masks[0]] == list(repeats)
    places = np.array(masks[0]).reshape(4, -1) % 42
    assert len({tuple(row) for row in places.tolist()}) == 4


def test_copies_are_read_in_another_order(loader):
    found = replace(loader, config=replace(loader.config, copies=1))
    size = len(loader.source)
    first, second = (all_rows(found.step(epoch, size, 100)) for epoch in (0, 1))
    assert first != second
    assert sorted(first) == sorted(second)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"held_out": -0.1}, r"data\.held_out must be at least 0 and under 1, not -0\.1"),
        ({"held_out": 1.0}, r"data\.held_out must be"),
        ({"short_share": -0.1}, r"data\.short_share must be at least 0 and at most 1, not -0\.1"),
        ({"short_share": 1.5}, r"data\.short_share must be at least 0 and at most 1"),
        ({"short_share": float("nan")}, r"data\.short_share must be a finite number"),
        ({"copies": -1}, r"data\.copies must be at least 0, not -1"),
        ({"max_length": 4}, r"data\.max_length must be at least 5, not 4"),
        ({"pairs": "sop"}, r"data\.pairs must be one of next, order, full, varied, contiguous, not 'sop'"),
    ],
)
def test_settings_out_of_range_are_refused(values, reason):
    with pytest.raises(UserError, match=reason):
        DataConfig(**values)


def test_settings_at_the_limits_are_accepted():
    for values in ({"short_share": 0.0}, {"short_share": 1.0}, {"copies": 0}, {"max_length": 5}, {"held_out": 0.0}):
        DataConfig(**values)


@pytest.mark.parametrize(
    ("count", "held_out", "size"), [(1000, 0.01, 10), (1000, 0.25, 250), (50, 0.01, 2), (4, 0.9, 2)]
)
def test_split_documents_is_a_reproducible_partition(count, held_out, size):
    training, held = split_documents(count, held_out)
    assert len(held) == size
    assert np.array_equal(np.sort(np.concatenate([training, held])), np.arange(count))
    again = split_documents(count, held_out)
    assert np.array_equal(training, again[0])
    assert np.array_equal(held, again[1])
    assert count < 50 or not np.array_equal(held, np.arange(size))  # a random choice


def test_split_documents_may_hold_out_none():
    training, held = split_documents(10, 0.0)
    assert training.tolist() == list(range(10))
    assert held.tolist() == []


def test_too_few_documents_to_split_are_refused():
    with pytest.raises(UserError, match="3 documents cannot be divided"):
        split_documents(3, 0.1)
