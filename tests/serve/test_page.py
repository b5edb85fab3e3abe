"""The page's files are sent without a key and say nothing about the models; /view gives what `bertsmith view` shows."""

import base64
import re
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient

import bertsmith.serve
from bertsmith.inference.engines import int8_backends
from bertsmith.inference.predictor import Predictor
from bertsmith.pages.view import look, sequence_of
from bertsmith.serve.app import create_app
from bertsmith.serve.models import open_models
from bertsmith.serve.page import FILES, OWN
from bertsmith.serve.settings import ServeConfig
from bertsmith.training.settings import has_bfloat16

ASSETS = Path(bertsmith.serve.__file__).parent / "assets"
TEXT, PAIR = "the quick brown foxes jump over dogs", "lazy dogs bark"


def test_page_and_its_files_are_sent_with_a_strict_policy(client) -> None:
    page = client.get("/")
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert page.headers["Content-Security-Policy"].startswith("default-src 'self';")
    assert "<template id=view>" in page.text
    assert "id=heads" in page.text.split("<template")[1]  # the markup of the view
    assert "data-key" not in page.text
    named = set(re.findall(r"(?:href|src)=page/([\w.]+)", page.text))
    named |= {name for file in OWN if file.endswith(".js") for name in re.findall(r'"\./([\w.]+)"', read(file))}
    assert named == FILES
    for name in FILES:
        found = client.get(f"/page/{name}")
        kind = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}[name.rpartition(".")[2]]
        assert (found.status_code, found.headers["Content-Type"]) == (200, f"{kind}; charset=utf-8")
        assert found.headers["X-Content-Type-Options"] == "nosniff"
        again = client.get(f"/page/{name}", headers={"If-None-Match": found.headers["ETag"]})
        assert (again.status_code, again.content) == (304, b"")


def read(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["index.html", "..%2fapp.py", "../app.py", "%2e%2e/app.py", "main.js/", "none.js", ""])
def test_no_other_file_is_sent(client, name) -> None:
    assert client.get(f"/page/{name}", follow_redirects=False).status_code in (307, 404)


def test_scripts_insert_no_html_and_load_nothing_from_elsewhere() -> None:
    assert {path.name for path in ASSETS.iterdir()} == {*OWN, "index.html"}
    for path in ASSETS.iterdir():
        text = read(path.name).replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(", text), path
        assert not re.search(r"https?://|@import|url\(| style=| on\w+=", text), path


def test_page_asks_for_the_key_itself(served_models) -> None:
    with TestClient(create_app(served_models, ServeConfig(api_keys=("a-key-of-some-length",)))) as client:
        page = client.get("/")
        assert (page.status_code, " data-key>" in page.text) == (200, True)
        files = "".join(client.get(f"/page/{name}").raise_for_status().text for name in FILES)
        assert not [name for name in ("colours", "endings") if name in re.findall(r"\w+", page.text)]
        assert "a-key-of-some-length" not in page.text + files
        assert client.get("/models").status_code == client.post("/view", json={"inputs": "a"}).status_code == 401
        assert client.get("/page/none.js").status_code == 401  # only files of the page are open


@pytest.mark.parametrize("inputs", [TEXT, [TEXT, PAIR]])
@pytest.mark.parametrize("name", ["words", "colours"])
def test_view_is_that_of_the_command(client, served, name, inputs) -> None:
    predictor = Predictor.load(served[name], "cpu")
    expected = look(predictor, sequence_of(predictor, *([inputs] if isinstance(inputs, str) else inputs)))
    found = client.post("/view", json={"inputs": inputs, "model": name}).json()
    assert found["tokens"] == expected["tokens"]
    assert found["attention"] == expected["attention"]
    assert bool(found["masked"]) is (name == "words")
    for theirs, ours in zip(found["masked"], expected["masked"], strict=True):
        assert (theirs is None) is (ours is None)
        if theirs is not None:
            assert theirs["rank"] == ours["rank"]
            assert theirs["own"] == pytest.approx(ours["own"], abs=1e-4)
    assert [[word for word, _ in token] for layer in found["nearest"] for token in layer] == [
        [word for word, _ in token] for layer in expected["nearest"] for token in layer
    ]


@pytest.mark.parametrize(
    "precision",
    [
        pytest.param("bfloat16", marks=pytest.mark.skipif(not has_bfloat16(), reason="this CPU has no bfloat16")),
        pytest.param("int8", marks=pytest.mark.skipif(not int8_backends(), reason="torch has no int8 for this CPU")),
    ],
)
def test_view_of_a_model_in_another_precision_is_close(client, served, precision) -> None:
    models = open_models([str(served["words"])], "cpu", precision=precision)
    with TestClient(create_app(models)) as other:
        found = other.post("/view", json={"inputs": TEXT}).raise_for_status().json()
    expected = client.post("/view", json={"inputs": TEXT, "model": "words"}).json()
    bytes_of = [np.frombuffer(base64.b64decode(each["attention"]), np.uint8) / 255 for each in (found, expected)]
    assert np.abs(bytes_of[0] - bytes_of[1]).max() < 0.15
    assert len(found["masked"]) == len(expected["masked"])


def test_view_of_too_much_is_refused(client, served_models) -> None:
    long = client.post("/view", json={"inputs": "fox " * 60})
    assert (long.status_code, "a page shows 48; shorten it" in long.json()["error"]) == (413, True)
    with TestClient(create_app(served_models, ServeConfig(max_numbers=500))) as small:
        wide = small.post("/view", json={"inputs": TEXT})
        assert (wide.status_code, "shorten the text" in wide.json()["error"]) == (413, True)
    assert client.post("/view", json={"inputs": ["a", "b", "c"]}).status_code == 422
    assert client.post("/view", json={"inputs": ""}).status_code == 200
