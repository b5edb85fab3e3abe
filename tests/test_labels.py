"""Labels of a batch: a label of any kind is collated, padded and moved to a device, in both layouts."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bertsmith.batch import Batch, Example, Label, LabelKind, Packed, bucketed, collate
from bertsmith.training import cuda_graphs
from bertsmith.training.cuda_graphs import GraphRunner
from bertsmith.training.settings import TrainConfig

# Made-up labels: none of these names is known to the package.
KINDS = {
    "weight": LabelKind("token", fill=-1.0),
    "layers": LabelKind("token", fill=0),
    "replaced": LabelKind("token", fill=-100, loss="detection"),
    "entity": LabelKind("position", fill=0, index=True),
    "kind": LabelKind("position", fill=-7, loss="entities"),
    "anchors": LabelKind("position", index=True),
    "topic": LabelKind("sequence", loss="topics"),
    "vector": LabelKind("sequence"),
}
LENGTHS = (5, 3, 9)
LAYOUTS = pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])


def example(length: int) -> Example:
    """A sequence with one label of each kind, whose values encode their position."""
    tokens = 100 * length + np.arange(length)
    entities = np.arange(0, length, 2)
    values: dict[str, Any] = {
        "weight": tokens.astype(np.float32),
        "layers": np.repeat(tokens, 6).reshape(length, 2, 3).astype(np.float16),
        "replaced": np.where(tokens % 2, -100, tokens),
        "entity": entities,
        "kind": tokens[entities],
        "anchors": np.array([length - 1]),
        "topic": length,
        "vector": np.full(4, length, dtype=np.float32),
    }
    return Example(tokens, np.zeros(length), {name: Label(values[name], kind) for name, kind in KINDS.items()})


def made(packed: bool, *lengths: int) -> Batch:
    return collate([example(length) for length in lengths or LENGTHS], packed=packed)


def check(batch: Batch) -> None:
    """Every label of the three sequences belongs to its tokens, positions or sequences, and the rest is fill."""
    labels, flat = batch.labels, batch.layout.flat
    tokens = torch.from_numpy(np.concatenate([example(length).tokens for length in LENGTHS]))
    rows = torch.cat([torch.arange(n) + first for first, n in zip(batch.layout.firsts, LENGTHS, strict=True)])
    assert flat(batch.tokens)[rows].tolist() == tokens.tolist()
    assert flat(labels["weight"])[rows].tolist() == tokens.tolist()
    assert flat(labels["layers"]).shape[1:] == (2, 3)
    assert labels["layers"].dtype == torch.float16
    assert flat(labels["layers"])[rows, 1, 2].tolist() == tokens.half().tolist()
    rest = torch.ones(len(flat(batch.tokens)), dtype=torch.bool).index_fill(0, rows, False)
    assert {*flat(labels["weight"])[rest].tolist()} <= {-1.0}
    assert {*flat(labels["replaced"])[rest].tolist()} <= {-100}
    assert len(labels["kind"]) == len(labels["entity"])
    found = labels["kind"] != -7
    assert flat(batch.tokens)[labels["entity"][found]].tolist() == labels["kind"][found].tolist()
    assert int(found.sum()) == sum(-(-n // 2) for n in LENGTHS)
    assert flat(batch.tokens)[labels["anchors"]].tolist() == [101 * n - 1 for n in LENGTHS]
    assert labels["topic"].tolist() == list(LENGTHS)
    assert labels["vector"].tolist() == [[float(n)] * 4 for n in LENGTHS]


@LAYOUTS
def test_collate_lays_out_every_kind_and_counts_the_losses(packed: bool) -> None:
    batch = made(packed)
    check(batch)
    assert batch.counts == {"detection": 10, "entities": 10, "topics": 3}


@LAYOUTS
def test_padding_to_a_bucket_keeps_every_kind(packed: bool) -> None:
    batch, padded = made(packed), bucketed(made(packed))
    check(padded)
    assert padded.counts == batch.counts
    if packed:
        sizes = {name: len(padded.labels[name]) for name in KINDS}
        by_token, by_position = dict.fromkeys(("weight", "layers", "replaced"), 256), {"entity": 256, "kind": 256}
        assert sizes == {**by_token, **by_position, "anchors": 3, "topic": 3, "vector": 3}


@LAYOUTS
def test_zero_weight_and_to_device_keep_every_kind(packed: bool) -> None:
    batch = made(packed).to(torch.device("cpu")).zero_weight()
    check(batch)
    assert batch.kinds == KINDS
    assert batch.counts == {"detection": 0, "entities": 0, "topics": 0}


def test_padding_sequences_of_a_bucket_have_no_outputs() -> None:
    batch = bucketed(made(packed=True))
    outputs = torch.arange(len(batch.layout.starts) - 1)  # type: ignore[union-attr]
    assert batch.layout.valid(outputs).tolist() == [0, 1, 2]


@LAYOUTS
def test_cuda_graph_is_replayed_with_the_labels_of_the_next_batch(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "max_memory_allocated": lambda: 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("graph_pool_handle", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1))
    monkeypatch.setattr(cuda_graphs, "capturing", lambda graph, pool: nullcontext())
    seen: list[Batch] = []

    def forward_backward(batch: Batch, scales: Any) -> tuple[list[str], Tensor]:
        seen.append(batch)
        return ["loss"], torch.zeros(1)

    runner = GraphRunner(nn.Linear(1, 1), [], TrainConfig(steps=1), capturable=True)
    for lengths in ((9, 9, 3), (5, 5, 9), LENGTHS):  # the first is run, the second captured, the third copied into it
        runner.run(forward_backward, bucketed(made(packed, *lengths)), {"loss": 1.0})
    assert len(seen) == (2 if packed else 3)
    batch = seen[-1]
    if packed:  # its tensors hold the boundaries of the sequences
        starts = batch.layout.starts  # type: ignore[union-attr]
        assert starts.diff()[:3].tolist() == list(LENGTHS)
        assert isinstance(batch.layout, Packed)
    check(batch)


def test_a_label_per_token_needs_a_fill() -> None:
    with pytest.raises(ValueError, match="needs a fill"):
        LabelKind("token")


def test_label_may_be_missing_from_some_sequences() -> None:
    """Only one of the endings of a question has the label."""
    first, second = example(5), replace(example(3), labels={})
    batch = collate([replace(first, labels={"topic": first.labels["topic"]}), second], packed=True)
    assert batch.labels["topic"].tolist() == [5]
    assert batch.counts == {"topics": 1}
