"""Examples of rows: pairs have two segments, and the longer text is truncated to the maximum length."""

import numpy as np
import pytest

from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Row
from bertsmith.tasks.description import Limits
from bertsmith.tasks.examples import shorten
from bertsmith.tasks.kinds import KINDS
from bertsmith.tasks.sequences import predict_label, predict_labels
from bertsmith.text.tokenizer import Tokenizer


def one_at_a_time(first: int, second: int, room: int) -> tuple[int, int]:
    while first + second > room:
        first, second = (first - 1, second) if first > second else (first, second - 1)
    return first, second


@pytest.mark.parametrize("room", [2, 7, 10])
def test_the_longer_text_of_a_pair_is_truncated(room: int) -> None:
    for first in range(15):
        for second in range(15):
            a, b = shorten(*(np.array([n]) for n in (first, second, room)), np.array([True]))
            assert (int(a[0]), int(b[0])) == one_at_a_time(first, second, room)


def test_pairs_are_encoded_in_two_segments(world) -> None:
    tokenizer = Tokenizer.load(world / "tok")
    rows = [Row("a list of numbers", "the file", None, ""), Row("a list " * 40, None, None, "")]
    encoded = KINDS["regression"].encode(rows, tokenizer, Limits(16), HeadConfig("regression"), labelled=False)
    pair, single = encoded.examples
    first, second = tokenizer.encode(["a list of numbers", "the file"])
    cls_id, sep_id = tokenizer.id("[CLS]"), tokenizer.id("[SEP]")
    assert pair.tokens.tolist() == [cls_id, *first, sep_id, *second, sep_id]
    assert pair.segments.tolist() == [0] * (len(first) + 2) + [1] * (len(second) + 1)
    long = tokenizer.encode(["a list " * 40])[0]
    assert single.tokens.tolist() == [cls_id, *long[:14], sep_id]
    assert single.segments.tolist() == [0] * 16
    assert encoded.shortened == 1


@pytest.mark.usefixtures("own_clock")
def test_fine_tuning_by_the_clock_repeats_epochs_until_time_is_up(world, tmp_path) -> None:
    from bertsmith.config import override
    from bertsmith.finetuning.run import FinetuneConfig, finetune
    from bertsmith.training import runlog

    config = override(FinetuneConfig("classify"), ["train.batch_size=16", "train.epochs=1", "train.hours=0.0002"])
    finetune(config, world / "run", world / "train.csv", tmp_path / "run", device="cpu")
    assert runlog.read(tmp_path / "run")[-1]["step"] == 8  # 0.72 s; an epoch is three steps


def test_several_labels_are_those_with_a_probability_of_at_least_one_half() -> None:
    """Each label has its own probability: they need not add up to 1, and there may be no label."""
    head = HeadConfig("multi", ("a", "b", "c"))
    found = predict_labels(np.array([0.01, -0.01, 3.0], dtype=np.float32), head)
    assert found["labels"] == ["a", "c"]
    assert list(found["scores"].values()) == pytest.approx([1 / (1 + np.exp(-x)) for x in (0.01, -0.01, 3.0)], abs=1e-6)
    assert predict_labels(np.full(3, -1.0, dtype=np.float32), head)["labels"] == []


def test_the_scores_of_one_label_are_the_softmax_of_the_logits() -> None:
    found = predict_label(np.array([1.0, 2.0, 0.0], dtype=np.float32), HeadConfig("single", ("a", "b", "c")))
    chances = np.exp([1, 2, 0]) / np.exp([1, 2, 0]).sum()
    assert (found["label"], found["score"]) == ("b", pytest.approx(chances[1]))
    assert found["scores"] == {name: pytest.approx(chance) for name, chance in zip("abc", chances, strict=True)}
