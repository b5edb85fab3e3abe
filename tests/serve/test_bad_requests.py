"""Bad requests get a 4xx with one line, never a 5xx or a traceback, and other clients are served on."""

import asyncio
import json
import re

import httpx
import pytest
import uvicorn
from fastapi.testclient import TestClient

from bertsmith.errors import UserError
from bertsmith.serve.app import create_app
from bertsmith.serve.models import open_models
from bertsmith.serve.settings import ServeConfig, read_keys

KEY, OTHER = "correct-horse-battery", "staple-staple"
JSON = {"Content-Type": "application/json"}


def message(response) -> str:
    """The message of an error, which is one line."""
    found = response.json()["error"]
    found = found["message"] if isinstance(found, dict) else found
    assert "\n" not in found
    assert "Traceback" not in found
    assert len(found) <= 300
    return found


BODIES = {
    "not JSON": (b"{inputs", 400, "the body is not JSON"),
    "empty": (b"", 422, "the body"),
    "not UTF-8": (b'{"inputs": "\xff\xfe"}', 400, "not JSON"),
    "a list": (b"[1]", 422, "the body: "),
    "null": (b"null", 422, "the body"),
    "no inputs": (b"{}", 422, "inputs: Field required"),
    "a number": (b'{"inputs": 3}', 422, "inputs: Input should be a valid string"),
    "a number among texts": (b'{"inputs": ["a", 3]}', 422, "inputs[1]: Input should be a valid string"),
    "an object": (b'{"inputs": {"a": 1}}', 422, "inputs: "),
    "an unknown field": (b'{"inputs": "a", "colour": 1}', 422, "colour: Extra inputs are not permitted"),
    "a wrong count": (b'{"inputs": "a", "n_best": 0}', 422, "n_best: Input should be greater than or equal to 1"),
    "a huge number": (b'{"inputs": "a", "n_best": 1' + b"0" * 5000 + b"}", 400, "JSON"),
    "deep nesting": (b'{"inputs": ' + b"[" * 100_000, 400, "JSON"),
    "a lone surrogate in a name": (b'{"inputs": "a", "model": "\\ud800"}', 404, "no model"),
    "a lone surrogate in a field": (b'{"inputs": "a", "\\ud800": 1}', 422, "the body: Input should be a valid string"),
    "an unknown model": (b'{"inputs": "a", "model": "colour"}', 404, "did you mean 'colours'?"),
    "a path as a model": (b'{"inputs": "a", "model": "../../etc/passwd"}', 404, "no model '../../etc/passwd'"),
    "a model without the head": (
        b'{"inputs": "a", "model": "tags"}',
        422,
        "does not answer /classify; it answers: tag",
    ),
    "too many texts": (json.dumps({"inputs": ["a"] * 2049}).encode(), 413, "send at most 2,048 at a time"),
    "too many characters": (json.dumps({"inputs": "ab " * 400_000}).encode(), 413, "send at most 524,288 at a time"),
    "a body over the limit": (
        b'{"inputs": "' + b"a" * 4 * 2**20 + b'"}',
        413,
        "the body has more than 4,194,304 bytes",
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_bad_body_is_refused_in_one_line(client, name) -> None:
    body, status, expected = BODIES[name]
    response = client.post("/classify", content=body, headers=JSON)
    assert response.status_code == status, response.text
    assert expected in message(response)


ODD = {
    "nothing": "",
    "a space": " ",
    "null bytes": "the\0fox\0",
    "lone surrogates": "the \ud800 fox \udfff",
    "a long word": "a" * 100_000,
    "a megabyte of one word": "a" * 1_000_000,
    "many characters that are no letters": "\u200b" * 10_000,
    "Hangul, an emoji and a byte order mark": "\ufeff여우 🦊",
    "special tokens": "[CLS] [SEP] [MASK] [PAD] [UNK]",
}


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_odd_texts_are_answered_or_refused_on_every_route(client, text) -> None:
    bodies = {
        "/classify": {"inputs": text},
        "/pair": {"inputs": [text, text]},
        "/tag": {"inputs": text},
        "/answer": {"inputs": {"question": text, "context": text}},
        "/choose": {"inputs": {"context": text, "endings": [text, text]}},
        "/fill-mask": {"inputs": text},
        "/embed": {"inputs": text},
        "/features": {"inputs": text},
        "/predict": {"inputs": text},
        "/rerank": {"query": text, "texts": [text]},
        "/view": {"inputs": text},
        "/v1/embeddings": {"input": text},
    }
    statuses = {
        route: client.post(route, content=json.dumps(body), headers=JSON).status_code for route, body in bodies.items()
    }
    assert set(statuses.values()) <= {200, 413, 422}, statuses
    expected = 413 if len(text) == 1_000_000 else 200
    assert statuses["/classify"] == statuses["/embed"] == statuses["/v1/embeddings"] == expected


def test_wrong_requests_are_refused(client) -> None:
    assert "Content-Type: application/json" in message(client.post("/classify", content=b'{"inputs": "a"}'))
    assert client.post("/classify", content=b'{"inputs": "a"}').status_code == 415
    assert client.get("/classify").status_code == 405
    assert client.get("/../../etc/passwd").status_code == 404
    assert client.post("/no-such-route", json={}).status_code == 404
    assert "no [MASK] in" in message(client.post("/fill-mask", json={"inputs": "no mask here"}))
    assert "layers 'nine'" in message(client.post("/features", json={"inputs": "a", "layers": "nine"}))
    several = message(client.post("/fill-mask", json={"inputs": "[MASK] " * 100}))
    assert "more than the model's 48 positions" in several
    assert client.post("/v1/embeddings", json={"input": 3}).json()["error"]["type"] == "invalid_request_error"


def test_messages_name_the_model_and_never_its_folder(client, served) -> None:
    found = client.post("/fill-mask", json={"inputs": "a [MASK]", "model": "colours"})
    assert found.status_code == 422
    assert str(served["colours"].parent) not in found.text


def test_too_many_numbers_are_refused_before_they_are_computed(served_models) -> None:
    with TestClient(create_app(served_models, ServeConfig(max_numbers=5000))) as client:
        found = client.post("/features", json={"inputs": "the fox " * 20, "layers": "all"})
        assert (found.status_code, "ask for fewer texts or layers" in message(found)) == (413, True)
        found = client.post("/embed", json={"inputs": ["fox"] * 100})
        assert (found.status_code, "send fewer texts" in message(found)) == (413, True)
        assert client.post("/embed", json={"inputs": ["fox"] * 10}).status_code == 200


def test_keys_are_checked_in_every_form_and_never_shown(served_models, caplog, capfd) -> None:
    config = ServeConfig(api_keys=(OTHER, KEY))
    assert KEY not in repr(config)
    with TestClient(create_app(served_models, config)) as client:
        body = {"inputs": "the fox", "model": "colours"}
        missing = client.post("/classify", json=body)
        assert (missing.status_code, missing.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert "missing" in message(missing)
        for wrong in ("correct-horse-batterz", "", "é", KEY + "x"):
            headers = {"Authorization": f"Bearer {wrong}".encode()}
            assert client.post("/classify", json=body, headers=headers).status_code == 401
        assert client.get("/metrics").status_code == client.get("/models").status_code == 401
        assert client.get("/health").status_code == client.get("/ready").status_code == 200
        for headers in ({"Authorization": f"Bearer {KEY}"}, {"authorization": f"bearer {OTHER}"}, {"X-API-Key": KEY}):
            assert client.post("/classify", json=body, headers=headers).status_code == 200
    assert KEY not in caplog.text
    assert KEY not in "".join(capfd.readouterr())


def test_keys_come_from_a_file_or_the_environment(tmp_path, monkeypatch) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# two keys\n{KEY}\n\n {OTHER} \n")
    assert read_keys(file) == (KEY, OTHER)
    monkeypatch.setenv("BERTSMITH_API_KEY", OTHER)
    assert read_keys(None) == (OTHER,)
    monkeypatch.delenv("BERTSMITH_API_KEY")
    assert read_keys(None) == ()
    for content in ("", "# none", "short", "with a space in it", "schlüssel-schlüssel"):
        file.write_text(content)
        with pytest.raises(UserError) as error:
            read_keys(file)
        assert not content or content not in str(error.value)


def test_cors_is_off_unless_it_is_asked_for(client, served_models) -> None:
    origin = {"Origin": "https://example.org"}
    assert "access-control-allow-origin" not in client.get("/health", headers=origin).headers
    with TestClient(create_app(served_models, ServeConfig(cors=("https://example.org",)))) as asked:
        allowed = asked.get("/health", headers=origin)
        assert allowed.headers["access-control-allow-origin"] == "https://example.org"
        assert "access-control-allow-origin" not in asked.get("/health", headers={"Origin": "https://evil.org"}).headers
        asked.post("/classify", json={"inputs": "a"}, headers=origin)


def test_slow_bodies_and_bodies_without_a_length(served_models) -> None:
    config = ServeConfig(body_seconds=0.2, max_body_bytes=1000, max_held_bytes=1500)

    async def chunks(count: int, seconds: float = 0.0):
        for _ in range(count):
            yield b" " * 100
            await asyncio.sleep(seconds)

    async def play() -> None:
        app = create_app(served_models, config)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:

            async def post(content) -> httpx.Response:
                return await http.post("/classify", content=content, headers=JSON)

            slow = await post(chunks(9, 0.1))
            assert (slow.status_code, "within 0.2 s" in message(slow)) == (408, True)
            assert (await post(chunks(11))).status_code == 413
            crowd = await asyncio.gather(*(post(chunks(9, 0.01)) for _ in range(5)))
            assert 429 in {response.status_code for response in crowd}
            good = await http.post("/classify", json={"inputs": "the fox", "model": "colours"})
            assert good.status_code == 200  # nothing is held any more
        app.state.service.close()

    asyncio.run(play())


def test_names_of_models(served, tmp_path) -> None:
    assert list(open_models([str(served["tags"]), f"a=b={served['tags']}"][:1], "cpu").by_name) == ["tags"]
    with pytest.raises(UserError, match="two models have the name 'tags'"):
        open_models([str(served["tags"]), f"tags={served['spans']}"], "cpu")
    with pytest.raises(UserError, match="write FOLDER or NAME=FOLDER"):
        open_models(["=folder"], "cpu")
    with pytest.raises(UserError, match="missing"):
        open_models([f"name={tmp_path / 'missing'}"], "cpu")


def test_command_refuses_bad_settings_in_one_line(run_command, served, tmp_path, monkeypatch) -> None:
    for options, expected in (
        (["--port", "70000"], "--port 70000 is not between"),
        (["--workers", "0"], "--workers 0 is not between"),
        (["--queue", "0"], "--queue 0 must be at least 1"),
        (["--api-key-file", tmp_path / "missing"], "missing"),
        (["--host", "256.256.256.256"], "cannot listen on 256.256.256.256"),
    ):
        code, out, err = run_command("serve", served["tags"], "--device", "cpu", *options)
        assert (code, out) == (2, "")
        assert expected in err.splitlines()[-1]
        assert not re.search("Traceback", err)
    monkeypatch.setattr("bertsmith.commands.serve.find_spec", lambda name: None)
    code, _, err = run_command("serve", served["tags"])
    assert (code, "pip install 'bertsmith[serve]'" in err) == (2, True)


@pytest.mark.parametrize(("host", "noted"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_an_open_host_without_a_key_is_noted(served, host, noted, tmp_path, monkeypatch, run_command) -> None:
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_: None)
    monkeypatch.delenv("BERTSMITH_API_KEY", raising=False)
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-some-length\n")
    options = (served["colours"], "--host", host, "--port", 0, "--device", "cpu")
    assert ("everyone who reaches 0.0.0.0" in run_command("serve", *options)[2]) is noted
    assert "everyone" not in run_command("serve", *options, "--api-key-file", keys)[2]
