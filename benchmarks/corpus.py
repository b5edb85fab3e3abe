"""Raw text to shards: MB/s beside `tokenizers` alone and beside `datasets.map`, peak memory, resuming, the loader.

python -m benchmarks.corpus TEXT… [--skip-datasets] [--three-times]
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.record import record
from bertsmith.corpus.shards import Corpus
from bertsmith.corpus.vocabulary import train_tokenizer
from bertsmith.pretraining.loader import DataConfig, Loader
from bertsmith.pretraining.segments import PairSource
from bertsmith.text.tokenizer import Tokenizer


def resident(process: int) -> int:
    """Bytes that a process and its children hold, shared pages counted once (proportional set size)."""
    total, todo = 0, [process]
    while todo:
        pid = todo.pop()
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) * 1024
            for task in Path(f"/proc/{pid}/task").iterdir():
                todo += map(int, (task / "children").read_text().split())
        except (OSError, StopIteration):
            continue
    return total


@contextmanager
def peak_of(process: subprocess.Popen[Any]) -> Iterator[list[int]]:
    """Watches the memory of a process and its children; the list holds the highest value."""
    highest, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            highest[0] = max(highest[0], resident(process.pid))

    thread = threading.Thread(target=watch)
    thread.start()
    yield highest
    over.set()
    thread.join()


def timed(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def build(texts: list[Path], tokenizer: Path, out: Path, *more: str) -> tuple[float, int]:
    """Seconds and peak bytes of `bertsmith corpus build` on all cores."""
    command = [sys.executable, "-m", "bertsmith", "corpus", "build", *map(str, texts), "--tokenizer", str(tokenizer)]
    began = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--out", str(out), *more], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    with peak_of(process) as highest:
        assert process.wait() == 0
    return time.perf_counter() - began, highest[0]


def encode_alone(texts: list[Path], tokenizer: Path) -> float:
    """Seconds of `tokenizers.encode_batch` alone on the lines of the text, all cores, a thousand at a time."""
    backend = Tokenizer.load(tokenizer).backend
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    spent = 0.0
    for path in texts:
        with path.open(encoding="utf-8") as file:
            while lines := [line for _, line in zip(range(1000), file, strict=False)]:
                spent += timed(lambda lines=lines: backend.encode_batch(lines, add_special_tokens=False))  # type: ignore[misc]
    return spent


def datasets_map(texts: list[Path], tokenizer: Path, folder: Path) -> float:
    """Seconds of the usual way: `datasets` reads lines, tokenises and groups them into blocks of 512, two processes."""
    code = f"""
import sys
from datasets import load_dataset
from transformers import AutoTokenizer
tok = AutoTokenizer.from_pretrained({str(tokenizer)!r})
data = load_dataset("text", data_files={[str(t) for t in texts]!r}, split="train", cache_dir={str(folder)!r})
data = data.map(lambda b: tok(b["text"], add_special_tokens=False), batched=True, num_proc={os.cpu_count()},
                remove_columns=["text"])
def group(b):
    ids = sum(b["input_ids"], [])
    return {{"input_ids": [ids[i:i + 512] for i in range(0, len(ids) - 511, 512)]}}
data.map(group, batched=True, num_proc={os.cpu_count()}, remove_columns=data.column_names)
"""
    return timed(lambda: subprocess.run([sys.executable, "-c", code], check=True, capture_output=True))


def resumed(texts: list[Path], tokenizer: Path, whole: Path, out: Path, seconds: float) -> bool:
    """Kill a build half-way, start it again, compare every byte."""
    command = [sys.executable, "-m", "bertsmith", "corpus", "build", *map(str, texts), "--tokenizer", str(tokenizer)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*command, "--out", str(out)], start_new_session=True, **quiet)  # type: ignore[call-overload]
    time.sleep(0.6 * seconds)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    subprocess.run([*command, "--out", str(out)], check=True, **quiet)  # type: ignore[call-overload]
    names = sorted(p.name for p in whole.iterdir())
    return names == sorted(p.name for p in out.iterdir()) and all(
        (whole / n).read_bytes() == (out / n).read_bytes() for n in names
    )


def loader_speed(folder: Path, max_length: int) -> dict[str, float]:
    """Seconds to open a corpus and draw the first batch, and packed, masked tokens a second from one process."""
    began = time.perf_counter()
    corpus = Corpus.open(folder)
    pairs = PairSource(corpus, np.arange(corpus.manifest.documents), max_length)
    loader = Loader.of(pairs, Tokenizer.load(folder), DataConfig(max_length=max_length))
    loader.step(0, 256, 256)
    first = time.perf_counter() - began
    tokens, began = 0, time.perf_counter()
    for step in range(1, 41):
        tokens += sum(batch.num_tokens for batch in loader.step(step, 256, 256))
    return {"first_batch_seconds": first, "tokens_per_second": tokens / (time.perf_counter() - began)}


def speeds(texts: list[Path], tokenizer: Path, work: Path, with_datasets: bool) -> dict[str, Any]:
    """The same text through `corpus build`, `encode_batch` alone and the usual way; then a kill and a resume."""
    size = sum(path.stat().st_size for path in texts) / 1e6
    seconds, _ = build(texts, tokenizer, work / "one")
    alone = encode_alone(texts, tokenizer)
    results: dict[str, Any] = {
        "megabytes": size,
        "build_mb_per_second": size / seconds,
        "build_mb_per_second_and_core": size / seconds / (os.cpu_count() or 1),
        "encode_batch_mb_per_second": size / alone,
        "build / encode_batch": alone / seconds,
        "resumed_is_identical": resumed(texts, tokenizer, work / "one", work / "cut", seconds),
    }
    if with_datasets:
        usual = datasets_map(texts, tokenizer, work / "cache")
        results |= {"datasets_map_mb_per_second": size / usual, "build / datasets_map": usual / seconds}
    return results


def whole(texts: list[Path], tokenizer: Path, work: Path, times: int) -> dict[str, Any]:
    """All of the text: speed, peak memory, bytes a token, the loader; and the peak on the text several times over."""
    size = sum(path.stat().st_size for path in texts) / 1e6
    seconds, peak = build(texts, tokenizer, work / "shards")
    facts = Corpus.open(work / "shards").manifest
    results: dict[str, Any] = {
        "all_megabytes": size,
        "all_tokens": facts.tokens,
        "all_build_mb_per_second": size / seconds,
        "all_peak_megabytes": peak / 1e6,
        "bytes_per_token": sum(shard.bytes for shard in facts.shards) / facts.tokens,
        **{f"loader_{length}": loader_speed(work / "shards", length) for length in (128, 512)},
    }
    if times > 1:
        off = ["--set", "clean.duplicate_documents=false", "--set", "clean.duplicate_paragraphs=false"]
        results[f"{times}_times_peak_megabytes"] = build(texts * times, tokenizer, work / "times", *off)[1] / 1e6
    return results


def main() -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description="Raw text to shards; the first file is for the comparison of speeds.")
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--datasets", action="store_true", help="also `datasets.map`, which has to be installed")
    parser.add_argument("--times", type=int, default=1, help="peak memory on the text this many times over")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp())
    train_tokenizer(options.texts[:1], work / "tok")
    results = speeds(options.texts[:1], work / "tok", work, options.datasets)
    results |= whole(options.texts, work / "tok", work, options.times)
    table = Table("", "value")
    for name, value in results.items():
        table.add_row(name, f"{value:,.2f}" if isinstance(value, float) else str(value))
    Console().print(table)
    record("corpus", results)
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
