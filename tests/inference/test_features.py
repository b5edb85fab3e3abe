"""Features equal the hidden states of `transformers` in every layer, word by word, for texts of any length."""

import json
import unicodedata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from conftest import reference
from variants import VARIANTS, their_model

from bertsmith.errors import UserError
from bertsmith.formats.feature_store import part_file
from bertsmith.inference import features as module
from bertsmith.inference.features import Features, features, passages, windows
from bertsmith.inference.output import partial_folder
from bertsmith.model.states import parse_layers
from bertsmith.rows.columns import Row

TEXTS = [
    "the quick brown fox, jumps",
    "",
    "dogs bark at the foxes over 0123456789.",
    "fox",
    "the lazy dog's quickest jumps and barks; over the lazy brown dogs",
]
LAYERS = 3


@pytest.fixture
def theirs(tiny_tokenizer):
    return reference("mlm", tiny_tokenizer.vocab_size)


@pytest.fixture
def folder(theirs, tmp_path, tiny_tokenizer) -> Path:
    theirs.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save(tmp_path / "model")
    return tmp_path / "model"


def write(path: Path, texts) -> Path:
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def states(model, tokenizer, ids) -> np.ndarray:
    """The hidden states of `transformers` for a sequence, (layers, n, H), without `[CLS]` and `[SEP]`."""
    whole = torch.tensor([[tokenizer.id("[CLS]"), *ids, tokenizer.id("[SEP]")]])
    with torch.inference_mode():
        outputs = model.base_model(whole, output_hidden_states=True)
    kept = [*outputs.hidden_states[:-1], outputs.last_hidden_state]
    return torch.cat(kept).numpy()[:, 1:-1]


@pytest.fixture(scope="module", params=VARIANTS)
def their_folder(request, tmp_path_factory, tiny_tokenizer):
    """A model of `transformers` and the folder in which they saved it."""
    theirs, folder = their_model(request.param, "mlm", tiny_tokenizer.vocab_size), tmp_path_factory.mktemp("theirs")
    theirs.save_pretrained(folder)
    tiny_tokenizer.save(folder)
    return theirs, folder


@pytest.mark.parametrize("align", ["none", "first", "mean"])
def test_every_layer_equals_that_of_transformers(their_folder, align, tmp_path, tiny_tokenizer):
    theirs, folder = their_folder
    options = {"layers": "all", "align": align, "dtype": "float32", "device": "cpu"}
    found = features(folder, write(tmp_path / "t.txt", TEXTS), tmp_path / "out", **options)
    read = Features.open(tmp_path / "out")
    assert found["layers"] == [0, 1, 2, 3] == list(read.layers)
    assert [entry.text for entry in read] == TEXTS
    for text, entry in zip(TEXTS, read, strict=True):
        encoding = tiny_tokenizer.encode_aligned([text])[0]
        wanted = states(theirs, tiny_tokenizer, encoding.ids)
        if align != "none":
            owners = np.array(encoding.word_ids)
            groups = [np.flatnonzero(owners == word) for word in range(len(set(encoding.word_ids)))]
            pooled = [wanted[:, g[0]] if align == "first" else wanted[:, g].mean(1) for g in groups]
            wanted = np.stack(pooled, 1) if pooled else wanted
            assert entry.words == [text[a:b] for a, b in entry.offsets]
            assert "".join(entry.words) == text.replace(" ", "")
        else:
            assert entry.words == encoding.tokens
            assert entry.offsets.tolist() == [list(pair) for pair in encoding.offsets]
        assert entry.vectors.dtype == np.float32
        np.testing.assert_allclose(entry.vectors, wanted, atol=1e-5, rtol=0)


def test_float16_is_the_default_and_arrays_are_views_into_the_file(folder, tmp_path):
    texts = write(tmp_path / "t.txt", TEXTS)
    found = features(folder, texts, tmp_path / "half", layers="-2..-1", device="cpu")
    features(folder, texts, tmp_path / "full", layers="-2..-1", dtype="float32", device="cpu")
    half, full = Features.open(tmp_path / "half"), Features.open(tmp_path / "full")
    assert len(half) == len(TEXTS) == found["texts"]
    assert found["words"] == sum(len(entry.words) for entry in half)
    for one, other in zip(half, full, strict=True):
        assert one.vectors.dtype == np.float16
        assert one.vectors.shape == (2, len(one.words), 64)
        assert not one.vectors.flags.owndata
        assert not one.vectors.flags.writeable
        np.testing.assert_array_equal(one.vectors, other.vectors.astype(np.float16))
    assert half[-1].text == TEXTS[-1]
    with pytest.raises(IndexError):
        half[len(TEXTS)]
    size = sum(path.stat().st_size for path in (tmp_path / "half").glob("*.arrow"))
    assert found["bytes_per_word"] == round(size / found["words"])
    assert size < 2 * 2 * 64 * found["words"] + 4000


def test_arrow_opens_a_part(folder, tmp_path):
    features(folder, write(tmp_path / "t.txt", TEXTS), tmp_path / "out", layers="0,3", device="cpu")
    table = pa.ipc.open_file(part_file(tmp_path / "out", 0)).read_all()
    assert table["text"].to_pylist() == TEXTS
    row = Features.open(tmp_path / "out")[2]
    vectors = np.array(table["vectors"][2].as_py(), dtype=np.float16).reshape(len(row.words), 2, 64)
    np.testing.assert_array_equal(vectors.transpose(1, 0, 2), row.vectors)


@pytest.mark.parametrize("align", ["first", "mean", "none"])
def test_each_word_of_a_long_text_is_taken_from_the_window_with_most_context(
    align, folder, theirs, tmp_path, tiny_tokenizer
):
    text = " ".join(TEXTS * 7)
    found = features(
        folder, write(tmp_path / "t.txt", [text, "fox"]), tmp_path / "out",
        layers="0,3", align=align, dtype="float32", max_length=22, overlap=8, device="cpu",
    )  # fmt: skip
    entry = Features.open(tmp_path / "out")[0]
    encoding = tiny_tokenizer.encode_aligned([text])[0]
    tokens = len(encoding.ids)
    assert tokens > 150
    assert found["texts"] == 2
    (passage,) = passages([Row(text, None, None, "")], tiny_tokenizer, align)
    cut = list(windows(passage, 20, 8))
    assert sorted(place for *_, taken in cut for place in taken) == list(range(tokens))
    owners = np.array(encoding.word_ids)
    token_states = np.zeros((2, tokens, 64), dtype=np.float32)
    for begin, end, taken in cut:
        assert end - begin == 20
        token_states[:, taken] = states(theirs, tiny_tokenizer, encoding.ids[begin:end])[[0, 3]][:, taken - begin]
        if align != "none":  # a word is complete in one window, and no other has more context on its shorter side
            for word in np.unique(owners[taken]):
                whole = np.flatnonzero(owners == word)
                assert set(whole) <= set(taken)
        for place in taken:
            left, right = place - begin if begin else 99, end - place - 1 if end < tokens else 99
            slack = 0 if align == "none" else max(np.bincount(owners))
            for other, stop, _ in cut:
                if other <= place < stop:
                    behind, ahead = place - other if other else 99, stop - place - 1 if stop < tokens else 99
                    assert min(left, right) + 1 + slack >= min(behind, ahead)
    groups = (
        [np.flatnonzero(owners == word) for word in np.unique(owners)]
        if align != "none"
        else np.arange(tokens)[:, None]
    )
    pooled = [token_states[:, g].mean(1) if align == "mean" else token_states[:, g[0]] for g in groups]
    np.testing.assert_allclose(entry.vectors, np.stack(pooled, 1), atol=1e-5, rtol=0)


def test_a_word_longer_than_the_overlap_is_not_lost(folder, theirs, tmp_path, tiny_tokenizer):
    text = "the fox " + "0123456789" * 9 + " jumps over the lazy dog"
    for align in ("mean", "first", "none"):
        features(folder, write(tmp_path / "t.txt", [text]), tmp_path / align, align=align, max_length=16, device="cpu")
        entry = Features.open(tmp_path / align)[0]
        assert np.isfinite(entry.vectors).all()
        assert (np.abs(entry.vectors.astype(float)).sum((0, 2)) > 1).all()
    assert len(Features.open(tmp_path / "none")[0].words) > 30
    assert len(Features.open(tmp_path / "first")[0].words) == 8


CONLL = """-DOCSTART- O

the O
quick B-X
fox's O

dogs O
\u200b O
bark. O

-DOCSTART- O

foxes O
"""


@pytest.mark.parametrize("align", ["first", "mean", "none"])
def test_given_words_are_encoded_with_or_without_their_document(align, folder, theirs, tmp_path, tiny_tokenizer):
    (tmp_path / "eng.train").write_text(CONLL, encoding="utf-8")
    (tmp_path / "words.txt").write_text(f"\n{CONLL}", encoding="utf-8")
    (tmp_path / "known.txt").write_text(CONLL, encoding="utf-8")
    options = {"layers": "1", "align": align, "dtype": "float32", "device": "cpu"}
    features(folder, tmp_path / "eng.train", tmp_path / "documents", **options)
    features(folder, tmp_path / "words.txt", tmp_path / "alone", conll=True, documents=False, **options)
    features(folder, tmp_path / "known.txt", tmp_path / "known", **options)
    assert [entry.words for entry in Features.open(tmp_path / "known")][2] == Features.open(tmp_path / "documents")[
        2
    ].words
    together, alone = Features.open(tmp_path / "documents"), Features.open(tmp_path / "alone")
    sentences = [["the", "quick", "fox's"], ["dogs", "\u200b", "bark."], ["foxes"]]
    pieces = [[tiny_tokenizer.encode([w])[0] or [tiny_tokenizer.id("[UNK]")] for w in words] for words in sentences]
    for read, documents in ((together, [[0, 1], [2]]), (alone, [[0], [1], [2]])):
        assert [entry.text for entry in read] == [" ".join(words) for words in sentences]
        for document in documents:
            ids = [i for s in document for word in pieces[s] for i in word]
            wanted, place = states(theirs, tiny_tokenizer, ids)[1], 0
            for number in document:
                entry = read[number]
                if align != "none":
                    assert entry.words == sentences[number]
                    assert [entry.text[a:b] for a, b in entry.offsets] == sentences[number]
                expected = []
                for word in pieces[number]:
                    own = wanted[place : place + len(word)]
                    expected += {"first": [own[0]], "mean": [own.mean(0)], "none": list(own)}[align]
                    place += len(word)
                np.testing.assert_allclose(entry.vectors[0], np.stack(expected), atol=1e-5, rtol=0)


def test_lists_of_words_in_a_column_are_read(folder, tmp_path):
    rows = [{"tokens": ["the", "fox"], "id": 1}, {"tokens": [], "id": 2}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    features(folder, tmp_path / "rows.jsonl", tmp_path / "out", device="cpu")
    assert [entry.words for entry in Features.open(tmp_path / "out")] == [["the", "fox"], []]
    (tmp_path / "t.csv").write_text("body,n\nthe fox,1\n")
    features(folder, tmp_path / "t.csv", tmp_path / "columns", text="body", device="cpu")
    assert Features.open(tmp_path / "columns")[0].words == ["the", "fox"]


def test_offsets_refer_to_the_original_text(tokenizer_folder):
    from bertsmith.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(tokenizer_folder)
    for text in ("한국어는 좋다, 정말!", "Ünïcode Café \u200b x", unicodedata.normalize("NFD", "한국어는 café naïve.")):
        (passage,) = passages([Row(text, None, None, "")], tokenizer, "first")
        assert passage.words == [text[a:b] for a, b in passage.offsets]
        assert "".join(passage.words) == text.replace(" ", "").replace("\u200b", "")


def test_parts_and_a_resumed_run_give_identical_bytes(folder, tmp_path, monkeypatch, capsys):
    texts = write(tmp_path / "t.txt", TEXTS * 6)
    monkeypatch.setattr(module, "PART_BYTES", 64 * 2 * 25)
    options = {"layers": "2", "device": "cpu"}
    features(folder, texts, tmp_path / "whole", **options)
    assert len(list((tmp_path / "whole").glob("*.arrow"))) > 5
    assert [entry.text for entry in Features.open(tmp_path / "whole")] == TEXTS * 6
    original, calls = module.write_part, []

    def dies(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        original(*arguments)

    monkeypatch.setattr(module, "write_part", dies)
    with pytest.raises(KeyboardInterrupt):
        features(folder, texts, tmp_path / "again", **options)
    monkeypatch.setattr(module, "write_part", original)
    assert "--resume continues the run" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()
    with pytest.raises(UserError, match="add --resume"):
        features(folder, texts, tmp_path / "again", **options)
    with pytest.raises(UserError, match="begun with another align"):
        features(folder, texts, tmp_path / "again", resume=True, align="mean", **options)
    features(folder, texts, tmp_path / "again", resume=True, **options)
    assert "resuming after" in capsys.readouterr().err
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
    assert not partial_folder(tmp_path / "again").exists()


def test_a_text_larger_than_a_part_is_computed_on_disk(folder, tmp_path, monkeypatch):
    texts = write(tmp_path / "t.txt", [" ".join(TEXTS * 5), "fox"])
    features(folder, texts, tmp_path / "whole", device="cpu")
    monkeypatch.setattr(module, "PART_BYTES", 1000)
    features(folder, texts, tmp_path / "parts", device="cpu")
    assert len(list((tmp_path / "parts").glob("*.arrow"))) == 2
    for one, other in zip(Features.open(tmp_path / "whole"), Features.open(tmp_path / "parts"), strict=True):
        np.testing.assert_allclose(one.vectors, other.vectors, atol=1e-2)


def test_layers_are_selected_by_name():
    assert parse_layers("-1", 12) == (12,)
    assert parse_layers("-4..-1", 12) == (9, 10, 11, 12)
    assert parse_layers("0, 6,12", 12) == (0, 6, 12)
    assert parse_layers("all", 2) == (0, 1, 2)
    assert parse_layers("2,0..1", 2) == (2, 0, 1)
    for text, message in (
        ("13", r"layers 0 \(embeddings\) to 12"),
        ("-1..-4", "runs from layer 12 down to 9"),
        ("1,-12", "names layer 1 twice"),
        ("last", "'last' is not a layer"),
        ("1..", "'1..' is not a layer"),
    ):
        with pytest.raises(UserError, match=message):
            parse_layers(text, 12)


def test_bad_options_are_refused_and_leave_no_files(folder, tmp_path):
    texts = write(tmp_path / "t.txt", TEXTS)
    for options, message in (
        ({"layers": "9"}, "--layers 9"),
        ({"align": "last"}, "--align 'last' is not one of first, mean, none"),
        ({"dtype": "int8"}, "--dtype 'int8' is not one of float16, float32"),
        ({"max_length": 49}, "--max-length 49 is not between 4 and the model's 48"),
        ({"overlap": 24}, "--overlap 24 is not between 0 and 23"),
        ({"data": tmp_path / "none.txt"}, "no such file"),
    ):
        options = {"data": texts, **options}
        with pytest.raises(UserError, match=message):
            features(folder, options.pop("data"), tmp_path / "out", device="cpu", **options)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "t.txt"}
    with pytest.raises(UserError, match="holds no features"):
        Features.open(tmp_path)


def test_states_too_large_for_float16_are_refused(folder, theirs, tmp_path):
    with torch.no_grad():
        theirs.bert.encoder.layer[2].output.LayerNorm.weight[0] = 1e6
    theirs.save_pretrained(folder)
    texts = write(tmp_path / "t.txt", TEXTS)
    with pytest.raises(UserError, match="use --dtype float32"):
        features(folder, texts, tmp_path / "out", device="cpu")
    assert features(folder, texts, tmp_path / "out", dtype="float32", device="cpu")["texts"] == 5


def test_the_features_command(folder, tmp_path, run_command):
    texts = write(tmp_path / "t.txt", TEXTS)
    code, stdout, _ = run_command("features", folder, texts, "--layers", "-1", "--out", tmp_path / "out", "--json")
    assert code == 0
    found = json.loads(stdout)
    assert found["layers"] == [3]
    assert found["bytes_per_word"] > 128


def test_a_flipped_byte_is_detected_on_resume_and_on_opening(folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "t.txt").write_text("".join(f"the fox {i} barks\n" for i in range(30)))
    monkeypatch.setattr(module, "PART_BYTES", 4000)
    monkeypatch.setattr(module, "PASSAGES", 4)
    features(folder, tmp_path / "t.txt", tmp_path / "whole", device="cpu")
    real, done = module.Extractor.write, []

    def write(self, path, part):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(path)
        return real(self, path, part)

    monkeypatch.setattr(module.Extractor, "write", write)
    with pytest.raises(KeyboardInterrupt):
        features(folder, tmp_path / "t.txt", tmp_path / "out", device="cpu")
    monkeypatch.setattr(module.Extractor, "write", real)
    damaged = bytearray(done[1].read_bytes())
    damaged[len(damaged) // 2] ^= 1
    done[1].write_bytes(damaged)
    features(folder, tmp_path / "t.txt", tmp_path / "out", device="cpu", resume=True)
    assert "part-00001.arrow is damaged" in capsys.readouterr().err
    names = {path.name for path in (tmp_path / "whole").iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    (tmp_path / "out" / "part-00001.arrow").write_bytes(damaged)
    store = Features.open(tmp_path / "out")
    assert store[0].words
    with pytest.raises(UserError, match=r"part-00001\.arrow is damaged: its checksum"):
        list(store)
    (tmp_path / "out" / "features.json").write_text('{"version": 1, "texts"')
    with pytest.raises(UserError, match="not valid JSON"):
        Features.open(tmp_path / "out")
