"""Sentence-order pairs and full sentences are as in their papers; next-sentence pairs have not changed."""

import hashlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from conftest import TINY
from sklearn.ensemble import HistGradientBoostingClassifier
from test_pretraining_data import FIRST, corpus_of, documents_of, drawn, is_contiguous, same, source_of
from tokenizers import Tokenizer as Backend
from tokenizers import models

from bertsmith.corpus.shards import Corpus
from bertsmith.errors import UserError
from bertsmith.objectives.settings import MaskedLMConfig
from bertsmith.pretraining.loader import DataConfig, Loader
from bertsmith.pretraining.segments import FullSource, Pair, PairSource, Sample, segment_source
from bertsmith.text.frame import GPT_TEXT, ROBERTA, WORDPIECE
from bertsmith.text.tokenizer import Tokenizer

NO_PAIRS = MaskedLMConfig(next_sentence=False)


def digest(*arrays) -> str:
    return hashlib.sha256(b"".join(np.asarray(a, dtype=np.int64).tobytes() for a in arrays)).hexdigest()[:16]


def tokenizer_for(corpus: Corpus, folder: Path) -> Tokenizer:
    """A tokenizer with as many entries as the corpus has tokens."""
    words = [f"w{i}" for i in range(corpus.manifest.vocab_size - FIRST)]
    (folder / "vocab.txt").write_text("\n".join([*WORDPIECE.special_tokens, *words]))
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Documents of all sizes, the smallest of a single token."""
    documents = [[1 + (7 * i + 3 * j * j) % 19 for j in range(1 + 5 * i % 40)] for i in range(60)]
    return corpus_of(tmp_path_factory.mktemp("numbered"), documents)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Tokenizer:
    return tokenizer_for(corpus, tmp_path_factory.mktemp("words"))


def sentence_starts(corpus: Corpus) -> np.ndarray:
    sentences = np.concatenate([np.diff(shard.sentences) for shard in corpus.shards])
    return FIRST + np.cumsum([0, *sentences])


# Next-sentence pairs


def test_next_sentence_pairs_have_not_changed(corpus):
    pairs = drawn(source_of(corpus, 48), 3)
    assert digest(*(x for p in pairs for x in (p.first, p.second, [p.is_next]))) == "87ae67c1ab5da7df"


def test_batches_of_next_sentence_pairs_have_not_changed(corpus, tokenizer):
    loader = Loader.of(source_of(corpus, 48), tokenizer, DataConfig(max_length=48))
    columns = []
    for batch in (b for number in range(20) for b in loader.step(number, 32, 12)):
        columns += [batch.tokens, batch.segments, batch.positions]
        columns += [batch.labels[name] for name in ("masked", "targets", "next")]
        columns.append(list(batch.counts.values()))
    assert digest(*columns) == "627b30a68e43e1c5"


def test_the_kind_selects_the_source(corpus):
    documents = np.arange(corpus.manifest.documents)
    chosen = {kind: segment_source(kind, corpus, documents, 48, 0.2, 3) for kind in ("next", "order", "full", "varied")}
    assert chosen["next"].kind == "next"
    assert chosen["order"].kind == "order"
    assert chosen["order"].short_share == 0.2
    assert isinstance(chosen["full"], FullSource)
    assert (chosen["full"].short_share, chosen["varied"].short_share) == (0.0, 0.2)
    assert {(s.max_length, s.seed) for s in chosen.values()} == {(48, 3)}


# Sentence order


@pytest.fixture(scope="module")
def ordered(corpus) -> list[Pair]:
    return drawn(source_of(corpus, 48, kind="order"), 12)


def test_order_labels_are_balanced(ordered):
    share = np.mean([p.is_next for p in ordered])
    assert abs(share - 0.5) < 4 * 0.5 / np.sqrt(len(ordered))


def test_ordered_segments_are_adjacent_in_one_document(corpus, ordered):
    for pair in ordered:
        first, second = (pair.first, pair.second) if pair.is_next else (pair.second, pair.first)
        assert len(first) > 0
        assert len(second) > 0
        assert len(first) + len(second) + 3 <= 48
        assert is_contiguous(first)
        assert is_contiguous(second)
        assert 0 < int(second[0]) - int(first[-1]) <= 20, "no more between them than truncation takes"
        assert len(set(documents_of(corpus, [*first, *second]))) == 1


def test_ordered_text_that_fits_is_not_truncated(tmp_path):
    corpus = corpus_of(tmp_path, [[5, 7, 9]] * 40)
    found = drawn(source_of(corpus, 64, kind="order", short_share=0.0), 4)
    for pair in found:
        first, second = (pair.first, pair.second) if pair.is_next else (pair.second, pair.first)
        assert len(first) in (5, 12)
        assert is_contiguous([*first, *second])
    assert {(len(p.first), p.is_next) for p in found} == {(5, True), (12, True), (16, False), (9, False)}


def test_every_document_of_more_than_one_token_is_read(corpus, ordered):
    reached = {int(documents_of(corpus, p.first)[0]) for p in ordered}
    assert reached == set(np.flatnonzero(corpus.document_tokens > 1).tolist())
    assert len(reached) < corpus.manifest.documents


@pytest.mark.parametrize("length", [2, 9, 60, 300])
def test_a_single_sentence_is_split_into_two_segments(tmp_path, length):
    found = drawn(source_of(corpus_of(tmp_path, [[length]] * 100), kind="order"), 12)
    assert abs(np.mean([p.is_next for p in found]) - 0.5) < 4 * 0.5 / np.sqrt(len(found))
    assert all(min(len(p.first), len(p.second)) > 0 for p in found)
    assert all((p.first[0] < p.second[0]) == p.is_next for p in found)


def test_a_last_sentence_of_one_token_gives_no_empty_segment(tmp_path):
    found = drawn(source_of(corpus_of(tmp_path, [[60, 1], [61, 1, 1], [1, 1]] * 20), kind="order"), 6)
    assert all(min(len(p.first), len(p.second)) > 0 for p in found)
    assert abs(np.mean([p.is_next for p in found]) - 0.5) < 4 * 0.5 / np.sqrt(len(found))


def test_order_needs_a_document_of_two_tokens(tmp_path):
    corpus = corpus_of(tmp_path, [[1], [4, 4]])
    assert len(drawn(PairSource(corpus, np.array([1]), 16, kind="order"))) == 1
    with pytest.raises(UserError, match="no document of two or more tokens"):
        PairSource(corpus, np.array([0]), 16, kind="order")
    with pytest.raises(UserError, match="no document of two or more tokens"):
        PairSource(corpus, np.array([], dtype=np.int64), 16, kind="order")


@pytest.mark.parametrize("max_length", [5, 6, 16, 512])
def test_ordered_pairs_fit_any_maximum_length(corpus, max_length):
    for pair in drawn(source_of(corpus, max_length, kind="order")):
        assert min(len(pair.first), len(pair.second)) > 0
        assert len(pair.first) + len(pair.second) + 3 <= max_length


def test_ordered_pairs_are_reproducible(corpus, ordered):
    source = source_of(corpus, 48, kind="order")
    picked = np.random.default_rng(1).permutation(len(ordered))[:200]
    epochs, indices = np.divmod(picked, len(source))
    assert same(source.pairs(epochs, indices), [ordered[i] for i in picked])
    assert not same(source_of(corpus, 48, kind="order", seed=1).pairs(epochs, indices), [ordered[i] for i in picked])


@pytest.mark.parametrize(("documents", "sentences"), [(4000, 1), (3000, 4), (800, 60)])
def test_segment_lengths_do_not_reveal_the_order(tmp_path, documents, sentences):
    """A classifier on the lengths, trained on some documents, is near chance on the others."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 1 + sentences, size=documents)
    corpus = corpus_of(tmp_path, [rng.integers(2, 30, size=n).tolist() for n in sizes])
    found = drawn(source_of(corpus, kind="order"))
    lengths = np.array([(len(p.first), len(p.second), len(p.first) - len(p.second)) for p in found])
    labels = np.array([p.is_next for p in found])
    trained_on = documents_of(corpus, [p.first[0] for p in found]) % 2 == 0
    classifier = HistGradientBoostingClassifier(max_iter=40).fit(lengths[trained_on], labels[trained_on])
    assert len(labels) > 3500
    assert classifier.score(lengths[~trained_on], labels[~trained_on]) < 0.55


# Full sentences


def full_of(corpus: Corpus, max_length: int = 64, **changes) -> FullSource:
    return FullSource(corpus, np.arange(corpus.manifest.documents), max_length, **changes)


def all_samples(source: FullSource, epochs: int = 1) -> list[Sample]:
    size = len(source)
    return source.samples(np.repeat(np.arange(epochs), size), np.tile(np.arange(size), epochs))


def size_of(sample: Sample) -> int:
    """The number of tokens of a sequence, including special tokens."""
    return 1 + sum(len(part) + 1 for part in sample.parts)


@pytest.fixture(scope="module")
def full(corpus) -> list[Sample]:
    return all_samples(full_of(corpus), 8)


def test_full_sentences_have_one_segment_and_no_label(full):
    assert all(set(s.segments) == {0} and len(s.segments) == len(s.parts) and s.label is None for s in full)


def test_parts_are_contiguous_and_from_consecutive_documents(corpus, full):
    count = corpus.manifest.documents
    ends = FIRST + np.cumsum(corpus.document_tokens)
    crossings = 0
    for sample in full:
        for part in sample.parts:
            assert len(part) > 0
            assert is_contiguous(part)
            assert len(set(documents_of(corpus, part))) == 1
        owners = [int(documents_of(corpus, part)[0]) for part in sample.parts]
        assert all((b - a) % count == 1 for a, b in pairwise(owners))
        for part, owner in zip(sample.parts[:-1], owners, strict=False):
            assert part[-1] + 1 == ends[owner], "a document is left at its end"
        assert {p[0] for p in sample.parts[1:]} <= {FIRST, *ends.tolist()}, "and entered at its beginning"
        crossings += len(owners) - 1
    assert crossings > 0


def test_sequences_are_full(full):
    sizes = np.array([size_of(s) for s in full])
    assert sizes.max() == 64
    assert sizes.min() >= 1 + 0.95 * 62
    assert sizes.mean() > 0.98 * 64


def test_sequences_begin_at_a_sentence(corpus, full):
    assert np.isin([s.parts[0][0] for s in full], sentence_starts(corpus)).all()


def test_a_last_sentence_is_dropped_if_too_little_of_it_fits(tmp_path):
    source = full_of(corpus_of(tmp_path, [[20] * 300, [20] * 300]), 62 + 2)
    inside = [s for s in all_samples(source) if len(s.parts) == 1]
    assert {size_of(s) for s in inside} == {62}, "three sentences of 20; two tokens of a fourth would fit"
    source = full_of(corpus_of(tmp_path / "other", [[19] * 300, [19] * 300]), 62 + 2)
    inside = [s for s in all_samples(source) if len(s.parts) == 1]
    assert {size_of(s) for s in inside} == {64}, "five tokens of a fourth are taken"


def test_contiguous_text_begins_anywhere_and_an_epoch_reads_every_token_once(corpus):
    frame = GPT_TEXT  # no token between two documents: they are one row of tokens
    source = full_of(corpus, 50, frame=frame, whole_sentences=False)
    for epoch in range(2):
        found = source.samples(np.full(len(source), epoch), np.arange(len(source)))
        sizes = [sum(map(len, sample.parts)) for sample in found]
        assert set(sizes) == {50}
        starts = [sample.parts[0][0] for sample in found]
        assert not np.isin(starts, sentence_starts(corpus)).all()
        tokens = np.concatenate([part for sample in found for part in sample.parts])
        total = int(corpus.document_tokens.sum())
        assert len(set(tokens.tolist())) == total
        assert len(tokens) - total < 50  # the last chunk continues with the first one


def test_an_epoch_covers_the_corpus_about_once(corpus, full):
    size = len(full) // 8
    total = corpus.manifest.tokens
    assert size == -(-(total + corpus.manifest.documents) // 62)
    seen = np.zeros((8, total), dtype=int)
    for number, sample in enumerate(full):
        for part in sample.parts:
            seen[number // size, part.astype(np.int64) - FIRST] += 1
    assert (np.abs(seen.mean(1) - 1) < 0.03).all()
    assert ((seen > 0).mean(1) > 0.93).all()
    assert seen.max() <= 3
    assert (seen.sum(0) > 0).all(), "what one epoch passes over comes in another"


def test_the_epoch_shifts_the_chunks(full):
    size = len(full) // 8
    begins = np.array([s.parts[0][0] for s in full]).reshape(8, size)
    assert np.mean(begins[1:] == begins[:-1]) < 0.5
    assert len(np.unique(begins[:, size // 2])) > 3


def test_sentences_longer_than_a_sequence_are_read_completely(tmp_path):
    source = full_of(corpus_of(tmp_path, [[500], [3, 499], [400, 2]]))
    seen = np.zeros(1404, dtype=int)
    for sample in all_samples(source, 50):
        for part in sample.parts:
            seen[part.astype(np.int64) - FIRST] += 1
    assert seen.min() > 25
    assert seen.max() < 125


@pytest.mark.parametrize("documents", [[[40]], [[3, 4], [5], [2, 2, 2]], [[62]], [[1], [1]]], ids=str)
def test_no_token_of_a_tiny_corpus_is_repeated_in_a_sequence(tmp_path, documents):
    source = FullSource(corpus_of(tmp_path, [*documents, [1]]), np.arange(len(documents)), 64)
    for sample in all_samples(source, 20):
        tokens = np.concatenate(sample.parts)
        assert len(np.unique(tokens)) == len(tokens) > 0
        assert size_of(sample) <= 64


def test_short_documents_are_packed_into_full_sequences(tmp_path):
    source = full_of(corpus_of(tmp_path, [[4]] * 500), 128)
    sizes = [size_of(s) for s in all_samples(source, 3)]
    assert min(sizes) >= 0.95 * 128
    assert np.mean([len(s.parts) for s in all_samples(source)]) > 24


@pytest.mark.parametrize("max_length", [5, 6, 16, 512])
def test_full_sentences_fit_any_maximum_length(corpus, max_length):
    sizes = np.array([size_of(s) for s in all_samples(full_of(corpus, max_length))])
    assert sizes.max() <= max_length
    assert sizes.min() >= 0.95 * (max_length - 2) + 1


def test_full_sentences_are_reproducible(corpus, full):
    source = full_of(corpus)
    picked = np.random.default_rng(1).permutation(len(full))[:200]
    again = source.samples(*np.divmod(picked, len(source)))
    for one, i in zip(again, picked, strict=True):
        assert [p.tolist() for p in one.parts] == [p.tolist() for p in full[i].parts]


def test_varied_sentences_are_full_ones_of_which_some_are_short(corpus, full):
    found = all_samples(full_of(corpus, short_share=0.4), 8)
    same = [[p.tolist() for p in a.parts] == [p.tolist() for p in b.parts] for a, b in zip(found, full, strict=True)]
    assert 0.6 <= np.mean(same) < 0.65  # some are shortened to their own length
    short = [sample for sample, whole in zip(found, same, strict=True) if not whole]
    sizes = np.array([size_of(sample) for sample in short])
    assert np.percentile(sizes, 5) < 16 < 40 < np.percentile(sizes, 90) <= sizes.max() <= 64
    assert all(len(sample.parts) == 1 and is_contiguous(sample.parts[0]) for sample in short)
    starts = sentence_starts(corpus)
    assert np.isin([sample.parts[0][0] for sample in short], starts).all()
    inside = [sample.parts[0] for sample in short if size_of(sample) < 64]
    ends = {*starts.tolist(), FIRST + corpus.manifest.tokens}
    assert {int(part[-1]) + 1 for part in inside} <= ends, "whole sentences, unless they fill the sequence"


def test_a_short_sequence_of_a_long_sentence_is_cut(tmp_path):
    source = full_of(corpus_of(tmp_path, [[500, 3], [7]]), 64, short_share=1.0)
    sizes = {size_of(sample) for sample in all_samples(source, 20)}
    assert max(sizes) <= 64
    assert min(sizes) < 12


def test_full_sentences_use_only_the_given_documents(corpus):
    chosen = np.array([7, 11, 30])
    found = all_samples(FullSource(corpus, chosen, 32), 3)
    assert {int(d) for s in found for p in s.parts for d in documents_of(corpus, p)} == set(chosen.tolist())


def test_full_sentences_need_a_document_and_room(corpus):
    with pytest.raises(UserError, match="gives no documents"):
        FullSource(corpus, np.array([], dtype=np.int64), 64)
    with pytest.raises(UserError, match=r"data\.max_length 2 leaves no room"):
        FullSource(corpus, np.arange(3), 2)


# In the loader, and in a run


@pytest.mark.parametrize("packed", [True, False])
def test_batches_of_full_sentences(corpus, tokenizer, packed):
    source = full_of(corpus)
    loader = Loader.of(source, tokenizer, DataConfig(max_length=64, pairs="full"), packed, NO_PAIRS)
    batch = loader.batch(np.zeros(12, dtype=np.int64), np.arange(12))
    tokens = batch.layout.flat(batch.tokens).clone()
    tokens[batch.labels["masked"]] = batch.labels["targets"]
    expected = [[2, *(x for part in s.parts for x in [*part, 3])] for s in all_samples(source)[:12]]
    real = batch.layout.pad((batch.tokens != 0).long()).bool() if not packed else slice(None)
    assert tokens.reshape(batch.tokens.shape)[real].tolist() == [x for row in expected for x in row]
    assert not batch.segments.any()
    assert "next" not in batch.labels
    assert batch.counts == {"mlm": len(batch.labels["masked"])}


@pytest.mark.parametrize("kind", ["next", "order", "full"])
def test_batches_have_the_special_tokens_of_another_frame(corpus, kind):
    """`<s> a </s></s> b </s>` fits the maximum length with all special tokens and has one segment."""
    words = [f"w{i}" for i in range(corpus.manifest.vocab_size - FIRST)]
    vocab = {token: number for number, token in enumerate([*ROBERTA.special_tokens, *words])}
    tokenizer = Tokenizer(Backend(models.WordLevel(vocab, unk_token="<unk>")), False, frame=ROBERTA)
    source = segment_source(kind, corpus, np.arange(corpus.manifest.documents), 48, 0.0, 3, ROBERTA)
    loader = Loader.of(source, tokenizer, DataConfig(max_length=48, pairs=kind), objective=NO_PAIRS)
    batch = loader.batch(np.zeros(40, dtype=np.int64), np.arange(40))
    tokens = batch.tokens.clone()
    tokens[batch.labels["masked"]] = batch.labels["targets"]
    start, end = tokenizer.id("<s>"), tokenizer.id("</s>")
    rows = np.split(tokens.numpy(), batch.layout.starts[1:-1].numpy())
    samples = source.samples(np.zeros(40, dtype=np.int64), np.arange(40))
    assert [row.tolist() for row in rows] == [
        [start, *(x for i, part in enumerate(s.parts) for x in [*[end, end] * (i > 0), *part]), end] for s in samples
    ]
    assert max(map(len, rows)) == 48
    assert not batch.segments.any()


def test_batches_of_ordered_pairs(corpus, tokenizer):
    source = source_of(corpus, kind="order")
    loader = Loader.of(source, tokenizer, DataConfig(max_length=64, pairs="order"))
    batch = loader.batch(np.zeros(40, dtype=np.int64), np.arange(40))
    assert batch.labels["next"].tolist() == [int(not p.is_next) for p in drawn(source)[:40]]
    assert batch.counts["nsp"] == 40
    assert batch.segments.max() == 1


@pytest.mark.parametrize(("pairs", "unit"), [("order", "n-gram"), ("full", "span")])
def test_a_run_trains_with_another_kind_of_segments(world, tmp_path, pairs, unit):
    from bertsmith.config import override
    from bertsmith.pretraining.run import pretrain
    from bertsmith.recipes import recipe

    changes = [*TINY, "train.steps=2", "train.batch_size=8", "data.max_length=32", f"data.pairs={pairs}"]
    changes.append(f"objective.next_sentence={str(pairs != 'full').lower()}")
    config = override(recipe("bert-tiny"), [*changes, f"data.masking.unit={unit}"])
    scores = pretrain(config, world / "shards", tmp_path / "run", device="cpu")
    assert ("nsp_accuracy" in scores) == (pairs == "order")
