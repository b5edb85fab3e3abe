"""Folders that others wrote: what they say is kept, and what makes no sense is refused in a line, fast and small."""

import json
import os
from pathlib import Path

import pytest
from conftest import reference

from bertsmith.config import read_json
from bertsmith.errors import UserError
from bertsmith.formats.sentence_folder import Pooling, read_pooling, write_pooling

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def saved(tmp_path, tiny_tokenizer):
    """Saves a small model of `transformers` as a folder."""

    def save(kind: str = "mlm", **changes) -> Path:
        reference(kind, tiny_tokenizer.vocab_size, **changes).save_pretrained(tmp_path / "theirs")
        tiny_tokenizer.save(tmp_path / "theirs")
        return tmp_path / "theirs"

    return save


def edit(path: Path, **changes) -> None:
    values = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**values, **changes}), encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        ('{"label": "\\ud800"}', "not valid JSON.*surrogates"),
        ('{"label": "\xff"}', "not valid JSON"),
        ("[]", "expected a JSON object, found list"),
    ],
    ids=["deep", "surrogate", "latin-1", "list"],
)
def test_json_that_is_none_is_an_error_in_one_line(text, words, tmp_path):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=words) as caught:
        read_json(tmp_path / "config.json")
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pipe_and_a_device_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    for name in ("pipe.json", "zero.json"):
        with pytest.raises(UserError, match=f"{name} is not a regular file"):
            read_json(tmp_path / name)
    with pytest.raises(UserError, match="no such file"):
        read_json(tmp_path / "none.json")


def test_escaped_characters_are_read(tmp_path):
    (tmp_path / "a.json").write_text('{"label": "\\ud83d\\ude00 \\u00e9"}')
    assert read_json(tmp_path / "a.json") == {"label": "😀 é"}


def test_prompts_of_a_sentence_folder_are_read_and_written(tmp_path):
    pooling = Pooling("cls", True, 32, True, {"query": "query: ", "passage": ""}, "query", include_prompt=False)
    write_pooling(tmp_path, pooling, 64)
    assert read_pooling(tmp_path) == pooling
    assert (pooling.prompt, Pooling().prompt) == ("query: ", "")
    edit(tmp_path / "config_sentence_transformers.json", default_prompt_name="other")
    with pytest.raises(UserError, match="default_prompt_name 'other' is not one of the prompts query, passage"):
        read_pooling(tmp_path)
    edit(tmp_path / "config_sentence_transformers.json", prompts=["query: "])
    with pytest.raises(UserError, match="prompts is not an object of texts"):
        read_pooling(tmp_path)


def test_the_length_of_a_sentence_folder_may_stand_with_its_tokenizer(tmp_path):
    write_pooling(tmp_path, Pooling(), 64)
    for length, expected in ((10**30, None), (32, 32)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": length}))
        assert read_pooling(tmp_path).max_length == expected
    edit(tmp_path / "sentence_bert_config.json", max_seq_length="long")
    with pytest.raises(UserError, match="the length 'long' is not a whole number"):
        read_pooling(tmp_path)
