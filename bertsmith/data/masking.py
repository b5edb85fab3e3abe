"""Masking for the masked language model (BERT paper, section 3.1): 15 % of the tokens, 80/10/10."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith import draws
from bertsmith.errors import UserError


@dataclass(frozen=True)
class MaskPolicy:
    """How many tokens are chosen, and what becomes of them; what is left over stays as it is."""

    rate: float = 0.15
    mask_share: float = 0.8
    random_share: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise UserError(f"data.masking.rate must lie between 0 and 1, not {self.rate}")
        if min(self.mask_share, self.random_share) < 0 or self.mask_share + self.random_share > 1 + 1e-9:
            raise UserError(
                f"data.masking: mask_share {self.mask_share} + random_share {self.random_share} must lie in [0, 1]"
            )


@dataclass(frozen=True)
class Masked:
    """Tokens with some replaced, where the chosen ones stand, and what they were."""

    tokens: NDArray[Any]  # (T,)
    positions: NDArray[np.int64]  # (M,)
    targets: NDArray[Any]  # (M,)


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """What masking has to know of the tokenizer: the mask's id, and which ids are ordinary words."""

    mask_id: int
    is_special: NDArray[np.bool_]  # (V,)
    ordinary: NDArray[np.int64]

    @classmethod
    def of(cls, size: int, mask_id: int, special_ids: tuple[int, ...]) -> Vocabulary:
        is_special = np.zeros(size, dtype=bool)
        is_special[list(special_ids)] = True
        return cls(mask_id, is_special, np.flatnonzero(~is_special))


def mask_tokens(
    tokens: NDArray[Any], lengths: NDArray[Any], keys: NDArray[np.uint64], policy: MaskPolicy, vocabulary: Vocabulary
) -> Masked:
    """Mask packed sequences; sequence i draws from `keys[i]` alone, so its neighbours do not matter.

    Of a sequence of n tokens (special ones counted) exactly max(1, round(rate · n)) are chosen, as released; special
    tokens never are.
    """
    starts = np.cumsum(lengths) - lengths
    owner = np.repeat(np.arange(len(lengths)), lengths)
    places = np.arange(len(tokens)) - starts[owner]
    order_draw = draws.uniform(keys[owner], places, 0)
    special = vocabulary.is_special[tokens]
    order_draw[special] = 1.0  # after all others
    order = np.argsort(order_draw + 2.0 * owner)  # sequence by sequence
    wanted = np.maximum(1, np.rint(policy.rate * lengths)).astype(np.int64)
    wanted = np.minimum(wanted, np.bincount(owner, ~special, len(lengths)).astype(np.int64))
    rank = np.arange(len(tokens)) - starts[owner]  # of the sorted tokens, inside their sequence
    positions = np.sort(order[rank < wanted[owner]])
    targets = tokens[positions]
    masked = tokens.copy()
    fate = draws.uniform(keys[owner[positions]], places[positions], 1)
    masked[positions[fate < policy.mask_share]] = vocabulary.mask_id
    random = (fate >= policy.mask_share) & (fate < policy.mask_share + policy.random_share)
    chosen = positions[random]
    masked[chosen] = vocabulary.ordinary[draws.below(len(vocabulary.ordinary), keys[owner[chosen]], places[chosen], 2)]
    return Masked(masked, positions, targets)
