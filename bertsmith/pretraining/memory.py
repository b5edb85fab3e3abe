"""The size of a micro-batch: as set, or the largest that fits the device's memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bertsmith.errors import UserError
from bertsmith.objectives.objective import Objective
from bertsmith.progress import say
from bertsmith.training import distributed
from bertsmith.training.settings import TrainConfig, autocast_dtype
from bertsmith.training.speed import free_memory


@dataclass(frozen=True)
class MicroBatches:
    """What the memory of a training step depends on, apart from the size of its micro-batches."""

    objective: Objective
    train: TrainConfig
    device: torch.device
    length: int  # of a sequence, in tokens
    predicted: float  # the share of the tokens that the vocabulary head is applied to

    def size(self, kept: int | None = None) -> int:
        """The size that is set, else the one that the run was started with (`kept`), else the largest that fits.

        All ranks choose the same size, by the rank with the least memory. A resumed run keeps its size, since another
        one would draw other dropout masks. A size that does not fit is refused.
        """
        train, most = self.train, -(-self.train.batch_size // distributed.world_size())
        room = distributed.all_reduce_min(free_memory(self.device))
        if train.micro_batch_size is not None:
            size = min(train.micro_batch_size, train.batch_size)
            if self.memory(size) > room:
                raise UserError(self._refusal(size, room))
            return size
        if kept is not None and self.memory(kept) <= room:
            return kept
        size = self._largest(most, room)
        if kept is not None:
            say(
                f"note: the run was started with {kept} sequences of {self.length} tokens at once, which do not fit "
                f"here; it resumes with {size}, and where there is dropout it is not identical to the bit"
            )
        return size

    def _largest(self, most: int, room: float) -> int:
        """The largest size up to `most` that fits the free memory `room`, with a margin."""
        size = min(self.train.micro_size(self.length), most)
        while self.device.type == "cuda" and size * 2 <= most and self.memory(size * 2) <= 0.6 * room:
            size *= 2
        while size > 1 and self.memory(size) > 0.9 * room:
            size //= 2
        if self.memory(size) > room:
            raise UserError(self._refusal(size, room))
        return size

    def memory(self, size: int) -> float:
        """About how many bytes a step with micro-batches of this size needs."""
        words = int(self.predicted * size * self.length) + size
        half = autocast_dtype(self.train.precision, self.device) is not None
        checkpointing, divided = self.train.gradient_checkpointing, self.train.parallel == "fsdp"
        processes = distributed.world_size() if divided else 1
        tokens = size * self.length
        return self.objective.memory(
            tokens, self.length, words, half=half, checkpointing=checkpointing, processes=processes
        )

    def _refusal(self, size: int, room: float) -> str:
        """The error for a micro-batch that does not fit, with the settings that would."""
        smaller = next((s for s in range(size - 1, 0, -1) if self.memory(s) <= 0.9 * room), 0)
        text = (
            f"{size} sequences of {self.length} tokens at once need about {self.memory(size) / 1e9:.1f} GB; "
            f"{self.device} has {room / 1e9:.1f} GB"
        )
        if smaller:
            turns = -(-self.train.batch_size // (smaller * distributed.world_size()))
            return (
                f"{text}; set train.micro_batch_size={smaller}: {turns} of them make a batch, and the result is equal"
            )
        more = [] if self.train.gradient_checkpointing else ["set train.gradient_checkpointing=true"]
        return f"{text}; {', '.join([*more, 'set train.parallel=fsdp on several GPUs, or take a smaller model'])}"
