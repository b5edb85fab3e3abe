"""Export to ONNX: the padded layout with any batch and length, checked against PyTorch, in float32 and int8.

A folder holds `model.onnx` (standard operators only), optionally `model_int8.onnx` (for ONNX Runtime), the
configuration and the tokenizer of a model folder, and `onnx.json`: what was exported, the largest difference from
PyTorch, and the cost of int8 on a task, if it was measured. B sequences, L padded length.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bertsmith.batch import Batch, Padded
from bertsmith.config import read_json, write_json
from bertsmith.errors import UserError
from bertsmith.folders import new_file, new_folder
from bertsmith.formats.card import write_card
from bertsmith.formats.families.table import OWN_CLASS, family_of
from bertsmith.formats.graphs import FLOAT32, INPUTS, INT8, in_terms_of_bert
from bertsmith.formats.hf import Loaded, Notes, fitting_tokenizer, read_notes, write_notes
from bertsmith.formats.saved_config import CONFIG, Model, config_in, config_out, head_in, read_config
from bertsmith.model.config import EncoderConfig
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.text.tokenizer import Tokenizer

REPORT = "onnx.json"
TOLERANCE = {FLOAT32: 1e-4, INT8: 1.0}  # the largest difference from PyTorch, as a share of the largest output
OPSET = 20
LARGEST = 1_800_000_000  # bytes of weights in one file; a protobuf message has at most 2 GiB


@dataclass(frozen=True, eq=False)
class Exported:
    """An ONNX folder without its weights; `head` is None for masked words and for the encoder alone."""

    folder: Path
    config: EncoderConfig
    head: HeadConfig | None
    tokenizer: Tokenizer
    notes: Notes
    outputs: tuple[str, ...]


class Flat(nn.Module):
    """A model as a function of tensors, as the export needs it."""

    def __init__(self, model: Model, encoder_alone: bool) -> None:
        super().__init__()
        self.model = model
        self.encoder_alone = encoder_alone

    @property
    def outputs(self) -> tuple[str, ...]:
        if self.encoder_alone:
            return ("last_hidden_state",)
        if isinstance(self.model, TaskModel):
            return ("logits",)
        return tuple(f"{name}_logits" for name in self.model.counts(self.model.config))

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the graph's inputs: an encoder with fewer than two segments takes no segment numbers."""
        return INPUTS if self.model.encoder.config.num_segments > 1 else INPUTS[:2]

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)
        segments = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        batch = Batch(input_ids, segments, positions, Padded(attention_mask.bool()))
        if isinstance(self.model, TaskModel) and not self.encoder_alone:
            return (self.model.logits(batch),)
        if self.encoder_alone or isinstance(self.model, TaskModel):
            return (self.model.encoder(batch),)
        return tuple(self.model.dense_logits(batch).values())  # a graph has no list of the masked positions


def export_onnx(
    loaded: Loaded, folder: str | Path, *, int8: bool = False, encoder_alone: bool = False
) -> dict[str, Any]:
    """Write an ONNX folder and return its report; if the export differs from PyTorch, nothing is written.

    `encoder_alone` exports no head; a folder without weights for masked words is exported so as well.
    """
    require("onnx"), require("onnxscript"), require("onnxruntime")
    if isinstance(loaded.model, TaskModel) and not encoder_alone:
        if lacking := [name for name in loaded.missing if name.startswith("head.")]:
            raise UserError(f"{loaded.folder} has no weights for {', '.join(lacking)}; fine-tune it first")
    elif not isinstance(loaded.model, TaskModel) and loaded.model.lacks_token_head(loaded.missing):
        encoder_alone = True
    model = loaded.model.cpu().float().eval()
    flat = Flat(model, encoder_alone).eval()
    with new_folder(folder) as work:
        _write_description(loaded, work, encoder_alone)
        _export(flat, work / FLOAT32, fused=False)
        files = [FLOAT32]
        if int8:
            _export(flat, work / "fused.onnx", fused=True)
            _quantise(work / "fused.onnx", work / INT8)
            for path in work.glob("fused.onnx*"):
                path.unlink()
            files.append(INT8)
        report = {
            "inputs": list(flat.inputs),
            "outputs": list(flat.outputs),
            "opset": OPSET,
            "files": {name: {"bytes": _size(work, name), **check(flat, work / name)} for name in files},
        }
        write_json(work / REPORT, report)
    return report


def check(flat: Flat, path: Path) -> dict[str, Any]:
    """Measure the difference from PyTorch on shapes that were not traced; too large a difference is an error."""
    run = session(path, threads=1)
    limit = flat.model.encoder.config.max_positions
    choices = _choices(flat.model)
    shapes = [(choices, limit), (3 * choices, min(5, limit)), (2 * choices, 1), (5 * choices, min(33, limit))]
    worst, largest = np.zeros(len(flat.outputs)), np.zeros(len(flat.outputs))
    for number, (rows, length) in enumerate(shapes):
        inputs = example_inputs(flat, rows, length, seed=number + 1)
        with torch.inference_mode():
            expected = [t.numpy() for t in flat(*inputs)]
        found = run.run(None, dict(zip(flat.inputs, (t.numpy() for t in inputs), strict=True)))
        worst = np.maximum(worst, [_difference(a, b) for a, b in zip(expected, found, strict=True)])
        largest = np.maximum(largest, [_largest(a) for a in expected])
    shares = worst / np.maximum(largest, 1e-9)
    for name, share in zip(flat.outputs, shares.tolist(), strict=True):
        if not share <= TOLERANCE[path.name]:
            raise UserError(
                f"{path.name} differs from PyTorch: {name} by {share:.2g} of its largest value, and "
                f"{TOLERANCE[path.name]:g} is allowed; this model cannot be exported"
            )
    return {"shapes_checked": [list(shape) for shape in shapes], "largest_relative_difference": float(shares.max())}


def open_onnx(folder: str | Path) -> Exported:
    """Read an ONNX folder without its graph."""
    folder = Path(folder)
    values = read_config(folder)
    if not (folder / REPORT).exists():  # of another program: only the graph knows how the model computes
        values = in_terms_of_bert(values)
    config, notes = config_in(values, folder), read_notes(folder, values)
    outputs = read_json(folder / REPORT).get("outputs") if (folder / REPORT).exists() else []
    if not isinstance(outputs, list) or not all(isinstance(name, str) for name in outputs):
        raise UserError(f"{folder / REPORT}: outputs is not a list of names; export the model again")
    tokenizer = fitting_tokenizer(folder, config)
    return Exported(folder, config, head_in(values, folder), tokenizer, notes, tuple(outputs))


def session(path: Path, threads: int | None = None) -> Any:
    """Open an ONNX Runtime session on the CPU; without `threads` it uses all cores."""
    runtime = require("onnxruntime")
    if not path.exists():
        hint = "; export it again with int8" if path.name == INT8 else ""
        raise UserError(f"{path} is missing{hint}")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the runtime's errors have no common class
        raise UserError(f"{path} is not a graph that ONNX Runtime opens: {error}") from None


def write_quality(folder: Path, task: str, rows: int, scores: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Add the scores of a task by precision to `onnx.json`, with the points that int8 costs."""
    drop = {name: scores["float32"][name] - scores["int8"][name] for name in scores["float32"]}
    changes = [
        f"{'costs' if value >= 0 else 'gains'} {abs(value):.1f} points of {name}" for name, value in drop.items()
    ]
    words = f"int8 {', '.join(changes)} on {rows} rows"
    precisions = {name: dict(values) for name, values in scores.items()}
    quality = {"task": task, "rows": rows, **precisions, "drop": drop, "in_words": words}
    report = read_json(folder / REPORT)
    with new_file(folder / REPORT) as work:
        write_json(work, {**report, "quality": quality})
    return quality


def require(package: str) -> Any:
    """Import an optional package, or raise an error that says how to install it."""
    try:
        return import_module(package)
    except ImportError:
        raise UserError(f"the package {package} is not installed; `pip install 'bertsmith[onnx]'`") from None


def has_vnni() -> bool:
    """Whether the CPU accumulates 8-bit products in 32 bits; else sums of the full range may overflow 16 bits."""
    capabilities = torch.cpu.get_capabilities()
    return bool(
        capabilities.get("avx512_vnni") or capabilities.get("avx_vnni") or capabilities["architecture"] != "x86_64"
    )


def _export(flat: Flat, path: Path, *, fused: bool) -> None:
    """Trace the model once; `fused` exports attention as ONNX Runtime's own operator, one node per layer."""
    config = flat.model.encoder.config
    inputs = example_inputs(flat, 2 * _choices(flat.model), min(8, config.max_positions), seed=0)
    weights = sum(p.numel() * p.element_size() for p in flat.parameters())
    table = {torch.ops.aten.scaled_dot_product_attention.default: _fused_attention} if fused else None
    with _quiet():
        torch.onnx.export(
            flat,
            inputs,
            path,
            input_names=flat.inputs,
            output_names=flat.outputs,
            dynamic_shapes={name: {0: "batch", 1: "length"} for name in flat.inputs},
            opset_version=OPSET,
            dynamo=True,
            external_data=weights > LARGEST,
            custom_translation_table=table,  # type: ignore[arg-type]
            verbose=False,
        )


def _fused_attention(
    q: Any, k: Any, v: Any, attn_mask: Any = None, dropout: float = 0.0, is_causal: bool = False, **options: Any
) -> Any:
    """Translate attention to ONNX Runtime's own operator: in int8 the small nodes take a quarter of the time.

    A left-to-right encoder needs no mask: padding comes after all tokens, so they do not see it.
    """
    from onnx.defs import OpSchema
    from onnxscript import opset20 as op
    from onnxscript import values

    kind, optional = OpSchema.FormalParameter, OpSchema.FormalParameterOption.Optional
    schema = OpSchema(
        "MultiHeadAttention",
        "com.microsoft",
        1,
        inputs=[
            *(kind(name, "T") for name in ("query", "key", "value")),
            kind("bias", "T", param_option=optional),
            kind("key_padding_mask", "M", param_option=optional),
        ],
        outputs=[kind("output", "T")],
        type_constraints=[("T", ["tensor(float)"], ""), ("M", ["tensor(int32)"], "")],
        attributes=[
            OpSchema.Attribute("num_heads", OpSchema.AttrType.INT, "", required=True),
            OpSchema.Attribute("unidirectional", OpSchema.AttrType.INT, "", required=False),
        ],
    )
    attention = values.Op(values.Opset("com.microsoft", 1), "MultiHeadAttention", schema)
    heads, size = q.shape[1], q.shape[3]
    joined = op.Constant(value_ints=[0, 0, heads * size])
    q, k, v = (op.Reshape(op.Transpose(x, perm=[0, 2, 1, 3]), joined) for x in (q, k, v))  # (B, L, A·D)
    if is_causal:
        mixed = attention(q, k, v, num_heads=heads, unidirectional=1)
    else:
        alike = attn_mask.shape[2] == 1  # all queries see the same keys
        axes = op.Constant(value_ints=[1, 2] if alike else [1])
        mask = op.Cast(op.Squeeze(attn_mask, axes), to=6)  # (B, L) int32; with a window (B, L, L)
        mixed = attention(q, k, v, None, mask, num_heads=heads)
    mixed = op.Reshape(mixed, op.Constant(value_ints=[0, 0, heads, size]))
    return op.Transpose(mixed, perm=[0, 2, 1, 3])


def _quantise(source: Path, path: Path) -> None:
    """Quantise the matrices of the encoder dynamically: 8-bit weights per column, inputs scaled at run time.

    The products inside attention and the small layers of the heads stay in float32, and so does the second matrix of
    the feed-forward layers: its inputs have outliers, which cost half a point on STS-B. Where only the first token
    leaves the last layer, the layers after its attention are small and stay in float32 as well.
    """
    onnx, quantization = require("onnx"), require("onnxruntime.quantization")
    graph = onnx.load(str(source))
    graph.graph.ClearField("value_info")  # the quantised weights would contradict these shapes
    shared = _transpose_shared_weights(graph.graph)
    shapes = {tensor.name: list(tensor.dims) for tensor in graph.graph.initializer}
    matrices = [
        (n.name, shapes[n.input[1]]) for n in graph.graph.node if n.op_type == "MatMul" and n.input[1] in shapes
    ]
    kept = [
        name for name, shape in matrices if len(shape) != 2 or shape[0] > shape[1]
    ]  # tables of distances have heads
    # The quantiser turns every Gemm into a MatMul of this name before it looks at the nodes to exclude.
    kept += [f"{n.name}_MatMul" for n in graph.graph.node if n.op_type == "Gemm" and n.input[1] not in shared]
    with _quiet():
        quantization.quantize_dynamic(
            graph,
            path,
            nodes_to_exclude=kept,
            op_types_to_quantize=["MatMul"],
            per_channel=True,
            reduce_range=not has_vnni(),
            weight_type=quantization.QuantType.QInt8,
            use_external_data_format=_size(source.parent, source.name) > 4 * LARGEST,
            extra_options={
                "MatMulConstBOnly": True,
                "WeightSymmetric": True,
                "DefaultTensorType": onnx.TensorProto.FLOAT,  # of attention, whose operator ONNX does not know
            },
        )


def _transpose_shared_weights(graph: Any) -> set[str]:
    """Store a weight that a Gemm shares with a MatMul the way the MatMul reads it; return these weights' names.

    DeBERTa projects states and relative positions by the same matrix: the graph transposes it for the MatMul of the
    states, and the quantiser transposes it in place for the Gemm of the positions, after which the first is wrong.
    """
    helper = require("onnx.numpy_helper")
    weights = {tensor.name: tensor for tensor in graph.initializer}
    gemms = [n for n in graph.node if n.op_type == "Gemm" and any(a.name == "transB" and a.i for a in n.attribute)]
    shared = {n.input[1] for n in gemms} & set(weights)
    turned = {n.input[0]: n for n in graph.node if n.op_type == "Transpose" and n.input[0] in shared}
    for name, node in turned.items():
        weights[name].CopyFrom(helper.from_array(helper.to_array(weights[name]).T.copy(), name))
        for other in graph.node:
            other.input[:] = [name if each == node.output[0] else each for each in other.input]
        graph.node.remove(node)
    for gemm in (n for n in gemms if n.input[1] in turned):
        next(a for a in gemm.attribute if a.name == "transB").i = 0
    return set(turned)


def example_inputs(flat: Flat, rows: int, length: int, seed: int) -> tuple[Tensor, ...]:
    """Return random tokens (B, L) of different lengths, with both segments where there are two."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, length + 1, rows)
    lengths[0] = length
    mask = np.arange(length) < lengths[:, None]
    segments = (np.arange(length) > lengths[:, None] // 2) * mask
    values = (rng.integers(0, flat.model.encoder.config.vocab_size, (rows, length)) * mask, mask, segments)
    return tuple(torch.from_numpy(value.astype(np.int64)) for value in values[: len(flat.inputs)])


def _choices(model: Model) -> int:
    """Return the number that the batch size must be a multiple of."""
    return max(1, model.head_config.num_choices) if isinstance(model, TaskModel) else 1


def _difference(ours: NDArray[Any], theirs: NDArray[Any]) -> float:
    """Return the largest difference; infinite if the shapes or the infinite values differ."""
    finite = np.isfinite(ours)
    if ours.shape != theirs.shape or not np.array_equal(finite, np.isfinite(theirs)):
        return float("inf")
    return _largest(ours[finite] - theirs[finite])


def _largest(values: NDArray[Any]) -> float:
    """The largest magnitude of finite values."""
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


def _write_description(loaded: Loaded, folder: Path, encoder_alone: bool) -> None:
    """The configuration, the notes and the tokenizer, as in every model folder."""
    values = {**loaded.notes.kept, **config_out(loaded.model)}
    if encoder_alone:
        own = OWN_CLASS if values["architectures"][0].startswith(OWN_CLASS) else ""
        values["architectures"] = [own + family_of(loaded.model.encoder.config).encoder_class]
    write_json(folder / CONFIG, values)
    write_notes(folder, loaded.notes)
    config = loaded.model.encoder.config
    loaded.tokenizer.save(folder, loaded.tokenizer.length_within(config.max_positions), config.num_segments)
    write_card(folder)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the messages of the exporting libraries."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "root")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _size(folder: Path, name: str) -> int:
    """Return the size of a graph with its external weights."""
    return sum(path.stat().st_size for path in folder.glob(f"{name}*"))
