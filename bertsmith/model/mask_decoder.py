"""The mask decoder of DeBERTa (section 3.2): positions before the masked words are predicted.

R rows, H hidden size. `…` stands for (B, L) or (T,), as the batch is laid out.
"""

from __future__ import annotations

from torch import Tensor, nn

from bertsmith.batch import Batch
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder, init_weights


class MaskDecoder(nn.Module):
    """Absolute positions, which come in just before the masked words are predicted (DeBERTa, section 3.2).

    The states before the last layer, with the vectors of their positions added, ask that layer, and its output asks it
    again; keys and values come from the states before it both times. So the layer has no parameters of the decoder,
    which only has the table of positions.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.positions = nn.Embedding(config.max_positions, config.hidden_size)
        init_weights(self, config.init_std)

    def forward(self, encoder: Encoder, batch: Batch, rows: Tensor | None = None) -> Tensor:
        """The decoded states (…, H), or those of the given rows (R, H)."""
        places = batch.positions if rows is None else batch.layout.flat(batch.positions).index_select(0, rows)
        return encoder(batch, rows=rows, asking=self.positions(places))  # type: ignore[no-any-return]
