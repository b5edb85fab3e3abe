"""What the terms of distances in attention cost on one GPU: DeBERTa beside BERT of the same shape.

    python -m benchmarks.relative_speed kernels [--lengths 128 512] [--tokens 32768] [--flex]
    python -m benchmarks.relative_speed steps [--lengths 128 512] [--no-peer]

`kernels` times the kernels of one layer's attention, forward and backward, with 12 heads of 64 and dropout 0.1, beside
BERT's attention and, with `--flex`, FlexAttention. A variant says whether the weights are kept or recomputed, the
positions of a block, and the warps and stages of the kernels. `steps` times whole steps of pre-training (12 × 768,
masked words only) for BERT, DeBERTa v1 and DeBERTa v3, and the two of `transformers`, compiled; where a model of
`transformers` does not compile, it runs as it is, and the result says so ("compiled": false). A variant that fails
prints its error, and the others go on. `--smoke` tries `steps` out with tiny shapes.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from benchmarks.kernel_kinds import by_kind
from benchmarks.peer_forms import DEVICE, ROUNDED, Step, free_memory, measure, peer_steps, pinned, rectangular
from benchmarks.pretrain_gpu import full_batch, our_steps, plain_reason
from benchmarks.record import RESULTS, keep
from bertsmith.batch import Batch, Packed
from bertsmith.model.config import EncoderConfig, Reach
from bertsmith.model.encoder import Encoder
from bertsmith.model.relative import RelativeTable
from bertsmith.model.sizes import encoder_config
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.objectives.settings import MaskedLMConfig
from bertsmith.training.settings import TrainConfig

NAME = "relative_speed"
HEADS, SIZE, DROPOUT = 12, 64, 0.1
Launch = tuple[int, int]  # warps, stages
VARIANTS: tuple[tuple[str, int, Launch, Launch, Launch], ...] = (  # forward, query side, key side
    ("recomputed", 64, (4, 2), (4, 1), (4, 1)),
    ("kept", 64, (4, 2), (4, 1), (4, 1)),
    ("kept", 64, (4, 1), (4, 2), (4, 2)),
    ("kept", 64, (4, 2), (4, 3), (4, 1)),
    ("kept", 32, (2, 2), (2, 2), (2, 2)),
)
DEBERTA: dict[str, Any] = {
    "positions": "none", "num_segments": 0, "relative_terms": "both", "norm_eps": 1e-7, "key_bias": False,
}  # fmt: skip
V3: dict[str, Any] = {
    **DEBERTA, "relative_buckets": 256, "relative_norm": True, "relative_projections": False, "key_bias": True,
}  # fmt: skip
Times = tuple[int, int, int]  # tokens of a step, steps that are measured, steps before them
MODELS: dict[str, dict[str, Any]] = {"bert": {"num_segments": 0}, "deberta v1": DEBERTA, "deberta v3": V3}


def attempt(name: str, work: Callable[[], Any]) -> Any:
    """The result, or None after one line about the error."""
    try:
        return work()
    except Exception as error:  # the other variants are worth having
        lines = str(error).strip().splitlines() or [type(error).__name__]
        print(f"{name}: failed: {type(error).__name__}: {lines[-1][:200]}", flush=True)
        free_memory()
        return None


def packed_inputs(length: int, tokens: int) -> tuple[Tensor, Packed]:
    torch.manual_seed(0)
    qkv = torch.randn(tokens, 3 * HEADS * SIZE, device=DEVICE).bfloat16().requires_grad_()
    starts = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=DEVICE)
    return qkv, Packed(starts, length)


def distance_tables(length: int, buckets: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Random vectors of distances as keys and as queries, and the row of each distance."""
    config = replace(encoder_config("base"), **{**DEBERTA, "relative_buckets": buckets})
    relative = RelativeTable(config).to(DEVICE)(length, DEVICE)
    shape = len(relative.table), HEADS * SIZE
    keys, queries = (torch.randn(shape, device=DEVICE).bfloat16().requires_grad_() for _ in range(2))
    return keys, queries, relative.rows


def forward_and_backward(run: Callable[[], Tensor]) -> Step:
    grad = torch.randn_like(run())
    return lambda: run().backward(grad)


def of_bert(length: int, tokens: int) -> Step:
    from bertsmith.model.fused.operations import attend

    qkv, layout = packed_inputs(length, tokens)
    return forward_and_backward(lambda: attend(qkv, None, layout, HEADS, Reach(None, None), DROPOUT))


def of_deberta(length: int, tokens: int, buckets: int | None) -> Step:
    from bertsmith.model.fused.distances import rows_of
    from bertsmith.model.fused.operations import attend_with_distances
    from bertsmith.model.fused.weights import RelativeTables

    qkv, layout = packed_inputs(length, tokens)
    keys, queries, rows = distance_tables(length, buckets)
    tables = RelativeTables(keys, queries, *rows_of(rows, len(keys), length), (3 * SIZE) ** -0.5)
    return forward_and_backward(lambda: attend_with_distances(qkv, None, layout, HEADS, tables, DROPOUT))


def of_flex(length: int, tokens: int, buckets: int | None) -> Step:
    """FlexAttention, compiled, which takes the terms from products with all rows; it has no dropout."""
    qkv, _ = packed_inputs(length, tokens)
    keys, queries, rows = distance_tables(length, buckets)
    compiled, scale = torch.compile(flex_attention), (3 * SIZE) ** -0.5

    def run() -> Tensor:
        q, k, v = qkv.view(-1, length, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
        of_queries, of_keys = (
            torch.einsum("bhld,nhd->bhln", x, table.unflatten(1, (HEADS, SIZE)))
            for x, table in ((q, keys), (k, queries))
        )

        def modified(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            row = rows[i - j + length - 1]
            return score + (of_queries[b, h, i, row] + of_keys[b, h, j, row]) * scale

        return compiled(q, k, v, score_mod=modified, scale=scale)

    return forward_and_backward(run)


def set_variant(weights: str, block: int, forward: Launch, queries: Launch, keys: Launch) -> None:
    from bertsmith.model.fused import distances, relative_attention

    distances.LARGEST = block
    relative_attention.KEPT_LENGTH = sys.maxsize if weights == "kept" else 0
    relative_attention.FORWARD, relative_attention.QUERY_SIDE = forward, queries
    relative_attention.KEY_SIDE = relative_attention.RECOMPUTING = keys


def times(step: Step) -> dict[str, float]:
    """Milliseconds of each kernel, and of all."""
    for _ in range(3):
        step()
    kinds, kernels = by_kind(step, 5)
    parts = {"forward": "attention_forward", "queries": "attention_queries", "keys": "attention_keys"}
    parts["table"] = "_table_gradient"
    found = {part: sum(ms for name, ms in kernels if text in name) for part, text in parts.items()}
    return {**{part: round(ms, 3) for part, ms in found.items()}, "all": kinds["all"]}


def kernels(arguments: argparse.Namespace) -> None:
    """Print a row for each variant: milliseconds of one layer's attention, forward and backward."""
    if DEVICE.type != "cuda":
        raise SystemExit("the kernels need a GPU; tests/model/compile_kernels.py compiles them without one")
    results: dict[str, Any] = {}

    def row(name: str, make: Callable[[], Step]) -> None:
        found = attempt(name, lambda: times(make()))
        free_memory()
        if found is not None:
            results[name] = found
            print(f"{name:40}", "  ".join(f"{part} {ms:7.3f}" for part, ms in found.items()), flush=True)

    for length in arguments.lengths:
        given = length, arguments.tokens
        row(f"{length}: bert", partial(of_bert, *given))
        for variant in VARIANTS:
            set_variant(*variant)
            weights, block, *launches = variant
            name = f"{length}: {weights}, {block}, " + " ".join(f"{warps}x{stages}" for warps, stages in launches)
            row(name, partial(of_deberta, *given, None))
        if arguments.flex:
            row(f"{length}: FlexAttention", partial(of_flex, *given, 256))
    keep(NAME, arguments.results, "kernels", f"{arguments.tokens} tokens", results)


def peer_config(name: str, config: EncoderConfig) -> Any:
    """The configuration of `transformers` for the same model."""
    values: dict[str, Any] = {
        "vocab_size": -(-config.vocab_size // ROUNDED) * ROUNDED,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "type_vocab_size": 0,
        "relative_attention": True,
        "position_biased_input": False,
        "pos_att_type": ["c2p", "p2c"],
    }
    if name == "deberta v1":
        return transformers.DebertaConfig(**values)
    return transformers.DebertaV2Config(**values, position_buckets=256, norm_rel_ebd="layer_norm", share_att_key=True)


def peer_step(name: str, config: EncoderConfig, batch: Batch, compiled: bool) -> Step:
    free_memory()
    torch._dynamo.reset()
    kind = transformers.DebertaForMaskedLM if name == "deberta v1" else transformers.DebertaV2ForMaskedLM
    model = kind(peer_config(name, config)).to(DEVICE)
    given = rectangular(batch, mask=True)
    inputs = {n: v for n, v in given.items() if n in ("input_ids", "attention_mask", "labels")}
    return peer_steps(torch.compile(model) if compiled else model, [pinned(inputs)])


def peer_speed(name: str, label: str, config: EncoderConfig, batch: Batch, times: Times) -> dict[str, Any] | None:
    """The speed of `transformers`, compiled if its model compiles."""
    for compiled in (True, False) if DEVICE.type == "cuda" else (False,):
        form = f"{label}, transformers, {'compiled' if compiled else 'not compiled'}"
        found = speed_of(form, lambda compiled=compiled: peer_step(name, config, batch, compiled), *times)  # type: ignore[misc]
        if found is not None:
            return {**found, "compiled": compiled}
    return None


def our_model_steps(config: EncoderConfig, batch: Batch) -> Step:
    free_memory()
    model = MaskedLM(Encoder(config), MaskedLMConfig(next_sentence=False)).to(DEVICE)
    print("kernels:", plain_reason(model) or "fused", flush=True)
    return our_steps(model, [batch], TrainConfig(steps=1))


def speed_of(label: str, make: Callable[[], Step], tokens: int, count: int, warm: int) -> dict[str, Any] | None:
    """Tokens a second and memory of a step; None after an error."""
    measured = attempt(label, lambda: measure(make(), count, warm))
    if measured is None:
        return None
    return {"tokens_per_second": round(tokens / measured["seconds"]), "memory_gb": measured["memory_gb"]}


def steps_of(name: str, length: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Our steps of a model, and those of `transformers`."""
    shape: dict[str, Any] = {"max_positions": 512, "hidden_dropout": DROPOUT, "attention_dropout": DROPOUT}
    tokens, count, warm = arguments.tokens, 10, 6
    if arguments.smoke:
        tokens, count, warm = 4 * length, 1, 1
        shape |= {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "intermediate_size": 128, "vocab_size": 1200}
    config = replace(encoder_config("base"), **shape, **MODELS[name])
    batch = full_batch(length, tokens, config.vocab_size, 1)
    labels = {n: v for n, v in batch.labels.items() if n in ("masked", "targets")}
    own = replace(batch, labels=labels, counts={"mlm": batch.counts["mlm"]})
    label, times = f"{name}, {length}", (tokens, count, warm)
    found: dict[str, Any] = {"bertsmith": speed_of(label, lambda: our_model_steps(config, own), *times)}
    if name != "bert" and not arguments.no_peer:
        found["transformers"] = peer_speed(name, label, config, batch, times)
    return found


def steps(arguments: argparse.Namespace) -> None:
    """Print tokens a second of every model, beside BERT and beside `transformers`."""
    for length in arguments.lengths:
        bert: float | None = None
        for name in MODELS:
            found = steps_of(name, length, arguments)
            speeds = {who: result["tokens_per_second"] for who, result in found.items() if result}
            own = speeds.get("bertsmith")
            bert = bert or own
            if own and bert:
                found["of_bert"] = round(own / bert, 3)
            if own and "transformers" in speeds:
                found["ratio"] = round(own / speeds["transformers"], 3)
            print(f"{name}, length {length}:", found, flush=True)
            keep(NAME, arguments.results, "steps", f"{name}, length {length}", found)


COMMANDS = {"kernels": kernels, "steps": steps}


def without_warnings() -> None:
    """Print no warnings of the compiler and the profiler, so that the end of a log shows the results."""
    warnings.simplefilter("ignore")
    torch._logging.set_logs(all=logging.ERROR)  # type: ignore[attr-defined]


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--tokens", type=int, default=32768, help="of a step")
    parser.add_argument("--flex", action="store_true", help="kernels: FlexAttention too, which compiles for a minute")
    parser.add_argument("--no-peer", action="store_true", help="steps: without transformers")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--smoke", action="store_true", help="steps: tiny shapes")
    arguments = parser.parse_args(given)
    if arguments.smoke and arguments.results == RESULTS:
        parser.error("--smoke needs --results FOLDER: what it measures means nothing")
    without_warnings()
    COMMANDS[arguments.command](arguments)


if __name__ == "__main__":
    main()
