"""What every pre-training objective has: an encoder, named losses, and attributes that other modules use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from bertsmith.batch import Batch
from bertsmith.model.config import EncoderConfig
from bertsmith.model.cost import training_flops, training_memory
from bertsmith.model.encoder import Encoder

PAIR_LABEL = "next"  # the label of segment pairs: whether the second segment follows the first
EVERY_TOKEN = "tokens"  # in `Objective.counts`: the loss is summed over all tokens, which have no label
ORIGINAL_LABEL = "original"  # the tokens before masking
GENERATOR = "generator"  # the folder of the generator in that of its discriminator


class Objective(nn.Module):
    """A module that owns an encoder and maps a batch to named losses.

    A kind of objective is a subclass that is built from an encoder and its section of the configuration, and a row of
    `kinds.OBJECTIVES`. The class attributes define how it differs from the other kinds.
    """

    targets: ClassVar[Literal["masked", "next"]]  # which tokens the loader makes targets: masked ones, or the next ones
    token_loss: ClassVar[str]  # the name of the loss over the vocabulary, and of its logits
    token_head: ClassVar[str]  # the submodule that computes these logits
    folders: ClassVar[Mapping[str, str]] = {"": ""}  # folder inside the saved model folder: the submodule saved there
    config: Any
    encoder: Encoder

    @staticmethod
    def counts(config: Any) -> dict[str, str]:
        """Every loss of this kind with the label of the batch whose entries it is summed over, or `EVERY_TOKEN`."""
        raise NotImplementedError

    @classmethod
    def saved(cls, model: EncoderConfig, config: Any) -> list[tuple[EncoderConfig, str]]:
        """The encoders that are saved, given the first one, each with the kind of its output in a family's table."""
        output = cls.output(config)
        return [(model, f"{output}+next_sentence" if PAIR_LABEL in cls.counts(config).values() else output)]

    @classmethod
    def output(cls, config: Any) -> str:
        """The kind of the output in a family's table, without the head of the pairs."""
        return cls.token_head

    @classmethod
    def of_parts(cls, config: Any, parts: Mapping[str, Objective]) -> Objective:
        """Join the models of several saved folders (see `folders`), by the submodule that each becomes."""
        raise NotImplementedError

    def tensors_of(self, part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors that are saved of a submodule (see `folders`), given the gathered state of the whole."""
        prefix = f"{part}." if part else ""
        return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}

    def logits(self, batch: Batch) -> dict[str, Tensor]:
        """The logits of every loss at the positions that the batch's labels name."""
        raise NotImplementedError

    def token_logits(self, batch: Batch) -> Tensor:
        """The logits over the vocabulary (M, V) at the positions of the label `masked`, which needs no other label."""
        return self.logits(batch)[self.token_loss]

    def dense_logits(self, batch: Batch) -> dict[str, Tensor]:
        """The logits of every loss at all positions of a padded batch, which needs no labels."""
        raise NotImplementedError

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """The summed losses and, as `<loss>_accuracy`, the numbers of correct predictions."""
        raise NotImplementedError

    def measures(self, batch: Batch) -> dict[str, tuple[Tensor, int | Tensor]]:
        """The held-out scores of a batch, each as a sum and the number of entries that it is the sum of."""
        logits, targets = self.logits(batch), batch.labels["targets"]
        loss = F.cross_entropy(logits[self.token_loss], targets, reduction="sum")
        found: dict[str, tuple[Tensor, int | Tensor]] = {f"{self.token_loss}_loss": (loss, len(targets))}
        for name, label in self.counts(self.config).items():
            right = (logits[name].argmax(-1) == batch.labels[label]).sum()
            found[f"{name}_accuracy"] = right, len(batch.labels[label])
        return found

    def flops(self, lengths: Sequence[int], predicted: int) -> float:
        """The operations of a training step on sequences of these lengths, with this number of predicted tokens."""
        return training_flops(self.encoder.config, lengths, predicted)

    def memory(
        self, tokens: int, length: int, predicted: int, *, half: bool, checkpointing: bool, processes: int
    ) -> float:
        """About how many bytes a training step needs on this many tokens in sequences of one length."""
        return training_memory(
            self.encoder.config, tokens, length, predicted,
            half=half, checkpointing=checkpointing, processes=processes,
        )  # fmt: skip

    @property
    def loss_weights(self) -> Mapping[str, float]:
        """The weights of losses in the sum that is minimised; 1 for those that are not named."""
        return {}

    @property
    def encoders(self) -> list[Encoder]:
        """The encoders, whose layers training treats one by one."""
        return [self.encoder]

    @property
    def goal(self) -> str:
        """The held-out score that makes a checkpoint the best one; a minus sign means that lower is better."""
        return f"-{self.token_loss}_loss"

    @property
    def fills_masks(self) -> bool:
        """Whether the token logits at a mask are predictions of the masked word."""
        return self.targets == "masked"

    def lacks_token_head(self, missing: tuple[str, ...]) -> bool:
        """Whether the head of the token logits is among the parameters that a folder had no weights for."""
        return any(name.startswith(f"{self.token_head}.") for name in missing)

    def tie_weights(self) -> None:
        """Make the output layer over the vocabulary share the token embedding's matrix."""
        getattr(self, self.token_head).tie(self.encoder.embeddings.tokens)
