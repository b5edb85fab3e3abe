"""How the files of a family keep our tensors: under which names, whole or in parts, transposed, or written twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Stored:
    """Where and how a file keeps one of our tensors.

    In the rows of a table, `{i}` in a name is the layer and `*` stands for `weight` and `bias`.
    """

    names: tuple[str, ...]  # several names: equal parts of our tensor along its first dimension
    transposed: bool = False  # a matrix has its inputs first, as in the Conv1D of GPT
    pad_rows: bool = False  # pad_token_id + 1 unused rows come before the first row, as in RoBERTa's positions
    tied: tuple[str, ...] = ()  # further names of the same tensor: not written, and read where the first is missing
    by_head: bool = False  # the rows of a head's queries, keys and values are together, as in the first DeBERTa
    heads: int = 1  # their number; it is filled in for a model
    copies: tuple[
        tuple[str, ...], ...
    ] = ()  # further names of all parts: written as well, and equal when they are read

    def parts(self, tensor: Tensor, unused_rows: int) -> dict[str, Tensor]:
        """Our tensor as the tensors of a file, by name."""
        if self.pad_rows:
            tensor = torch.cat([tensor.new_zeros(unused_rows, *tensor.shape[1:]), tensor])
        chunks = self._regrouped(tensor, 3, self.heads).chunk(len(self.names))
        parts = {name: self._turned(chunk).contiguous() for name, chunk in zip(self.names, chunks, strict=True)}
        copied = {copy: parts[name] for names in self.copies for copy, name in zip(names, self.names, strict=True)}
        return parts | copied

    def joined(self, parts: Sequence[Tensor], unused_rows: int) -> Tensor:
        """Our tensor from the tensors of a file, in its own memory."""
        tensor = self._regrouped(torch.cat([self._turned(part) for part in parts]), self.heads, 3)
        return tensor[unused_rows:].clone() if self.pad_rows else tensor

    def shape(self, ours: Sequence[int], unused_rows: int) -> tuple[int, ...]:
        """The shape of each part in a file, given the shape of our tensor."""
        rows = (ours[0] + (unused_rows if self.pad_rows else 0)) // len(self.names)
        shape = (rows, *ours[1:])
        return shape[::-1] if self.transposed else shape

    def found_in(self, weights: Mapping[str, Tensor]) -> list[str]:
        """The names under which a file stores the tensor; none if it does not hold all parts."""
        if all(name in weights for name in self.names):
            return list(self.names)
        return next(([name] for name in self.tied if name in weights), [])

    def _turned(self, tensor: Tensor) -> Tensor:
        return tensor.T if self.transposed and tensor.dim() == 2 else tensor

    def _regrouped(self, tensor: Tensor, *groups: int) -> Tensor:
        """Rows in groups of two sizes, with the inner group first."""
        return tensor.unflatten(0, (*groups, -1)).transpose(0, 1).flatten(0, 2) if self.by_head else tensor


Row = str | Stored
Names = Mapping[str, Row]  # ours: theirs


def as_stored(row: Row) -> Stored:
    """A row of a table; a single name is a tensor that is stored like ours."""
    return Stored((row,)) if isinstance(row, str) else row


def expand(rows: Names, layers: range) -> Iterator[tuple[str, Stored]]:
    """The rows of a table, with every layer, weight and bias by its own name."""
    for ours, theirs in rows.items():
        stored = as_stored(theirs)
        for layer in layers if "{i}" in ours else range(1):
            for end in ("weight", "bias") if ours.endswith("*") else ("",):
                yield _filled(ours, layer, end), _with_names(stored, layer, end)


def _with_names(stored: Stored, layer: int, end: str) -> Stored:
    names = tuple(_filled(name, layer, end) for name in stored.names)
    return replace(stored, names=names, tied=tuple(_filled(name, layer, end) for name in stored.tied))


def _filled(name: str, layer: int, end: str) -> str:
    return name.replace("{i}", str(layer)).replace("*", end)
