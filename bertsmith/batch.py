"""Batches and how their tokens are laid out.

B sequences, L padded length, T tokens in all (no padding), H hidden size. A batch is `Padded`, with tensors of shape
(B, L, …), or `Packed`, with tensors of shape (T, …) in which the sequences stand one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

IGNORE = -100  # a token label that no loss counts
COLUMNS = "tokens", "segments", "positions"
Item = TypeVar("Item")


@dataclass(frozen=True)
class Padded:
    """Every sequence is filled up to the longest; `mask` is true where there is a token."""

    mask: Tensor  # (B, L)

    @property
    def max_length(self) -> int:
        return self.mask.shape[1]

    @property
    def firsts(self) -> Tensor:
        """The row of each sequence's first token, `[CLS]`, in the flat form (B,)."""
        return torch.arange(self.mask.shape[0], device=self.mask.device) * self.mask.shape[1]

    @property
    def lasts(self) -> Tensor:
        """The row of each sequence's last token in the flat form (B,)."""
        return self.firsts + (self.mask.sum(1) - 1).clamp_min(0)

    def flat(self, hidden: Tensor) -> Tensor:
        """One row a place, padding included: what `Batch` positions index."""
        return hidden.flatten(0, 1)

    def pad(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """Values as (B, L, …), with `fill` where there is no token."""
        mask = self.mask.reshape(self.mask.shape + (1,) * (values.dim() - 2))
        return values.masked_fill(~mask, fill)

    def unpad(self, values: Tensor) -> Tensor:
        """From (B, L, …) back to this layout's own form."""
        return values

    def valid(self, values: Tensor) -> Tensor:
        """Of one value a sequence, those that are no num_padding's: all."""
        return values

    def map(self, function: Callable[[Tensor], Tensor]) -> Padded:
        return Padded(function(self.mask))


@dataclass(frozen=True)
class Groups:
    """The sequences of a packed batch in rectangles of similar length, N places in all.

    `shapes[g]` is the (sequences, length) of a rectangle and `masks[g]` says where it has tokens, None where it is
    full. `source` (N,) is the token that each place takes, `places` (T,) the place of each token.
    """

    shapes: list[tuple[int, int]]
    masks: list[Tensor | None]
    source: Tensor
    places: Tensor


@dataclass(frozen=True)
class Packed:
    """No padding: sequence i holds the tokens from `starts[i]` to `starts[i + 1]`.

    The last `num_padding` sequences are there to round the batch up; nobody asks for what comes of them.
    """

    starts: Tensor  # (B + num_padding + 1,) int32
    max_length: int
    num_padding: int = 0

    @property
    def lengths(self) -> Tensor:
        """How many tokens each sequence has (B,)."""
        return self.valid(self.starts.diff())

    @property
    def firsts(self) -> Tensor:
        """The row of each sequence's first token, `[CLS]`, in the flat form (B,)."""
        return self.valid(self.starts[:-1].long())

    @property
    def lasts(self) -> Tensor:
        """The row of each sequence's last token in the flat form (B,)."""
        return self.valid(self.starts[1:].long()) - 1

    def flat(self, hidden: Tensor) -> Tensor:
        """One row a token."""
        return hidden

    def pad(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """Values as (B + num_padding, max_length, …), with `fill` where there is no token."""
        index, mask = self.rectangle
        mask = mask.reshape(mask.shape + (1,) * (values.dim() - 1))
        return values[index].masked_fill(~mask, fill)

    def unpad(self, values: Tensor) -> Tensor:
        """From (B + num_padding, max_length, …) back to (T, …)."""
        return values.flatten(0, 1).index_select(0, self.places)

    def valid(self, values: Tensor) -> Tensor:
        """Of one value a sequence, those that are no num_padding's: (B, …)."""
        return values[: len(values) - self.num_padding]

    def map(self, function: Callable[[Tensor], Tensor]) -> Packed:
        return Packed(function(self.starts), self.max_length, self.num_padding)

    @cached_property
    def rectangle(self) -> tuple[Tensor, Tensor]:
        """Where each place of the padded form finds its token (B, max_length), and whether there is one."""
        return _rectangle(self.starts[:-1].long(), self.starts[1:].long(), self.max_length)

    @cached_property
    def places(self) -> Tensor:
        """Where each token stands in the padded form (T,)."""
        return self.rectangle[1].flatten().nonzero().squeeze(1)

    @cached_property
    def groups(self) -> Groups | None:
        """Rectangles for attention on a CPU, padding under an eighth of each; None where one full one is enough."""
        starts = self.starts.to(torch.int64).cpu().numpy()
        lengths = np.diff(starts)
        if (lengths == self.max_length).all():
            return None
        order = np.argsort(-lengths, kind="stable")
        order = order[lengths[order] > 0]  # num_padding may be empty
        shapes, masks, sources = [], [], []
        while order.size:
            longest = int(lengths[order[0]])
            size = int(np.searchsorted(-lengths[order], -(longest - longest // 8), side="right"))
            rows, order = order[:size], order[size:]
            index, mask = _rectangle(torch.from_numpy(starts[rows]), torch.from_numpy(starts[rows + 1]), longest)
            shapes.append((size, longest))
            masks.append(None if bool(mask.all()) else mask)
            sources.append((index.flatten(), mask.flatten()))
        source, real = torch.cat([s for s, _ in sources]), torch.cat([m for _, m in sources])
        places = torch.empty(int(starts[-1]), dtype=torch.int64)
        places[source[real]] = real.nonzero().squeeze(1)
        return Groups(shapes, masks, source, places)


Layout = Padded | Packed


def _rectangle(starts: Tensor, ends: Tensor, length: int) -> tuple[Tensor, Tensor]:
    index = starts[:, None] + torch.arange(length, device=starts.device)
    return torch.minimum(index, ends[:, None] - 1), index < ends[:, None]


@dataclass(frozen=True)
class Example:
    """One encoded input: `[CLS] A [SEP] B [SEP]` as token ids, with what is to be learnt from it."""

    tokens: NDArray[Any]  # (n,)
    segments: NDArray[Any]  # (n,)
    label: Any = None  # a class, a number, a row of numbers, or a (start, end) span
    tags: NDArray[Any] | None = None  # (n,) one class a token, IGNORE where there is none
    read: NDArray[Any] | None = None  # the tokens that are asked about, in order: each word's first; others are context
    begins: NDArray[Any] | None = None  # those of them that begin a sentence; None: the first alone
    states: NDArray[Any] | None = None  # (n, layers, H) what a frozen encoder gave for them

    @property
    def sentences(self) -> NDArray[Any]:
        """The tokens that are asked about and begin a sentence."""
        return np.asarray(self.read)[:1] if self.begins is None else self.begins


@dataclass(frozen=True)
class Batch:
    """What a model takes: tokens and their layout, labels by name, and how much each loss will count.

    `indices` says which samples of the data it holds, where that is known; it stays on the CPU.
    """

    tokens: Tensor  # (B, L) or (T,)
    segments: Tensor
    positions: Tensor
    layout: Layout
    labels: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    num_tokens: int = 0  # real ones
    indices: NDArray[np.int64] | None = None  # (B,)
    largest: tuple[int, int] = (0, 0)  # token id and segment, where they are known: a device would have to be asked

    def pin_memory(self) -> Batch:
        """In memory that a GPU reads without the CPU's help."""
        return self._map(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device) -> Batch:
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        return replace(
            self,
            tokens=function(self.tokens),
            segments=function(self.segments),
            positions=function(self.positions),
            layout=self.layout.map(function),
            labels={name: function(value) for name, value in self.labels.items()},
        )

    def tensors(self) -> list[Tensor]:
        """All tensors of the batch, in one order."""
        found: list[Tensor] = []
        self._map(lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
        return found

    def zero_weight(self) -> Batch:
        """The same work for nothing: no loss counts it, no token and no sample is reckoned as used."""
        indices = None if self.indices is None else self.indices[:0]
        return replace(self, counts=dict.fromkeys(self.counts, 0), num_tokens=0, indices=indices)


def split_for_rank(items: Sequence[Item], rank: int, ranks: int) -> list[tuple[Item, bool]]:
    """The part of a step's items that one of several processes takes, and whether each is idle work.

    Every rank has the same number, since the ranks wait for each other; one that has none left takes the first item
    of the step again, idle.
    """
    own: list[tuple[Item, bool]] = [(item, False) for item in items[rank::ranks]]
    return own if len(own) == -(-len(items) // ranks) else [*own, (items[0], True)]


def lay_out(
    tokens: NDArray[Any], segments: NDArray[Any], lengths: NDArray[Any], *, packed: bool, pad: int = 0
) -> Batch:
    """A batch without labels from sequences that stand one after the other."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    positions = np.arange(len(tokens)) - np.repeat(starts[:-1], lengths)
    longest, largest = int(max(lengths)), (largest_id(tokens), largest_id(segments))
    if packed:
        t, s, p = (torch.from_numpy(np.asarray(c, dtype=np.int64)) for c in (tokens, segments, positions))
        return Batch(t, s, p, Packed(torch.from_numpy(starts), longest), num_tokens=len(tokens), largest=largest)
    mask = np.arange(longest) < np.asarray(lengths)[:, None]
    t, s = (torch.from_numpy(fill_grid(mask, c, fill)) for c, fill in ((tokens, pad), (segments, 0)))
    p = torch.arange(longest).expand(len(lengths), longest)
    return Batch(t, s, p, Padded(torch.from_numpy(mask)), num_tokens=len(tokens), largest=largest)


def largest_id(ids: NDArray[Any]) -> int:
    """The largest id; a negative one counts as larger than all others."""
    return int(np.asarray(ids, dtype=np.int64).view(np.uint64).max(initial=0))


def bucketed(batch: Batch) -> Batch:
    """A packed batch rounded up to one of few sizes, by num_padding that no loss counts.

    Tokens go up by a thirty-second at most (or to 256), masked positions by an eighth; the longest sequence counts as
    64, or as a multiple of 128 tokens.
    """
    assert isinstance(batch.layout, Packed)
    longest = batch.layout.max_length
    longest = 64 if longest <= 64 else -(-longest // 128) * 128
    step = _step(len(batch.tokens), 32)
    more, fillers = -len(batch.tokens) % step, -(-step // longest)
    ends = torch.arange(1, fillers + 1, dtype=torch.int32, device=batch.tokens.device) * longest
    starts = torch.cat([batch.layout.starts, len(batch.tokens) + ends.clamp(max=more)])
    sizes = {"tags": (more, IGNORE)}
    if "masked" in batch.labels:
        masked = len(batch.labels["masked"])
        room = -masked % _step(masked, 8)
        sizes |= {"masked": (room, 0), "targets": (room, IGNORE)}
    labels = {n: F.pad(v, (0, sizes[n][0]), value=sizes[n][1]) if n in sizes else v for n, v in batch.labels.items()}
    if "states" in labels:
        labels["states"] = F.pad(labels["states"], (0, 0, 0, 0, 0, more))
    columns = (F.pad(v, (0, more)) for v in (batch.tokens, batch.segments, batch.positions))
    layout = Packed(starts, longest, batch.layout.num_padding + fillers)
    return replace(batch, **dict(zip(COLUMNS, columns, strict=True)), layout=layout, labels=labels)  # type: ignore[arg-type]


def _step(size: int, parts: int) -> int:
    return max(256, (1 << (size.bit_length() - 1)) // parts)


def fill_grid(mask: NDArray[np.bool_], values: NDArray[Any], fill: int) -> NDArray[np.int64]:
    """Packed values as a (B, L) grid."""
    grid = np.full(mask.shape, fill, dtype=np.int64)
    grid[mask] = values
    return grid


def collate(
    examples: Sequence[Example], *, packed: bool, pad: int = 0, indices: NDArray[np.int64] | None = None
) -> Batch:
    """Examples as one batch; the labels that they carry come along, and their count under the loss name `task`."""
    tokens = np.concatenate([e.tokens for e in examples])
    segments = np.concatenate([e.segments for e in examples])
    batch = lay_out(tokens, segments, np.array([len(e.tokens) for e in examples]), packed=packed, pad=pad)
    labels: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    if given := [e.label for e in examples if e.label is not None]:
        labels["label"] = torch.as_tensor(np.asarray(given))
        counts["task"] = len(given)
    if examples[0].tags is not None:
        tags = np.concatenate([np.asarray(e.tags) for e in examples]).astype(np.int64)
        counts["task"] = int((tags != IGNORE).sum())
        if isinstance(batch.layout, Padded):
            tags = fill_grid(batch.layout.mask.numpy(), tags, IGNORE)
        labels["tags"] = torch.from_numpy(tags)
    if examples[0].read is not None and isinstance(batch.layout, Packed):
        starts = batch.layout.starts.numpy()[:-1].astype(np.int64)
        for name, asked in (("read", [e.read for e in examples]), ("begins", [e.sentences for e in examples])):
            shifted = [start + np.asarray(places, np.int64) for start, places in zip(starts, asked, strict=True)]
            labels[name] = torch.from_numpy(np.concatenate(shifted))
    if examples[0].states is not None:
        labels["states"] = torch.from_numpy(np.concatenate([np.asarray(e.states) for e in examples]))
    return replace(batch, labels=labels, counts=counts, indices=indices)
