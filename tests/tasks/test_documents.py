"""Documents that are longer than the model: windows, their pooled logits, and a class that is decided at the end."""

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from variants import MODERN, randomise

import bertsmith
from bertsmith.config import override
from bertsmith.conversion import convert
from bertsmith.errors import UserError
from bertsmith.finetuning.row_cache import encode_once
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.formats.hf import Notes, save_folder
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.objectives.settings import MaskedLMConfig
from bertsmith.rows.columns import Row
from bertsmith.serve.models import open_models
from bertsmith.tasks.description import Limits
from bertsmith.tasks.documents import spread
from bertsmith.tasks.kinds import KINDS
from bertsmith.text.tokenizer import train_wordpiece

pytestmark = pytest.mark.usefixtures("one_thread")
LABELS = HeadConfig("single", ("a", "b", "c"))
SIZES = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "intermediate_size": 64, "max_positions": 24}


@pytest.mark.parametrize("length", [1, 21, 22, 40, 41, 500])
@pytest.mark.parametrize("most", [1, 3, 1000])
def test_windows_cover_the_text_in_order_and_overlap(length: int, most: int) -> None:
    windows, whole = spread(length, 22, most)
    assert len(windows) <= most
    assert windows[0] == (0, min(length, 22))
    assert all(end - begin == min(length, 22) for begin, end in windows)
    assert all(0 < later[0] - earlier[0] <= 22 - 2 for earlier, later in pairwise(windows))
    assert whole == (windows[-1][1] == length)
    assert whole or len(windows) == most


def rows_of(tokenizer) -> list[Row]:
    """Texts of 3, 60 and 200 tokens, and pairs in which one text is long."""
    words = [tokenizer.token(number) for number in range(20, 30)]
    texts = [" ".join(random.Random(size).choices(words, k=size)) for size in (3, 60, 200)]
    single = [Row(text, None, label, "") for text, label in zip(texts, "abc", strict=True)]
    return [*single, Row(texts[0], texts[1], "a", ""), Row(texts[1], texts[0], "b", ""), Row(texts[0], "x", "c", "")]


def test_every_token_of_a_document_is_in_a_window(tiny_tokenizer) -> None:
    rows, limits = rows_of(tiny_tokenizer), Limits(24, windows=50)
    encoded = KINDS["single"].encode(rows, tiny_tokenizer, limits, LABELS, labelled=True)
    assert encoded.shortened == 0
    assert all(len(example.tokens) <= 24 for example in encoded.examples)
    for number, row in enumerate(rows):
        windows = [encoded.examples[i] for i in encoded.parts_of(number)]
        tokens = set(np.concatenate([window.tokens for window in windows]).tolist())
        wanted = tiny_tokenizer.encode([row.text, row.pair or ""])
        assert tokens >= {*wanted[0], *wanted[1]}
        if row.pair is not None:  # the shorter text is in every window
            short = set(min(wanted, key=len))
            assert all(short <= set(window.tokens.tolist()) for window in windows)
    few = KINDS["single"].encode(rows, tiny_tokenizer, replace(limits, windows=3), LABELS, labelled=False)
    assert few.shortened == 1 + sum(len(encoded.parts_of(i)) > 3 for i in (1, 3, 4))
    assert max(len(few.parts_of(i)) for i in range(len(rows))) == 3


@pytest.mark.parametrize("how", ["mean", "max"])
@pytest.mark.parametrize("kind", ["single", "multi", "regression"])
def test_the_loss_is_that_of_the_pooled_logits(kind, how, tiny_tokenizer) -> None:
    """In training as in prediction, whose logits are computed window by window."""
    labels = {"single": "abc", "multi": [["a"], [], ["b", "c"]], "regression": [0.5, 1.0, -2.0]}[kind]
    rows = [replace(row, label=label) for row, label in zip(rows_of(tiny_tokenizer)[:3], labels, strict=True)]
    head = HeadConfig(kind, () if kind == "regression" else ("a", "b", "c"))
    limits = Limits(24, windows=9, pooled=how)
    encoded = KINDS[kind].encode(rows, tiny_tokenizer, limits, head, labelled=True)
    assert encoded.examples.num_rows == 3
    model = randomise(TaskModel(Encoder(EncoderConfig(tiny_tokenizer.vocab_size, **SIZES)), head)).eval()
    model.pooled_windows = how
    batch = encoded.examples.batch(np.array([2, 0, 1]))
    assert batch.counts == {"task": 3}
    scores = model.scores(batch).split([len(encoded.parts_of(i)) for i in (2, 0, 1)])
    assert len(scores[0]) == 9
    pooled = torch.stack([s.mean(0) if how == "mean" else s.amax(0) for s in scores])
    assert_close(model(batch)["task"], model.loss(pooled, batch))
    logits = [row.detach().numpy() for part in (scores[1], scores[2], scores[0]) for row in part]
    found = KINDS[kind].decode(rows, encoded, logits, head, limits)
    best = {"single": "label", "multi": "scores", "regression": "value"}[kind]
    for answer, own in zip(found, pooled[[1, 2, 0]].detach(), strict=True):
        expected = {
            "single": head.labels[int(own.argmax())] if head.labels else None,
            "multi": pytest.approx(dict(zip(head.labels, own.sigmoid().tolist(), strict=False)), abs=1e-5),
            "regression": pytest.approx(float(own[0]), abs=1e-5),
        }[kind]
        assert answer[best] == expected


def test_encoded_windows_are_cached(tiny_tokenizer, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("BERTSMITH_CACHE", str(tmp_path))
    rows, limits = rows_of(tiny_tokenizer), Limits(24, windows=9)
    first, again = (encode_once(rows, tiny_tokenizer, limits, LABELS, labelled=True) for _ in range(2))
    assert list(first.examples.rows) == list(again.examples.rows)
    assert encode_once(rows, tiny_tokenizer, Limits(24), LABELS, labelled=True).examples.rows is None
    assert_close(first.examples.batch(np.arange(3)).labels["rows"], again.examples.batch(np.arange(3)).labels["rows"])


def test_tasks_without_a_label_of_the_text_refuse_windows(world: Path, tmp_path: Path) -> None:
    rows = [{"tokens": ["a", "b"], "tags": ["O", "B-X"]}] * 4
    with pytest.raises(UserError, match=r"data.windows 4 pools the labels .* tag has none; leave it out"):
        bertsmith.finetune("tag", world / "run", rows, tmp_path / "run", dev=rows, windows=4, device="cpu")


FILLER = "the list of a file is in the class and the value of an object has a name".split()


def document(seed: int, word: str) -> str:
    """A text of 540 words in which one word decides, again and again after the 512th."""
    words = random.Random(seed).choices(FILLER, k=540)
    return " ".join([*words[:513], *[word] * 27])


def random_encoder(folder: Path) -> Path:
    """An encoder with random weights that learns in few steps which words a text has: it pools the mean."""
    torch.manual_seed(0)
    tokenizer = train_wordpiece([" ".join([*FILLER, "import number"])] * 5, 200)
    values = {**MODERN, **SIZES, "pooling": "mean", "init_std": 0.1, "max_positions": 128, "window": 32}
    model = MaskedLM(Encoder(EncoderConfig(tokenizer.vocab_size, **values)), MaskedLMConfig(next_sentence=False))
    save_folder(folder, model, tokenizer, Notes())
    return folder


@pytest.mark.slow
def test_a_word_after_the_512th_token_decides(tmp_path: Path, capfd) -> None:
    """Without windows the classes are drawn by lot; with them a document's class is learnt, whatever predicts it."""
    start = random_encoder(tmp_path / "start")
    rows = [{"text": document(i, "import" if i % 2 else "number"), "label": "ab"[i % 2]} for i in range(48)]
    dev = [{"text": document(100 + i, "import" if i % 2 else "number"), "label": "ab"[i % 2]} for i in range(20)]
    settings = ["train.steps=30", "train.batch_size=8", "train.learning_rate=3e-3", "data.max_length=128", "restarts=0"]
    config, scores = override(FinetuneConfig("classify"), settings), {}
    for windows in (0, 8):
        out = tmp_path / f"run{windows}"
        scores[windows] = bertsmith.finetune(config, start, rows, out, dev=dev, windows=windows, device="cpu")
        cut = "48 of 48 texts did not fit whole into 128 tokens; see data.max_length, or read them in windows"
        assert (cut in " ".join(capfd.readouterr().err.split())) == (windows == 0)
    assert scores[0]["accuracy"] <= 75
    assert scores[8]["accuracy"] >= 95
    texts = [row["text"] for row in dev]
    expected = bertsmith.Predictor.load(tmp_path / "run8", device="cpu")(texts)
    assert [found["label"] for found in expected] == [row["label"] for row in dev]
    served = open_models([f"m={tmp_path / 'run8'}"], "cpu").named("m").predict(texts[:3])
    for one, other in zip(served.decode(served.lane.compute(served.items)), expected, strict=False):
        assert one["scores"] == pytest.approx(other["scores"], abs=1e-5)
    pytest.importorskip("onnxruntime")
    convert(tmp_path / "run8", tmp_path / "onnx", "onnx")
    graph = bertsmith.Predictor.load(tmp_path / "onnx")(texts)
    for one, other in zip(graph, expected, strict=True):
        assert one["scores"] == pytest.approx(other["scores"], abs=1e-4)
