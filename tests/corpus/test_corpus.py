"""All file formats give the same documents, bad files clear errors, and shards hold exactly the tokenised text."""

import bz2
import gzip
import io
import json
import lzma
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from bertsmith.corpus import sources
from bertsmith.corpus.build import MAX_SENTENCE, BuildConfig, build_corpus
from bertsmith.corpus.cleaning import CleanConfig
from bertsmith.corpus.readers import Documents, ReadErrors
from bertsmith.corpus.shards import Corpus, Tokens, pack_shard, token_dtype
from bertsmith.corpus.vocabulary import train_tokenizer
from bertsmith.errors import UserError
from bertsmith.text.frame import WORDPIECE
from bertsmith.text.sentences import split_sentences
from bertsmith.text.tokenizer import Tokenizer

DOCUMENTS = [
    ["The first paragraph. It has two sentences.", "The second paragraph."],
    ["한국어는 좋다. 영어도 좋다."],
    ["Café, 漢字 and 😀.", 'A quote: "x" and a back\\slash.', "The end"],
]


def read(*paths: Path, field: str = "text") -> list[list[str]]:
    return list(Documents.of(paths, field))


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


COMPRESS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress, ".zst": zstd}


def as_text(documents: list[list[str]]) -> bytes:
    return "\n\n".join("\n".join(d) for d in documents).encode() + b"\n"


def as_rows(documents: list[list[str]]) -> bytes:
    return "".join(json.dumps({"id": i, "text": "\n".join(d)}) + "\n" for i, d in enumerate(documents)).encode()


def as_parquet(documents: list[list[str]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"id": range(len(documents)), "text": ["\n".join(d) for d in documents]}), sink)
    return sink.getvalue()


KINDS = {
    ".txt": as_text,
    ".text": as_text,
    ".md": as_text,
    "": as_text,
    ".jsonl": as_rows,
    ".ndjson": as_rows,
    ".json": as_rows,
    ".parquet": as_parquet,
}


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_file_format_gives_the_same_documents(tmp_path, kind, compression):
    path = tmp_path / f"file{kind}{compression}"
    path.write_bytes(COMPRESS[compression](KINDS[kind](DOCUMENTS)))
    documents = Documents.of([path])
    assert list(documents) == DOCUMENTS
    assert list(documents) == DOCUMENTS, "a second time"
    assert documents.reading.bytes_read == documents.num_bytes == path.stat().st_size


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"a\nb\n\nc\n", [["a", "b"], ["c"]]),
        (b"a\nb\n\nc", [["a", "b"], ["c"]]),
        (b"\n\n\na\n\n\n \t \n\nb\n\n\n", [["a"], ["b"]]),
        (b"a\r\nb\r\n\r\nc\r\n", [["a", "b"], ["c"]]),
        (b"\xef\xbb\xbfa\n\nb\n", [["a"], ["b"]]),
        (b"\xef\xbb\xbf\n\na", [["a"]]),
        (b"  a  b \n\tc\n", [["a  b", "c"]]),
        ("가\n\u3000\n나".encode(), [["가"], ["나"]]),
        (b"\n \n", []),
    ],
)
def test_blank_lines_separate_documents_of_plain_text(tmp_path, content, expected):
    (tmp_path / "a.txt").write_bytes(content)
    assert read(tmp_path / "a.txt") == expected


def test_byte_order_marks_blank_lines_and_empty_texts_are_skipped(tmp_path):
    content = '\ufeff{"text": "a\\r\\nb\\n\\nc"}\r\n\r\n{"text": "  "}\n{"body": "x", "text": "d"}'
    (tmp_path / "a.jsonl").write_text(content, encoding="utf-8", newline="")
    assert read(tmp_path / "a.jsonl") == [["a", "b", "c"], ["d"]]


def test_the_text_is_read_from_the_named_field(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    pq.write_table(pa.table({"body": ["y", None, ""], "text": [1, 2, 3]}), tmp_path / "b.parquet")
    assert read(tmp_path / "a.jsonl", tmp_path / "b.parquet", field="body") == [["x"], ["y"]]


def test_folders_are_read_in_the_order_of_names(tmp_path):
    for name in ("b.txt", "sub/c.txt", "a.txt.gz", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(gzip.compress(b"a.txt.gz") if name.endswith("gz") else name.encode())
    assert read(tmp_path) == [["a.txt.gz"], ["b.txt"], ["sub/c.txt"]]
    assert read(tmp_path / "b.txt", tmp_path / "sub") == [["b.txt"], ["sub/c.txt"]]


def test_concatenated_compressed_parts_are_read(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\n") + gzip.compress(b"two\n"))
    (tmp_path / "b.txt.zst").write_bytes(zstd(b"one\n") + zstd(b"two\n"))
    assert read(tmp_path) == [["one", "two"]] * 2


INVALID = b"good \xff\xfe line\n\ncaf\xe9, \xef\xbf\xbd is not counted\n"


def test_invalid_utf8_is_replaced_and_counted(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"fine\n\n" + INVALID)
    documents = Documents.of([tmp_path / "a.txt"])
    for _ in range(2):
        assert list(documents) == [["fine"], ["good \ufffd\ufffd line"], ["caf\ufffd, \ufffd is not counted"]]
        assert documents.read_errors.replaced == 3
    (warning,) = documents.read_errors.warnings()
    assert "replaced 3 invalid" in warning
    assert warning.endswith(f"the first in {tmp_path / 'a.txt'}, line 3")


def test_invalid_utf8_is_reported_once(tmp_path, tokenizer_folder, capsys):
    (tmp_path / "a.txt").write_bytes(INVALID)
    build_corpus([tmp_path / "a.txt"], tokenizer_folder, tmp_path / "out", workers=1)
    assert capsys.readouterr().err.count("warning: replaced 3 invalid") == 1
    train_tokenizer([tmp_path / "a.txt"], tmp_path / "tok", vocab_size=60)
    assert capsys.readouterr().err.count("warning: replaced 3 invalid") == 1


def test_no_warning_without_reason(tmp_path, tokenizer_folder, capsys):
    (tmp_path / "a.txt").write_bytes(as_text(DOCUMENTS))
    build_corpus([tmp_path / "a.txt"], tokenizer_folder, tmp_path / "out", workers=1)
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert all("[UNK]" in line for line in warnings)  # this short text has unknown tokens


TABLE = as_parquet(DOCUMENTS)
LONG = "".join(f"line {i} of some words {i * i}\n" for i in range(2000)).encode()
BAD_FILES = [
    ("a.txt", b"", "is empty"),
    ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', "line 3: not valid JSON"),
    ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n{"text": "b"\n'), "line 2: not valid JSON"),
    ("a.jsonl", b'{"text": "a"}\n{"body": "b", "id": 3}\n', "line 2: no text in field 'text'; there is: body, id;"),
    ("a.jsonl", b'{"text": 3}\n', "line 1: no text in field 'text'"),
    ("a.jsonl", b'{"text": null}\n', "line 1: no text in field 'text'"),
    ("a.json", b'[{"text": "a"}]\n', "is one JSON list, and a corpus is plain text or JSON lines"),
    ("a.jsonl", b'["a"]\n["b"]\n', "line 1: no text in field 'text'; there is: list"),
    ("a.csv", b"text\na\n", "is a table, and a corpus is plain text, or JSON lines of which --field names"),
    ("a.pdf.gz", gzip.compress(b"%PDF"), "unknown kind of file '.pdf'"),
    ("a.txt.gz", gzip.compress(LONG)[:-2000], "is damaged"),
    ("a.txt.gz", gzip.compress(LONG)[:10] + b"\xff" * 20, "is damaged"),  # a valid header, then invalid data
    ("a.txt.gz", b"not compressed", "is not a gzip file, but plain text: name it a.txt"),
    ("a.txt.xz", lzma.compress(LONG)[:-500], "is damaged"),
    ("a.txt.xz", b"not compressed", "is not an xz file, but plain text: name it a.txt"),
    ("a.txt.bz2", bz2.compress(LONG)[:-500], "is damaged"),
    ("a.txt.bz2", b"not compressed", "is not a bzip2 file, but plain text: name it a.txt"),
    ("a.txt.zst", zstd(LONG)[:-500], "cannot read"),
    ("a.txt.zst", b"not compressed", "is not a zstd file, but plain text: name it a.txt"),
    ("a.txt.gz", lzma.compress(LONG), "is not a gzip file, but an xz file: name it a.txt.xz"),
    ("a.txt.zst", bz2.compress(LONG), "is not a zstd file, but a bzip2 file: name it a.txt.bz2"),
    ("a.txt.xz", b"PK\x03\x04 and more", "is not an xz file, but a zip file: extract its text first"),
    ("a.txt", gzip.compress(LONG), "is a gzip file, whatever its name says: name it a.txt.gz"),
    ("a.jsonl", zstd(LONG), "is a zstd file, whatever its name says: name it a.jsonl.zst"),
    ("a.txt", b"%PDF-1.4\n1 0 obj\n", "is a PDF, whatever its name says: extract its text first"),
    (
        "a.txt.gz",
        gzip.compress(b"PK\x03\x04 and more"),
        "is a zip file, whatever its name says: extract its text first",
    ),
    ("a.json", b'{\n "text": "a"\n}\n', "is one JSON object on several lines; write an object a line"),
    ("a.parquet", b"this is not a table, whatever its name says", "is not a parquet file"),
    ("a.parquet", TABLE[: len(TABLE) // 2], "is not a parquet file"),
]


@pytest.mark.parametrize(("name", "content", "reason"), BAD_FILES, ids=[f"{n}: {r}" for n, _, r in BAD_FILES])
def test_errors_name_the_file_and_the_reason(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        read(tmp_path / name)
    assert str(tmp_path / name) in str(error.value)
    assert reason in str(error.value)


def test_a_missing_column_is_named(tmp_path):
    pq.write_table(pa.table({"body": ["a"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: no column 'text'; there is: body, id; choose with --field"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize("column", [[1, 2], [b"x", b"y"]])
def test_a_column_without_text_is_refused(tmp_path, column):
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet.*'text'"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize("number", ["9" * 5000, "[" * 100_000 + "]" * 100_000], ids=["digits", "depth"])
def test_too_long_numbers_and_too_deep_json_are_refused(tmp_path, number):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "a", "n": {number}}}\n')
    with pytest.raises(UserError, match=r"a\.jsonl, line 1: not valid JSON"):
        read(tmp_path / "a.jsonl")


def test_half_a_surrogate_pair_is_replaced(tmp_path, tokenizer_folder):
    """JSON may hold a lone `\\ud83d`, for example if an emoji was cut in the middle."""
    (tmp_path / "a.jsonl").write_text('{"text": "list \\ud83d list"}\n')
    assert read(tmp_path / "a.jsonl") == [["list \ufffd list"]]
    assert build_corpus([tmp_path], tokenizer_folder, tmp_path / "out", workers=1).manifest.tokens == 2


def test_whole_surrogate_pairs_are_kept(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d\\ude00"}\n')
    assert read(tmp_path / "a.jsonl") == [["😀"]]


def test_missing_inputs_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"no such file: .*nowhere"):
        Documents.of([tmp_path / "nowhere"])
    with pytest.raises(UserError, match="holds no files"):
        Documents.of([tmp_path])
    with pytest.raises(UserError, match="no input files"):
        Documents.of([])


@pytest.fixture(scope="module")
def topics_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pydoc_data.topics import topics

    path = tmp_path_factory.mktemp("text") / "topics.txt"
    texts = [[line for line in t.splitlines() if line.strip()] for t in list(topics.values())[:25]]
    path.write_bytes(as_text([*texts, *DOCUMENTS]))
    return path


AS_IT_IS = BuildConfig(CleanConfig(unicode="none", unwrap=False, duplicate_documents=False, duplicate_paragraphs=False))


@pytest.fixture(scope="module")
def small_parts():
    """A corpus of small blocks, so that a short text gives several shards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "BLOCK_BYTES", 40_000)
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, topics_file, tokenizer_folder, small_parts) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus") / "shards"
    return build_corpus([topics_file], tokenizer_folder, folder, workers=1, config=AS_IT_IS)


def test_the_number_of_workers_does_not_change_the_bytes(tmp_path, corpus, topics_file, tokenizer_folder):
    other = build_corpus([topics_file], tokenizer_folder, tmp_path / "shards", workers=2, config=AS_IT_IS)
    names = sorted(f.name for f in corpus.folder.iterdir())
    assert len(corpus.shards) > 2
    assert names == sorted(f.name for f in other.folder.iterdir())
    assert [(corpus.folder / n).read_bytes() for n in names] == [(other.folder / n).read_bytes() for n in names]


def test_packing_a_shard_is_deterministic(tmp_path):
    part = Tokens(np.arange(6), np.array([2, 3, 1]), np.array([1, 2]))
    assert len({pack_shard(part, 9, {"b": 1, "a": 2}, ReadErrors()) for _ in range(20)}) == 1


def test_shards_hold_the_text_tokenised_sentence_by_sentence(corpus, topics_file, tokenizer_folder):
    tokenizer, documents = Tokenizer.load(tokenizer_folder), read(topics_file)
    assert corpus.manifest.documents == len(documents)
    for number, paragraphs in enumerate(documents):
        sentences = [tokenizer.encode([s])[0] for p in paragraphs for s in split_sentences(p)]
        tokens, bounds = corpus.document(number)
        assert tokens.tolist() == [token for sentence in sentences for token in sentence]
        assert bounds.tolist() == np.cumsum([0, *(len(s) for s in sentences if s)]).tolist()
        assert corpus.document_tokens[number] == len(tokens)


def test_the_manifest_counts_documents_sentences_and_tokens(corpus, tokenizer_folder):
    facts = corpus.manifest
    assert facts.tokenizer == Tokenizer.load(tokenizer_folder).hash == Tokenizer.load(corpus.folder).hash
    assert (facts.dtype, facts.vocab_size) == ("uint16", 1200)
    for name in ("documents", "sentences", "tokens"):
        assert getattr(facts, name) == sum(getattr(s, name) for s in facts.shards)
    for shard, line in zip(corpus.shards, facts.shards, strict=True):
        counts = (len(shard.documents) - 1, len(shard.sentences) - 1, len(shard.tokens))
        assert counts == (line.documents, line.sentences, line.tokens)
        assert shard.path.stat().st_size == line.bytes


def test_shards_are_safetensors(corpus):
    for shard in corpus.shards:
        arrays = load_file(shard.path)
        assert sorted(arrays) == ["documents", "sentences", "tokens"]
        assert all(np.array_equal(arrays[name], shard.arrays[name]) for name in arrays)
        assert arrays["tokens"].dtype == np.uint16
        assert arrays["sentences"][-1] == len(arrays["tokens"])
        assert arrays["documents"][-1] == len(arrays["sentences"]) - 1


@pytest.mark.parametrize(("size", "dtype"), [(5, np.uint16), (65_536, np.uint16), (65_537, np.uint32)])
def test_token_dtype_is_the_smallest_that_fits_the_vocabulary(tmp_path, size, dtype):
    assert token_dtype(size) is dtype
    part = Tokens(np.array([0, size - 1], dtype=np.uint32), np.array([2]), np.array([1]))
    (tmp_path / "a.safetensors").write_bytes(pack_shard(part, size, {}, ReadErrors()))
    assert load_file(tmp_path / "a.safetensors")["tokens"].tolist() == [0, size - 1]


def test_a_large_vocabulary_is_stored_as_uint32(tmp_path):
    (tmp_path / "tok").mkdir()
    words = (f"w{i}" for i in range(70_000))
    (tmp_path / "tok" / "vocab.txt").write_text("\n".join([*WORDPIECE.special_tokens, *words]))
    (tmp_path / "a.txt").write_text("w0 w69999. w65536\n")
    corpus = build_corpus([tmp_path / "a.txt"], tmp_path / "tok", tmp_path / "out", workers=1)
    assert corpus.manifest.dtype == "uint32"
    assert corpus.shards[0].tokens.dtype == np.uint32
    assert corpus.document(0)[0].tolist() == [5, 70_004, 1, 65_541]


def test_long_sentences_are_split_without_losing_tokens(tmp_path, tokenizer_folder):
    text = "the list of numbers " * 400 + "ends here"
    (tmp_path / "a.txt").write_text(f"A short one.\n{text}\nThe end.\n")
    corpus = build_corpus([tmp_path / "a.txt"], tokenizer_folder, tmp_path / "out", workers=1)
    whole = [Tokenizer.load(tokenizer_folder).encode([s])[0] for s in ("A short one.", text, "The end.")]
    tokens, bounds = corpus.document(0)
    assert tokens.tolist() == [token for sentence in whole for token in sentence]
    sizes = np.diff(bounds).tolist()
    full, rest = divmod(len(whole[1]), MAX_SENTENCE)
    assert full > 1
    assert sizes == [len(whole[0]), *[512] * full, rest, len(whole[2])]


def test_text_without_tokens_is_dropped(tmp_path, tokenizer_folder):
    (tmp_path / "a.txt").write_text("one list\n\n\u200b\u200d\n\nanother list\n", encoding="utf-8")
    corpus = build_corpus([tmp_path / "a.txt"], tokenizer_folder, tmp_path / "out", workers=1)
    assert (corpus.manifest.documents, corpus.manifest.sentences) == (2, 2)


@pytest.fixture
def copy(tmp_path, corpus) -> Path:
    """A copy of the corpus that may be damaged."""
    return Path(shutil.copytree(corpus.folder, tmp_path / "copy"))


@pytest.mark.parametrize("place", [0, 60, -1], ids=["length", "header", "data"])
def test_a_flipped_byte_is_detected(copy, place):
    content = bytearray((copy / "000001.safetensors").read_bytes())
    content[place] ^= 1
    (copy / "000001.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"00001\.safetensors does not match its checksum"):
        Corpus.open(copy).verify()


def test_an_undamaged_corpus_passes_verification(copy):
    Corpus.open(copy).verify()


def test_a_truncated_shard_is_refused(copy):
    content = (copy / "000001.safetensors").read_bytes()
    (copy / "000001.safetensors").write_bytes(content[:-10])
    with pytest.raises(UserError, match=rf"00001\.safetensors has {len(content) - 10} bytes, not {len(content)}"):
        Corpus.open(copy)


def test_a_missing_shard_is_refused(copy):
    (copy / "000002.safetensors").unlink()
    with pytest.raises(UserError, match=r"00002\.safetensors is missing"):
        Corpus.open(copy)


def test_a_damaged_header_is_refused(copy):
    content = bytearray((copy / "000001.safetensors").read_bytes())
    content[8] = ord("x")  # the header's brace
    (copy / "000001.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"00001\.safetensors"):
        _ = Corpus.open(copy).shards[1].tokens


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"version": 2}, "version 2, not 1"), ({"shards": None}, "shards"), ({"tokens": None}, "tokens")],
)
def test_a_damaged_manifest_is_refused(copy, change, reason):
    values = json.loads((copy / "corpus.json").read_text()) | change
    (copy / "corpus.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    with pytest.raises(UserError, match=rf"corpus\.json.*{reason}"):
        Corpus.open(copy)


def test_a_folder_that_is_no_corpus_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"is not a corpus: no corpus\.json"):
        Corpus.open(tmp_path)


def test_another_tokenizer_is_refused(corpus):
    corpus.check_tokenizer(corpus.manifest.tokenizer, "here")
    with pytest.raises(UserError, match="the tokenizer of there ") as error:
        corpus.check_tokenizer("0123456789abcdef", "there")
    assert "0123456789abcdef" in str(error.value)
    assert corpus.manifest.tokenizer in str(error.value)


@pytest.mark.parametrize("second", ["broken.jsonl", "blank.txt", "unknown.csv"])
def test_a_failed_build_leaves_no_files(tmp_path, tokenizer_folder, topics_file, second):
    (tmp_path / "broken.jsonl").write_text('{"text": "fine"}\nnot JSON\n')
    (tmp_path / "blank.txt").write_text("\n\n")
    (tmp_path / "unknown.csv").write_text("a,b\n")
    inputs = [topics_file, tmp_path / second] if second == "unknown.csv" else [tmp_path / second]
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=second):
        build_corpus(inputs, tokenizer_folder, tmp_path / "out", workers=1)
    assert sorted(tmp_path.iterdir()) == before


def test_an_output_folder_that_is_not_empty_is_refused(tmp_path, tokenizer_folder, topics_file):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep me")
    (tmp_path / "file").write_text("keep me")
    with pytest.raises(UserError, match=r"--out .*out is there already and not empty"):
        build_corpus([topics_file], tokenizer_folder, tmp_path / "out", workers=1)
    with pytest.raises(UserError, match=r"--out .*file is a file"):
        build_corpus([topics_file], tokenizer_folder, tmp_path / "file", workers=1)
    assert (tmp_path / "out" / "mine").read_text() == (tmp_path / "file").read_text() == "keep me"


def test_an_empty_output_folder_is_used(tmp_path, tokenizer_folder):
    (tmp_path / "a.txt").write_bytes(as_text(DOCUMENTS))
    (tmp_path / "out").mkdir()
    assert build_corpus([tmp_path / "a.txt"], tokenizer_folder, tmp_path / "out", workers=1).manifest.documents == 3


@pytest.mark.parametrize("workers", [0, -1])
def test_a_number_of_workers_below_one_is_refused(tmp_path, tokenizer_folder, topics_file, workers):
    with pytest.raises(UserError, match=f"--workers {workers}: give a number of at least 1"):
        build_corpus([topics_file], tokenizer_folder, tmp_path / "out", workers=workers)
