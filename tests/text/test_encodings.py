"""Text that is not UTF-8: refused with the likely encoding and the command that converts it, read with --encoding."""

import gzip
from pathlib import Path

import pytest

from bertsmith.corpus.build import BuildConfig, build_corpus
from bertsmith.corpus.doctor.examination import examine
from bertsmith.corpus.readers import Documents
from bertsmith.corpus.vocabulary import train_tokenizer
from bertsmith.errors import UserError
from bertsmith.text.encodings import guess_encoding

KOREAN = (
    "한국어 문장은 이렇게 끝납니다. 영화가 정말 재미있었고, 배우들의 연기도 좋았다.\n\n두 번째 문서: 2023년 글.\n\n"
)
JAPANESE = "これは日本語の文章です。映画はとても面白かった。\n\n二つ目の文書です。\n\n"
CHINESE = "这是一个中文句子，电影很好看。我们明天去学校。\n\n第二个文件在这里。\n\n"
RUSSIAN = "Это предложение написано по-русски. Фильм был очень интересный.\n\nВторой документ.\n\n"
FRENCH = (
    "Le café était très agréable, déjà vu à l'été — où êtes-vous passés ? Élève, œuvre, naïf, çà.\n\nFin à côté.\n\n"
)
ENGLISH = "The film was good, and the actors were too.\n\nA second document.\n\n"


@pytest.mark.parametrize(
    ("text", "encoding", "guess"),
    [
        (KOREAN, "cp949", "CP949"),
        (KOREAN + "똠방각하 펲시콜라 햏자\n\n", "cp949", "CP949"),
        (KOREAN, "euc-kr", "CP949"),
        (KOREAN, "utf-16", "UTF-16LE"),
        (KOREAN, "utf-16-be", "UTF-16BE"),
        (ENGLISH, "utf-16-le", "UTF-16LE"),
        (JAPANESE, "shift_jis", "SHIFT_JIS"),
        (JAPANESE, "euc-jp", "EUC-JP"),
        (CHINESE, "gb18030", "GB18030"),
        (CHINESE, "gbk", "GB18030"),
        (RUSSIAN, "cp1251", "CP1251"),
        (FRENCH, "cp1252", "CP1252"),
    ],
    ids=lambda value: value if value.isascii() and len(value) < 20 else "",
)
def test_the_encoding_is_guessed_and_read_with_the_option(tmp_path: Path, text: str, encoding: str, guess: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes((text * 3).encode(encoding))
    assert guess_encoding(path.read_bytes()) == guess
    with pytest.raises(UserError, match=r"a\.txt is not UTF-8") as error:
        list(Documents.of([path]))
    assert f"iconv -f {guess} -t UTF-8 {path}" in str(error.value)
    documents = Documents.of([path], encoding=encoding)
    assert list(documents) == [[line] for line in (text * 3).split("\n") if line]
    assert documents.read_errors.warnings() == []


def test_every_command_refuses_other_encodings_and_takes_the_option(tmp_path: Path, capfd) -> None:
    path = tmp_path / "ko.txt.gz"
    path.write_bytes(gzip.compress((KOREAN * 50).encode("cp949")))
    with pytest.raises(UserError, match="CP949"):
        train_tokenizer([path], tmp_path / "tok")
    with pytest.raises(UserError, match="CP949"):
        examine([path])
    found = train_tokenizer([path], tmp_path / "tok", vocab_size=300, encoding="cp949").tokenizer
    assert found.encode(["한국어 문장"]) != [[found.id("[UNK]")] * 2]
    with pytest.raises(UserError, match="CP949"):
        build_corpus([path], tmp_path / "tok", tmp_path / "out", workers=1)
    assert not (tmp_path / "out").exists()
    corpus = build_corpus([path], tmp_path / "tok", tmp_path / "out", config=BuildConfig(encoding="cp949"), workers=1)
    (tmp_path / "utf8.txt").write_text(KOREAN * 50)
    same = build_corpus([tmp_path / "utf8.txt"], tmp_path / "tok", tmp_path / "same", workers=1)
    assert corpus.shards[0].tokens.tolist() == same.shards[0].tokens.tolist()
    assert examine([path], encoding="cp949").facts["documents"] == 100
    assert "warning" not in capfd.readouterr().err


def test_a_few_invalid_characters_are_replaced_and_not_taken_for_an_encoding(tmp_path: Path) -> None:
    text = (ENGLISH * 200).encode()
    (tmp_path / "a.txt").write_bytes(text + b"\xff" * 8)
    (tmp_path / "b.txt").write_bytes(text + b"\xff" * (len(text) // 1000 + 9))
    documents = Documents.of([tmp_path / "a.txt"])
    assert len(list(documents)) == 401
    assert documents.read_errors.replaced == 8
    with pytest.raises(UserError, match=r"b\.txt is not UTF-8 \(22 of"):
        list(Documents.of([tmp_path / "b.txt"]))


def test_bad_files_are_skipped_with_skip_bad(tmp_path: Path, world: Path, capfd) -> None:
    (tmp_path / "a.txt").write_text(ENGLISH)
    (tmp_path / "b.txt").write_bytes(KOREAN.encode("cp949"))
    config = BuildConfig(skip_bad=True)
    corpus = build_corpus([tmp_path / "*.txt"], world / "tok", tmp_path / "out", config=config, workers=1)
    assert corpus.manifest.documents == 2
    assert "skipped 1 bad record(s) or file(s)" in (stderr := capfd.readouterr().err)
    assert "iconv -f CP949" in stderr


def test_a_wrong_or_unknown_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes((KOREAN * 20).encode("cp949"))
    with pytest.raises(UserError, match="--encoding 'klingon' is not a known text encoding"):
        Documents.of([tmp_path / "a.txt"], encoding="klingon")
    with pytest.raises(UserError, match="--encoding 'base64' is not a known text encoding"):
        Documents.of([tmp_path / "a.txt"], encoding="base64")
    with pytest.raises(UserError, match=r"is not shift_jis: .* characters are invalid"):
        list(Documents.of([tmp_path / "a.txt"], encoding="shift_jis"))
