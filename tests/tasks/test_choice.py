"""Multiple choice: the endings of a row stay together in training, each gets a score, and a model learns to choose."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bertsmith.config import override
from bertsmith.errors import UserError
from bertsmith.finetuning.batches import micro_batches
from bertsmith.finetuning.run import FinetuneConfig, finetune
from bertsmith.formats.hf import Notes, save_folder
from bertsmith.inference.files import evaluate
from bertsmith.inference.predictor import Predictor
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import HeadConfig
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.rows.columns import Columns, Row
from bertsmith.tasks import choice
from bertsmith.tasks.description import Limits
from bertsmith.tasks.prediction_files import score_file
from bertsmith.tasks.reading import read_task, training_rows
from bertsmith.tasks.task import find_task
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training.settings import TrainConfig

ENDINGS = ("the file", "the list", "a class of it", "one")
OTHERS = ("the file", "a class of it", "one")


def rows_of(count: int) -> list[Row]:
    """Rows whose right ending is always `the list`, at changing places."""
    endings = [(*OTHERS[: i % 4], "the list", *OTHERS[i % 4 :]) for i in range(count)]
    return [Row(f"we want it {i}", None, i % 4, f"row {i}", parts=endings[i]) for i in range(count)]


def test_swag_codah_and_lists_of_endings_are_read(tmp_path: Path) -> None:
    header = "video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,label"
    (tmp_path / "train.csv").write_text(header + '\nv,1,x y,"He sits, alone.",He,gold,a,b,c,d,2\n')
    (swag,) = read_task(find_task("swag"), tmp_path / "train.csv", Columns(), labelled=True)
    assert (swag.text, swag.pair, swag.parts) == ("He sits, alone.", "He", ("a", "b", "c", "d"))
    assert choice.ending_index(swag, HeadConfig("choice", num_choices=4)) == 2
    (tmp_path / "fold_0_train.tsv").write_text('n\tA "cat\truns.\tflies.\tsits.\tbarks.\t3\n' * 2)
    codah, _ = training_rows(find_task("swag"), [tmp_path / "fold_0_train.tsv"], Columns())
    assert len(codah) == 2
    assert codah[0].text == 'A "cat'
    assert (codah[0].pair, codah[0].parts[3], codah[0].label) == (None, "barks.", "3")
    (tmp_path / "own.jsonl").write_text(json.dumps({"question": "q", "choices": ["x", "y"], "answer": "B"}))
    (own,) = read_task(find_task("choose"), tmp_path / "own.jsonl", Columns(), labelled=True)
    assert choice.ending_index(own, HeadConfig("choice", num_choices=2)) == 1


def test_a_number_is_read_as_an_index_before_it_is_read_as_text() -> None:
    head = HeadConfig("choice", num_choices=4)
    assert choice.ending_index(Row("1 + 2 is", None, "2", "", parts=("2", "1", "3", "5")), head) == 2
    assert choice.ending_index(Row("1 + 4 is", None, "5", "", parts=("2", "1", "3", "5")), head) == 3  # not an index
    assert choice.ending_index(Row("He", None, "ran. ", "", parts=("sat.", "ran. ", "ate.", "slept.")), head) == 1


def test_the_first_words_of_an_ending_are_encoded_with_it(world: Path) -> None:
    tokenizer, head = Tokenizer.load(world / "tok"), HeadConfig("choice", num_choices=2)
    row = Row("he sat", "he", 1, "", parts=("ran", "slept"))
    encoded = choice.encode([row], tokenizer, Limits(32), head, labelled=True)
    cls_id, sep_id = tokenizer.id("[CLS]"), tokenizer.id("[SEP]")
    first, second = tokenizer.encode(["he sat", "he slept"])
    assert encoded.examples[1].tokens.tolist() == [cls_id, *first, sep_id, *second, sep_id]
    assert [e.labels["label"].values if e.labels else None for e in encoded.examples] == [1, None]


@pytest.mark.parametrize("micro", [1, 3, 8, 64])
def test_the_endings_of_a_row_stay_in_one_micro_batch(world: Path, micro: int) -> None:
    tokenizer, head = Tokenizer.load(world / "tok"), HeadConfig("choice", num_choices=4)
    rows = rows_of(7)
    encoded = choice.encode(rows, tokenizer, Limits(32), head, labelled=True)
    train = TrainConfig(epochs=1, batch_size=5, micro_batch_size=micro)
    seen = []
    for step in range(train.num_steps(7)):
        for batch in micro_batches(encoded.examples, step, train, 32, endings=4):
            starts = batch.layout.starts
            assert len(starts) - 1 == 4 * len(batch.labels["label"]) == 4 * batch.counts["task"]
            assert batch.labels["label"].tolist() == [rows[i].label for i in batch.indices]
            for place, row in enumerate(batch.indices):
                tokens = batch.tokens[starts[4 * place] : starts[4 * place + 1]]
                assert torch.equal(tokens, torch.as_tensor(encoded.examples[4 * row].tokens))
            seen += batch.indices.tolist()
    assert sorted(seen) == list(range(7))


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_a_model_learns_to_choose(world: Path, tmp_path: Path, form: str) -> None:
    rows = rows_of(64)
    if form == "csv":
        with (tmp_path / "train.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["sent1", *(f"ending{i}" for i in range(4)), "label"])
            writer.writerows([row.text, *row.parts, row.label] for row in rows)
        (tmp_path / "val.csv").write_bytes((tmp_path / "train.csv").read_bytes())
        (tmp_path / "test.csv").write_bytes((tmp_path / "train.csv").read_bytes())
        task, data, dev = "swag", tmp_path, tmp_path / "val.csv"
    else:
        lines = [json.dumps({"text": r.text, "endings": r.parts, "label": r.parts[r.label]}) for r in rows]
        (tmp_path / "rows.jsonl").write_text("\n".join(lines))
        task, data, dev = "choose", tmp_path / "rows.jsonl", tmp_path / "rows.jsonl"
    changes = ["train.epochs=8", "train.batch_size=16", "train.learning_rate=3e-3", "data.max_length=32"]
    config = override(FinetuneConfig(task), changes)
    scores = finetune(config, world / "run", data, tmp_path / "run", dev=dev, device="cpu")
    assert scores["accuracy"] > 90
    assert evaluate(tmp_path / "run", dev, device="cpu")["accuracy"] == scores["accuracy"]
    predictor = Predictor.load(tmp_path / "run", "cpu")
    answers = list(predictor.predict_rows(rows))
    assert 100 * np.mean([a["choice"] == r.label for a, r in zip(answers, rows, strict=True)]) == scores["accuracy"]
    (alone,) = predictor.predict_rows(rows[:1])  # scores do not depend on the other rows
    assert alone["scores"] == pytest.approx(answers[0]["scores"], abs=1e-5)
    if task == "swag":
        written = tmp_path / "run/predictions/SWAG.csv"
        assert score_file(written, "swag", tmp_path / "test.csv")["accuracy"] == scores["accuracy"]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, world: Path) -> Path:
    """A model with large random weights: its states depend on pairs of words, and a few steps suffice."""
    folder, tokenizer = tmp_path_factory.mktemp("choice") / "wide", Tokenizer.load(world / "tok")
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 64, "max_positions": 16}
    torch.manual_seed(1)
    encoder = Encoder(EncoderConfig(tokenizer.vocab_size, **sizes, init_std=0.2))
    save_folder(folder, MaskedLM(encoder), tokenizer, Notes())
    return folder


@pytest.mark.parametrize("seed", [1, 2])  # seeds 1 to 8 all learn it
def test_an_ending_is_chosen_by_its_context(wide: Path, tmp_path: Path, seed: int) -> None:
    """The endings are the same in all rows and right equally often: neither text nor ending alone decides the label."""
    words = ["file", "class"]
    rows = []
    for i in range(64):
        right = words[i % 2]
        endings = words if i % 4 < 2 else words[::-1]
        rows.append({"text": f"{right} {i // 4}", "endings": endings, "label": endings.index(right)})
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    changes = ["train.epochs=12", "train.batch_size=16", "train.learning_rate=2e-3", "data.max_length=16"]
    config = override(FinetuneConfig("choose"), [*changes, "dropout=0", f"train.seed={seed}"])
    scores = finetune(config, wide, data, tmp_path / "run", dev=data, device="cpu")
    assert scores["accuracy"] > 95


@pytest.mark.parametrize(
    ("label", "says"), [(4, "none of the 4 endings"), ("E", "from 0 to 3"), ("x y", "'x y' is none"), (-1, "none of")]
)
def test_labels_that_name_no_ending_are_refused(label: object, says: str) -> None:
    with pytest.raises(UserError, match=says):
        choice.head_for(find_task("choose"), [Row("a", None, label, "f, line 2", parts=ENDINGS)])


def test_rows_with_different_numbers_of_endings_are_refused() -> None:
    rows = [Row("a", None, 0, "f, line 2", parts=ENDINGS), Row("a", None, 0, "f, line 3", parts=ENDINGS[:3])]
    with pytest.raises(UserError, match="f, line 3: 3 endings, where the others have 4"):
        choice.head_for(find_task("choose"), rows)
