"""The published settings of DeBERTa (He et al. 2021) and DeBERTa v3 (He et al. 2023)."""

from __future__ import annotations

from bertsmith.model.sizes import deberta_config, deberta_v3_config
from bertsmith.objectives.settings import MaskedLMConfig, ReplacedTokenConfig
from bertsmith.pretraining.loader import DataConfig
from bertsmith.pretraining.masking import MaskPolicy
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.training.settings import TrainConfig

V3_OBJECTIVE = ReplacedTokenConfig(
    generator_size=1.0, generator_layers=0.5, disentangled=True, context=True, mask_decoder=True
)


def deberta(size: str) -> PretrainConfig:
    """DeBERTa as in its paper: attention by content and distance, positions before the words are predicted.

    Appendix A.3: n-gram masks, no pair loss, batch 2,048. The published vocabulary is a byte-level BPE of 50,265
    entries.
    """
    return PretrainConfig(
        recipe=f"deberta-{size}",
        model=deberta_config(size),
        data=DataConfig(max_length=512, pairs="full", masking=MaskPolicy(unit="n-gram", span_max=3), copies=0),
        train=TrainConfig(
            steps=1_000_000, batch_size=2048, learning_rate=2e-4, warmup=10_000 / 1_000_000, evaluate_every=0.1
        ),
        objective=MaskedLMConfig(next_sentence=False, mask_decoder=True),
    )


def deberta_v3(size: str) -> PretrainConfig:
    """DeBERTa v3 as in its paper: replaced tokens are detected, and the generator alone trains the shared embeddings.

    Section 3 and its appendix; every chosen token becomes a mask, as in the released code. The generator has the width
    of the discriminator and half of its layers. The published vocabulary is a Unigram of 128,000 entries.
    """
    return PretrainConfig(
        recipe=f"deberta-v3-{size}",
        model=deberta_v3_config(size),
        data=DataConfig(max_length=512, pairs="full", masking=MaskPolicy(mask_share=1.0, random_share=0.0), copies=0),
        train=TrainConfig(
            steps=500_000,
            batch_size=8192,
            learning_rate=3e-4 if size == "large" else 6e-4,
            warmup=10_000 / 500_000,
            beta2=0.98,
            evaluate_every=0.1,
        ),
        objective=V3_OBJECTIVE,
    )
