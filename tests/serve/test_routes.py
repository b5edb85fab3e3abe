"""Every route gives what `Predictor`, `Embedder` and `features` give, and other servers' clients get their forms."""

import base64
import hashlib
import html
import json
import re

import numpy as np
import pytest
from fastapi.testclient import TestClient

from bertsmith import Embedder, Features, Predictor
from bertsmith.formats.hf import load_folder
from bertsmith.formats.onnx import export_onnx
from bertsmith.inference.features import features
from bertsmith.serve.run import build

TEXTS = ["the quick brown fox", "dogs bark", "the lazy dog jumps over the quick brown foxes " * 8]
CONTEXT = "the quick brown fox jumps over the lazy dog. " * 12  # several windows of 48 tokens
HEADS = {
    "classify": ("colours", TEXTS, TEXTS),
    "pair": ("colours", [["the fox", "a dog"]] * 2, [("the fox", "a dog")] * 2),
    "tag": ("tags", [*TEXTS, ["the", "quick", "fox"]], [*TEXTS, ["the", "quick", "fox"]]),
    "answer": ("spans", [{"question": "who?", "context": CONTEXT}], [("who?", CONTEXT)]),
    "choose": ("endings", [{"context": "the", "endings": ["fox", "dog"]}], [("the", ["fox", "dog"])]),
}


def close(found: object, expected: object) -> bool:
    """Whether two JSON values are equal up to rounding: batches of other sizes round differently."""
    if isinstance(found, float):
        return found == pytest.approx(expected, abs=1e-5)
    if isinstance(found, list) and isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(close, found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(close(found[key], expected[key]) for key in found)
    return found == expected


@pytest.mark.parametrize("route", HEADS)
def test_a_head_predicts_as_the_predictor_does(client, served, route) -> None:
    name, inputs, items = HEADS[route]
    expected = Predictor.load(served[name], "cpu")(items)
    response = client.post(f"/{route}", json={"inputs": inputs, "model": name})
    assert response.status_code == 200, response.text
    assert close(response.json(), expected)
    single = client.post(f"/{route}", json={"inputs": inputs[0], "model": name})
    assert close(single.json(), expected[0])
    assert client.post(f"/{route}", json={"inputs": [], "model": name}).json() == []


def test_tags_have_character_offsets_and_answers_a_no_answer_score(client) -> None:
    text = "the  quick (brown) fox"
    found = client.post("/tag", json={"inputs": text, "model": "tags"}).json()
    assert found["words"] == ["the", "quick", "(", "brown", ")", "fox"]
    assert all(text[entity["start"] : entity["end"]] == entity["text"] for entity in found["entities"])
    answer = client.post("/answer", json={"inputs": {"question": "who?", "context": CONTEXT}, "n_best": 3}).json()
    assert {"text", "start", "end", "score", "null_odds"} <= answer.keys()
    assert len(answer["nbest"]) == 3
    assert all(CONTEXT[each["start"] : each["end"]] == each["text"] for each in answer["nbest"])


def test_masks_are_filled(client, served) -> None:
    texts = ["the [MASK] fox", "[MASK] dogs [MASK]"]
    found = client.post("/fill-mask", json={"inputs": texts, "top": 3}).json()
    predictor = Predictor.load(served["words"], "cpu")
    assert close(found, [predictor.fill(text, 3) for text in texts])
    assert close(client.post("/fill-mask", json={"inputs": texts[0], "top": 3}).json(), found[0])


def test_vectors_are_the_embedders(client, served) -> None:
    embedder = Embedder.load(served["words"], "cpu")
    as_saved = client.post("/embed", json={"inputs": TEXTS, "normalize": None}).json()
    np.testing.assert_allclose(as_saved, embedder(TEXTS), atol=1e-5)
    unit = client.post("/embed", json={"inputs": TEXTS}).json()  # as text-embeddings-inference, by default
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, atol=1e-5)
    assert np.shape(client.post("/embed", json={"inputs": "one text"}).json()) == (1, embedder.size)
    long = client.post("/embed", json={"inputs": TEXTS, "truncate": False})
    assert (long.status_code, long.json()["error_type"]) == (413, "validation")
    assert "inputs[2] has" in long.json()["error"]


@pytest.mark.parametrize("align", ["first", "mean", "none"])
def test_features_are_those_of_the_command(client, served, tmp_path, align) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    options = {"layers": "0,-1", "align": align, "dtype": "float32", "device": "cpu"}
    features(served["words"], tmp_path / "texts.txt", tmp_path / "states", **options)
    stored = Features.open(tmp_path / "states")
    found = client.post("/features", json={"inputs": TEXTS, "layers": "0,-1", "align": align, "model": "words"}).json()
    for entry, expected in zip(found, stored, strict=True):
        assert entry["words"] == expected.words
        assert np.array_equal(entry["offsets"], expected.offsets)
        np.testing.assert_allclose(entry["vectors"], expected.vectors, atol=1e-5)


def test_openai_embeddings(client, served) -> None:
    expected = Embedder.load(served["words"], "cpu", normalize=True)(TEXTS)
    body = {"input": TEXTS, "model": "words"}
    found = client.post("/v1/embeddings", json=body).json()
    assert (found["object"], found["model"]) == ("list", "words")
    assert [entry["index"] for entry in found["data"]] == [0, 1, 2]
    np.testing.assert_allclose([entry["embedding"] for entry in found["data"]], expected, atol=1e-5)
    assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] > 48
    packed = client.post("/v1/embeddings", json={**body, "encoding_format": "base64"}).json()
    vectors = [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in packed["data"]]
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    missing = client.post("/v1/embeddings", json={**body, "model": "word"})
    assert missing.status_code == 404
    assert "did you mean 'words'?" in missing.json()["error"]["message"]
    assert client.post("/v1/embeddings", json={**body, "dimensions": 3}).status_code == 400
    assert client.post("/v1/embeddings", json={"model": "words", "input": [1, 2]}).status_code == 400
    listed = client.get("/v1/models").json()
    assert [entry["id"] for entry in listed["data"]] == list(served)
    assert client.get("/v1/models/tags").json() == listed["data"][list(served).index("tags")]
    assert client.get("/v1/models/none").status_code == 404


def test_rerank_and_predict_as_text_embeddings_inference(client, served) -> None:
    predictor = Predictor.load(served["ranks"], "cpu")
    raw = [each["value"] for each in predictor([("who?", text) for text in TEXTS])]
    found = client.post("/rerank", json={"query": "who?", "texts": TEXTS, "return_text": True}).json()
    assert sorted(entry["index"] for entry in found) == [0, 1, 2]
    assert [entry["score"] for entry in found] == sorted((entry["score"] for entry in found), reverse=True)
    for entry in found:
        assert entry["score"] == pytest.approx(1 / (1 + np.exp(-raw[entry["index"]])), abs=1e-5)
        assert entry["text"] == TEXTS[entry["index"]]
    scores = client.post("/rerank", json={"query": "who?", "texts": TEXTS, "raw_scores": True}).json()
    assert {entry["index"]: pytest.approx(entry["score"], abs=1e-5) for entry in scores} == dict(enumerate(raw))

    labels = Predictor.load(served["colours"], "cpu")(TEXTS[0])["scores"]
    one = client.post("/predict", json={"inputs": TEXTS[0]}).json()
    assert {entry["label"]: pytest.approx(entry["score"], abs=1e-5) for entry in one} == labels
    assert one[0]["score"] == max(labels.values()) or one[0]["score"] == pytest.approx(max(labels.values()), abs=1e-5)
    several = client.post("/predict", json={"inputs": [[TEXTS[0]], ["the fox", "a dog"]]}).json()
    assert close(several[0], one)
    assert len(several) == 2
    assert isinstance(client.post("/predict", json={"inputs": ["the fox", "a dog"]}).json()[0], dict)  # one pair
    assert client.post("/predict", json={"inputs": ["a", "b", "c"]}).status_code == 422
    assert client.post("/rerank", json={"query": "?", "texts": TEXTS, "model": "tags"}).status_code == 422


def test_facts_of_the_server(client, served) -> None:
    info = client.get("/info").json()
    assert (info["model_id"], info["model_type"]) == ("words", {"embedding": {"pooling": "mean"}})
    assert (info["max_input_length"], info["max_client_batch_size"]) == (48, 2048)
    described = {model["name"]: model for model in client.get("/models").json()}
    assert described["colours"]["labels"] == ["red", "green", "blue", "none"]
    assert described["colours"]["routes"] == ["classify", "pair", "embed", "features", "view"]
    assert described["words"]["mask"] == "[MASK]"
    assert str(served["words"].parent) not in json.dumps(described)
    assert client.get("/health").status_code == client.get("/ready").status_code == 200
    paths = client.get("/openapi.json").json()["paths"]
    assert {"/classify", "/fill-mask", "/embed", "/v1/embeddings", "/metrics"} <= paths.keys()
    client.post("/classify", json={"inputs": "the fox", "model": "colours"})
    counted = client.get("/metrics").text
    assert 'bertsmith_requests_total{route="/classify",status="200"}' in counted
    assert 'bertsmith_tokens_total{model="colours"}' in counted


def test_docs_list_every_route_with_an_example_that_works_and_load_nothing(client) -> None:
    found = client.get("/docs")
    assert found.headers["Content-Security-Policy"].startswith("default-src 'self';")
    assert not re.search(r"https?:|<script|<link|<img|@import|url\(", found.text)
    text = html.unescape(found.text)
    schema = client.get("/openapi.json").json()
    for path, methods in schema["paths"].items():
        assert all(f"{method.upper()} {path}</h3>" in text for method in methods)
    examples = dict(re.findall(r"curl localhost:8000(/\S+) .* -d '(.*)'</code>", text))
    assert examples.keys() == {path for path, methods in schema["paths"].items() if "post" in methods}
    for path, body in examples.items():
        response = client.post(path, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 200, (path, response.text)


def test_style_of_the_docs_is_the_one_that_its_policy_allows(client) -> None:
    found = client.get("/docs")
    (style,) = re.findall("<style>(.*?)</style>", found.text, re.S)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"'sha256-{digest}'" in found.headers["Content-Security-Policy"]


@pytest.mark.slow
def test_an_onnx_model_answers_as_torch_does(client, served, tmp_path) -> None:
    """The application of `bertsmith serve … --engine onnxruntime`, beside that of the folders it was exported from."""
    names = ("colours", "words")
    for name in names:
        export_onnx(load_folder(served[name]), tmp_path / name)
    app = build([str(tmp_path / name) for name in names], device="cpu", engine="onnxruntime", wait_ms=0)
    bodies = {
        "classify": {"inputs": TEXTS, "model": "colours"},
        "pair": {"inputs": ["the fox", "a dog"], "model": "colours"},
        "fill-mask": {"inputs": ["the [MASK] fox", "[MASK] dogs [MASK]"]},
    }
    with TestClient(app) as onnx:
        for route, body in bodies.items():
            found = onnx.post(f"/{route}", json=body)
            assert found.status_code == 200, found.text
            assert close(found.json(), client.post(f"/{route}", json=body).json()), route
        described = {model["name"]: model["engine"] for model in onnx.get("/models").json()}
        assert all("onnxruntime" in engine for engine in described.values())
        assert onnx.post("/features", json={"inputs": "the fox"}).status_code == 422
