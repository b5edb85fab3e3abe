"""The counts of operations, parameters and memory follow the configuration's fields."""

from dataclasses import replace

import pytest
import torch

from bertsmith.model.config import EncoderConfig
from bertsmith.model.cost import parameter_count, training_flops, training_memory
from bertsmith.model.encoder import Encoder
from bertsmith.model.sizes import ALBERT_SIZES, SIZES, albert_config, encoder_config
from bertsmith.objectives.masked_lm import MaskedLM

BASE = EncoderConfig()
LENGTHS, MASKED = [128] * 4, 80


def forward_flops(config: EncoderConfig, lengths=LENGTHS, masked=MASKED) -> float:
    return training_flops(config, lengths, masked) / 3


def test_operations_of_bert_base() -> None:
    """The sum of 12 layers of matrix products and attention scores, less the skipped rows of the last, and the head."""
    tokens, layer = 512, 2 * 768 * (4 * 768 + 2 * 3072)
    skipped = (tokens - MASKED - 4) * 2 * 768 * (768 + 2 * 3072)
    expected = 12 * (tokens * layer + 4 * 4 * 128 * 128 * 768) - skipped + MASKED * 2 * 768 * (768 + 30522)
    assert forward_flops(BASE) == expected


COUNTED = {
    **{f"bert-{size}": encoder_config(size) for size in SIZES},
    **{f"albert-{size}": albert_config(size) for size in ALBERT_SIZES},
    "roberta-base": replace(encoder_config("base"), vocab_size=50265, num_segments=1),
    "distilbert": replace(BASE, num_layers=6, num_segments=0),
    "attention is shared": replace(BASE, shared_layers="attention"),
    "feed-forward layers are shared": replace(BASE, shared_layers="feed-forward"),
}


@pytest.mark.parametrize("name", COUNTED)
def test_parameters_are_those_of_the_model(name) -> None:
    with torch.device("meta"):
        model = MaskedLM(Encoder(COUNTED[name]))
    real = sum(p.numel() for p in model.parameters())
    assert abs(parameter_count(COUNTED[name]) - real) < 1e-3 * real


def test_a_gate_adds_a_third_matrix() -> None:
    rows = 11 * 512 + MASKED + 4  # the last layer computes only the rows that a head needs
    assert forward_flops(replace(BASE, gated=True)) - forward_flops(BASE) == rows * 2 * 768 * 3072


def test_a_narrow_embedding_adds_its_projection_and_makes_the_head_smaller() -> None:
    saved = MASKED * 2 * (768 - 128) * (768 + 30522)
    added = 512 * 2 * 128 * 768
    assert forward_flops(replace(BASE, embedding_size=128)) - forward_flops(BASE) == added - saved


def test_a_head_without_transform_saves_one_matrix_product() -> None:
    assert forward_flops(BASE) - forward_flops(replace(BASE, head_transform=False)) == MASKED * 2 * 768 * 768


@pytest.mark.parametrize("length", [1, 2, 5, 9, 40])
def test_a_window_counts_only_the_pairs_inside_it(length) -> None:
    local = replace(BASE, window=8, global_every=3)  # layers 0, 3, 6, 9 are global
    pairs = sum(abs(query - key) <= 4 for query in range(length) for key in range(length))
    saved = forward_flops(BASE, [length], 0) - forward_flops(local, [length], 0)
    assert saved == 8 * 4 * 768 * (length**2 - pairs)


def test_shared_layers_have_the_same_operations_and_less_memory() -> None:
    shared = replace(BASE, shared_layers="all")
    assert forward_flops(shared) == forward_flops(BASE)
    options = {"half": True, "checkpointing": False}
    saved = training_memory(BASE, 512, 128, MASKED, **options) - training_memory(shared, 512, 128, MASKED, **options)
    layer = 4 * 768 * 769 + 2 * 768 * 3072 + 3072 + 768 + 4 * 768
    assert saved == 11 * layer * 18  # float32 weight, gradient and two moments; a bfloat16 copy


def test_a_gate_and_rotary_positions_add_memory() -> None:
    options = {"half": True, "checkpointing": False}
    plain = training_memory(BASE, 512, 128, MASKED, **options)
    rotary = training_memory(replace(BASE, positions="rotary"), 512, 128, MASKED, **options)
    assert rotary - plain == 12 * 512 * 2 * 2 * 768 - 512 * 768 * 18  # rotated copies, less the position embeddings
    gated = training_memory(replace(BASE, gated=True), 512, 128, MASKED, **options)
    assert gated - plain == 12 * (512 * 2 * 2 * 3072 + (768 + 1) * 3072 * 18)
