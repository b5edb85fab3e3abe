"""A vocabulary on the first nine tenths of a text's documents, its fit to the rest, and the peak memory of training.

python -m benchmarks.vocabulary wikipedia-ko.txt
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.record import record
from bertsmith.config import to_dict
from bertsmith.corpus.coverage import coverage
from bertsmith.corpus.readers import Documents
from bertsmith.corpus.vocabulary import train_tokenizer


def measure(path: Path, cased: bool, work: Path) -> dict[str, Any]:
    """Train on the first part and count [UNK] in the rest."""
    documents = list(Documents.of([path]))
    cut = len(documents) * 9 // 10
    (work / "train.txt").write_text("\n\n".join("\n".join(d) for d in documents[:cut]) + "\n", encoding="utf-8")
    held_out = [paragraph for document in documents[cut:] for paragraph in document]
    del documents
    began = time.perf_counter()
    trained = train_tokenizer([work / "train.txt"], work / f"tok-{cased}", cased=cased)
    seconds = time.perf_counter() - began
    facts = to_dict(coverage(trained.tokenizer, held_out))
    kept = {name: facts[name] for name in ("words", "tokens", "tokens_per_word", "unk_share")}
    return {**kept, "entries": trained.tokenizer.vocab_size, "sampled": trained.sampled, "seconds": seconds}


def main() -> None:
    """Measure each text, cased and uncased, print the table, write the results."""
    results = {}
    for path in map(Path, sys.argv[1:]):
        for cased in (False, True):
            with tempfile.TemporaryDirectory() as work:
                results[f"{path.stem}, {'cased' if cased else 'uncased'}"] = measure(path, cased, Path(work))
    table = Table("text", "[UNK] %", "tokens a word", "seconds")
    for name, facts in results.items():
        table.add_row(
            name, f"{100 * facts['unk_share']:.4f}", f"{facts['tokens_per_word']:.3f}", f"{facts['seconds']:.0f}"
        )
    Console().print(table)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    record("vocabulary", {**results, "peak_mebibytes_with_the_text_in_memory": peak})


if __name__ == "__main__":
    main()
