"""What names no model takes the default model of the package; a tiny model stands in for it, the last tests open it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import shrunk
from safetensors import safe_open

import bertsmith
from benchmarks import default_model as benchmark
from bertsmith.demo import run as demonstration
from bertsmith.errors import UserError
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.formats import hub
from bertsmith.pretraining.run import pretrain
from bertsmith.training.settings import TrainConfig

pytestmark = pytest.mark.usefixtures("one_thread")
NOTE = "note: no model is named, so this is the package's default model (0 MB, English, lower-cased)\n"
TEXT = "Paris is the [MASK] of France."
REAL = hub.DEFAULT
ROWS = [(f"a {word} film {n}", label) for word, label in (("good", "+"), ("bad", "-")) for n in range(10)]


@pytest.fixture(scope="module")
def packed(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as `pack` writes it, with a card that was there before."""
    root = tmp_path_factory.mktemp("packed")
    pretrain(shrunk("speedrun-small"), world / "shards", root / "speedrun-small", device="cpu")
    folder = root / "default_model"
    folder.mkdir()
    (folder / "README.md").write_text("# A card\n")
    (folder / "old.json").write_text("{}")
    benchmark.main(["pack", "--work", str(root), "--out", str(folder)])
    return folder


@pytest.fixture
def folder(packed: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny model in the place of the default model."""
    monkeypatch.delenv(hub.USUAL, raising=False)
    monkeypatch.setattr(hub, "DEFAULT", packed)
    return packed


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with rows and texts."""
    monkeypatch.chdir(tmp_path)
    lines = "".join(f"{text},{label}\n" for text, label in ROWS)
    (tmp_path / "mine.csv").write_text(f"text,label\n{lines}")
    (tmp_path / "texts.txt").write_text("one text\nanother one\n")
    return tmp_path


def test_pack_writes_half_precision_and_keeps_the_card(packed: Path) -> None:
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt"}
    assert {path.name for path in packed.iterdir()} == names | {"bertsmith.json", "README.md"}
    assert (packed / "README.md").read_text() == "# A card\n"
    with safe_open(packed / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float16}  # noqa: SIM118


def test_pack_refuses_a_model_that_is_too_large(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "LARGEST", 1000)
    with pytest.raises(SystemExit, match=r"bytes, more than 1,000; .*new is as it was"):
        benchmark.main(["pack", "--work", str(packed.parent), "--out", str(tmp_path / "new")])
    assert not (tmp_path / "new").exists()


FINETUNE = ["finetune", "classify", "MODEL", "--data", "mine.csv", "--out", "OUT", "--epochs", "1"]
COMMANDS = {  # the words of a command, in which MODEL is where a model may be named
    "fill": ["fill", "MODEL", TEXT],
    "embed": ["embed", "MODEL", "texts.txt", "--out", "vectors.npy", "--force"],
    "features": ["features", "MODEL", "texts.txt", "--out", "OUT"],
    "view": ["view", "MODEL", TEXT],
    "view of a pair": ["view", "MODEL", "Is it raining?", "The street is wet."],
    "finetune": FINETUNE,
    "finetune, two seeds": [*FINETUNE, "--seeds", "2"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_without_a_model_says_in_one_line_what_it_takes(
    name: str, folder: Path, here: Path, run_command
) -> None:
    """On standard output both calls print the same, and a model that is named is not announced."""
    found = []
    for model, out in (([folder], "named"), ([], "unnamed")):
        place = COMMANDS[name].index("MODEL")
        before, after = COMMANDS[name][:place], [word.replace("OUT", out) for word in COMMANDS[name][place + 1 :]]
        option = ["--model"] if model and name.startswith("finetune") else []
        code, shown, said = run_command(*before, *option, *model, *after, "--json", "--device", "cpu")
        assert code == 0, said
        assert said.count("default model") == (0 if model else 1)
        assert (NOTE in said) == (not model)
        found.append(json.loads(shown.replace(out, "OUT")))
    assert found[0] == found[1]


def test_benchmark_and_serve_without_a_model(folder: Path, monkeypatch: pytest.MonkeyPatch, run_command) -> None:
    given = []
    monkeypatch.setattr("bertsmith.finetuning.benchmark.benchmark", lambda models, *_, **__: given.append(models) or {})
    monkeypatch.setattr("bertsmith.pages.benchmark.write_benchmark", lambda page, result: None)
    monkeypatch.setattr("bertsmith.serve.run.run", lambda models, *_, **__: given.append(models))
    assert run_command("benchmark", "--data", "tasks", "--json")[0] == 0
    code, shown, said = run_command("serve")
    assert (code, shown, said) == (0, "", NOTE)
    assert given == [[str(folder)]] * 2


def test_the_page_of_a_server_with_the_default_model(folder: Path) -> None:
    from fastapi.testclient import TestClient

    from bertsmith.serve.run import build

    with TestClient(build([hub.usual_model()], device="cpu")) as client:
        assert client.get("/").status_code == 200
        (served,) = client.get("/models").json()
        assert served["name"] == folder.name
        assert served["routes"] == ["fill-mask", "embed", "features", "view"]
        (found,) = client.post("/fill-mask", json={"inputs": TEXT}).json()
        assert found == bertsmith.fill(folder, TEXT, device="cpu")[0]
        assert len(client.post("/embed", json={"inputs": ["one", "two"]}).json()) == 2
        assert client.post("/view", json={"inputs": TEXT}).status_code == 200


def test_functions_without_a_model(folder: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert bertsmith.fill(None, TEXT) == bertsmith.Predictor.load(folder).fill(TEXT)
    assert bertsmith.Predictor.load(device="cpu").folder == folder
    assert bertsmith.Predictor.load().fill(TEXT) == bertsmith.Predictor.load(folder).fill(TEXT)
    vectors = bertsmith.Embedder.load(pooling="cls")(["one", "two"])
    assert np.array_equal(vectors, bertsmith.Embedder.load(folder, pooling="cls")(["one", "two"]))
    assert bertsmith.embed(None, "texts.txt", "vectors.npy")["rows"] == 2
    assert bertsmith.features(None, "texts.txt", "states")["texts"] == 2
    assert bertsmith.view(None, TEXT, out="page.html")["masked_words"]
    assert capfd.readouterr().err.count(NOTE) == 7


def test_fine_tuning_functions_without_a_model(folder: Path, here: Path) -> None:
    """Half precision is read as float32, trained in it, and saved in it; the card names no path."""
    scores = bertsmith.finetune("classify", data=ROWS, out="run", epochs=1, device="cpu")
    assert "accuracy" in scores
    with safe_open(here / "run" / "model" / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float32}  # noqa: SIM118
    assert "float16" not in (here / "run" / "model" / "config.json").read_text()
    card = (here / "run" / "model" / "README.md").read_text()
    assert "| Starts from | the default model of bertsmith |" in card
    assert "base_model" not in card
    assert bertsmith.Predictor.load("run")("a good film")["label"] in ("+", "-")
    config = FinetuneConfig("classify", train=TrainConfig(epochs=1))
    summary = bertsmith.finetune_many(config, None, ROWS, "runs", seeds=2, device="cpu")
    assert summary["settings"][0]["seeds"] == 2
    with pytest.raises(UserError, match="no data is given; name a file or the folder of a data set, or give rows"):
        bertsmith.finetune("classify", out="other")


def test_it_is_opened_in_float32(folder: Path) -> None:
    model = bertsmith.Predictor.load(device="cpu").torch_engine.model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_the_environment_comes_first_and_is_not_announced(
    folder: Path, world: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(hub.USUAL, f" {world / 'run'} ")
    assert hub.usual_model() == str(world / "run")
    assert not capfd.readouterr().err
    monkeypatch.setenv(hub.USUAL, " ")
    assert hub.usual_model() == str(folder)
    assert capfd.readouterr().err == NOTE
    monkeypatch.setenv("RANK", "1")  # of several processes one speaks
    assert hub.usual_model() == str(folder)
    assert not capfd.readouterr().err


def test_a_folder_with_a_card_alone_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command) -> None:
    monkeypatch.delenv(hub.USUAL, raising=False)
    (tmp_path / "README.md").write_text("# A card\n")
    monkeypatch.setattr(hub, "DEFAULT", tmp_path)
    assert hub.default_model() is None
    with pytest.raises(UserError, match=f"no model is named: .* or set {hub.USUAL} to one for all commands"):
        bertsmith.Predictor.load()
    code, _, said = run_command("fill", TEXT)
    assert (code, said.count("\n")) == (2, 1)
    assert said.endswith(f"and no model is named: write MODEL TEXT, or set {hub.USUAL} to a model\n")


def test_the_demo_begins_with_it(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command) -> None:
    def stop(out: Path) -> None:
        raise UserError("the path begins")

    monkeypatch.setattr(demonstration, "write_text", stop)
    _, shown, said = run_command("demo", "--out", tmp_path / "demo", "--json")
    lines = said.splitlines()
    assert not shown
    assert lines[0] == f'The default model of the package: bertsmith fill "{TEXT}"'
    best = [line.split() for line in lines[1:6]]
    assert [(word, float(share)) for word, share, _ in best] == [
        (found["token"], round(100 * found["probability"], 1)) for found in bertsmith.fill(folder, TEXT)[0]
    ]
    assert lines[6].startswith("The whole path")
    monkeypatch.setattr(hub, "DEFAULT", tmp_path)
    _, _, said = run_command("demo", "--out", tmp_path / "demo")
    assert said.startswith("The whole path")


def test_real_weights_are_small_and_opened_in_float32() -> None:
    assert sum(path.stat().st_size for path in REAL.iterdir()) <= benchmark.LARGEST
    assert "float16" in (REAL / "config.json").read_text()
    model = bertsmith.Predictor.load(REAL, "cpu").torch_engine.model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


FILLED = {
    "She opened the [MASK] and walked into the room.": {"door"},
    "The patient was taken to the [MASK] by an ambulance.": {"hospital"},
    "The judge sentenced him to ten years in [MASK].": {"prison"},
    "He was elected president of the United [MASK].": {"states"},
    "He was born in London, [MASK].": {"england"},
    "He is the father of two [MASK].": {"children"},
    "The [MASK] shines during the day.": {"sun", "light", "sky", "sunlight"},
}


def test_real_weights_fill_masks_sensibly() -> None:
    predictor = bertsmith.Predictor.load(REAL, "cpu")
    assert predictor.fill(TEXT)[0][0]["token"] == "capital"
    found = {text: [word["token"] for word in predictor.fill(text)[0]] for text in FILLED}
    assert not {text: words for text, words in found.items() if not FILLED[text] & set(words)}


GOOD, BAD = "good great wonderful lovely excellent fine".split(), "bad awful terrible poor dreadful boring".split()
THINGS = "film book meal song hotel game play lecture concert story".split()
FORMS = ["It was a {} {}.", "What a {} {} that was!", "The {1} was {0}.", "I found the {1} {0}."]
HELD_OUT = ["My sister says that her {1} is {0}.", "They had a {} {} last week."]


def reviews(forms: list[str], things: list[str]) -> list[tuple[str, str]]:
    """Every word in every form, with each of the things in turn."""
    words = [(word, label) for label, words in (("good", GOOD), ("bad", BAD)) for word in words]
    pairs = [(form, *word) for form in forms for word in words]
    return [(form.format(word, things[n % len(things)]), label) for n, (form, word, label) in enumerate(pairs)]


def test_real_weights_learn_a_small_task_in_seconds(tmp_path: Path) -> None:
    """The forms and the things of the dev rows are others than those of the training rows."""
    train, dev = reviews(FORMS, THINGS[:7]), reviews(HELD_OUT, THINGS[7:])
    scores = bertsmith.finetune(
        "classify", REAL, train, tmp_path / "run", dev=dev, learning_rate=5e-4, epochs=8, batch_size=16, device="cpu"
    )
    assert scores["accuracy"] >= 90


PARAPHRASES = [  # a sentence, what means nearly the same, and another one
    ("The cat is sleeping on the sofa.", "A cat sleeps on the couch.", "The bank raised its interest rates."),
    ("He bought a new car last week.", "Last week he purchased a new car.", "Rain is expected in the mountains."),
    ("The team won the match.", "The match was won by the team.", "She is reading a book about chemistry."),
    ("How old are you?", "What is your age?", "The train to the airport was late."),
]


def test_vectors_of_paraphrases_are_closer_than_those_of_other_sentences() -> None:
    embed = bertsmith.Embedder.load(REAL, "cpu", normalize=True)
    for sentence, paraphrase, other in PARAPHRASES:
        first, near, far = embed([sentence, paraphrase, other])
        assert first @ near > first @ far, sentence
