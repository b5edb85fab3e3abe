"""Frames place special tokens and segment numbers as `transformers` does, for one sequence and for many at once."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from bertsmith.errors import UserError
from bertsmith.text.frame import GPT, ROBERTA, WORDPIECE, Frame, WordMarker
from bertsmith.text.tokenizer import Tokenizer

FRAMES = {"wordpiece": WORDPIECE, "roberta": ROBERTA, "gpt": GPT}
WORDS = ["the", "quick", "brown", "fox", "jumps"]
TEXTS = [["the quick fox"], ["the fox", "quick brown"], [""], ["", "fox"]]


def tokenizer_of(frame: Frame) -> Tokenizer:
    """A tokenizer with whole words as entries, after the special tokens of its frame."""
    vocab = {token: number for number, token in enumerate([*frame.special_tokens, *WORDS])}
    backend = Backend(models.WordLevel(vocab, unk_token=frame.unknown))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(backend, False, frame=frame)


def random_parts(counts: list[int], seed: int = 0) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [[rng.integers(10, 99, rng.integers(0, 7)) for _ in range(count)] for count in counts]


def names(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    return " ".join(tokenizer.token(int(number)) for number in ids)


@pytest.mark.parametrize(
    ("frame", "single", "pair", "segments"),
    [
        ("wordpiece", "[CLS] the fox [SEP]", "[CLS] the fox [SEP] jumps [SEP]", [0, 0, 0, 0, 1, 1]),
        ("roberta", "<s> the fox </s>", "<s> the fox </s> </s> jumps </s>", [0] * 7),
        ("gpt", "_start_ the fox _classify_", "_start_ the fox _delimiter_ jumps _classify_", [0] * 6),
    ],
)
def test_each_frame_places_its_special_tokens(frame, single, pair, segments):
    tokenizer = tokenizer_of(FRAMES[frame])
    first, second = tokenizer.encode(["the fox", "jumps"])
    assert names(tokenizer, tokenizer.joiner.join(first).tokens) == single
    joined = tokenizer.joiner.join(first, second)
    assert names(tokenizer, joined.tokens) == pair
    assert joined.segments.tolist() == segments


@pytest.mark.parametrize("texts", TEXTS)
def test_special_tokens_equal_those_of_bert_in_transformers(texts, tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join([*WORDPIECE.special_tokens, *WORDS]))
    theirs = transformers.BertTokenizerFast(vocab=str(tmp_path / "vocab.txt"))(*texts)
    ours = Tokenizer.load(tmp_path)
    joined = ours.joiner.join(*ours.encode(texts))
    assert joined.tokens.tolist() == theirs["input_ids"]
    assert joined.segments.tolist() == theirs["token_type_ids"]


@pytest.mark.parametrize("texts", TEXTS)
def test_special_tokens_equal_those_of_roberta_in_transformers(texts):
    ours = tokenizer_of(ROBERTA)
    backend = Backend.from_str(ours.backend.to_str())
    ends = [("</s>", ours.id("</s>")), ("<s>", ours.id("<s>"))]
    backend.post_processor = processors.RobertaProcessing(*ends, add_prefix_space=False)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)(*texts, return_token_type_ids=True)
    joined = ours.joiner.join(*ours.encode(texts))
    assert joined.tokens.tolist() == theirs["input_ids"]
    assert joined.segments.tolist() == theirs["token_type_ids"]


@pytest.mark.parametrize("frame", FRAMES)
def test_the_template_of_saved_tokenizers_gives_the_same_sequence(frame):
    """`arrange`, from which saved tokenizers get their template, and `join` give the same sequence."""
    tokenizer = tokenizer_of(FRAMES[frame])
    for texts in (["the"], ["the", "fox"], ["the", "fox", "jumps"]):
        joined = tokenizer.joiner.join(*tokenizer.encode(texts))
        assert list(zip(names(tokenizer, joined.tokens).split(), joined.segments.tolist(), strict=True)) == (
            FRAMES[frame].arrange(texts)
        )


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("counts", [[1], [2], [1, 2, 1, 3, 2, 5], [2] * 40])
def test_join_many_equals_joining_one_by_one(frame, counts):
    joiner = tokenizer_of(FRAMES[frame]).joiner
    rows = random_parts(counts)
    parts = [part for row in rows for part in row]
    many = joiner.join_many(np.concatenate(parts), [len(part) for part in parts], counts)
    single = [joiner.join(*row) for row in rows]
    assert many.tokens.tolist() == np.concatenate([one.tokens for one in single]).tolist()
    assert many.segments.tolist() == np.concatenate([one.segments for one in single]).tolist()
    assert many.lengths.tolist() == [len(one.tokens) for one in single]
    shifts = np.cumsum(many.lengths) - many.lengths
    begins = [one.begins + shift for one, shift in zip(single, shifts, strict=True)]
    assert many.begins.tolist() == np.concatenate(begins).tolist()


@pytest.mark.parametrize("frame", FRAMES)
def test_begins_holds_the_first_position_of_each_part(frame):
    """Token i of a part is at its `begins` + i, which maps its offsets."""
    joiner = tokenizer_of(FRAMES[frame]).joiner
    for row in random_parts([1, 2, 2, 3]):
        joined = joiner.join(*row)
        for part, begin in zip(row, joined.begins, strict=True):
            assert joined.tokens[begin : begin + len(part)].tolist() == part.tolist()
        assert len(joined.tokens) == joiner.frame.size(len(row)) + sum(map(len, row))


def test_segment_numbers_may_be_given():
    """The documents of one sequence of full sentences are parts of a single segment."""
    joiner = tokenizer_of(WORDPIECE).joiner
    joined = joiner.join_many(np.arange(10, 16), [2, 1, 3], [2, 1], segments=[0, 0, 0])
    assert joined.segments.tolist() == [0] * 11
    assert joiner.join_many(np.arange(10, 16), [2, 1, 3], [2, 1]).segments.sum() == 2


def test_join_many_keeps_the_dtype():
    joiner = tokenizer_of(WORDPIECE).joiner
    assert joiner.join_many(np.arange(3, dtype=np.int32), [3], [1]).tokens.dtype == np.int32
    assert joiner.join([]).tokens.dtype == joiner.join(np.arange(3, dtype=np.uint16)).tokens.dtype == np.int64


@pytest.mark.parametrize(("frame", "sizes"), [("wordpiece", [2, 3, 4]), ("roberta", [2, 4, 6]), ("gpt", [2, 3, 4])])
def test_the_number_of_special_tokens_of_a_sequence(frame, sizes):
    assert [FRAMES[frame].size(parts) for parts in (1, 2, 3)] == sizes


# Special tokens


def test_special_tokens_and_their_ids():
    assert WORDPIECE.special_tokens == ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    assert ROBERTA.special_tokens == ("<pad>", "<unk>", "<s>", "</s>", "<mask>")
    gpt = tokenizer_of(GPT)
    assert gpt.special_ids == (0, 1, 2, 3)
    assert gpt.pad_id == gpt.unknown_id == 0
    with pytest.raises(UserError, match="no mask token"):
        _ = gpt.mask_id
    roberta = tokenizer_of(ROBERTA)
    assert (roberta.pad_id, roberta.unknown_id, roberta.mask_id) == (0, 1, 4)


@pytest.mark.parametrize("frame", FRAMES)
def test_special_tokens_are_marked(frame):
    tokenizer = tokenizer_of(FRAMES[frame])
    first, second = tokenizer.encode(["the fox", "brown"])
    ids = tokenizer.joiner.join(first, [tokenizer.unknown_id, *second]).tokens
    around = [name not in (*WORDS, FRAMES[frame].unknown) for name in names(tokenizer, ids).split()]
    assert tokenizer.frames(ids).tolist() == around
    assert tokenizer.is_special[ids].sum() == sum(around) + 1


def test_special_token_names_of_the_settings_are_used_by_the_frame(tmp_path):
    """A folder whose special tokens are named `<s>` and `</s>` keeps BERT's layout."""
    renamed = {"[CLS]": "<s>", "[SEP]": "</s>"}
    entries = [renamed.get(token, token) for token in (*WORDPIECE.special_tokens, *WORDS)]
    (tmp_path / "vocab.txt").write_text("\n".join(entries))
    (tmp_path / "tokenizer_config.json").write_text('{"cls_token": "<s>", "sep_token": "</s>"}')
    ours = Tokenizer.load(tmp_path)
    joined = ours.joiner.join(*ours.encode(["the fox", "jumps"]))
    assert names(ours, joined.tokens) == "<s> the fox </s> jumps </s>"
    assert joined.segments.tolist() == [0, 0, 0, 0, 1, 1]
    ours.save(tmp_path / "saved")
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")("the fox", "jumps")
    assert (saved["input_ids"], saved["token_type_ids"]) == (joined.tokens.tolist(), joined.segments.tolist())


# Pieces of words

UNFRAMED = {
    "wordpiece": ["un", "##able", "to", "jump", "##s"],
    "roberta": ["Ġun", "able", "Ġto", "Ġjump", "s"],
    "gpt": ["un", "able</w>", "to</w>", "jump", "s</w>"],
}


@pytest.mark.parametrize("frame", FRAMES)
def test_continuation_pieces_are_recognised(frame):
    marker, tokens = FRAMES[frame].word_marker, UNFRAMED[frame]
    marked = np.array([marker.marks(token) for token in tokens])
    assert marker.continues(marked).tolist() == [False, True, False, False, True]
    assert marker.once_per_word(marked).sum() == 3
    assert marker.spell(tokens) == "unable to jumps"
    assert [marker.strip(token) for token in tokens] == ["un", "able", "to", "jump", "s"]
    assert marker.continues(marked[:0]).tolist() == []


@pytest.mark.parametrize("frame", FRAMES)
def test_special_tokens_belong_to_no_word(frame):
    tokens, chosen = UNFRAMED[frame], FRAMES[frame]
    vocab = {token: number for number, token in enumerate([*chosen.special_tokens, *tokens])}
    tokenizer = Tokenizer(Backend(models.WordLevel(vocab, unk_token=chosen.unknown)), False, frame=chosen)
    ids = [vocab[token] for token in tokens]
    joined = tokenizer.joiner.join(ids[1:4], ids[4:])  # truncation has cut the beginning of the first word
    found = tokenizer.continues(joined.tokens)
    assert found.sum() == 0
    both = tokenizer.joiner.join(ids)
    assert (np.flatnonzero(tokenizer.continues(both.tokens)) - both.begins[0]).tolist() == [1, 4]


def test_unigram_marks_the_beginning_of_words():
    marker = WordMarker("▁", "first")
    marked = np.array([marker.marks(token) for token in ["▁a", "▁", "fox"]])
    assert marker.continues(marked).tolist() == [False, False, True]
    assert marker.spell(["▁a", "▁", "fox"]) == "a fox"


# Literals

PACKAGE = Path(__file__).parents[2] / "bertsmith"
TOKEN = r"\[(?:CLS|SEP|MASK|PAD|UNK)\]|</?s>|</w>|<(?:mask|pad|unk)>|##|Ġ|▁"
ALONE = re.compile(rf"\s*(?:{TOKEN})\s*")  # with other words it is a message or a docstring
QUOTED = re.compile(rf"""["']\s*(?:{TOKEN})\s*["']""")


def literals(source: str, name: str) -> list[str]:
    """The strings of a file that are a special token or a word marker, or code with one in quotation marks."""
    if not name.endswith(".py"):
        return QUOTED.findall(source)
    strings = [n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return [text for text in strings if ALONE.fullmatch(text) or QUOTED.search(text)]


def test_only_the_frame_names_special_tokens():
    files = [path for path in PACKAGE.rglob("*") if path.suffix in {".py", ".js"}]
    assert any(path.suffix == ".js" for path in files)
    found = {str(path.relative_to(PACKAGE)): literals(path.read_text("utf-8"), path.name) for path in files}
    remarks = {"rows/conll.py"}  # there, ## begins a remark in a file
    assert {name for name, some in found.items() if some} - remarks == {"text/frame.py"}


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ('x = tokenizer.id("[CLS]")', 1),
        ('x = " [MASK] ".join(parts)', 1),
        ('x = token.startswith("##")', 1),
        ('x = f"##{word}"', 1),
        ('SCRIPT = """if (token.startsWith("##")) return"""', 1),
        ('"""What follows `[CLS] A [SEP]`."""', 0),
        ('say(f"no [MASK] in {text}")', 0),
        ('x = "## Heading"', 0),
    ],
)
def test_literals_are_found(code, count):
    assert len(literals(code, "a.py")) == count
