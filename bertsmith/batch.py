"""Batches and how their tokens are laid out.

B sequences, L padded length, T tokens in all (no padding), H hidden size. A batch is `Padded`, with tensors of shape
(B, L, …), or `Packed`, with tensors of shape (T, …) in which the sequences are concatenated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

IGNORE = -100  # the label of a token that no loss counts
CHARACTERS = "characters"  # the label with the characters of every token, for encoders that read them
NEAR = 8  # tokens; on a CPU, more calls for attention cost more than so much padding
ROWS = "rows"  # the label with the row of each sequence, where the sequences are windows of texts
Item = TypeVar("Item")


@dataclass(frozen=True)
class Padded:
    """Every sequence is padded to the length of the longest one; `mask` is true where there is a token."""

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
        """One row per token, padding included: what labels with `index` refer to."""
        return hidden.flatten(0, 1)

    def is_token(self, flat: Tensor) -> Tensor:
        """Whether each row of the flat form belongs to a token (N,), not to padding."""
        return self.mask.flatten()

    def pad(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """Values as (B, L, …), with `fill` where there is no token."""
        mask = self.mask.reshape(self.mask.shape + (1,) * (values.dim() - 2))
        return values.masked_fill(~mask, fill)

    def unpad(self, values: Tensor) -> Tensor:
        """From (B, L, …) to this layout: nothing changes."""
        return values

    def valid(self, values: Tensor) -> Tensor:
        """Drop the rows of padding sequences (B, …): there are none in this layout."""
        return values

    def map(self, function: Callable[[Tensor], Tensor]) -> Padded:
        return Padded(function(self.mask))


@dataclass(frozen=True)
class Groups:
    """The sequences of a packed batch in padded groups of similar length, N places in all.

    `shapes[g]` is the (sequences, length) of a rectangle and `masks[g]` marks its tokens, None if it is full. `source`
    (N,) is the token that each place takes, `places` (T,) the place of each token; None if both have the same order.
    """

    shapes: list[tuple[int, int]]
    masks: list[Tensor | None]
    source: Tensor | None = None
    places: Tensor | None = None


@dataclass(frozen=True)
class Packed:
    """No padding: sequence i holds the tokens from `starts[i]` to `starts[i + 1]`.

    The last `num_padding` sequences pad the batch to the size of a captured CUDA graph; their outputs are not used.
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
        """One row per token."""
        return hidden

    def is_token(self, flat: Tensor) -> Tensor:
        """Whether each row of the flat form belongs to a token (N,), not to padding."""
        end = self.starts[len(self.starts) - 1 - self.num_padding]
        return torch.arange(len(flat), device=flat.device) < end

    def pad(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """Values as (B + num_padding, max_length, …), with `fill` where there is no token."""
        index, mask = self.rectangle
        mask = mask.reshape(mask.shape + (1,) * (values.dim() - 1))
        return values[index].masked_fill(~mask, fill)

    def unpad(self, values: Tensor) -> Tensor:
        """From (B + num_padding, max_length, …) back to (T, …)."""
        return values.flatten(0, 1).index_select(0, self.places)

    def valid(self, values: Tensor) -> Tensor:
        """Drop the rows of padding sequences from a tensor with one row per sequence: (B, …)."""
        return values[: len(values) - self.num_padding]

    def map(self, function: Callable[[Tensor], Tensor]) -> Packed:
        return Packed(function(self.starts), self.max_length, self.num_padding)

    @cached_property
    def rectangle(self) -> tuple[Tensor, Tensor]:
        """The index of the token at each place of the padded form (B, max_length), and the mask of valid places."""
        return _rectangle(self.starts[:-1].long(), self.starts[1:].long(), self.max_length)

    @cached_property
    def places(self) -> Tensor:
        """The place of each token in the padded form (T,)."""
        return self.rectangle[1].flatten().nonzero().squeeze(1)

    @cached_property
    def groups(self) -> Groups | None:
        """Groups for attention on a CPU, of lengths within an eighth or `NEAR`; None if all have one length."""
        starts = self.starts.to(torch.int64).cpu().numpy()
        lengths = np.diff(starts)
        if (lengths == self.max_length).all():
            return None
        order = np.argsort(-lengths, kind="stable")
        order = order[lengths[order] > 0]  # padding sequences may be empty
        shapes, masks, sources = [], [], []
        while order.size:
            longest = int(lengths[order[0]])
            size = int(np.searchsorted(-lengths[order], -(longest - max(longest // 8, NEAR)), side="right"))
            rows, order = order[:size], order[size:]
            index, mask = _rectangle(torch.from_numpy(starts[rows]), torch.from_numpy(starts[rows + 1]), longest)
            shapes.append((size, longest))
            masks.append(None if bool(mask.all()) else mask)
            sources.append((index.flatten(), mask.flatten()))
        source, real = torch.cat([s for s, _ in sources]), torch.cat([m for _, m in sources])
        places = torch.empty(int(starts[-1]), dtype=torch.int64)
        places[source[real]] = real.nonzero().squeeze(1)
        return Groups(shapes, masks, source, places)

    @cached_property
    def runs(self) -> Groups:
        """Groups of neighbouring sequences of one length: more of them, but none with padding or copies."""
        shapes = [(len(list(run)), length) for length, run in groupby(self.starts.diff().tolist()) if length]
        return Groups(shapes, [None] * len(shapes))


Layout = Padded | Packed


def _rectangle(starts: Tensor, ends: Tensor, length: int) -> tuple[Tensor, Tensor]:
    index = starts[:, None] + torch.arange(length, device=starts.device)
    return torch.minimum(index, ends[:, None] - 1), index < ends[:, None]


@dataclass(frozen=True)
class LabelKind:
    """The unit that a label has one value for, and how it is padded and collated.

    A label has one value `per` token, per position (the masked ones, for example) or per sequence. `fill` is its value
    for padding; None means that it is never padded, and labels per sequence are not, because `Layout.valid` drops the
    outputs of padding sequences. With `index` the values are indices of tokens in their sequence, which become rows of
    the batch. `loss` names the loss that divides its sum by the number of this label's values.
    """

    per: Literal["token", "position", "sequence"]
    fill: float | None = None
    index: bool = False
    loss: str | None = None

    def __post_init__(self) -> None:
        if self.per == "token" and self.fill is None:
            raise ValueError("a label per token needs a fill: padding has tokens too")

    def count(self, values: NDArray[Any]) -> int:
        """The number of values that a loss counts: all but those that are `fill`."""
        return len(values) if self.fill is None else int((values != self.fill).sum())


@dataclass(frozen=True)
class Label:
    """The values of one label, of an example or of a batch in packed order, and its kind."""

    values: Any
    kind: LabelKind


@dataclass(frozen=True)
class Example:
    """One encoded sequence, `[CLS] A [SEP] B [SEP]` as token ids, and its labels by name."""

    tokens: NDArray[Any]  # (n,)
    segments: NDArray[Any]  # (n,)
    labels: Mapping[str, Label] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """The input of a model: tokens and their layout, labels with their kinds by name, and the count of each loss.

    `indices` are the numbers of its samples in the data, where they are known; they stay on the CPU.
    """

    tokens: Tensor  # (B, L) or (T,)
    segments: Tensor
    positions: Tensor
    layout: Layout
    labels: dict[str, Tensor] = field(default_factory=dict)
    kinds: dict[str, LabelKind] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    num_tokens: int = 0  # without padding
    indices: NDArray[np.int64] | None = None  # (B,)
    largest: tuple[int, int] = (0, 0)  # token id and segment, known without synchronising with the device

    def with_labels(self, labels: Mapping[str, Label]) -> Batch:
        """Add labels, whose values are in packed order, in this batch's layout, and the counts of their losses."""
        counts = {v.kind.loss: v.kind.count(np.asarray(v.values)) for v in labels.values() if v.kind.loss}
        return replace(
            self,
            labels={**self.labels, **{name: _lay_out_label(label, self.layout) for name, label in labels.items()}},
            kinds={**self.kinds, **{name: label.kind for name, label in labels.items()}},
            counts={**self.counts, **counts},
        )

    def pin_memory(self) -> Batch:
        """Copy all tensors to page-locked memory, from which a GPU copies asynchronously."""
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
        """Return the batch with a count of zero for every loss: it takes part in the backward pass and adds nothing."""
        indices = None if self.indices is None else self.indices[:0]
        return replace(self, counts=dict.fromkeys(self.counts, 0), num_tokens=0, indices=indices)


def split_for_rank(items: Sequence[Item], rank: int, world_size: int) -> list[tuple[Item, bool]]:
    """The part of a step's items that one rank takes, and whether each is to have zero weight.

    Every rank has the same number of items, since the ranks synchronise their gradients; a rank that has none left
    takes the first item of the step again, with zero weight.
    """
    own: list[tuple[Item, bool]] = [(item, False) for item in items[rank::world_size]]
    return own if len(own) == -(-len(items) // world_size) else [*own, (items[0], True)]


def lay_out(
    tokens: NDArray[Any], segments: NDArray[Any], lengths: NDArray[Any], *, packed: bool, pad: int = 0
) -> Batch:
    """A batch without labels from concatenated sequences."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    positions = np.arange(len(tokens)) - np.repeat(starts[:-1], lengths)
    longest, largest = int(max(lengths)), (largest_id(tokens), largest_id(segments))
    if packed:
        t, s, p = (torch.from_numpy(np.asarray(c, dtype=np.int64)) for c in (tokens, segments, positions))
        return Batch(t, s, p, Packed(torch.from_numpy(starts), longest), num_tokens=len(tokens), largest=largest)
    mask = np.arange(longest) < np.asarray(lengths)[:, None]
    grids = (fill_grid(mask, np.asarray(c, np.int64), fill) for c, fill in ((tokens, pad), (segments, 0)))
    t, s = map(torch.from_numpy, grids)
    p = torch.arange(longest).expand(len(lengths), longest)
    return Batch(t, s, p, Padded(torch.from_numpy(mask)), num_tokens=len(tokens), largest=largest)


def largest_id(ids: NDArray[Any]) -> int:
    """The largest id; a negative one counts as larger than all others."""
    return int(np.asarray(ids, dtype=np.int64).view(np.uint64).max(initial=0))


def bucketed(batch: Batch) -> Batch:
    """Pad a packed batch to one of few sizes, with tokens and positions that no loss counts; a padded one is returned.

    The number of tokens grows by a thirty-second at most (or to 256), that of positions by an eighth; the length of the
    longest sequence becomes 64, or a multiple of 128 tokens.
    """
    if isinstance(batch.layout, Padded):
        return batch
    longest = batch.layout.max_length
    longest = 64 if longest <= 64 else -(-longest // 128) * 128
    step = _step(len(batch.tokens), 32)
    more, sequences = -len(batch.tokens) % step, -(-step // longest)
    ends = torch.arange(1, sequences + 1, dtype=torch.int32, device=batch.tokens.device) * longest
    starts = torch.cat([batch.layout.starts, len(batch.tokens) + ends.clamp(max=more)])
    return replace(
        batch,
        tokens=_pad_end(batch.tokens, more),
        segments=_pad_end(batch.segments, more),
        positions=_pad_end(batch.positions, more),
        layout=Packed(starts, longest, batch.layout.num_padding + sequences),
        labels={name: _pad_label(values, batch.kinds[name], more) for name, values in batch.labels.items()},
    )


def _step(size: int, parts: int) -> int:
    return max(256, (1 << (size.bit_length() - 1)) // parts)


def _pad_label(values: Tensor, kind: LabelKind, tokens: int) -> Tensor:
    """The label of a packed batch that is padded by a number of tokens."""
    if kind.fill is None or kind.per == "sequence":
        return values
    more = tokens if kind.per == "token" else -len(values) % _step(len(values), 8)
    return _pad_end(values, more, kind.fill)


def _pad_end(values: Tensor, more: int, fill: float = 0) -> Tensor:
    """Append rows of `fill` to a tensor."""
    return F.pad(values, (*(0, 0) * (values.dim() - 1), 0, more), value=fill)


def _lay_out_label(label: Label, layout: Layout) -> Tensor:
    """The values of a label, which are in packed order, in a layout; whole numbers become int64."""
    values, kind = np.asarray(label.values), label.kind
    if values.dtype.kind in "iu":
        values = values.astype(np.int64, copy=False)
    if isinstance(layout, Padded) and kind.index:
        values = np.flatnonzero(layout.mask.numpy().ravel())[values]
    if isinstance(layout, Padded) and kind.per == "token":
        values = fill_grid(layout.mask.numpy(), values, kind.fill or 0)
    return torch.from_numpy(values)


def fill_grid(mask: NDArray[np.bool_], values: NDArray[Any], fill: float) -> NDArray[Any]:
    """Values (T, …) in packed order as a (B, L, …) grid with `fill` at the padding."""
    grid = np.full(mask.shape + values.shape[1:], fill, dtype=values.dtype)
    grid[mask] = values
    return grid


def collate(
    examples: Sequence[Example], *, packed: bool, pad: int = 0, indices: NDArray[np.int64] | None = None
) -> Batch:
    """Examples as one batch, with the labels that they have and the counts of the losses."""
    tokens = np.concatenate([e.tokens for e in examples])
    segments = np.concatenate([e.segments for e in examples])
    lengths = np.array([len(e.tokens) for e in examples])
    batch = lay_out(tokens, segments, lengths, packed=packed, pad=pad)
    names = dict.fromkeys(name for example in examples for name in example.labels)
    labels = {name: _collate_label(examples, name, lengths.cumsum() - lengths) for name in names}
    return replace(batch.with_labels(labels), indices=indices)


def _collate_label(examples: Sequence[Example], name: str, starts: NDArray[np.int64]) -> Label:
    """A label of several examples in packed order; only one ending of a question has a label per sequence."""
    found = [(start, e.labels[name]) for start, e in zip(starts, examples, strict=True) if name in e.labels]
    kind = found[0][1].kind
    if kind.index:
        values = [start + np.asarray(label.values, dtype=np.int64) for start, label in found]
    else:
        values = [np.asarray(label.values) for _, label in found]
    return Label(np.stack(values) if kind.per == "sequence" else np.concatenate(values), kind)
