"""RoBERTa and ALBERT are pre-trained on a corpus of any kind of vocabulary; `transformers` opens what is saved."""

from pathlib import Path

import pytest
import torch
import transformers

from bertsmith.batch import Example, collate
from bertsmith.config import override
from bertsmith.corpus.build import build_corpus
from bertsmith.corpus.vocabulary import train_tokenizer
from bertsmith.formats.hf import load_folder
from bertsmith.pretraining import models
from bertsmith.pretraining.run import pretrain
from bertsmith.recipes import recipe

KINDS = ["wordpiece", "bytes", "unigram"]
PUBLISHED = {"roberta": "bytes", "albert": "unigram"}
SMALL = ["model.hidden_size=32", "model.num_heads=2", "model.intermediate_size=64", "model.max_positions=48"]
SHORT = ["data.max_length=32", "train.batch_size=8", "train.steps=2", "train.evaluate_every=0"]
FIRST, SECOND = "The value of x is a list of numbers.", "An iterator is an object, too."


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory, world: Path) -> Path:
    root = tmp_path_factory.mktemp("corpora")
    documents = (world / "text.txt").read_text(encoding="utf-8").split("\n\n")[:25]
    (root / "text.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    for kind in KINDS:
        train_tokenizer([root / "text.txt"], root / f"{kind}-tok", vocab_size=400, kind=kind)
        build_corpus([root / "text.txt"], root / f"{kind}-tok", root / kind, workers=1)
    return root


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", PUBLISHED)
def test_a_family_with_any_vocabulary(
    family: str, kind: str, corpora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(models, "say", notes.append)
    small = [*SMALL, "model.embedding_size=16"] if family == "albert" else SMALL
    pretrain(override(recipe(f"{family}-tiny"), [*small, *SHORT]), corpora / kind, tmp_path / "run", device="cpu")
    assert bool(notes) == (kind != PUBLISHED[family])
    assert all(f"--kind {PUBLISHED[family]}" in note and kind in note for note in notes)
    folder = tmp_path / "run" / "model"
    loaded, theirs = load_folder(folder), transformers.AutoModel.from_pretrained(folder).eval()
    given = transformers.AutoTokenizer.from_pretrained(folder)(FIRST, SECOND, return_tensors="pt")
    joined = loaded.tokenizer.joiner.join(*loaded.tokenizer.encode([FIRST, SECOND]))
    batch = collate([Example(joined.tokens, joined.segments)], packed=True)
    assert batch.tokens.tolist() == given["input_ids"][0].tolist()
    with torch.no_grad():
        ours = loaded.model.encoder.eval()(batch)
        assert torch.allclose(ours, theirs(**given).last_hidden_state[0], atol=1e-5)
