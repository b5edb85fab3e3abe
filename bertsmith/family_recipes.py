"""The recipes of the families beside BERT, as published, and one of each to try on a CPU."""

from __future__ import annotations

from dataclasses import replace

from bertsmith.model.sizes import albert_config, electra_config, elmo_config, encoder_config, modern_config
from bertsmith.objectives.settings import (
    BIDIRECTIONAL_LM,
    CausalLMConfig,
    DistillationConfig,
    MaskedLMConfig,
    ReplacedTokenConfig,
)
from bertsmith.pretraining.deberta import deberta, deberta_v3
from bertsmith.pretraining.loader import DataConfig
from bertsmith.pretraining.masking import MaskPolicy
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.training.settings import TrainConfig


def roberta(size: str) -> PretrainConfig:
    """RoBERTa as in its paper: full sentences of 512 tokens, new masks in every epoch, no pair loss, batch 8,192.

    Section 4 and Table 9. The published vocabulary is a byte-level BPE of 50,265 entries.
    """
    large = size == "large"
    return PretrainConfig(
        recipe=f"roberta-{size}",
        model=replace(encoder_config(size), family="roberta", num_segments=1, norm_eps=1e-5),
        data=DataConfig(max_length=512, pairs="full", copies=0),
        train=TrainConfig(
            steps=500_000,
            batch_size=8192,
            learning_rate=4e-4 if large else 6e-4,
            warmup=(30_000 if large else 24_000) / 500_000,
            beta2=0.98,
            clip_norm=0.0,
            evaluate_every=0.1,
        ),
        objective=MaskedLMConfig(next_sentence=False),
    )


def roberta_prenorm() -> PretrainConfig:
    """A Base that learns masked words fast: pre-norm, no bias, no dropout, full sentences, 20 % masked, Muon.

    An hour on one GPU unless `--hours` says otherwise; the rate falls all the way. With less weight decay the weights
    grow until every token attends to a single other one, and fine-tuning changes little (docs/experiments.md).
    """
    plain = {"norm_first": True, "bias": False, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    return PretrainConfig(
        recipe="roberta-prenorm",
        model=replace(encoder_config("base"), family="roberta-prelayernorm", **plain),  # type: ignore[arg-type]
        data=DataConfig(max_length=128, pairs="full", masking=MaskPolicy(rate=0.2), copies=0),
        train=TrainConfig(
            hours=1.0,
            batch_size=512,
            optimizer="muon",
            learning_rate=0.02,
            rest_learning_rate=1e-3,
            weight_decay=0.1,
            warmup=0.05,
            schedule="linear",
            beta2=0.98,
            evaluate_every=0.05,
        ),
        objective=MaskedLMConfig(next_sentence=False),
    )


def albert(size: str) -> PretrainConfig:
    """ALBERT as in its paper: shared layers, narrow embeddings, sentence order, n-gram masks, LAMB, batch 4,096.

    Sections 3 and 4.1, with the warm-up and the copies of the released code. The published vocabulary is a Unigram of
    30,000 entries.
    """
    return PretrainConfig(
        recipe=f"albert-{size}",
        model=albert_config(size),
        data=DataConfig(max_length=512, pairs="order", masking=MaskPolicy(unit="n-gram", span_max=3), copies=40),
        train=TrainConfig(
            steps=125_000,
            batch_size=4096,
            optimizer="lamb",
            learning_rate=0.00176,
            warmup=3125 / 125_000,
            evaluate_every=0.1,
        ),
    )


def electra(size: str) -> PretrainConfig:
    """ELECTRA as in its paper: tokens that a small generator replaced are detected; full sentences, no pair loss.

    Table 6; 85 % of the chosen tokens become masks, as in the released code. Small has sequences of 128 tokens, the
    others of 512. The published vocabulary is BERT's: WordPiece, uncased, 30,522 entries.
    """
    small, large = size in ("tiny", "small"), size == "large"
    steps = {"base": 766_000, "large": 400_000}.get(size, 1_000_000)
    masking = MaskPolicy(rate=0.25 if large else 0.15, mask_share=0.85, random_share=0.0)
    return PretrainConfig(
        recipe=f"electra-{size}",
        model=electra_config(size),
        data=DataConfig(max_length=128 if small else 512, pairs="full", masking=masking, copies=0),
        train=TrainConfig(
            steps=steps,
            batch_size={"base": 256, "large": 2048}.get(size, 128),
            learning_rate=5e-4 if small else 2e-4,
            warmup=10_000 / steps,
            evaluate_every=0.1,
        ),
        objective=ReplacedTokenConfig(generator_size={"tiny": 1 / 2, "base": 1 / 3}.get(size, 1 / 4)),
    )


def elmo(size: str) -> PretrainConfig:
    """ELMo as released: a character CNN and two LSTM layers of each direction, ten epochs of running text.

    The sizes and the dropout are those of the released model. Its authors trained by Adagrad with a rate of 0.2, on 20
    words at a time of 384 rows of text, and carried the states of the LSTM from one piece of a row to the next; here
    AdamW trains on sequences of 128 words, each of which begins anew. They predicted 793,470 words by a sampled
    softmax, here the most frequent 100,000 are predicted by a full one. The vocabulary is of the kind `words`.
    """
    return PretrainConfig(
        recipe="elmo" if size == "base" else f"elmo-{size}",
        model=replace(elmo_config(size), predicted_words=100_000),
        data=DataConfig(max_length=128, pairs="full", copies=0),
        train=TrainConfig(
            epochs=10, batch_size=128, learning_rate=1e-3, warmup=0.01, weight_decay=0.0, evaluate_every=0.1
        ),
        objective=BIDIRECTIONAL_LM,
    )


def elmo_tiny() -> PretrainConfig:
    """ELMo to try on a CPU: few filters and cells, short sequences, a short run at a high learning rate."""
    tried = _tried(elmo("tiny"))
    return replace(tried, train=replace(tried.train, steps=500, evaluate_every=100))


def gpt(size: str) -> PretrainConfig:
    """OpenAI GPT as in its paper: left to right, contiguous text of 512 tokens, batch 64, Adam 2.5e-4, 100 epochs.

    Section 4.1; the rate rises for 2,000 updates, of the three million that 100 epochs of a billion tokens (BookCorpus)
    take, and falls as a cosine. The published vocabulary is a BPE of 40,000 merges, 40,478 entries.
    """
    left_to_right = {"direction": "left-to-right", "num_segments": 0, "activation": "gelu_tanh", "norm_eps": 1e-5}
    no_layers = dict.fromkeys(("embedding_norm", "head_transform", "head_bias", "pooler"), False)
    return PretrainConfig(
        recipe="gpt" if size == "base" else f"gpt-{size}",
        model=replace(encoder_config(size), family="openai-gpt", **left_to_right, **no_layers),  # type: ignore[arg-type]
        data=DataConfig(max_length=512, pairs="contiguous", copies=0),
        train=TrainConfig(
            epochs=100,
            batch_size=64,
            learning_rate=2.5e-4,
            warmup=2000 / 3_000_000,
            schedule="cosine",
            adam_eps=1e-8,
            evaluate_every=0.1,
        ),
        objective=CausalLMConfig(),
    )


def gpt_tiny() -> PretrainConfig:
    """OpenAI GPT to try on a CPU: two layers, short sequences, a short run by Muon.

    Every token is predicted, so a few hundred steps are enough; with AdamW it takes four times as many.
    """
    base = _tried(gpt("tiny"))
    train = replace(base.train, optimizer="muon", learning_rate=0.02, rest_learning_rate=4e-3, steps=600)
    return replace(base, train=replace(train, evaluate_every=100))


def roberta_tiny() -> PretrainConfig:
    """RoBERTa to try on a CPU: two layers, short sequences, a short run at a high learning rate."""
    return _tried(roberta("tiny"))


def albert_tiny() -> PretrainConfig:
    """ALBERT to try on a CPU: two layers, short sequences, a short run at a high learning rate."""
    return _tried(albert("tiny"))


def electra_tiny() -> PretrainConfig:
    """ELECTRA to try on a CPU: two layers, short sequences, a short run at the published rate of ELECTRA-Small.

    At a higher rate the generator learns faster, but the discriminator calls every token original.
    """
    published = electra("tiny")
    base = _tried(published)
    return replace(base, train=replace(base.train, learning_rate=published.train.learning_rate))


def deberta_tiny() -> PretrainConfig:
    """DeBERTa to try on a CPU: two layers, short sequences, a short run at a high learning rate."""
    return _tried(deberta("tiny"))


def deberta_v3_tiny() -> PretrainConfig:
    """DeBERTa v3 to try on a CPU: two layers, 32 ranges of distances, short sequences, a short run at its own rate."""
    published = deberta_v3("tiny")
    base = _tried(published)
    return replace(base, train=replace(base.train, learning_rate=published.train.learning_rate))


def modern(size: str) -> PretrainConfig:
    """ModernBERT as published: rotary positions, gated layers, local and global attention, 8,192 tokens, 30 % masked.

    Warner et al. 2024, section 2 and appendix A, with the released settings: 1.7 trillion tokens in sequences of 1,024,
    then 300 billion in sequences of 8,192. Theirs differ in three ways: StableAdamW clips each update, here the
    gradient is clipped; the rate of the long sequences is a third, here it falls to 0 in them; the global layers have
    the base 10,000 before them, here 160,000 from the first step. The published vocabulary is a byte-level BPE of
    50,368 entries.
    """
    large = size == "large"
    batch_size = 4928 if large else 4608
    short, long = (round(tokens / batch_size / length) for tokens, length in ((1.719e12, 1024), (3e11, 8192)))
    steps = short + long
    return PretrainConfig(
        recipe=f"modern-{size}",
        model=modern_config(size),
        data=DataConfig(
            max_length=1024,
            long_length=8192,
            long_share=long / steps,
            pairs="full",
            masking=MaskPolicy(rate=0.3),
            copies=0,
        ),
        train=TrainConfig(
            steps=steps,
            batch_size=batch_size,
            learning_rate=5e-4 if large else 8e-4,
            warmup=(2e9 if large else 3e9) / 1024 / batch_size / steps,
            schedule="stable",
            decay=long / steps,
            weight_decay=1e-5,
            beta2=0.98,
            evaluate_every=0.1,
        ),
        objective=MaskedLMConfig(next_sentence=False),
    )


def modern_tiny() -> PretrainConfig:
    """ModernBERT to try on a CPU: four layers, windows of 32 tokens, short sequences, a short run by Muon."""
    base = _tried(modern("tiny"))
    train = replace(base.train, optimizer="muon", learning_rate=0.02, rest_learning_rate=4e-3, steps=800)
    return replace(
        base,
        model=replace(base.model, max_positions=1024, window=32),
        data=replace(base.data, long_length=None),
        train=replace(train, weight_decay=0.01, beta2=0.999, evaluate_every=100),
    )


def _tried(base: PretrainConfig) -> PretrainConfig:
    """A recipe made small: what is learnt from which data and by which optimiser stays."""
    rate = {"adamw": 2e-3, "lamb": 1e-2}[base.train.optimizer]
    train = replace(
        base.train, epochs=None, steps=2000, batch_size=32, learning_rate=rate, warmup=0.05, evaluate_every=200
    )
    return replace(
        base,
        model=replace(base.model, hidden_dropout=0.0, attention_dropout=0.0, max_positions=128),
        data=replace(base.data, max_length=64, copies=0),
        train=replace(train, schedule="stable", decay=0.3),
    )


def distilbert(size: str) -> PretrainConfig:
    """DistilBERT as published: half the layers of a BERT of this size, which is given by --teacher.

    The settings are those of the paper's section 3 and of its authors' code.
    """
    base = encoder_config(size)
    model = replace(base, family="distilbert", num_layers=base.num_layers // 2, num_segments=0)
    model = replace(model, pooler_activation="relu")
    train = TrainConfig(epochs=3, batch_size=4096, learning_rate=5e-4, warmup=0.05, weight_decay=0.0, clip_norm=5.0)
    return PretrainConfig(
        recipe=f"distilbert-{size}",
        model=model,
        data=DataConfig(max_length=512, pairs="full", copies=0),
        train=replace(train, beta2=0.98, evaluate_every=0.1),
        objective=DistillationConfig(),
    )


def half_of_teacher() -> PretrainConfig:
    """Half of any teacher, which is given by --teacher: its sizes and half of its layers, trained as DistilBERT is."""
    base = distilbert("base")
    return replace(base, recipe="distilbert", objective=DistillationConfig(half=True))


def distilbert_tiny() -> PretrainConfig:
    """Half of any teacher in a minute or two on CPU cores: short sequences, small batches, a high learning rate."""
    base = half_of_teacher()
    train = TrainConfig(steps=500, batch_size=32, learning_rate=1e-3, warmup=0.05, evaluate_every=100)
    data = replace(base.data, max_length=64)
    return replace(base, recipe="distilbert-tiny", data=data, train=train)
