"""Large texts are sampled evenly, rare syllables are kept, rare symbols dropped, coverage is right, words are added."""

import gzip
import json
from pathlib import Path
from pydoc_data.topics import topics

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import KOREAN, reference
from safetensors.torch import load_file
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from bertsmith.corpus import sources, vocabulary
from bertsmith.corpus.coverage import coverage
from bertsmith.corpus.vocabulary import sample, train_tokenizer
from bertsmith.errors import UserError
from bertsmith.extend import extend, read_words
from bertsmith.formats.hf import load_folder
from bertsmith.text.frame import WORDPIECE
from bertsmith.text.tokenizer import Tokenizer, train_wordpiece

ENGLISH = [line.strip() for text in topics.values() for line in text.splitlines() if line.strip()]
SYMBOLS = "☃★♞漢字पЖ"  # each occurs once in hundreds of thousands of characters
RARE_SYLLABLES = "꿹뷁쀍"


# The alphabet


@pytest.mark.parametrize("cased", [False, True])
def test_rare_syllables_are_kept_and_rare_symbols_dropped(cased) -> None:
    texts = [*ENGLISH, *KOREAN.splitlines() * 200, f"단어{RARE_SYLLABLES}", *SYMBOLS]
    entries = train_wordpiece(texts, 4000, cased=cased).backend.get_vocab()
    for syllable in RARE_SYLLABLES:
        assert syllable in entries
        assert f"##{syllable}" in entries
    assert not set(SYMBOLS) & set(entries)


def test_a_few_foreign_words_do_not_make_a_main_script() -> None:
    entries = train_wordpiece([*ENGLISH, f"단어{RARE_SYLLABLES}"], 2000).backend.get_vocab()
    assert not set(RARE_SYLLABLES) & set(entries)


def test_every_ascii_character_that_occurs_has_a_piece() -> None:
    entries = train_wordpiece(["all but few letters here"] * 20_000 + ["7 ~ jazz"], 200).backend.get_vocab()
    assert {"7", "##7", "~", "j", "##z"} <= set(entries)


def test_the_most_frequent_of_too_many_characters_are_kept() -> None:
    many = [chr(0xAC00 + i) * (2000 - i) for i in range(0, 2000, 10)]
    entries = train_wordpiece(many, 200).backend.get_vocab()
    assert "가" in entries
    assert chr(0xAC00 + 1990) not in entries
    assert len(entries) <= 200


# Sampling and held-out documents


def write(path: Path, documents: list[str]) -> Path:
    path.write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def small_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", 20_000)
    monkeypatch.setattr(sources, "MAX_RECORD", 100_000)
    monkeypatch.setattr(vocabulary, "SAMPLE_BYTES", 100_000)


def test_a_large_text_is_sampled_with_a_note(tmp_path, small_sample, capsys) -> None:
    large = write(tmp_path / "a.txt", list(topics.values()))
    small = write(tmp_path / "b.txt", [KOREAN] * 30)
    made = [train_tokenizer([large, small], tmp_path / name, vocab_size=500) for name in ("one", "two")]
    assert "note: the vocabulary is trained on 0.1 of 0.5 MB of text, spread evenly" in capsys.readouterr().err
    assert made[0].sampled == made[1].sampled == "0.1 of 0.5 MB of text"
    assert made[0].tokenizer.hash == made[1].tokenizer.hash == Tokenizer.load(tmp_path / "one").hash
    assert "학" in made[0].tokenizer.backend.get_vocab()


def test_a_small_text_is_used_completely(tmp_path, capsys) -> None:
    made = train_tokenizer([write(tmp_path / "a.txt", ENGLISH[:500])], tmp_path / "tok", vocab_size=300)
    assert made.sampled == ""
    assert made.coverage is None
    assert made.tokenizer.hash == train_wordpiece(ENGLISH[:500], 300).hash
    assert "note" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["text", "one document", "json", "parquet", "extracted"])
@pytest.mark.parametrize("share", [0.01, 0.3, 0.9])
def test_a_sample_has_its_size_and_is_spread_over_all_blocks(tmp_path, small_sample, kind, share) -> None:
    path = tmp_path / {"json": "a.jsonl", "parquet": "a.parquet"}.get(kind, "a.txt")
    if kind == "parquet":
        pq.write_table(pa.table({"text": ENGLISH}), path)
    elif kind == "json":
        path.write_text("".join(json.dumps({"text": line}) + "\n" for line in ENGLISH))
    elif kind == "extracted":
        path.write_text("".join(f'<doc id="1" title="t">\nt\n\n{line}\n</doc>\n' for line in ENGLISH))
    else:
        path.write_text(("\n\n" if kind == "text" else "\n").join(ENGLISH))
    found = sources.find_sources([path])
    whole = list(sources.read_blocks(found, "text", sources.Reading()))
    parts = list(sample(whole, share))
    size, wanted = (
        sum(len(b.data if b.kind != "parquet" else "".join(b.data)) for b in blocks) for blocks in (parts, whole)
    )
    assert abs(size - share * wanted) < 2500
    by_line = {block.first_line: block for block in whole}
    assert all(by_line[part.first_line].data[: len(part.data)] == part.data for part in parts)
    assert len(parts) > 0.8 * len(whole) or share < 0.1
    assert list(sample(whole, 1.0)) == whole


def test_documents_of_a_large_text_are_held_out(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(vocabulary, "HELD_OUT_FROM", 100_000)
    documents = [f"{ENGLISH[i]} {ENGLISH[-i]}" for i in range(2000)]
    for i in range(49, 2000, 50):
        documents[i] = "zyxwvutsrq one"
    made = train_tokenizer([write(tmp_path / "a.txt", documents)], tmp_path / "tok", vocab_size=1000)
    assert made.coverage is not None
    assert made.coverage.words == 80
    assert made.coverage.longest_words[0][0] == "zyxwvutsrq"
    assert "zyxwvutsrq" not in made.tokenizer.backend.get_vocab()
    assert made.coverage == coverage(made.tokenizer, ["zyxwvutsrq one"] * 40)


def test_no_more_than_a_fixed_size_is_held_out(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(vocabulary, "HELD_OUT_FROM", 10_000)
    monkeypatch.setattr(vocabulary, "HELD_OUT_MOST", 31)
    path = write(tmp_path / "a.txt", ["three short words"] * 2000)
    made = train_tokenizer([path], tmp_path / "tok", vocab_size=100)
    assert made.coverage is not None
    assert made.coverage.words == 3


# The report


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    pieces = ["un", "##able", "##ab", "##le", "able", "a", "##b", "cat", "."]
    backend = train_wordpiece(["x"], 20).backend
    vocab = {token: i for i, token in enumerate([*WORDPIECE.special_tokens, *pieces])}
    backend.model = models.WordPiece(vocab, unk_token="[UNK]")
    return Tokenizer(backend, True)


def test_coverage_counts_words_tokens_and_unknowns(small) -> None:
    report = coverage(small, ["Unable cat. dog", "ab able ab Dog dog dog", ""])
    assert (report.words, report.tokens) == (10, 13)
    assert report.tokens_per_word == 1.3
    assert report.unk_share == pytest.approx(4 / 13)
    assert report.longest_words == (("Unable", 2), ("ab", 2))
    assert report.unknown_words == (("dog", 3), ("Dog", 1))


def test_coverage_of_empty_text(small) -> None:
    report = coverage(small, [])
    assert (report.words, report.tokens, report.tokens_per_word, report.unk_share) == (0, 0, 0, 0)
    assert report.longest_words == report.unknown_words == ()


def test_coverage_does_not_depend_on_batches_and_keeps_the_ten_longest(tokenizer_folder, monkeypatch) -> None:
    tokenizer = Tokenizer.load(tokenizer_folder)
    whole = coverage(tokenizer, ENGLISH[:3000])
    monkeypatch.setattr("bertsmith.corpus.coverage.BATCH", 7)
    monkeypatch.setattr("bertsmith.corpus.coverage.CANDIDATES", 20)
    assert coverage(tokenizer, iter(ENGLISH[:3000])) == whole
    assert len(whole.longest_words) == 10
    words = {w: len(tokenizer.encode([w])[0]) for line in ENGLISH[:3000] for w in line.split() if w.isalpha()}
    assert whole.longest_words[0][1] >= max(words.values())
    assert whole.tokens == sum(map(len, tokenizer.encode(ENGLISH[:3000])))


# New words

WORDS = ["Myocarditis", "tachycardia", "부정맥", "the", "well-known", "tachycardia", "漢字"]
NEW = ["myocarditis", "tachycardia", "부정맥"]
OLD_TEXTS = ["The length of a list is its number of items.", "한국어는 좋다.", "the [MASK] of a [MASK]", "☃"]


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode([text])[0]


def test_new_words_get_ids_after_the_old_ones(tokenizer_folder, tmp_path, capsys) -> None:
    old = Tokenizer.load(tokenizer_folder)
    facts = extend(tokenizer_folder, tmp_path / "out", words=WORDS)
    new = Tokenizer.load(tmp_path / "out")
    assert facts["words"] == NEW
    assert facts["passed_over"] == ["the", "well-known", "漢字"]
    assert "skipped 3 of the given words: the, well-known, 漢字" in capsys.readouterr().err
    assert facts["hash"] == new.hash != old.hash
    assert facts["entries"] == new.vocab_size == old.vocab_size + 3
    assert [new.token(old.vocab_size + i) for i in range(3)] == NEW
    assert [new.token(i) for i in range(old.vocab_size)] == [old.token(i) for i in range(old.vocab_size)]
    assert ids(new, "Tachycardia 부정맥이") == [old.vocab_size + 1, old.vocab_size + 2, *ids(old, "a이")[1:]]
    assert new.encode(OLD_TEXTS, special=True) == old.encode(OLD_TEXTS, special=True)
    assert new.special_ids == old.special_ids
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.txt",
    ]


def test_transformers_reads_the_extended_tokenizer(tokenizer_folder, tmp_path) -> None:
    from transformers import AutoTokenizer

    extend(tokenizer_folder, tmp_path / "out", words=WORDS)
    texts = [*OLD_TEXTS, "Acute myocarditis, or tachycardia?", "부정맥이 있다."]
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert [theirs(t)["input_ids"] for t in texts] == Tokenizer.load(tmp_path / "out").encode(texts, special=True)
    assert len(theirs) == Tokenizer.load(tmp_path / "out").vocab_size


def test_added_tokens_keep_their_ids(tokenizer_folder, tmp_path) -> None:
    tokenizer = Tokenizer.load(tokenizer_folder)
    tokenizer.backend.add_tokens([AddedToken("<drug>", normalized=False), "qqq"])
    tokenizer.backend.add_special_tokens(["[USER]"])
    Tokenizer(tokenizer.backend, True).save(tmp_path / "added")
    before = Tokenizer.load(tmp_path / "added")
    facts = extend(tmp_path / "added", tmp_path / "out", words=["myocarditis", "xxqqqxx"])
    after = Tokenizer.load(tmp_path / "out")
    assert facts["passed_over"] == ["xxqqqxx"]
    assert facts["first_id"] == before.id("[USER]") + 1 == after.id("myocarditis")
    texts = [*OLD_TEXTS, "a <drug> and aqqqa for [USER] qqq"]
    assert after.encode(texts, special=True) == before.encode(texts, special=True)
    assert after.backend.get_added_tokens_decoder().keys() == before.backend.get_added_tokens_decoder().keys()


def test_the_words_that_save_most_tokens_are_added(tokenizer_folder, tmp_path) -> None:
    lines = ["Tachycardia tachycardia."] * 6 + ["pericarditis"] * 5 + ["endocarditis"] * 4 + ["the list 😀 😀"] * 50
    facts = extend(tokenizer_folder, tmp_path / "out", texts=[write(tmp_path / "a.txt", lines)], words=["xylophone"])
    assert facts["words"][0] == "xylophone"
    assert set(facts["words"][1:]) == {"tachycardia", "pericarditis", "😀"}
    few = extend(tokenizer_folder, tmp_path / "few", texts=[tmp_path / "a.txt"], count=1)
    assert few["words"] == ["😀"]
    assert Tokenizer.load(tmp_path / "few").token(few["first_id"]) == "😀"


def test_new_words_come_from_a_field_and_from_other_encodings(tokenizer_folder, tmp_path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "the list", "note": "pericarditis"}\n' * 6, encoding="utf-8")
    assert extend(tokenizer_folder, tmp_path / "field", texts=[rows], field="note")["words"] == ["pericarditis"]
    korean = tmp_path / "korean.txt"
    korean.write_text("심근염\n" * 6, encoding="cp949")
    assert extend(tokenizer_folder, tmp_path / "korean", texts=[korean], encoding="cp949")["words"] == ["심근염"]
    with pytest.raises(UserError, match="add --encoding CP949"):
        extend(tokenizer_folder, tmp_path / "unnamed", texts=[korean])


@pytest.mark.parametrize("kind", ["mlm+nsp", "mlm", "single", "encoder"])
def test_an_extended_model_has_the_same_outputs_in_transformers(tokenizer_folder, tmp_path, kind, one_thread) -> None:
    import transformers

    tokenizer = Tokenizer.load(tokenizer_folder)
    model = reference(kind, tokenizer.vocab_size)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save(tmp_path / "model")
    facts = extend(tmp_path / "model", tmp_path / "out", words=WORDS)
    again = type(model).from_pretrained(tmp_path / "out").eval()
    size = tokenizer.vocab_size + 3
    assert facts["model"] == str(tmp_path / "out")
    assert again.config.vocab_size == size == again.get_input_embeddings().weight.shape[0]
    inputs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")(
        OLD_TEXTS[:2], return_tensors="pt", padding=True
    )
    with torch.no_grad():
        before, after = model(**inputs), again(**inputs)
    for name, value in before.items():
        theirs = after[name][..., : tokenizer.vocab_size] if after[name].shape[-1] == size else after[name]
        assert torch.equal(value, theirs)
    assert not load_folder(tmp_path / "out").missing or kind == "encoder"


def test_new_rows_start_from_the_mean_of_the_old_pieces(tokenizer_folder, tmp_path) -> None:
    tokenizer = Tokenizer.load(tokenizer_folder)
    reference("mlm", tokenizer.vocab_size).save_pretrained(tmp_path / "model")
    tokenizer.save(tmp_path / "model")
    extend(tmp_path / "model", tmp_path / "out", words=NEW)
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out"))
    assert old.keys() == new.keys()
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed == {"bert.embeddings.word_embeddings.weight", "cls.predictions.bias"}
    for name in changed:
        assert torch.equal(new[name][: tokenizer.vocab_size], old[name])
        for row, word in enumerate(NEW, tokenizer.vocab_size):
            assert len(ids(tokenizer, word)) > 1 or word == "부정맥"  # [UNK] in the old vocabulary
            torch.testing.assert_close(new[name][row], old[name][ids(tokenizer, word)].mean(0))


def test_a_model_with_spare_rows_uses_them(tokenizer_folder, tmp_path) -> None:
    tokenizer = Tokenizer.load(tokenizer_folder)
    reference("mlm", tokenizer.vocab_size + 2).save_pretrained(tmp_path / "model")
    tokenizer.save(tmp_path / "model")
    for count, size in ((1, 2), (3, 3)):
        extend(tmp_path / "model", tmp_path / f"out{count}", words=NEW[:count])
        loaded = load_folder(tmp_path / f"out{count}")
        assert loaded.model.encoder.config.vocab_size == tokenizer.vocab_size + size


def test_the_model_of_a_run_is_extended_and_its_notes_are_kept(tokenizer_folder, tmp_path) -> None:
    tokenizer, model = Tokenizer.load(tokenizer_folder), tmp_path / "run" / "model"
    reference("single", tokenizer.vocab_size).save_pretrained(model)
    tokenizer.save(model)
    (tmp_path / "run" / "config.json").write_text("{}")
    (model / "bertsmith.json").write_text('{"task": "classify", "max_length": 17}')
    extend(tmp_path / "run", tmp_path / "out", words=NEW)
    loaded = load_folder(tmp_path / "out")
    assert (loaded.notes.task, loaded.notes.max_length) == ("classify", 17)
    assert loaded.model.encoder.config.vocab_size == loaded.tokenizer.vocab_size == tokenizer.vocab_size + 3


def test_a_model_with_too_few_rows_is_refused(tokenizer_folder, tmp_path) -> None:
    reference("mlm", 50).save_pretrained(tmp_path / "model")
    Tokenizer.load(tokenizer_folder).save(tmp_path / "model")
    with pytest.raises(UserError, match=r"ids up to 1,199, and config\.json has vocab_size = 50"):
        extend(tmp_path / "model", tmp_path / "out", words=NEW)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no words given"),
        ({"words": ["the"]}, "nothing new to add .*; skipped: the"),
        ({"words": ["heart attack"]}, "'heart attack' is not one word"),
        ({"words": [" "]}, "is not one word"),
        ({"texts": ["nowhere.txt"]}, "no such file: nowhere.txt"),
        ({"texts": [__file__.replace("test_vocabulary.py", "test_doctor.py")]}, "unknown kind of file"),
    ],
)
def test_words_that_cannot_be_added_are_refused(tokenizer_folder, tmp_path, options, message) -> None:
    with pytest.raises(UserError, match=message):
        extend(tokenizer_folder, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_bad_count_and_folders_are_refused(tokenizer_folder, tmp_path) -> None:
    text = write(tmp_path / "a.txt", ["pericarditis"] * 5)
    with pytest.raises(UserError, match="--count 0 is too small"):
        extend(tokenizer_folder, tmp_path / "out", texts=[text], count=0)
    with pytest.raises(UserError, match="no such model folder"):
        extend(tmp_path / "no where", tmp_path / "out", words=NEW)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    with pytest.raises(UserError, match="not empty"):
        extend(tokenizer_folder, tmp_path / "full", words=NEW)


def test_other_tokenizers_are_refused_with_the_reason(tmp_path) -> None:
    unigram = Backend(models.Unigram([(t, -1.0) for t in WORDPIECE.special_tokens], unk_id=1))
    (tmp_path / "unigram").mkdir()
    unigram.save(str(tmp_path / "unigram" / "tokenizer.json"))
    with pytest.raises(UserError, match="has a Unigram tokenizer; only WordPiece"):
        extend(tmp_path / "unigram", tmp_path / "out", words=NEW)


def test_words_are_read_from_a_file(tmp_path) -> None:
    (tmp_path / "words.txt").write_text("\ufeffone\n\n  two \r\n세단어\n", encoding="utf-8")
    assert read_words(tmp_path / "words.txt") == ["one", "two", "세단어"]
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9\n")
    for name, message in (("empty.txt", "holds no words"), ("bad.txt", "not UTF-8"), ("nowhere", "cannot read")):
        with pytest.raises(UserError, match=message):
            read_words(tmp_path / name)


@pytest.fixture
def bad_files(tmp_path) -> Path:
    """A folder with text, rows of which two are bad, and a damaged archive."""
    folder = tmp_path / "bad"
    folder.mkdir()
    (folder / "a.txt").write_text("A plain line of text.\n" * 50)
    (folder / "b.jsonl").write_text(
        '{"text": "wombats dig"}\n' * 9 + 'not JSON\n{"txt": 1}\n{"text": "wombats sleep"}\n'
    )
    (folder / "c.txt.gz").write_bytes(gzip.compress(b"lost text\n" * 1000)[:-20])
    return folder


def test_bad_rows_and_files_are_skipped_for_a_vocabulary(bad_files, tmp_path, capsys) -> None:
    with pytest.raises(UserError, match=r"c\.txt\.gz is damaged"):
        train_tokenizer([bad_files], tmp_path / "tok", vocab_size=200)
    tokenizer = train_tokenizer([bad_files], tmp_path / "tok", vocab_size=200, skip_bad=True).tokenizer
    found = f"skipped 3 bad record(s) or file(s), the first: {bad_files / 'b.jsonl'}, line 10: not valid JSON"
    assert capsys.readouterr().err.count(f"warning: {found}") == 1
    assert tokenizer.backend.token_to_id("wombats") is not None
    with pytest.raises(UserError, match="the text has no words"):
        train_tokenizer([bad_files / "c.txt.gz"], tmp_path / "none", skip_bad=True)
    assert "warning: skipped 1 bad record(s) or file(s), the first: " in capsys.readouterr().err


def test_bad_rows_and_files_are_skipped_for_new_words(bad_files, tokenizer_folder, tmp_path, capsys) -> None:
    with pytest.raises(UserError, match=r"b\.jsonl, line 10: not valid JSON"):
        extend(tokenizer_folder, tmp_path / "out", texts=[bad_files])
    found = extend(tokenizer_folder, tmp_path / "out", texts=[bad_files], skip_bad=True)
    assert "wombats" in found["words"]
    assert "warning: skipped 3 bad record(s) or file(s), the first: " in capsys.readouterr().err
