"""Whether the label of next sentence prediction shows in segments' lengths: a classifier that sees nothing else.

python -m benchmarks.pairs shards [shards]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier

from benchmarks.record import record
from bertsmith.corpus.shards import Corpus
from bertsmith.pretraining.loader import DataConfig, split_documents
from bertsmith.pretraining.segments import PairSource

PAIRS = 20_000  # half to learn from


def shown(corpus: Corpus, max_length: int) -> dict[str, float]:
    """How often the lengths give the label away, and how full sequences are."""
    data = DataConfig()
    documents = split_documents(corpus.manifest.documents, data.held_out)[0]
    source = PairSource(corpus, documents, max_length, data.short_share)
    chunks = np.random.default_rng(0).integers(0, len(source), PAIRS)
    pairs = source.pairs(np.zeros(PAIRS, np.int64), chunks)
    lengths = np.array([(len(pair.first), len(pair.second)) for pair in pairs])
    labels = np.array([pair.is_next for pair in pairs])
    learnt, asked = slice(PAIRS // 2), slice(PAIRS // 2, None)
    model = HistGradientBoostingClassifier(max_depth=4).fit(lengths[learnt], labels[learnt])
    right = float(model.score(lengths[asked], labels[asked]))
    return {"label_right_by_lengths": round(right, 3), "mean_tokens": round(float(lengths.sum(1).mean()) + 3, 1)}


def main() -> None:
    """Measure, print, write."""
    results = {}
    for folder in map(Path, sys.argv[1:]):
        corpus = Corpus.open(folder)
        facts = {"documents": corpus.manifest.documents, "tokens": corpus.manifest.tokens}
        results[folder.name] = facts | {str(length): shown(corpus, length) for length in (128, 512)}
    print(results)
    record("pairs", results)


if __name__ == "__main__":
    main()
