"""Tokenizers give the tokens, pairs, truncations and offsets of `transformers` for 10,000 hard strings.

The folders are written as releases have them: `tokenizer.json`, or the older files alone.
"""

import json
import random
import struct
import unicodedata
from collections.abc import Callable
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import KOREAN
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from bertsmith.errors import UserError
from bertsmith.tasks.examples import join_texts, shorten, texts_of
from bertsmith.text.byte_bpe import files as released_files
from bertsmith.text.offsets import whole_letters
from bertsmith.text.spiece import read_spiece
from bertsmith.text.tokenizer import Tokenizer, train_byte_bpe, train_unigram, train_word_bpe, train_wordpiece

COUNT = 10_000
TEXTS = [*[topics[name] for name in sorted(topics)[:10]], *[KOREAN] * 3, "``quotes'' Café naïve ½ ﬁ 漢字 1,000"]
PIECES = [
    *"the of list class Python function ing isn't don't I'm U.S. e.g. 3.14 1,000 9, 2024-05-10 a_b foo.bar()".split(),
    *[
        "<s>",
        "</s>",
        "</w>",
        "_start_",
        "<mask>",
        "<pad>",
        "<unk>",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "[PAD]",
        "[UNK]",
        "[MASK",
        "<mask",
    ],
    *[
        "한국어는",
        unicodedata.normalize("NFD", "한국어는 좋다"),
        "ㄱㄴㄷ",
        "漢字",
        "とかな",
        "カタカナ",
        "ｶﾀｶﾅ",
        "ＦＵＬＬ",
    ],
    *["العربية", "עברית", "हिन्दी", "ไทย", "ελληνικά", "ΟΔΥΣΣΕΥΣ", "Русский", "Straße", "İstanbul", "ǅ", "ﬃ", "½", "²"],
    *["é", "e\u0301", "x\u0302\u0303\u0323", "Å", "\u212b", "ÀÉÎÕÜ", "o\u0308\u0304"],
    *["👩‍👩‍👧", "👍🏽", "🇰🇷", "😀", "❤️", "☃", "𝔘𝔫𝔦", "🏴\U000e0067\U000e007f"],
    *[
        "\x00",
        "\x01",
        "\x07",
        "\x1b",
        "\x7f",
        "\x85",
        "\u00ad",
        "\u200b",
        "\u200d",
        "\u2028",
        "\ufeff",
        "\ufffd",
        "\ue000",
    ],
    *[" ", "  ", "   ", "\t", "\n", "\r\n", "\n\n", "\u00a0", "\u3000", "\u2003"],
    *["``", "''", '"', "'", "“", "”", "…", "—", "(", ")", "[", "]", "!?", "...", "###", "##", "Ġ", "▁", "▁▁", "\\"],
]
LONG = ["a" * 99, "b" * 101, "word" * 40, "한" * 150, "=" * 60]


@cache
def hard_strings() -> list[str]:
    """Rows of words, scripts, controls, spaces and special tokens, joined with and without spaces."""
    draw = random.Random(23)
    strings = ["", " ", *PIECES]
    while len(strings) < COUNT:
        parts = draw.choices(PIECES, k=draw.randint(1, 7))
        if draw.random() < 0.2:
            parts.append(
                "".join(chr(draw.choice((0x20, 0x2E80, 0xAC00, 0x1F300)) + draw.randrange(500)) for _ in "abc")
            )
        strings.append(draw.choice(["", " ", " "]).join(parts))
    return strings


# Folders: name -> (writes it, gives transformers' tokenizer of it)

Reference = Any


def save_wordpiece(folder: Path) -> None:
    train_wordpiece(TEXTS, 800).save(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": true}')


def save_roberta(folder: Path) -> None:
    """`vocab.json` and `merges.txt` alone, with the mask as an object that takes the space before it."""
    for name, text in released_files(train_byte_bpe(TEXTS, 800).backend).items():
        (folder / name).write_text(text, encoding="utf-8")
    mask = {"content": "<mask>", "lstrip": True, "rstrip": False, "normalized": True, "single_word": False}
    (folder / "special_tokens_map.json").write_text(json.dumps({"mask_token": mask}))


def save_modern(folder: Path) -> None:
    """`tokenizer.json` as ModernBERT was released: runs of spaces and the special tokens are added to the BPE."""
    entries = released_files(train_byte_bpe(TEXTS, 800).backend)
    vocab, merges = json.loads(entries["vocab.json"]), entries["merges.txt"].splitlines()[1:]
    special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    vocab = {entry: i for i, entry in enumerate(e for e in vocab if not e.startswith("<") or len(e) == 1)}
    backend = Backend(models.BPE(vocab, [tuple(line.split(" ")) for line in merges]))
    backend.normalizer, backend.decoder = normalizers.NFC(), decoders.ByteLevel()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_tokens([AddedToken(" " * size, normalized=True) for size in range(8, 1, -1)])
    backend.add_special_tokens([AddedToken(name, lstrip=name == "[MASK]", normalized=False) for name in special])
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(name, backend.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    backend.save(str(folder / "tokenizer.json"))
    names = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "mask_token": "[MASK]"}
    settings |= {"model_input_names": ["input_ids", "attention_mask"], "model_max_length": 8192}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def save_gpt(folder: Path) -> None:
    """`vocab.json` and `merges.txt` alone, as OpenAI GPT was released."""
    for name, text in released_files(train_word_bpe(TEXTS, 800).backend).items():
        (folder / name).write_text(text, encoding="utf-8")
    assert (folder / "merges.txt").read_text(encoding="utf-8").startswith("#version: 0.2\n")


def field(number: int, value: bytes | int | float) -> bytes:
    """A field of a protocol buffer."""
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    tag, size = number << 3 | (0 if isinstance(value, int) else 2), value if isinstance(value, int) else len(value)
    numbers = bytearray()
    for rest in (tag, size):
        while rest >= 0x80:
            numbers.append(rest & 0x7F | 0x80)
            rest >>= 7
        numbers.append(rest)
    return bytes(numbers) + (b"" if isinstance(value, int) else value)


CONTROL = {"<unk>": 2, "<pad>": 3, "[CLS]": 4, "[SEP]": 4, "[MASK]": 4}


def save_spiece(folder: Path, character_map: bytes = b"", model_type: int = 1) -> None:
    """`spiece.model` alone, as ALBERT was released; the scores are float32."""
    entries = json.loads(train_unigram(TEXTS, 800).backend.to_str())["model"]["vocab"]
    pieces = [
        field(1, text.encode()) + field(2, float(score)) + field(3, CONTROL.get(text, 1)) for text, score in entries
    ]
    pieces.append(field(1, b"9,") + field(2, -1.0) + field(3, 1))
    normal = field(1, b"nmt_nfkc") + (field(2, character_map) if character_map else b"")
    data = b"".join(field(1, piece) for piece in pieces) + field(2, field(3, model_type)) + field(3, normal)
    (folder / "spiece.model").write_bytes(data)


def albert(folder: Path) -> Reference:
    """transformers reads `spiece.model` with another library; its tokenizer is made from the same values here."""
    from transformers import AlbertTokenizer

    found = read_spiece(folder / "spiece.model")
    vocab = [(piece.text, piece.score - 100 * (piece.text == "9,")) for piece in found.pieces]
    return AlbertTokenizer(
        vocab=vocab,
        _spm_precompiled_charsmap=found.character_map or None,
        mask_token=AddedToken("[MASK]", lstrip=True, normalized=False, special=True),
    )


def save_deberta(folder: Path) -> None:
    """`vocab.json` and `merges.txt` with BERT's names of the special tokens, as the first DeBERTa was released."""
    names = {"<s>": "[CLS]", "</s>": "[SEP]", "<pad>": "[PAD]", "<unk>": "[UNK]", "<mask>": "[MASK]"}
    files = released_files(train_byte_bpe(TEXTS, 800).backend)
    vocab = {names.get(token, token): number for token, number in json.loads(files["vocab.json"]).items()}
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (folder / "merges.txt").write_text(files["merges.txt"], encoding="utf-8")
    mask = {"content": "[MASK]", "lstrip": True, "rstrip": False, "normalized": True, "single_word": False}
    (folder / "special_tokens_map.json").write_text(json.dumps({"mask_token": mask}))


def deberta(folder: Path) -> Reference:
    """transformers 5 puts two `[SEP]` between the texts of a pair; its releases before and the authors put one."""
    theirs = opened_by("DebertaTokenizer")(folder)
    ids = [(name, theirs.convert_tokens_to_ids(name)) for name in ("[CLS]", "[SEP]")]
    theirs.backend_tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    return theirs


def save_spm(folder: Path) -> None:
    """`spm.model` alone, as DeBERTa v2 and v3 were released: special tokens first, without the mask."""
    save_spiece(folder)
    entries = json.loads(train_unigram(TEXTS, 800, cased=True).backend.to_str())["model"]["vocab"]
    special = {"[PAD]": 3, "[CLS]": 3, "[SEP]": 3, "[UNK]": 2}
    pieces = [(name, 0.0, kind) for name, kind in special.items()]
    pieces += [(text, score, 1) for text, score in entries if text not in CONTROL]
    rows = [field(1, text.encode()) + field(2, float(score)) + field(3, kind) for text, score, kind in pieces]
    (folder / "spiece.model").unlink()
    (folder / "spm.model").write_bytes(b"".join(field(1, row) for row in rows) + field(2, field(3, 1)))


def deberta_v3(folder: Path) -> Reference:
    """transformers reads `spm.model` with another library; its tokenizer is made from the same values here."""
    from transformers import DebertaV2Tokenizer

    found = read_spiece(folder / "spm.model")
    return DebertaV2Tokenizer(vocab=[(piece.text, piece.score) for piece in found.pieces], unk_id=found.unknown)


def opened_by(name: str) -> Callable[[Path], Reference]:
    def load(folder: Path) -> Reference:
        import transformers

        return getattr(transformers, name).from_pretrained(folder)

    return load


def ours(train: Callable[..., Tokenizer]) -> Callable[[Path], None]:
    return lambda folder: train(TEXTS, 800).save(folder)


FOLDERS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Reference]]] = {
    "roberta, released": (save_roberta, opened_by("RobertaTokenizerFast")),
    "roberta, ours": (ours(train_byte_bpe), opened_by("AutoTokenizer")),
    "albert, released": (save_spiece, albert),
    "albert, ours": (ours(train_unigram), opened_by("AutoTokenizer")),
    "modern, released": (save_modern, opened_by("AutoTokenizer")),
    "gpt, released": (save_gpt, opened_by("OpenAIGPTTokenizer")),
    "gpt, ours": (ours(train_word_bpe), opened_by("AutoTokenizer")),
    "gpt, for tasks": (lambda folder: train_word_bpe(TEXTS, 800).for_tasks().save(folder), opened_by("AutoTokenizer")),
    "deberta, released": (save_deberta, deberta),
    "deberta v3, released": (save_spm, deberta_v3),
    "electra": (save_wordpiece, opened_by("ElectraTokenizerFast")),
    "distilbert": (save_wordpiece, opened_by("DistilBertTokenizerFast")),
}


@pytest.fixture(scope="module", params=FOLDERS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Reference]:
    save, load = FOLDERS[request.param]
    folder = tmp_path_factory.mktemp("tokenizer")
    save(folder)
    return Tokenizer.load(folder), load(folder)


def test_ids_and_offsets_are_the_same(both: tuple[Tokenizer, Reference]) -> None:
    mine, theirs = both
    is_theirs = type(theirs).__name__ != "TokenizersBackend"  # a folder of ours, which is opened as tokenizer.json
    strings = hard_strings() if is_theirs else hard_strings()[::5]
    found = theirs(strings, return_offsets_mapping=True, add_special_tokens=False, return_attention_mask=False)
    aligned = mine.encode_aligned(strings)
    ids = [encoding.ids for encoding in aligned]
    wrong = [(text, a, b) for text, a, b in zip(strings, ids, found["input_ids"], strict=True) if a != b]
    assert not wrong, (len(wrong), wrong[:3])
    offsets = [encoding.encoding.offsets for encoding in aligned]
    assert offsets == found["offset_mapping"]
    assert mine.encode(strings[:500]) == ids[:500]
    for text, encoding in zip(strings[:500], aligned, strict=False):  # ours are these, extended to whole letters
        assert encoding.offsets == whole_letters(text, encoding.encoding.offsets)


@pytest.mark.parametrize("room", [12, 36])
def test_pairs_and_truncations_are_the_same(both: tuple[Tokenizer, Reference], room: int) -> None:
    mine, theirs = both
    length = room + mine.frame.size(2)
    first, second = hard_strings()[:800:2], hard_strings()[1:800:2]
    found = theirs(first, second, truncation="longest_first", max_length=length, return_token_type_ids=True)
    joined, _ = join_texts(texts_of(first, mine), texts_of(second, mine), np.ones(len(first), dtype=bool), mine, length)
    rows = [joined[number] for number in range(len(first))]
    alone = [] if mine.frame.size(1) else [mine.unknown_id]  # without special tokens, an empty text is the unknown one
    assert [row.tokens.tolist() for row in rows] == [ids or alone for ids in found["input_ids"]]
    if "distilbert" not in type(theirs).__name__.lower() and mine.frame.size(1):
        assert [row.segments.tolist() for row in rows] == found["token_type_ids"]
    single = theirs(first, truncation=True, max_length=length)["input_ids"]
    no_second = np.zeros(len(first), dtype=bool)
    texts, _ = join_texts(texts_of(first, mine), texts_of(second, mine), no_second, mine, length)
    assert [texts[number].tokens.tolist() for number in range(len(first))] == [ids or alone for ids in single]


@pytest.mark.parametrize("room", range(1, 14))
def test_truncated_lengths_are_those_of_tokenizers_in_python(room: int) -> None:
    """In an odd room the first of two truncated texts keeps one token more; tokenizers in Rust differ in that."""
    from transformers import PythonBackend

    first, second = (lengths.flatten() for lengths in np.mgrid[:16, :16])
    kept = shorten(first, second, np.full(len(first), room), np.ones(len(first), dtype=bool))
    side = SimpleNamespace(truncation_side="right")
    for a, b, ours_a, ours_b in zip(first, second, *kept, strict=True):
        theirs = PythonBackend.truncate_sequences(side, [0] * a, [0] * b, a + b - room)
        assert (ours_a, ours_b) == (len(theirs[0]), len(theirs[1]))


def character_map(old: str, new: str) -> bytes:
    """SentencePiece's table that replaces one ASCII character: a double array, and the new strings."""
    array = [0] * 1024
    array[0] = 0x100 << 10  # an offset, to which the byte of the text leads
    array[0x100 ^ ord(old)] = 0x200 << 10 | 1 << 8 | ord(old)  # an offset to the leaf, "has a leaf", the byte
    array[0x300 ^ ord(old)] = 1 << 31  # the leaf: the new string is at byte 0
    trie = struct.pack(f"<{len(array)}I", *array)
    return struct.pack("<I", len(trie)) + trie + new.encode() + b"\0"


def test_the_table_of_characters_is_honoured(tmp_path: Path) -> None:
    save_spiece(tmp_path, character_map("x", "list"))
    mine, theirs = Tokenizer.load(tmp_path), albert(tmp_path)
    assert mine.encode(["the x of"]) == mine.encode(["the list of"])
    strings = hard_strings()[:300]
    assert theirs(strings)["input_ids"] == mine.encode(strings, special=True)
    mine.save(tmp_path / "saved")
    assert Tokenizer.load(tmp_path / "saved").encode(strings) == mine.encode(strings)


def test_the_file_of_sentencepiece_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    save_spiece(tmp_path / "a", character_map("x", "list"))
    for source, target in (("a", "b"), ("b", "c")):  # the second time from tokenizer.json
        Tokenizer.load(tmp_path / source).save(tmp_path / target)
        kept = tmp_path / target / "spiece.model"
        assert kept.read_bytes() == (tmp_path / "a" / "spiece.model").read_bytes()


def test_a_digit_with_a_comma_is_divided_as_in_alberts_code(tmp_path: Path) -> None:
    save_spiece(tmp_path)
    mine = Tokenizer.load(tmp_path)
    assert "9," in mine.backend.get_vocab()
    assert mine.encode_aligned(["9, 99,"])[0].tokens[-2:] == ["9", ","]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it has no pieces"),
        (b"\x0a\xff", "is damaged, or is not a model of SentencePiece"),
        (field(1, field(1, b"\xff") + field(3, 1)), "is damaged, or is not a model of SentencePiece"),
        (field(1, field(1, b"a") + field(3, 9)), "is damaged, or is not a model of SentencePiece"),
        (field(1, field(1, b"a")) + field(2, field(3, 2)), r"is a model of type 2; only Unigram \(1\)"),
        (field(1, field(1, b"a")) + field(3, field(2, b"abc")), "its table of characters cannot be read"),
    ],
)
def test_bad_sentencepiece_files_are_refused(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "spiece.model").write_bytes(content)
    with pytest.raises(UserError, match=f"spiece.model .*{why}"):
        Tokenizer.load(tmp_path)


def test_bad_released_files_are_refused(tmp_path: Path) -> None:
    save_roberta(tmp_path)
    (tmp_path / "merges.txt").write_text("one\n")
    with pytest.raises(UserError, match=r"vocab\.json and merges\.txt are not a byte-level vocabulary"):
        Tokenizer.load(tmp_path)
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(UserError, match=r"vocab\.json needs merges\.txt beside it"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("where", ["added_tokens.json", "added_tokens_decoder"])
def test_added_tokens_of_older_layouts(tmp_path: Path, where: str) -> None:
    from transformers import RobertaTokenizerFast

    save_roberta(tmp_path)
    size = len(json.loads((tmp_path / "vocab.json").read_text()))
    if where == "added_tokens.json":
        (tmp_path / where).write_text(json.dumps({"<new>": size, "<other>": size + 1}))
    else:
        flags = {"lstrip": False, "rstrip": False, "single_word": False}
        tokens = {
            str(size): {"content": "<new>", "normalized": True, "special": False, **flags},
            str(size + 1): {"content": "<other>", "normalized": False, "special": True, **flags},
            str(size - 1): {"content": "<mask>", "normalized": False, "special": True, **flags, "lstrip": True},
        }
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({where: tokens}))
    mine, theirs = Tokenizer.load(tmp_path), RobertaTokenizerFast.from_pretrained(tmp_path)
    texts = ["a <new> list", "a<other> list<new>", "the <mask> of"]
    assert mine.encode(texts, special=True) == theirs(texts)["input_ids"]
    assert mine.vocab_size == size + 2
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"9999": {"content": "<x>"}}}))
    with pytest.raises(UserError, match="the added token '<x>' should have the id 9999, and it would get"):
        Tokenizer.load(tmp_path)


def test_lone_surrogates_are_replaced(both: tuple[Tokenizer, Reference]) -> None:
    assert both[0].encode(["a \ud800 list"]) == both[0].encode(["a \ufffd list"])


def test_saved_again_the_tokens_are_the_same(both: tuple[Tokenizer, Reference], tmp_path: Path) -> None:
    mine, _ = both
    mine.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert (again.hash, again.frame) == (mine.hash, mine.frame)
    assert again.encode(hard_strings()[:400]) == mine.encode(hard_strings()[:400])
    theirs = opened_by("AutoTokenizer")(tmp_path)
    expected = [ids or [mine.unknown_id] for ids in theirs(hard_strings()[:400])["input_ids"]]
    assert mine.encode(hard_strings()[:400], special=True) == expected
