"""The page of one text has the numbers of `transformers`, loads nothing, and escapes the text."""

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import reference
from variants import VARIANTS, their_model

from bertsmith.cli import COMMANDS
from bertsmith.errors import UserError
from bertsmith.inference.predictor import Predictor
from bertsmith.pages.view import MOST_TOKENS, view

TEXT, PAIR = "the quick brown foxes jump over dogs", "lazy dogs bark"


def save(model, tokenizer, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture
def folder(tmp_path, tiny_tokenizer) -> Path:
    return save(reference("mlm", tiny_tokenizer.vocab_size), tiny_tokenizer, tmp_path / "model")


def data_of(page: Path) -> dict:
    (found,) = re.findall(
        r"<script type=application/json id=data>(.*?)</script>", page.read_text(encoding="utf-8"), re.S
    )
    return json.loads(found)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("pair", [None, PAIR])
def test_attention_and_neighbours_equal_those_of_transformers(variant, pair, tmp_path, tiny_tokenizer):
    theirs = their_model(variant, "mlm", tiny_tokenizer.vocab_size, attn_implementation="eager")
    found = view(save(theirs, tiny_tokenizer, tmp_path / "m"), TEXT, pair, tmp_path / "page.html", device="cpu")
    data = data_of(tmp_path / "page.html")
    first, second = tiny_tokenizer.encode([TEXT, PAIR])
    sep = tiny_tokenizer.id("[SEP]")
    ids = [tiny_tokenizer.id("[CLS]"), *first, sep, *([*second, sep] if pair else [])]
    other = int(VARIANTS[variant].ours.get("num_segments") != 1)  # a model with one segment gives it to both texts
    segments = [0] * (len(first) + 2) + [other] * (len(second) + 1 if pair else 0)
    assert data["tokens"] == [tiny_tokenizer.token(i) for i in ids]
    assert data["segments"] == segments
    assert found["tokens"] == len(ids)
    with torch.inference_mode():
        outputs = theirs.base_model(
            torch.tensor([ids]),
            token_type_ids=torch.tensor([segments]),
            output_attentions=True,
            output_hidden_states=True,
        )
    shape = (data["layers"], data["heads"], len(ids), len(ids))
    weights = np.frombuffer(base64.b64decode(data["attention"]), dtype=np.uint8).reshape(shape) / 255
    np.testing.assert_allclose(weights, torch.cat(outputs.attentions).numpy(), atol=0.5 / 255 + 1e-5)
    base = theirs.base_model
    mapped = base if hasattr(base, "embeddings_project") else getattr(base, "encoder", base)
    project = getattr(mapped, "embeddings_project", getattr(mapped, "embedding_hidden_mapping_in", torch.nn.Identity()))
    table = project(theirs.get_input_embeddings().weight).detach().numpy()
    table = table / np.linalg.norm(table, axis=1, keepdims=True)
    states = [*outputs.hidden_states[:-1], outputs.last_hidden_state]
    assert len(data["nearest"]) == len(states) == data["layers"] + 1
    for layer, state in zip(data["nearest"], states, strict=True):
        for listed, vector in zip(layer, state[0].numpy(), strict=True):
            cosines = table @ vector / np.linalg.norm(vector)
            np.testing.assert_allclose([value for _, value in listed], np.sort(cosines)[::-1][: len(listed)], atol=1e-4)
            assert listed[0][0] == tiny_tokenizer.token(int(cosines.argmax()))


def test_predictions_of_every_masked_token_equal_those_of_fill(folder, tmp_path, tiny_tokenizer):
    assert view(folder, TEXT, out=tmp_path / "page.html", device="cpu")["masked_words"]
    data, predictor = data_of(tmp_path / "page.html"), Predictor.load(folder, "cpu")
    assert data["masked"][0] is None
    assert data["masked"][-1] is None
    assert len(data["masked"]) == len(data["tokens"])
    words = TEXT.split()
    place = data["tokens"].index("the")
    expected = predictor.fill(" ".join(["[MASK]", *words[1:]]), top=99)[0]
    found = data["masked"][place]
    assert [word for word, _ in found["words"]] == [c["token"] for c in expected[: len(found["words"])]]
    np.testing.assert_allclose([p for _, p in found["words"]], [c["probability"] for c in expected[:8]], atol=1e-4)
    own = [c["token"] for c in expected].index("the")
    assert found["rank"] == own + 1
    assert found["own"] == pytest.approx(expected[own]["probability"], abs=1e-4)


@pytest.mark.parametrize("kind", ["single", "encoder"])
def test_a_model_without_a_masked_word_head_gives_a_note(kind, tmp_path, tiny_tokenizer):
    folder = save(reference(kind, tiny_tokenizer.vocab_size), tiny_tokenizer, tmp_path / "m")
    assert not view(folder, TEXT, out=tmp_path / "page.html", device="cpu")["masked_words"]
    data = data_of(tmp_path / "page.html")
    assert data["masked"] == []
    assert ("fine-tuned" if kind == "single" else "no weights") in data["why_not"]


def test_text_is_escaped_and_the_page_loads_no_other_file(tmp_path, tokenizer_folder):
    from bertsmith.text.tokenizer import Tokenizer

    backend = Tokenizer.load(tokenizer_folder).backend
    backend.add_tokens(["</script><img>"])  # entries of the vocabulary are escaped too
    tokenizer = Tokenizer(backend, True)
    model = reference("mlm", tokenizer.vocab_size, max_position_embeddings=128)
    folder = save(model, tokenizer, tmp_path / "<script>alert(1)<")
    nasty = "</script><script>alert(1)</script> <!-- <img src=x onerror=alert(1)> \"' & 한국어는 </script><img>"
    view(folder, nasty, nasty, tmp_path / "page.html", device="cpu")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert len(re.findall("<script", page)) == 2
    assert len(re.findall("</script", page)) == 2
    assert "<img" not in page
    assert "alert(1)" not in page.replace("&lt;script&gt;alert(1)&lt;", "")
    assert {"<", "</script><img>"} <= set(data_of(tmp_path / "page.html")["tokens"])
    assert not re.search(r"https?://|src\s*=|@import|url\(|innerHTML|fetch\(", page)


def test_an_empty_text_is_shown_and_a_too_long_one_refused(folder, tmp_path):
    assert view(folder, "", out=tmp_path / "page.html", device="cpu")["tokens"] == 2
    with pytest.raises(UserError, match=r"the text has \d+ tokens with special tokens, and a page shows 48; shorten"):
        view(folder, "fox " * 60, out=tmp_path / "long.html", device="cpu")
    assert not (tmp_path / "long.html").exists()
    assert MOST_TOKENS == 128
    assert "view" in COMMANDS


@pytest.mark.slow
def test_a_browser_draws_the_page(folder, tmp_path, browser):
    view(folder, TEXT, PAIR, tmp_path / "page.html", device="cpu")
    data = data_of(tmp_path / "page.html")
    opened = browser.new_page()
    errors = []
    opened.on("console", lambda message: errors.append(message.text))
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.goto(f"file://{tmp_path / 'page.html'}")
    assert opened.locator(".token").all_text_contents() == data["shown"]
    assert opened.locator("#heads canvas").count() == data["layers"] * (data["heads"] + 1)
    assert opened.locator("#strongest").text_content() == "What it attends to: the"
    assert "the itself: " in opened.locator("#note").text_content()
    assert opened.locator("#nearest tr").count() == data["layers"] + 1
    opened.locator("#heads button").nth(2).click()  # the second head of the first layer
    shape = (data["layers"], data["heads"], len(data["tokens"]), len(data["tokens"]))
    weights = np.frombuffer(base64.b64decode(data["attention"]), dtype=np.uint8).reshape(shape)[0, 1, 1] / 255
    best = opened.locator("#weights span").first.text_content().split(" (")[0]
    assert best == data["tokens"][int(weights.argmax())]
    opened.close()
    assert errors == []


ANSWERS = {"single": "label", "multi": "labels", "regression": "value", "tags": "tags", "span": "text"}


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_fine_tuned_model_shows_its_prediction(kind, tmp_path, tiny_tokenizer):
    folder = save(reference(kind, tiny_tokenizer.vocab_size), tiny_tokenizer, tmp_path / "m")
    pair = PAIR if kind in ("single", "span") else None
    found = view(folder, TEXT, pair, tmp_path / "page.html", device="cpu")["answer"]
    expected = next(Predictor.load(folder, "cpu").predict([(TEXT, pair) if pair else TEXT]))
    assert found == expected
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    top = page[page.index("Prediction</h2>") : page.index("The text</h2>")]
    predicted = found[ANSWERS[kind]]
    shown = {"regression": f"{found.get('value', 0):.3f}", "multi": ", ".join(predicted) if kind == "multi" else ""}
    assert shown.get(kind, "") in top
    for word in predicted if kind == "tags" else [predicted] if kind == "single" else []:
        assert f">{word}<" in top
    if kind == "single":
        best = max(found["scores"].values())
        assert f"{100 * best:.1f}\u00a0%" in top


def test_a_model_without_a_task_has_no_prediction(folder, tmp_path):
    assert "answer" not in view(folder, TEXT, out=tmp_path / "page.html", device="cpu")
    assert "Prediction</h2>" not in (tmp_path / "page.html").read_text(encoding="utf-8")
