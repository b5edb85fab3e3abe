"""A run whose length is not given: 3 epochs on a data set, and on few rows of the user's own so many that it learns."""

import json
from pathlib import Path

import pytest

import bertsmith
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.training.settings import TrainConfig


@pytest.mark.parametrize(
    ("rows", "own", "epochs"),
    [(200, True, 20), (1_000, True, 10), (3_199, True, 4), (3_200, True, 3), (10**6, True, 3), (200, False, 3)],
)
def test_epochs_by_the_number_of_rows(rows: int, own: bool, epochs: int) -> None:
    assert FinetuneConfig("classify").with_length(rows, own).train.epochs == epochs


@pytest.mark.parametrize("given", [{"epochs": 1.0}, {"steps": 7}, {"hours": 0.1}])
def test_a_length_that_is_given_stays(given: dict[str, float]) -> None:
    config = FinetuneConfig("classify", train=TrainConfig(**given))  # type: ignore[arg-type]
    assert config.with_length(200, own=True) == config


def test_few_rows_are_said_and_saved(world: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [(f"{word} film {n}", label) for word, label in (("good", "+"), ("bad", "-")) for n in range(10)]
    bertsmith.finetune("classify", world / "run", rows, tmp_path / "out", device="cpu")
    assert "note: 15 rows are few, so there are 20 epochs (--epochs, train.epochs)" in capfd.readouterr().err
    assert json.loads((tmp_path / "out" / "config.json").read_text())["train"]["epochs"] == 20
    again = bertsmith.finetune("classify", world / "run", rows, tmp_path / "out", device="cpu", resume=True)
    assert again["labels"] == 2
