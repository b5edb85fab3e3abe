"""Every kind of vocabulary works in what follows it: corpus, masks, doctor, fill, tags, answers, vectors."""

import json
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from conftest import KOREAN, TINY

import bertsmith
from bertsmith import draws
from bertsmith.config import override
from bertsmith.corpus.coverage import coverage
from bertsmith.corpus.doctor.examination import examine
from bertsmith.corpus.shards import Corpus
from bertsmith.errors import UserError
from bertsmith.extend import extend
from bertsmith.inference.features import passages
from bertsmith.model.heads import HeadConfig
from bertsmith.pretraining.masking import MaskPolicy, Vocabulary, mask_tokens
from bertsmith.recipes import recipe
from bertsmith.rows.columns import Row
from bertsmith.tasks import spans, tagging
from bertsmith.tasks.description import Limits
from bertsmith.text.byte_bpe import files as released_files
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.text.training import train

pytestmark = pytest.mark.usefixtures("one_thread")
RECIPES = {"bytes": "roberta-tiny", "unigram": "albert-tiny"}
KINDS = ["wordpiece", *RECIPES, "bpe"]
TEXT = "\n\n".join([*[topics[name] for name in sorted(topics)[:6]], *[KOREAN] * 3])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kinds") / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of a kind and a corpus made with it."""
    folder = tmp_path_factory.mktemp(request.param)
    bertsmith.train_tokenizer([text], folder / "tok", vocab_size=700, kind=request.param)
    bertsmith.build_corpus([text], folder / "tok", folder / "shards", workers=1)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder / "tok")


def test_corpus_holds_the_text(folder: Path, tokenizer: Tokenizer) -> None:
    corpus = Corpus.open(folder / "shards")
    assert corpus.manifest.tokenizer == tokenizer.hash
    unknown = corpus.manifest.unknown or 0
    assert unknown == 0 if tokenizer.kind == "bytes" else unknown < 0.01 * corpus.manifest.tokens
    texts = [tokenizer.spell(corpus.document(number)[0]) for number in range(len(corpus.document_tokens))]
    assert tokenizer.normalized(" ".join(KOREAN.split())).replace(" .", ".") in " ".join(texts).replace(" .", ".")


def test_doctor_finds_the_words(folder: Path, text: Path, tokenizer: Tokenizer) -> None:
    for inputs in ([folder / "shards"], [text]):
        found = {finding.name: finding.value for finding in examine(inputs, tokenizer=folder / "tok").findings}
        assert 1.2 < found["tokens_per_word"] < 3.5, found
        assert found["unknown_tokens"] == 0 if tokenizer.kind == "bytes" else found["unknown_tokens"] < 0.01


def test_coverage_counts_words(tokenizer: Tokenizer) -> None:
    found = coverage(tokenizer, ["the length of  a list", "the class"])
    assert found.words == 7
    assert found.unk_share == 0
    assert all(word.strip() for word, _ in found.longest_words)


@pytest.mark.parametrize("unit", ["word", "span", "n-gram"])
def test_masks_cover_whole_words(tokenizer: Tokenizer, unit: str) -> None:
    sentences = tokenizer.encode(["The functions, (of the classes) aren't sorted lists; 우리는 오늘 학교에 간다."] * 30)
    joined = tokenizer.joiner.join_many(np.concatenate(sentences), [len(s) for s in sentences], [1] * 30)
    keys = draws.key(1, np.arange(30))
    if tokenizer.frame.mask is None:
        pytest.skip("has no mask token")
    masked = mask_tokens(joined.tokens, joined.lengths, keys, MaskPolicy(unit=unit), Vocabulary.of(tokenizer))  # type: ignore[arg-type]
    chosen, continues = np.zeros(len(joined.tokens), dtype=bool), tokenizer.continues(joined.tokens)
    chosen[masked.positions] = True
    whole = chosen[1:] == chosen[:-1]
    cut = ~whole & continues[1:]  # a mask ends or begins inside a word: only if no free word fits the budget
    assert cut.sum() <= 0.1 * chosen.sum()
    assert continues.mean() > 0.2
    full_stops = [number for number, text in enumerate(tokenizer.spellings) if text in ",;().'"]
    assert not continues[np.isin(joined.tokens, full_stops)].any()


def test_answers_have_their_place_in_the_text(tokenizer: Tokenizer) -> None:
    context = "The  length of 한국어 lists, 👩‍👩‍👧 and Café."
    for answer in ("length", "한국어", "👩‍👩‍👧", "Café", "lists"):
        row = Row("which?", context, [{"text": answer, "answer_start": context.index(answer)}], "")
        encoded = spans.encode([row], tokenizer, Limits(max_length=96), HeadConfig("span"), labelled=True)
        first, last = encoded.examples[0].labels["label"].values - encoded.details[0].shift
        offsets = encoded.details[0].offsets
        assert context[offsets[first][0] : offsets[last][1]] == answer


@pytest.mark.parametrize("prefix_space", [True, False])
def test_given_words_are_those_of_transformers(tmp_path: Path, prefix_space: bool) -> None:
    """A word alone is encoded as inside a text, also by a released RoBERTa, which puts no space before a text."""
    from transformers import RobertaTokenizerFast

    for name, content in released_files(train([TEXT], 600, "bytes", cased=None, jamo=False).backend).items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_prefix_space": prefix_space}))
    tokenizer, words = Tokenizer.load(tmp_path), ["The", "length", "of", "한국어", "lists", "."]
    assert tokenizer.space == ("" if prefix_space else " ")
    row = Row(" ".join(words), None, None, "", parts=tuple(words))
    encoded = tagging.encode([row], tokenizer, Limits(max_length=64), HeadConfig("tags", ("O",)), labelled=False)
    theirs = RobertaTokenizerFast.from_pretrained(tmp_path, add_prefix_space=True)
    found = theirs(words, is_split_into_words=True)
    assert encoded.examples[0].tokens.tolist() == found["input_ids"]
    firsts = [found.word_ids().index(number) for number in range(len(words))]
    assert encoded.details[0].tolist() == firsts
    (passage,) = passages([row], tokenizer, "none")
    assert {row.text[a:b] for a, b in passage.offsets} >= {"The", "of", "."}
    assert passage.tokens.tolist() == found["input_ids"][1:-1]


def test_sentences_after_the_first_begin_with_a_space(tmp_path: Path) -> None:
    for name, content in released_files(train([TEXT], 600, "bytes", cased=None, jamo=False).backend).items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    (tmp_path / "text.txt").write_text("The list. The class.\n\nThe end.\n")
    bertsmith.build_corpus([tmp_path / "text.txt"], tmp_path, tmp_path / "shards", workers=1)
    tokenizer, corpus = Tokenizer.load(tmp_path / "shards"), Corpus.open(tmp_path / "shards")
    found = [corpus.document(number)[0].tolist() for number in range(2)]
    assert found == tokenizer.encode(["The list. The class.", "The end."])


@pytest.mark.parametrize("folder", RECIPES, indirect=True)
def test_model_is_trained_fills_masks_and_embeds(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    changes = [*TINY, "train.steps=3", "train.batch_size=4", "data.max_length=32"]
    config = override(recipe(RECIPES[tokenizer.kind]), changes)
    bertsmith.pretrain(config, folder / "shards", tmp_path / "run", device="cpu")
    model = tmp_path / "run" / "model"
    saved = json.loads((model / "config.json").read_text())
    assert (saved["pad_token_id"], saved["vocab_size"]) == (tokenizer.pad_id, tokenizer.vocab_size)
    assert (
        AutoTokenizer.from_pretrained(model)("The list")["input_ids"] == tokenizer.encode(["The list"], special=True)[0]
    )
    own = bertsmith.fill(model, f"The {tokenizer.frame.mask} of a list.", device="cpu")
    assert own == bertsmith.fill(model, "The [MASK] of a list.", device="cpu")
    assert len(own) == 1
    with pytest.raises(UserError, match=f"write {'<mask>' if tokenizer.kind == 'bytes' else r'.MASK.'} where"):
        bertsmith.fill(model, "The length of a list.", device="cpu")
    vectors = bertsmith.Embedder.load(model, device="cpu")(["a list", "한국어"])
    assert np.isfinite(vectors).all()
    with pytest.raises(UserError, match="only WordPiece can be extended"):
        extend(model, tmp_path / "more", words=["bertsmith"])
