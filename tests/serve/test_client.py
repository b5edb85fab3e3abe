"""The client and `predict --url` over a real connection: the same results as the local commands, retries, errors."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import uvicorn

import bertsmith
from bertsmith.errors import UserError
from bertsmith.serve.app import create_app
from bertsmith.serve.settings import ServeConfig

TEXTS = ["the quick brown fox", "dogs bark", "the lazy dog jumps"]
KEY = "a-key-of-the-test"


@pytest.fixture(scope="module")
def url(served_models) -> Iterator[str]:
    """The address of a server in another thread, which asks for a key."""
    app = create_app(served_models, ServeConfig(wait_ms=0, api_keys=(KEY,)))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(20)


@pytest.fixture
def key(monkeypatch) -> None:
    monkeypatch.setenv("BERTSMITH_API_KEY", KEY)


ITEMS = {
    "colours": [*TEXTS * 60, ("the fox", "a dog"), "dogs"],  # several requests, texts and pairs
    "tags": [*TEXTS, ["the", "fox"]],
    "spans": [("who?", "the quick brown fox jumps over the lazy dog. " * 10)],
    "endings": [("the", ["fox", "dog"])],
    "ranks": TEXTS,
}


def rounded(value):
    """A JSON value with numbers of five places: batches of other sizes round differently."""
    return json.loads(json.dumps(value), parse_float=lambda digits: pytest.approx(float(digits), abs=1e-5))


@pytest.mark.parametrize("name", ITEMS)
def test_client_predicts_as_the_predictor(url, key, served, name) -> None:
    expected = bertsmith.Predictor.load(served[name], "cpu")(ITEMS[name])
    client = bertsmith.Client(url, model=name)
    assert client.predict(ITEMS[name]) == rounded(expected)
    if isinstance(ITEMS[name][0], str):
        assert client.predict(ITEMS[name][0]) == rounded(expected[0])


def test_client_has_the_other_heads(url, key, served) -> None:
    client = bertsmith.Client(url)
    predictor = bertsmith.Predictor.load(served["words"], "cpu")
    assert client.fill("the [MASK] fox", 2) == rounded(predictor.fill("the [MASK] fox", 2))
    embedder = bertsmith.Embedder.load(served["words"], "cpu", normalize=True)
    np.testing.assert_allclose(client.embed(TEXTS * 50), embedder(TEXTS * 50), atol=1e-5)
    assert client.embed("one").shape == (embedder.size,)
    assert [entry["index"] for entry in client.rerank("who?", TEXTS)] != []
    found = client.features("the fox", layers="all")
    assert (found["words"], found["vectors"].shape) == (["the", "fox"], (4, 2, 64))
    assert client.features(["the", "fox"])["words"] == ["the", "fox"]


@pytest.mark.parametrize("name", ["colours", "tags", "endings"])
def test_predict_by_a_server_writes_the_same_file(url, key, served, name, tmp_path, run_command) -> None:
    rows = {
        "colours": [{"text": text, "id": i} for i, text in enumerate(TEXTS)],
        "tags": [{"tokens": text.split(), "id": i} for i, text in enumerate(TEXTS)],
        "endings": [{"text": text, "endings": ["a", "b"], "id": i} for i, text in enumerate(TEXTS)],
    }[name]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for out, model, options in (("here", served[name], ["--device", "cpu"]), ("there", name, ["--url", url])):
        code, _, err = run_command(
            "predict", model, tmp_path / "in.jsonl", "--out", tmp_path / f"{out}.jsonl", "--keep", "id", *options
        )
        assert code == 0, err
    here, there = ((tmp_path / f"{out}.jsonl").read_text().splitlines() for out in ("here", "there"))
    assert [json.loads(line) for line in there] == [rounded(json.loads(line)) for line in here]


def test_sentences_keep_the_context_of_their_document(url, key, served, tmp_path, run_command, monkeypatch) -> None:
    """The server gets runs of sentences with the words around them, and tags each as the local command does."""
    monkeypatch.setattr("bertsmith.serve.remote.SENTENCES", 3)
    sentences = [text.split() for text in TEXTS * 4]  # more than the 48 tokens of the model
    lines = ["-DOCSTART- O", "", *("\n".join(f"{word} O" for word in words) + "\n" for words in sentences)]
    document = "\n".join(lines)
    (tmp_path / "in.conll").write_text(f"{document}\n{document}\n-DOCSTART- O\n\nfoxes O\n")
    found = {}
    for out, model, options in (("here", served["tags"], ["--device", "cpu"]), ("there", "tags", ["--url", url])):
        code, _, err = run_command(
            "predict", model, tmp_path / "in.conll", "--out", tmp_path / f"{out}.jsonl", *options
        )
        assert code == 0, err
        found[out] = [json.loads(line) for line in (tmp_path / f"{out}.jsonl").read_text().splitlines()]
    assert [each["words"] for each in found["here"]] == [*sentences, *sentences, ["foxes"]]
    assert found["there"] == rounded(found["here"])
    alone = bertsmith.Client(url, model="tags").predict(sentences)
    assert [each["scores"] for each in alone] != rounded([each["scores"] for each in found["here"][: len(alone)]])


@pytest.mark.parametrize("sentences", [[[0, 2], [1, 3]], [[2, 4]], [[1, 1]], [[-1, 1]], [[2, 1]], [[0]]])
def test_sentences_outside_their_document_are_refused(client, sentences) -> None:
    body = {"inputs": {"document": ["the", "quick", "fox"], "sentences": sentences}}
    response = client.post("/tag", json=body)
    assert response.status_code == 422, response.text


def test_long_items_are_sent_in_several_requests(url, key, served) -> None:
    long = "the quick brown fox jumps over the lazy dog. " * 1000  # 45,000 characters, of which a request has 65,536
    client = bertsmith.Client(url, model="colours")
    sent = []
    client.post = lambda path, body, post=client.post: sent.append(len(body["inputs"])) or post(path, body)
    assert len(client.predict([long, "fox", long, long])) == 4
    assert sorted(sent) == [1, 1, 2]


def test_predict_by_a_server_answers_one_text(url, key, run_command) -> None:
    code, out, _ = run_command("predict", "colours", "the quick fox", "--url", url, "--n-best", "2", "--json")
    assert (code, len(json.loads(out)["scores"])) == (0, 2)
    for arguments, expected in (
        (["predict", "colour", "the fox runs", "--url", url], "did you mean 'colours'?"),
        (["predict", "words", "the fox runs", "--url", url], "has no output layer for a task"),
        (["predict", "colours", "the fox runs", "--url", "ftp://x"], "is not the address of a server"),
        (["predict", "colours", "the fox runs", "--url", url, "--device", "cpu"], "--device are the server's"),
    ):
        code, _, err = run_command(*arguments)
        assert code == 2
        assert expected in err


def test_errors_of_the_server_are_one_line(url, key, monkeypatch) -> None:
    with pytest.raises(UserError, match="no model 'nobody'"):
        bertsmith.Client(url, model="nobody").predict("a b")
    with pytest.raises(UserError, match=r"no \[MASK\] in"):
        bertsmith.Client(url).fill("no mask")
    with pytest.raises(UserError, match="the API key is wrong"):
        bertsmith.Client(url, api_key="wrong").models()
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(UserError, match="is `bertsmith serve` running there"):
        bertsmith.Client("http://127.0.0.1:9", retries=2).models()


class Busy(BaseHTTPRequestHandler):
    """A server that refuses some requests, drops one connection, and then answers."""

    statuses: list[int] = []
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        status = self.statuses.pop(0)
        if status == 0:
            self.close_connection = True
            self.connection.close()
            return
        body = b'[{"name": "m", "routes": []}]' if status == 200 else b'{"error": "busy"}'
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if status == 429:
            self.send_header("Retry-After", "7")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *values: object) -> None:
        pass


def test_client_waits_and_tries_again(monkeypatch) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Busy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    waited: list[float] = []
    monkeypatch.setattr("bertsmith.serve.client.time.sleep", waited.append)
    url = f"http://127.0.0.1:{server.server_port}"
    Busy.statuses = [429, 503, 0, 500, 200]
    assert bertsmith.Client(url).models()[0]["name"] == "m"
    assert len(waited) == 4
    assert waited[0] >= 7  # as the server asked
    assert waited[1] < 2
    Busy.statuses = [503] * 3
    with pytest.raises(UserError, match="busy"):
        bertsmith.Client(url, retries=2).models()
    Busy.statuses = [400]
    with pytest.raises(UserError, match="busy"):
        bertsmith.Client(url).models()
    assert not Busy.statuses  # a bad request is not sent again
    server.shutdown()
