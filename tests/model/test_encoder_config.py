"""The encoder's configuration: the configuration of each layer, and the contradictions that are refused."""

import pytest

from bertsmith.config import from_dict
from bertsmith.errors import UserError
from bertsmith.model.config import EncoderConfig, Reach

SMALL = {"hidden_size": 24, "num_heads": 3, "num_layers": 7}


def test_without_a_window_all_layers_have_the_same_configuration() -> None:
    config = EncoderConfig(**SMALL)
    assert set(config.layers) == {config.layer(0)}
    assert config.layer(6).reach == Reach(None, None)
    assert config.layer(6).rotary_base is None


def test_every_third_layer_is_global() -> None:
    config = EncoderConfig(
        **SMALL, positions="rotary", rotary_base=160_000.0, local_rotary_base=10_000.0, window=128, global_every=3
    )
    reaches = [layer.reach for layer in config.layers]
    assert [reach == Reach(None, None) for reach in reaches] == [True, False, False, True, False, False, True]
    assert set(reaches) == {Reach(None, None), Reach(64, 64)}
    assert [layer.rotary_base for layer in config.layers[:4]] == [160_000, 10_000, 10_000, 160_000]


@pytest.mark.parametrize(("direction", "reach"), [("left-to-right", Reach(4, 0)), ("right-to-left", Reach(0, 4))])
def test_a_window_keeps_the_direction(direction, reach) -> None:
    config = EncoderConfig(**SMALL, direction=direction, window=9, global_every=2)
    assert config.layer(1).reach == reach
    assert None in config.layer(2).reach


def test_only_the_first_layer_may_lack_its_attention_norm() -> None:
    config = EncoderConfig(**SMALL, norm_first=True, first_attention_norm=False)
    assert [layer.attention_norm for layer in config.layers] == [False] + 6 * [True]


@pytest.mark.parametrize(
    ("values", "activation"),
    [
        ({"activation": "relu"}, "relu"),
        ({"activation": "relu", "norm_first": True}, "gelu"),
        ({"activation": "relu", "norm_first": True, "head_activation": "silu"}, "silu"),
        ({"activation": "relu", "head_activation": "gelu"}, "gelu"),
    ],
)
def test_an_older_configuration_without_head_activation_keeps_its_activation(values, activation) -> None:
    assert from_dict(EncoderConfig, values).masked_word_activation == activation


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": "rotary", "num_heads": 8}, "even size of a head, and hidden_size / num_heads is 3"),
        ({"rotary_base": 160_000.0}, "need positions=rotary"),
        ({"local_rotary_base": 10_000.0}, "need positions=rotary"),
        ({"positions": "rotary", "local_rotary_base": 10_000.0}, "needs layers with a window"),
        ({"global_every": 3}, "global_every 3 needs a window"),
        ({"window": 128}, "window 128 is used by no layer while global_every is 1"),
        ({"window": 1, "global_every": 2}, "window must be at least 2, not 1"),
        ({"first_attention_norm": False}, "needs norm_first=true"),
        (
            {"first_attention_norm": False, "norm_first": True, "shared_layers": "all"},
            "contradicts shared_layers=all",
        ),
        ({"head_transform": False, "head_activation": "gelu"}, "head_activation gelu needs head_transform=true"),
        ({"head_transform": False, "embedding_size": 8}, "embedding_size 8 needs head_transform=true"),
        ({"embedding_size": 0}, "embedding_size must be at least 1"),
        ({"positions": "relative"}, "positions 'relative' is not one of learned, rotary"),
        ({"shared_layers": "al"}, "shared_layers 'al' is not one of .*did you mean 'all'"),
    ],
)
def test_contradictions_are_refused(changes, message) -> None:
    with pytest.raises(UserError, match=message):
        EncoderConfig(**{**SMALL, **changes})
