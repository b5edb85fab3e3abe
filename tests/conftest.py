"""Settings, fixtures and reference models that several test files share."""

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small models: one thread is faster, and tests may run in parallel
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["BERTSMITH_CACHE"] = tempfile.mkdtemp(prefix="bertsmith-cache-")  # not the user's own; see test_row_cache

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton interprets the kernels on the CPU

TINY = [
    "model.hidden_size=32",
    "model.num_heads=2",
    "model.num_layers=2",
    "model.intermediate_size=64",
    "train.evaluate_every=0",
]
FINISHED = pytest.StashKey[int]()
LONGEST = {"test_every_family.py", "test_fused.py", "test_saved_format.py", "test_engines.py", "test_report.py"}
LONGEST |= {"test_same_tokens.py", "test_real_weights.py", "test_convert.py", "test_side_by_side.py", "test_cli.py"}


def pytest_configure() -> None:
    """The files of tests need not outlive a power cut, so that checkpoints do not wait for the disk."""
    os.fsync = lambda handle: None


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries clean up at the exit
    shutil.rmtree(os.environ["BERTSMITH_CACHE"], ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With pytest-xdist the longest files come first, so that no worker waits for one at the end."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Garbage collections, of which every training run makes one, leave out what the imports have made."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """They also leave out what the tests have imported so far, such as the models of `transformers`."""
    result = yield
    item.config.stash[FINISHED] = item.config.stash.get(FINISHED, 0) + 1
    if item.config.stash[FINISHED] % 20 == 0:
        gc.collect()
        gc.freeze()
    return result


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, a tokenizer, a corpus, labelled rows and a small pre-trained run, made once."""
    from pydoc_data.topics import topics

    from bertsmith.config import override
    from bertsmith.corpus.build import build_corpus
    from bertsmith.corpus.vocabulary import train_tokenizer
    from bertsmith.pretraining.run import pretrain
    from bertsmith.recipes import recipe

    root = tmp_path_factory.mktemp("world")
    documents = ("\n".join(line for line in t.splitlines() if line.strip()) for t in topics.values())
    (root / "text.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    train_tokenizer([root / "text.txt"], root / "tok", vocab_size=1000)
    build_corpus([root / "text.txt"], root / "tok", root / "shards", workers=1)
    rows = [
        f"a {w} about numbers {i},numbers" if i % 2 else f"the {w} of a file {i},files"
        for i, w in enumerate("abcdefgh" * 5)
    ]
    (root / "train.csv").write_text("text,label\n" + "\n".join(rows) + "\n", encoding="utf-8")
    (root / "dev.csv").write_text("text,label\n" + "\n".join(rows[:10]) + "\n", encoding="utf-8")
    changes = [*TINY, "train.steps=6", "train.batch_size=8", "data.max_length=32", "train.learning_rate=1e-3"]
    pretrain(override(recipe("bert-tiny"), changes), root / "shards", root / "run", device="cpu")
    return root


@pytest.fixture
def own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes a tenth of a second, however busy the machine is."""
    from runs import step_clock

    step_clock(monkeypatch)


# The class of `transformers` and its settings for every kind of head.
LABELS = {0: "red", 1: "green", 2: "blue", 3: "none"}
REFERENCES = {
    "mlm+nsp": ("BertForPreTraining", {}),
    "mlm": ("BertForMaskedLM", {}),
    "single": ("BertForSequenceClassification", {"id2label": LABELS, "problem_type": "single_label_classification"}),
    "multi": ("BertForSequenceClassification", {"id2label": LABELS, "problem_type": "multi_label_classification"}),
    "regression": ("BertForSequenceClassification", {"num_labels": 1, "problem_type": "regression"}),
    "tags": ("BertForTokenClassification", {"id2label": LABELS}),
    "span": ("BertForQuestionAnswering", {}),
    "choice": ("BertForMultipleChoice", {}),
    "encoder": ("BertModel", {}),
}


def reference(kind: str, vocab_size: int, **changes):
    """A small model of `transformers` with random weights, in evaluation mode."""
    import transformers

    architecture, values = REFERENCES[kind]
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
    if "id2label" in values:
        changes.setdefault("label2id", {name: i for i, name in LABELS.items()})
    config = transformers.BertConfig(
        **{"vocab_size": vocab_size, "max_position_embeddings": 48, **sizes, **values, **changes}
    )
    return randomise(getattr(transformers, architecture)(config)).eval()


def randomise(model, seed: int = 0):
    """Draw all parameters, also biases and norms, more widely than an initialisation does, so that each one matters."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.15, generator=draw)
            if "norm" in name.lower() and name.endswith("weight"):
                parameter.add_(1.0)
    return model


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """A tokenizer of about a hundred tokens."""
    from bertsmith.text.tokenizer import train_wordpiece

    return train_wordpiece(
        ["the quick brown fox jumps over the lazy dog, and the dogs bark at foxes 0123456789."] * 4, 99
    )


@pytest.fixture
def pair_of(tmp_path, tiny_tokenizer):
    """Makes a model of `transformers`, saves it and loads it as ours."""
    from comparison import CHOICES, VOCAB
    from variants import their_model

    from bertsmith.formats.hf import load_folder
    from bertsmith.model.heads import HeadConfig

    def make(kind: str, variant: str = "bert", **changes):
        theirs = their_model(variant, kind, max(VOCAB, tiny_tokenizer.vocab_size), **changes)
        theirs.save_pretrained(tmp_path)
        tiny_tokenizer.save(tmp_path)
        loaded = load_folder(tmp_path, HeadConfig("choice", num_choices=CHOICES) if kind == "choice" else None)
        assert kind == "encoder" or loaded.missing == ()
        return theirs, loaded.model.eval()

    return make


@pytest.fixture
def one_thread():
    """Use one thread, which is faster for small tensors, above all on busy cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


KOREAN = """한국어는 좋다. 우리는 오늘 학교에 간다. 사람들은 서울에서 한국어로 말한다.
그는 어제 책을 읽었다. 나는 내일 친구를 만난다. 학교에서 친구와 책을 읽는다.
날씨가 좋아서 우리는 공원에 갔다. 공원에는 사람들이 많았다. 우리는 친구를 만나서 말했다."""


@pytest.fixture(scope="session")
def bilingual() -> list[str]:
    """English paragraphs of Python's documentation, and Korean ones."""
    from pydoc_data.topics import topics

    return [line for text in topics.values() for line in text.splitlines() if line.strip()] + KOREAN.splitlines() * 20


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory, bilingual: list[str]) -> Path:
    """A folder with an uncased tokenizer for English and Korean, made once."""
    from bertsmith.text.tokenizer import train_wordpiece

    folder = tmp_path_factory.mktemp("tokenizer") / "tok"
    train_wordpiece(bilingual, 1200).save(folder)
    return folder


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer) -> dict[str, Path]:
    """A small model with random weights for each kind of head, by its name on a server."""
    root = tmp_path_factory.mktemp("served")
    kinds = {"mlm": "words", "single": "colours", "multi": "many", "regression": "ranks", "tags": "tags"}
    kinds |= {"span": "spans", "choice": "endings"}
    for kind, name in kinds.items():
        reference(kind, tiny_tokenizer.vocab_size).save_pretrained(root / name)
        tiny_tokenizer.save(root / name)
    return {name: root / name for name in kinds.values()}


@pytest.fixture(scope="session")
def served_models(served: dict[str, Path]):
    """These models, opened."""
    from bertsmith.serve.models import open_models

    return open_models([f"{name}={folder}" for name, folder in served.items()], "cpu")


@pytest.fixture(scope="session")
def client(served_models):
    """A client of a server in this process, which holds all these models."""
    from fastapi.testclient import TestClient

    from bertsmith.serve.app import create_app
    from bertsmith.serve.settings import ServeConfig

    app = create_app(served_models, ServeConfig(wait_ms=0, engines=2))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


SWITCHES = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]


@pytest.fixture(scope="module")  # Playwright keeps an event loop running, which tests of other modules start themselves
def browser():
    """Chromium, driven by Playwright; what needs it is skipped where one of them is missing."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("there is no chromium to open the page with")
    playwright = pytest.importorskip("playwright.sync_api", reason="there is no playwright to drive a browser with")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=found, args=SWITCHES)
        yield opened
        opened.close()


@pytest.fixture
def run_command(monkeypatch, capfd):
    """Run the command line in this process; return the exit code, standard output and standard error."""
    from bertsmith.cli import main

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["bertsmith", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        return (stop.value.code or 0, *capfd.readouterr())

    return run
