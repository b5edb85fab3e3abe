"""The engines that compute logits for texts of mixed length: PyTorch, or ONNX Runtime on an exported graph.

Both sort the texts by length and limit the tokens of a batch. PyTorch runs packed batches, ONNX Runtime padded batches
of nearly equal lengths. T tokens, V vocabulary, K classes.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bertsmith.batch import Batch, Example, Packed, collate
from bertsmith.errors import NotFinite, UserError, nearest_or_all
from bertsmith.formats.graphs import FLOAT32, INPUTS, INT8, graph_file, graph_inputs, score_outputs, state_output
from bertsmith.formats.onnx import Exported, has_vnni, session
from bertsmith.formats.saved_config import Model
from bertsmith.model.attention import SelfAttention
from bertsmith.model.encoder import FeedForward
from bertsmith.model.heads import TaskModel
from bertsmith.training.settings import check_precision, has_bfloat16

EngineName = Literal["torch", "onnxruntime"]
Precision = Literal["float32", "bfloat16", "int8"]
Scores = NDArray[np.float32]
Places = NDArray[np.int64]
TOKENS = {
    "cpu": 2048,
    "cuda": 16384,
    "mps": 8192,
}  # per batch: enough to use the device well, few enough for its caches
LARGEST_PADDING = 1 / 8  # of the longest row of a padded batch


def batch_tokens(device: torch.device) -> int:
    """Return how many tokens a batch holds on a device."""
    return TOKENS.get(device.type, TOKENS["cpu"])


class Engine(Protocol):
    """A loaded model that computes logits for examples."""

    def run(self, examples: Sequence[Example]) -> list[Scores]:
        """Return the logits of each example, in order: (K,) for a text or an ending, (n, K) for its tokens."""

    def masked_words(self, examples: Sequence[Example], places: Sequence[Places]) -> list[Scores]:
        """Return the logits of the vocabulary (places, V) at some tokens of each example, in order."""


class TorchEngine:
    """An engine of PyTorch, which runs packed batches."""

    def __init__(
        self, model: Model, device: torch.device, threads: int | None = None, precision: Precision = "float32"
    ) -> None:
        self.device, self.threads, self.precision = device, threads, precision
        if precision == "int8":
            if device.type != "cpu":
                raise UserError(f"int8 is computed on a CPU, not on {device.type}; leave out --device or the precision")
            model = quantised(model)
        elif precision == "bfloat16":
            check_precision(device, precision)
            model = copy.deepcopy(model).bfloat16()
        self.model = model.to(device)

    def __repr__(self) -> str:
        return f"torch on {self.device.type}, {self.precision}"

    def run(self, examples: Sequence[Example]) -> list[Scores]:
        assert isinstance(self.model, TaskModel)
        self.model.eval()
        results: list[Any] = [None] * len(examples)
        with torch.inference_mode(), threads_of(self.threads):
            for chosen in batches(examples, batch_tokens(self.device)):
                batch = collate([_without_labels(examples[i]) for i in chosen], packed=True).to(self.device)
                scores = self.model.scores(batch).cpu().numpy()
                for i, row in zip(chosen, self._rows(scores, batch), strict=True):
                    results[i] = row
        return results

    def _rows(self, scores: Scores, batch: Batch) -> list[Scores]:
        """Split the logits of a batch into those of its examples."""
        assert isinstance(self.model, TaskModel)
        assert isinstance(batch.layout, Packed)
        if self.model.head_config.kind not in ("tags", "span"):
            return list(scores)
        return np.split(scores, batch.layout.starts[1:-1].cpu().numpy())

    def masked_words(self, examples: Sequence[Example], places: Sequence[Places]) -> list[Scores]:
        assert not isinstance(self.model, TaskModel)
        self.model.eval()
        results: list[Any] = [None] * len(examples)
        with torch.inference_mode(), threads_of(self.threads):
            for chosen in batches(examples, batch_tokens(self.device)):
                batch = collate([_without_labels(examples[i]) for i in chosen], packed=True)
                assert isinstance(batch.layout, Packed)
                starts = batch.layout.starts[:-1].numpy()
                rows = [start + places[i] for start, i in zip(starts, chosen, strict=True)]
                batch.labels["masked"] = torch.from_numpy(np.concatenate(rows))
                scores = self.model.token_logits(batch.to(self.device)).cpu().numpy()
                ends = np.cumsum([len(places[i]) for i in chosen])
                for i, part in zip(chosen, np.split(scores, ends[:-1]), strict=True):
                    results[i] = part
        return results


class OnnxEngine:
    """An engine of ONNX Runtime, which runs padded batches of nearly equal lengths."""

    def __init__(self, exported: Exported, threads: int | None = None, precision: Precision = "float32") -> None:
        if precision == "bfloat16":
            raise UserError("onnxruntime computes in float32 or int8, not in bfloat16; choose another precision")
        self.head, self.pad = exported.head, exported.config.pad_token_id
        self.precision, self.path = precision, graph_file(exported.folder, INT8 if precision == "int8" else FLOAT32)
        self.session = session(self.path, threads)
        self.inputs = graph_inputs(self.session, self.path)
        self.outputs = [output.name for output in self.session.get_outputs()]
        self.scores = score_outputs(self.outputs, exported.head)

    def __repr__(self) -> str:
        return f"onnxruntime, {self.precision}"

    def run(self, examples: Sequence[Example]) -> list[Scores]:
        assert self.head is not None
        results: list[Any] = [None] * len(examples)
        of_tokens = self.head.kind in ("tags", "span")
        for chosen in batches(examples, TOKENS["cpu"], LARGEST_PADDING):
            scores = self._scores([examples[i] for i in chosen])
            for i, row in zip(chosen, scores, strict=True):
                results[i] = row[: len(examples[i].tokens)] if of_tokens else row
        return results

    def _scores(self, examples: list[Example]) -> Scores:
        """Return the logits of a padded batch, a row for each example."""
        count = len(examples)
        if self.head is not None and self.head.kind == "choice":  # the graph takes all endings of a question together
            missing = -count % max(1, self.head.num_choices)
            return self._call(examples + examples[:1] * missing).reshape(-1, 1)[:count]
        return self._call(examples)

    def states(self, examples: Sequence[Example]) -> list[Scores]:
        """Return the last hidden states (n, H) of the tokens of each example, in order."""
        results: list[Any] = [None] * len(examples)
        output = state_output(self.outputs, self.path)
        for chosen in batches(examples, TOKENS["cpu"], LARGEST_PADDING):
            for i, row in zip(chosen, self._call([examples[i] for i in chosen], [output]), strict=True):
                results[i] = row[: len(examples[i].tokens)]
        return results

    def _call(self, examples: Sequence[Example], outputs: Sequence[str] = ()) -> Scores:
        """Run a padded batch and return the logits, or other outputs of the graph, stacked where there are several."""
        longest = max(len(e.tokens) for e in examples)
        tokens, mask, segments = (np.zeros((len(examples), longest), dtype=np.int64) for _ in range(3))
        tokens.fill(self.pad)
        for row, example in enumerate(examples):
            size = len(example.tokens)
            tokens[row, :size], segments[row, :size], mask[row, :size] = example.tokens, example.segments, 1
        arrays = dict(zip(INPUTS, (tokens, mask, segments), strict=True))
        feed = {name: arrays[name].astype(kind, copy=False) for name, kind in self.inputs.items()}
        found = self.session.run(list(outputs or self.scores), feed)
        joined = np.stack(found, -1) if len(found) > 1 else found[0]
        return joined.astype(np.float32, copy=False)

    def masked_words(self, examples: Sequence[Example], places: Sequence[Places]) -> list[Scores]:
        results: list[Any] = [None] * len(examples)
        for chosen in batches(examples, TOKENS["cpu"], LARGEST_PADDING):
            for i, row in zip(chosen, self._call([examples[i] for i in chosen]), strict=True):
                results[i] = row[places[i]]
        return results


class Together:
    """An ensemble of models that take the same examples: the mean of their logits, before any softmax."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = list(engines)

    def __repr__(self) -> str:
        return f"{len(self.engines)} models together, the first by {self.engines[0]!r}"

    def run(self, examples: Sequence[Example]) -> list[Scores]:
        found = [engine.run(examples) for engine in self.engines]
        return [np.mean(scores, axis=0, dtype=np.float32) for scores in zip(*found, strict=True)]

    def masked_words(self, examples: Sequence[Example], places: Sequence[Places]) -> list[Scores]:
        found = [engine.masked_words(examples, places) for engine in self.engines]
        return [np.mean(scores, axis=0, dtype=np.float32) for scores in zip(*found, strict=True)]


def refuse_not_finite(scores: Sequence[NDArray[Any]], what: str, folder: Path, engine: Engine) -> None:
    """Refuse logits or vectors that hold NaN or infinity, which mean nothing and cannot be written as JSON."""
    if not all(np.isfinite(each).all() for each in scores):
        raise NotFinite(
            f"{folder} gives {what} that are not finite numbers ({engine!r}): its weights are damaged, or too large "
            "for this precision"
        )


def batches(examples: Sequence[Example], tokens: int, padding: float = 1.0) -> Iterator[list[int]]:
    """Group the indices of examples into batches, longest first, of at most `tokens` tokens and this much padding."""
    lengths = np.array([len(example.tokens) for example in examples])
    chosen: list[int] = []
    longest = 0
    for i in np.argsort(-lengths, kind="stable").tolist():
        if chosen and ((len(chosen) + 1) * longest > tokens or lengths[i] < longest * (1 - padding)):
            yield chosen
            chosen = []
        if not chosen:
            longest = int(lengths[i])
        chosen.append(i)
    if chosen:
        yield chosen


class Int8Linear(nn.Module):
    """A linear layer with int8 weights and a scale for each row; its input is quantised dynamically."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, bias = linear.weight.detach().float(), linear.bias
        scales = weight.abs().amax(1).clamp_min(1e-12) / 127
        zeros = torch.zeros_like(scales, dtype=torch.int64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            quantised = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        self.packed = torch.ops.quantized.linear_prepack(quantised, None if bias is None else bias.detach().float())
        self.reduce_range = not has_vnni()

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic(x, self.packed, self.reduce_range)


class HalfLinear(nn.Module):
    """A linear layer in bfloat16 whose input and output are float32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = copy.deepcopy(linear).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.bfloat16()).float()


def int8_backends() -> list[str]:
    """Return torch's backends of int8 products for this CPU, the fastest first.

    On ARM there is none: oneDNN gives wrong results once the batch size changes, and QNNPACK is slower than float32.
    """
    on_x86 = torch.cpu.get_capabilities()["architecture"] == "x86_64"
    known = torch.backends.quantized.supported_engines if on_x86 else []
    return [name for name in ("onednn", "x86", "fbgemm") if name in known]


def quantised(model: Model) -> Model:
    """Return a copy of a model whose encoder has int8 matrices; embeddings, norms and the head stay in float32.

    The second matrix of the feed-forward layers is in bfloat16 where the CPU computes it, else in float32: its inputs
    have outliers, which cost half a point on STS-B in 8 bits.
    """
    if model.encoder.config.layer_type == "lstm":
        raise UserError("int8 is for Transformer layers, and this encoder has LSTMs; leave the precision out")
    if not (available := int8_backends()):
        raise UserError("torch has no reliable int8 kernels for this CPU; export to ONNX and use onnxruntime")
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = available[0]  # linear_prepack reads it
    try:
        model = _copy(model.cpu())
        for part in list(
            model.encoder.layers.modules()
        ):  # `modules` yields a sublayer that several layers share only once
            if isinstance(part, SelfAttention):
                part.qkv, part.output = Int8Linear(part.qkv), Int8Linear(part.output)  # type: ignore[assignment]
            elif isinstance(part, FeedForward):
                part.inner = Int8Linear(part.inner)  # type: ignore[assignment]
                if has_bfloat16():
                    part.outer = HalfLinear(part.outer)  # type: ignore[assignment]
    finally:
        torch.backends.quantized.engine = before
    return model


@contextmanager
def threads_of(threads: int | None) -> Iterator[None]:
    """Run PyTorch on this many threads inside the block."""
    before = torch.get_num_threads()
    if threads is None or threads == before:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_settings(engine: str | None, threads: int | None, precision: str | None) -> None:
    """Refuse an unknown engine or precision, and an impossible number of threads."""
    for what, value, known in (
        ("engine", engine, get_args(EngineName)),
        ("precision", precision, get_args(Precision)),
    ):
        if value is not None and value not in known:
            raise UserError(f"unknown {what} {value!r}{nearest_or_all(value, known)}")
    limit = max(64, os.cpu_count() or 1)
    if threads is not None and not 1 <= threads <= limit:
        raise UserError(f"threads must be between 1 and {limit}, not {threads}")


def _copy(model: Model) -> Model:
    """Return a copy of a model that shares its parameters."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def _without_labels(example: Example) -> Example:
    """Return an example without its labels: `collate` needs the same labels in all rows of a batch."""
    return replace(example, labels={name: label for name, label in example.labels.items() if not label.kind.loss})
