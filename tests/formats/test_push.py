"""A model folder has a card that the hub can parse, and `push` uploads it without printing secrets."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import reference
from huggingface_hub import ModelCard, constants

from bertsmith.config import override, read_json
from bertsmith.conversion import Options, convert
from bertsmith.errors import UserError
from bertsmith.finetuning.run import FinetuneConfig, finetune
from bertsmith.formats.card import card, write_card
from bertsmith.formats.hub import DEFAULT, known_name, push

TOKEN = "hf_secretsecretsecret"


@pytest.fixture
def folder(tmp_path, tiny_tokenizer):
    """A model folder with a card."""
    reference("single", tiny_tokenizer.vocab_size).save_pretrained(tmp_path / "theirs")
    tiny_tokenizer.save(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "model", "hf")
    return tmp_path / "model"


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's API that an upload needs; it keeps the uploaded files."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer(401, {"error": "Invalid username or password."})
        elif self.path == "/api/repos/create":
            self.server.created = json.loads(body)
            url = f"http://127.0.0.1:{self.server.server_address[1]}/me/model"
            self.answer(200, {"url": url, "name": "me/model", "id": "1"})
        elif "/preupload/" in self.path:
            mode = {"uploadMode": "regular", "shouldIgnore": False}
            self.answer(200, {"files": [{"path": file["path"], **mode} for file in json.loads(body)["files"]]})
        elif "/commit/" in self.path:
            lines = [json.loads(line) for line in body.decode().splitlines()]
            for line in lines:
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.server.revisions.append(self.path.rsplit("/", 1)[-1])
            self.answer(
                200,
                {
                    "success": True,
                    "commitOid": "a" * 40,
                    "commitUrl": f"https://huggingface.co/me/model/commit/{40 * chr(97)}",
                },
            )
        elif "/branch/" in self.path or self.path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        else:
            self.answer(404, {"error": self.path})

    def do_GET(self) -> None:
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        self.answer(
            200 if known else 401, {"id": "me/model", "sha": "b" * 40, "siblings": [], "name": "me", "type": "user"}
        )

    def answer(self, code: int, values: dict) -> None:
        data = json.dumps(values).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments) -> None:
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files, server.created, server.revisions = {}, None, []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def run(monkeypatch, run_command):
    """Runs the command against a hub; with None the hub cannot be reached."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def push_it(hub, *arguments: object, token: str = TOKEN) -> tuple[int, str, str]:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_address[1] if hub else 9}")
        monkeypatch.setenv("HF_TOKEN", token)
        return run_command("push", *arguments)

    return push_it


def test_push_uploads_the_files_of_a_model(folder, hub, run, tmp_path):
    (folder / "private.txt").write_text("notes of mine")
    code, out, err = run(hub, folder, "me/model", "--private", "--json")
    assert code == 0, err
    assert hub.created.get("private") is True or hub.created.get("visibility") == "private"
    expected = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "private.txt"}
    assert hub.files == expected
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json", "vocab.txt"} <= set(hub.files)
    assert set(json.loads(out)["files"]) == set(expected)
    assert TOKEN not in out + err
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    options = ("--revision", "second", "--token-file", tmp_path / "token")
    code, _, err = run(hub, folder, "me/model", *options, token="hf_bad")
    assert code == 0, err
    assert hub.revisions == ["main", "second"]


@pytest.mark.parametrize(
    ("answers", "name", "token", "words"),
    [
        (True, "me/model", "hf_wrongwrongwrong", "401"),
        (False, "me/model", TOKEN, "the hub did not take"),
        (True, "me/my/model", TOKEN, "is not a name on the hub"),
    ],
    ids=["token", "network", "name"],
)
def test_errors_of_the_hub_are_one_line(answers, name, token, words, folder, hub, run):
    code, out, err = run(hub if answers else None, folder, name, token=token)
    assert code == 2
    assert words in err
    assert len(err.strip().splitlines()) == 1, err
    assert token not in out + err
    assert not hub.files


def test_damaged_weights_are_not_pushed(folder):
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(UserError, match="damaged"):
        push(folder, "me/model")


def test_the_hub_library_parses_the_card(folder, tmp_path):
    found = ModelCard.load(folder / "README.md")
    assert (found.data.library_name, found.data.pipeline_tag) == ("transformers", "text-classification")
    assert found.data.license is None
    assert "red, green, blue, none" in found.text
    assert "BertForSequenceClassification.from_pretrained" in found.text
    write_card(folder, data="8 rows", settings={"steps": 3, "seed": None}, scores={"accuracy": 54.0}, base_model="a/b")
    found = ModelCard.load(folder / "README.md")
    assert (found.data.base_model, found.data.metrics) == ("a/b", ["accuracy"])
    assert "| accuracy | 54 |" in found.text
    assert "| steps | 3 |" in found.text
    assert "seed" not in found.text
    convert(tmp_path / "theirs", tmp_path / "st", "sentence-transformers", Options(pooling="mean"))
    assert ModelCard.load(tmp_path / "st" / "README.md").data.library_name == "sentence-transformers"
    (folder / "README.md").write_text("---\nlicense: mit\n---\nMine.\n")
    convert(folder, tmp_path / "again", "hf")
    assert (tmp_path / "again" / "README.md").read_text() == (folder / "README.md").read_text()


def test_labels_are_escaped_in_the_card():
    config = {"id2label": {"0": "a|b\n---\nx: y", "1": "`c`"}, "architectures": ["BertForSequenceClassification"]}
    text = card(config, {}, "transformers", "", {}, {"ac\ncuracy: 1": 3.0}, "no name: x\ny")
    assert set(ModelCard(text).data.to_dict()) == {"library_name", "pipeline_tag", "tags"}
    assert "a\\|b --- x: y" in text


def test_the_card_of_a_run_has_its_scores(world, tmp_path):
    config = override(FinetuneConfig("classify"), ["train.steps=2", "train.batch_size=8", "data.max_length=32"])
    texts = []
    for name in ("a", "b"):
        data = {"data": world / "train.csv", "dev": world / "dev.csv"}
        scores = finetune(config, world / "run", out=tmp_path / name, device="cpu", **data)
        texts.append((tmp_path / name / "model" / "README.md").read_text())
    assert texts[0] == texts[1]
    assert f"| accuracy | {scores['accuracy']:.4g} |" in texts[0]
    assert "40 labelled rows" in texts[0]
    assert str(tmp_path) not in texts[0]
    assert "tokens of text" in (world / "run" / "model" / "README.md").read_text()
    assert read_json(tmp_path / "a" / "model" / "config.json")["architectures"][0] in texts[0]


def test_name_of_a_cached_folder_and_of_the_default_model():
    cache = Path("/cache/hub/models--google-bert--bert-base-uncased/snapshots/86b5e09")
    assert known_name(cache) == "google-bert/bert-base-uncased"
    assert known_name(DEFAULT) == "the default model of bertsmith"
    assert known_name(Path("runs/model")) == ""
