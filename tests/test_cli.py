"""The commands: their options and output, and a one-line error with exit code 2 for every mistake of a user."""

import json
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from conftest import TINY

from bertsmith.cli import COMMANDS, SECTIONS, _help
from bertsmith.recipes import RECIPES

SETTINGS = ["train.steps=2", "train.batch_size=4", "data.max_length=32", *TINY]
QUICK = [part for setting in SETTINGS for part in ("--set", setting)]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "farewell"), [("1", "farewell\n"), ("2", "")])
def test_command_under_torchrun_skips_the_cleanup_of_the_interpreter(world: str, farewell: str) -> None:
    """The cleanup of the interpreter and its threads could abort a process whose work is done."""
    code = "import atexit; atexit.register(print, 'farewell'); from bertsmith.cli import main; main()"
    for argument, expected in (("recipes", 0), ("recipe", 2)):
        done = subprocess.run(
            [sys.executable, "-c", code, argument],
            capture_output=True, text=True, timeout=60, env={**os.environ, "WORLD_SIZE": world},
        )  # fmt: skip
        assert done.returncode == expected
        assert ("bert-base" in done.stdout) == (expected == 0)
        assert done.stdout.endswith(farewell)
        assert ("farewell" in done.stdout) == bool(farewell)


def test_out_of_memory_error_is_one_line(run_command, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        where = "GPU 0 has a total capacity of 139.80 GiB of which 1.06 GiB is free."
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate 1.46 GiB. {where} Process 7 has 17 GiB in use.\nSee the manual"
        )

    monkeypatch.setitem(COMMANDS, "recipes", full)
    code, out, err = run_command("recipes")
    assert (code, out) == (2, "")
    assert err.startswith("error: CUDA out of memory. Tried to allocate 1.46 GiB. GPU 0 has a total capacity")
    assert err.count("\n") == 1
    assert "--jobs" in err
    assert "Process 7" not in err


def tree(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


@pytest.fixture
def refused(run_command, tmp_path: Path):
    """Assert that a command ends with code 2 and one line on standard error, and leaves nothing new behind."""

    def check(*arguments: object, says: str) -> str:
        before = tree(tmp_path)
        code, out, err = run_command(*arguments)
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        assert code == 2, (out, err)
        assert len(errors) == 1, err
        assert "Traceback" not in err
        assert says in errors[0]
        assert tree(tmp_path) == before
        return errors[0]

    return check


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_fits_the_terminal(run_command, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run_command(*command.split(), "--help")
    assert code == 0
    assert re.search(rf"\n  Example:(\n   )? bertsmith {command}", out)  # on a line of its own
    assert "\\b" not in out
    assert not [line for line in out.splitlines() if len(line) > 80]


def test_long_example_is_wrapped_between_its_arguments() -> None:
    def command() -> None:
        """Do it.

        \b
        Example: bertsmith do it
        Long: bertsmith view run "The length of a list is its number of items." --top 5 --out page.html --json
        """

    shown = _help(command).splitlines()
    assert shown[2:4] == ["\b", "Example: bertsmith do it"]
    assert shown[4:] == [
        "Long:",
        '  bertsmith view run "The length of a list is its number of items." \\',
        "    --top 5 --out page.html --json",
    ]


def test_commands_are_listed_in_sections_with_their_whole_first_sentence(
    run_command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run_command("--help")
    assert "..." not in out.partition("Options:")[2]
    assert [title for title in SECTIONS if f"\n{title}:\n" in out] == list(SECTIONS)
    listed = " ".join(SECTIONS.values()).split()
    assert {name.split()[0] for name in COMMANDS} <= set(listed)
    words = " ".join(out.split())
    for name, function in COMMANDS.items():
        assert f"{name} {' '.join((function.__doc__ or '').splitlines()[0].split())}" in words


def test_program_prints_usage_without_arguments_and_its_version() -> None:
    bare = subprocess.run([sys.executable, "-m", "bertsmith"], capture_output=True, text=True, timeout=60)
    assert "Usage" in bare.stdout + bare.stderr
    version = subprocess.run(
        [sys.executable, "-m", "bertsmith", "--version"], capture_output=True, text=True, timeout=60
    )
    assert version.stdout.strip() == "0.1.0"


def test_error_gives_exit_code_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bertsmith", "tokenizer", "train", "nothing.txt", "--out", str(tmp_path / "tok")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr == "error: no such file: nothing.txt\n"
    assert result.stdout == ""


def test_recipes_lists_every_size(run_command) -> None:
    code, out, _ = run_command("recipes", "--json")
    assert code == 0
    assert {f"bert-{size}" for size in ("tiny", "mini", "small", "medium", "base", "large")} <= set(json.loads(out))


def test_recipes_lists_the_recommended_ones_first_and_a_line_for_each_family(run_command, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run_command("recipes")
    lines = out.splitlines()
    titles = [line for line in lines if line[:1].strip()]
    assert titles == [
        "To start with (layers × width, length of the training)",
        "Our own recipes",
        "Families",
        "Ablations of BERT's paper",
    ]
    first, own, families, ablations = (
        [line.split()[0] for line in lines[begin:end] if line[:2] == "  " and line[2:3].strip()]
        for begin, end in pairwise([*(lines.index(title) for title in titles), len(lines)])
    )
    others = ["modern-base", "distilbert", "bert-base", "demo"]
    assert first == ["quickstart", "speedrun", "speedrun-small", *others]
    assert lines.index("Our own recipes") == 1 + len(first) + 1  # one line each, also in a narrow terminal
    assert own == ["quickstart", "speedrun", "speedrun-small", "demo"]
    for name, when in {"speedrun": "a small corpus and a GPU", "modern-base": "long documents"}.items():
        assert (
            next(line for line in lines if line.startswith(f"  {name}")).split(maxsplit=1)[1].startswith(f"For {when}:")
        )
    assert sorted(families) == sorted({name.split("-")[0] for name in RECIPES} - {"quickstart", "speedrun", "demo"})
    assert ablations == ["no-nsp", "left-to-right", "right-to-left", "sized", "masked"]
    assert set(RECIPES) <= set(re.findall(r"[\w-]+", out))
    assert max(map(len, lines)) <= 80
    assert len(lines) < 80


def test_fill_gives_words_with_probabilities(run_command, world: Path) -> None:
    code, out, _ = run_command("fill", world / "run", "The [MASK] of a [MASK].", "--json", "--device", "cpu")
    masks = json.loads(out)["masks"]
    assert code == 0
    assert [len(m) for m in masks] == [5, 5]
    first = [c["probability"] for c in masks[0]]
    assert first == sorted(first, reverse=True)
    assert 0 < sum(first) <= 1


def test_finetune_evaluate_and_predict(run_command, world: Path, tmp_path: Path) -> None:
    base = ["--model", world / "run", "--data", world / "train.csv", "--dev", world / "dev.csv", "--device", "cpu"]
    learn = ["--set", "train.epochs=8", "--set", "train.learning_rate=3e-3", "--set", "train.batch_size=8"]
    code, out, err = run_command("finetune", "classify", *base, *learn, "--out", tmp_path / "run2", "--json")
    assert code == 0, err
    trained = json.loads(out)
    assert trained["accuracy"] >= 90
    code, out, _ = run_command("evaluate", tmp_path / "run2", "--data", world / "dev.csv", "--json", "--device", "cpu")
    assert code == 0
    assert json.loads(out)["accuracy"] == trained["accuracy"]
    code, out, _ = run_command("predict", tmp_path / "run2", world / "dev.csv", "--out", tmp_path / "out.jsonl")
    assert code == 0
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(answers) == 10
    for answer in answers:
        assert set(answer["scores"]) == {"numbers", "files"}
        assert answer["score"] == pytest.approx(max(answer["scores"].values()))
        assert sum(answer["scores"].values()) == pytest.approx(1)
    labels = [line.rsplit(",", 1)[1] for line in (world / "dev.csv").read_text().splitlines()[1:]]
    right = sum(a["label"] == label for a, label in zip(answers, labels, strict=True))
    assert right * 10 == pytest.approx(trained["accuracy"])


def test_regression_learns_a_number(run_command, world: Path, tmp_path: Path) -> None:
    rows = [json.dumps({"text": "many words " * (i % 5 + 1), "label": i % 5}) for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    learn = ["--set", "train.epochs=15", "--set", "train.learning_rate=3e-3", "--set", "train.batch_size=8"]
    command = [
        "finetune",
        "regress",
        "--model",
        world / "run",
        "--data",
        tmp_path / "rows.jsonl",
        "--out",
        tmp_path / "r",
    ]
    code, out, err = run_command(*command, "--dev", tmp_path / "rows.jsonl", *learn, "--json", "--device", "cpu")
    assert code == 0, err
    assert json.loads(out)["pearson"] > 80


def test_errors_leave_stdout_empty_and_tables_go_to_stdout(run_command, world: Path) -> None:
    code, out, err = run_command("evaluate", world / "run", "--data", world / "dev.csv", "--json")
    assert (code, out) == (2, "")
    assert "has no output layer" in err
    code, out, _ = run_command("recipes")
    assert "bert-base" in out


# --- mistakes of a user


def test_missing_file_is_refused(refused, world: Path, tmp_path: Path) -> None:
    refused(
        "corpus",
        "build",
        "none.txt",
        "--tokenizer",
        world / "tok",
        "--out",
        tmp_path / "s",
        says="no such file: none.txt",
    )
    refused(
        "finetune", "classify", "--model", world / "run", "--data", "none.csv", "--out", tmp_path / "o",
        says="no such file: none.csv",
    )  # fmt: skip
    refused("predict", world / "run", "none.csv", "--out", tmp_path / "o.jsonl", says="no such file: none.csv")
    refused("predict", world / "run", "Read a file.", "Wait for it.", says="'Read a file.' is a second text")
    refused("predict", world / "run", "", says="INPUT is '', which is neither a text nor a file")


def test_empty_file_is_refused(refused, world: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "empty.csv").touch()
    (tmp_path / "header.csv").write_text("text,label\n")
    refused("tokenizer", "train", tmp_path / "empty.txt", "--out", tmp_path / "tok", says="empty.txt is empty")
    (tmp_path / "blank.txt").write_text("\n \n\n")
    refused("tokenizer", "train", tmp_path / "blank.txt", "--out", tmp_path / "tok", says="no words")
    refused(
        "corpus", "build", tmp_path / "blank.txt", "--tokenizer", world / "tok", "--out", tmp_path / "s",
        says="no text",
    )  # fmt: skip
    for name in ("empty.csv", "header.csv"):
        refused(
            "finetune", "classify", "--model", world / "run", "--data", tmp_path / name, "--out", tmp_path / "o",
            says=f"{name} is empty",
        )  # fmt: skip


def test_invalid_utf8_is_replaced_counted_and_reported_once(run_command, world: Path, tmp_path: Path) -> None:
    text = b"A good line.\nA bad \xff\xfe line.\n\nAnother \xc3 document.\n"
    (tmp_path / "bad.txt").write_bytes(text)
    command = [
        "corpus",
        "build",
        tmp_path / "bad.txt",
        "--tokenizer",
        world / "tok",
        "--out",
        tmp_path / "s",
        "--workers",
        1,
    ]
    code, out, err = run_command(*command, "--json")
    assert code == 0
    assert json.loads(out)["documents"] == 2
    warnings = [line for line in err.splitlines() if "invalid UTF-8" in line]
    assert len(warnings) == 1
    assert "replaced 3" in warnings[0]
    assert "bad.txt, line 2" in warnings[0]


def test_folder_without_a_model_is_refused(refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "nothing").mkdir()
    refused("fill", tmp_path / "nothing", "a [MASK]", says="holds no model")
    refused("fill", tmp_path / "not-there" / "at" / "all", "a [MASK]", says="no such model folder")
    refused("fill", "somebody/some-model", "a [MASK]", says="'somebody/some-model' is no folder here")


def test_config_with_an_unknown_key_is_refused(refused, world: Path, tmp_path: Path) -> None:
    stored = json.loads((world / "run" / "config.json").read_text())
    stored["train"]["learning_rat"] = 1
    (tmp_path / "mine.json").write_text(json.dumps(stored))
    refused(
        "pretrain", tmp_path / "mine.json", "--data", world / "shards", "--out", tmp_path / "run",
        says="mine.json: train: unknown key 'learning_rat'; did you mean 'learning_rate'?",
    )  # fmt: skip
    shutil.copytree(world / "run" / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "hiden_size": 4}))
    refused("fill", tmp_path / "model", "a [MASK]", says="unknown key 'hiden_size'; did you mean 'hidden_size'?")


def test_tokenizer_that_does_not_match_the_shards_is_refused(refused, run_command, world: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text((world / "text.txt").read_text(encoding="utf-8")[:50_000], encoding="utf-8")
    run_command("tokenizer", "train", tmp_path / "text.txt", "--out", tmp_path / "other", "--vocab-size", 500)
    run_command(
        "corpus",
        "build",
        tmp_path / "text.txt",
        "--tokenizer",
        tmp_path / "other",
        "--out",
        tmp_path / "s",
        "--workers",
        1,
    )
    pretrain = ["pretrain", "bert-tiny", "--data", tmp_path / "s", "--out", tmp_path / "run", *QUICK]
    refused(*pretrain[: -len(QUICK)], "--model", world / "run", says="is not the one that")
    shutil.copy(world / "tok" / "tokenizer.json", tmp_path / "s" / "tokenizer.json")
    refused(*pretrain, says="is not the one that")


def test_sequence_longer_than_the_positions_is_refused(refused, world: Path, tmp_path: Path) -> None:
    pretrain = ["pretrain", "bert-tiny", "--data", world / "shards", "--out", tmp_path / "run"]
    refused(
        *pretrain,
        "--set",
        "data.long_length=null",
        "--set",
        "data.max_length=600",
        says="data.max_length 600 is longer than the encoder's 512 positions",
    )
    finetune = [
        "finetune",
        "classify",
        "--model",
        world / "run",
        "--data",
        world / "train.csv",
        "--out",
        tmp_path / "o",
    ]
    refused(*finetune, "--set", "data.max_length=600", says="data.max_length 600 is longer")
    refused("fill", world / "run", "word " * 600 + "[MASK]", says="more than the model's 512 positions")


def test_unknown_label_is_refused(refused, run_command, world: Path, tmp_path: Path) -> None:
    (tmp_path / "dev.csv").write_text("text,label\na text,numbers\nanother,number\n")
    finetune = [
        "finetune",
        "classify",
        "--model",
        world / "run",
        "--data",
        world / "train.csv",
        "--out",
        tmp_path / "o",
    ]
    message = (
        "dev.csv, line 3: label 'number' is not one of the model's labels: files, numbers; did you mean 'numbers'?"
    )
    refused(*finetune, "--dev", tmp_path / "dev.csv", says=message)
    run_command(*finetune, "--set", "train.steps=1")
    refused("evaluate", tmp_path / "o", "--data", tmp_path / "dev.csv", says=message)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.step=3", "--set train.step: unknown setting; did you mean 'train.steps'?"),
        ("trian.steps=3", "unknown setting; did you mean 'train.steps'?"),
        ("train.steps", "write it as key=value"),
        ("train.steps=many", "'many' is not a number"),
        ("train.steps=0", "train.steps must be at least 1"),
        ("train=3", "not a single setting"),
        ("train.schedule=cosin", "is not one of"),
        ("model.num_heads=7", "cannot be divided among 7 heads"),
        ("data.masking.rate=1.5", "must be above 0 and under 1"),
    ],
)
def test_bad_set_options_are_refused(refused, world: Path, tmp_path: Path, setting: str, message: str) -> None:
    command = ["pretrain", "bert-tiny", "--data", world / "shards", "--out", tmp_path / "run", "--set", setting]
    refused(*command, says=message)


def test_misspelt_names_are_refused(refused, world: Path, tmp_path: Path) -> None:
    pretrain = ["--data", world / "shards", "--out", tmp_path / "run"]
    refused("pretrain", "bert-tony", *pretrain, says="unknown recipe 'bert-tony'; did you mean 'bert-tiny'?")
    finetune = ["--model", world / "run", "--data", world / "train.csv", "--out", tmp_path / "o"]
    refused("finetune", "clasify", *finetune, says="unknown task 'clasify'; did you mean 'classify'?")
    refused(
        "finetune", "classify", *finetune, "--set", "data.columns.label=lable", says="no column 'lable'; did you mean"
    )
    refused("pretrain", "bert-tiny", *pretrain, "--device", "gpu", says="'gpu' is not available here")


def test_unusable_rows_are_refused(refused, world: Path, tmp_path: Path) -> None:
    finetune = [
        "finetune",
        "classify",
        "--model",
        world / "run",
        "--out",
        tmp_path / "o",
        "--data",
        tmp_path / "rows.csv",
    ]
    cases = {
        "text,label\na,x\nb,\n": "rows.csv, line 3: no label",
        "text,label\na,x\nb,x\n": "all rows have the label 'x'",
        "text,label\na,x,y\n": "rows.csv, line 2: more fields than the header names",
        "text,label\na\n": "rows.csv, line 2: nothing in column 'label'",
        "id,label\n1,x\n2,y\n": f"--data {tmp_path / 'rows.csv'} --out {tmp_path / 'o'} --text id --label label",
    }
    for content, message in cases.items():
        (tmp_path / "rows.csv").write_text(content)
        refused(*finetune, says=message)


def test_short_options_change_their_settings(run_command, refused, world: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(
        "body,kind,topic\n" + "".join(f"a text {i},k{i % 3},t{i % 2}\n" for i in range(8))
    )
    finetune = ["finetune", "classify", "--model", world / "run", "--data", tmp_path / "rows.csv", "--out"]
    columns = ["--text", "body", "--label", "topic"]
    rates = ["--lr", "1e-3", "--steps", "2", "--batch-size", "4", "--max-length", "16", "--seed", "7"]
    code, _, err = run_command(*finetune, tmp_path / "run", *columns, *rates, "--device", "cpu")
    assert code == 0, err
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    given = {name: config["train"][name] for name in ("learning_rate", "steps", "batch_size", "seed")}
    assert given == {"learning_rate": 1e-3, "steps": 2, "batch_size": 4, "seed": 7}
    assert (config["data"]["max_length"], config["data"]["columns"]["label"]) == (16, "topic")
    both = "train.learning_rate is given twice, by --set and by an option of its own"
    refused(*finetune, tmp_path / "o", *columns, *rates, "--set", "train.learning_rate=2", says=both)
    for other in (["--epochs", "2"], ["--set", "train.hours=1"]):
        refused(*finetune, tmp_path / "o", *columns, *rates, *other, says="both say how long the run is")
    pretrain = ["pretrain", "bert-tiny", "--data", world / "shards", "--out", tmp_path / "o"]
    refused(*pretrain, "--hours", "1", "--steps", "5", says="both say how long the run is")
    refused(*pretrain, "--lr", "-1", "--max-length", "64", says="train.learning_rate")


def test_output_is_never_overwritten(refused, world: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious.txt").write_text("keep")
    refused("tokenizer", "train", world / "text.txt", "--out", tmp_path / "mine", says="is there already and not empty")
    refused(
        "pretrain", "bert-tiny", "--data", world / "shards", "--out", tmp_path / "mine", *QUICK, says="add --resume"
    )


def test_model_of_commands_that_name_none(
    refused, run_command, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("one text\nanother one\n", encoding="utf-8")
    text, run = "The [MASK] of a list.", world / "run"
    monkeypatch.delenv("BERTSMITH_MODEL", raising=False)
    monkeypatch.setattr("bertsmith.formats.hub.DEFAULT", tmp_path / "none")  # test_default_model.py has one
    refused(
        "fill", text, says=f"{text!r} is taken as TEXT, and no model is named: write MODEL TEXT, or set BERTSMITH_MODEL"
    )
    refused("fill", says="TEXT is missing")
    refused("fill", run, says=f"TEXT is missing after the model {run}")
    refused("finetune", "classify", "--data", world / "train.csv", "--out", tmp_path / "o", says="no model is named")
    refused("serve", says="no model is named")
    monkeypatch.setenv("BERTSMITH_MODEL", str(run))
    options = "--json", "--device", "cpu"
    assert run_command("fill", text, *options)[:2] == run_command("fill", run, text, *options)[:2]
    for command, out in (("embed", "v.npy"), ("features", "states")):
        code, named, _ = run_command(command, run, texts, "--out", tmp_path / f"named-{out}", *options)
        assert code == 0
        code, usual, _ = run_command(command, texts, "--out", tmp_path / f"usual-{out}", *options)
        assert code == 0
        assert json.loads(usual).keys() == json.loads(named).keys()
    assert (tmp_path / "usual-v.npy").read_bytes() == (tmp_path / "named-v.npy").read_bytes()
    assert run_command("view", text, "--out", tmp_path / "view.html", *options)[0] == 0
    code, _, _ = run_command(
        "finetune", "classify", "--data", world / "train.csv", "--out", tmp_path / "o", "--set", "train.steps=1"
    )
    assert code == 0


def test_fill_refuses_text_without_a_mask_and_a_model_without_a_masked_lm_head(
    refused, run_command, world: Path, tmp_path: Path
) -> None:
    refused("fill", world / "run", "nothing to fill", says="no [MASK] in 'nothing to fill'")
    run_command(
        "finetune", "classify", "--model", world / "run", "--data", world / "train.csv", "--out", tmp_path / "o",
        "--set", "train.steps=1",
    )  # fmt: skip
    refused(
        "fill",
        tmp_path / "o",
        "a [MASK]",
        says="has no masked-word head (it was fine-tuned for classify), so it cannot fill masks",
    )


def test_hub_name_is_downloaded_from_the_hub(run_command, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(world / "run" / "model")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    code, out, _ = run_command("fill", "somebody/some-model", "The [MASK].", "--json", "--device", "cpu")
    assert code == 0
    assert len(json.loads(out)["masks"]) == 1
    assert asked[0][0] == "somebody/some-model"
    assert "*.bin" not in asked[0][1]


def test_tokenizer_extend_and_corpus_doctor(run_command, world: Path, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("metaclassification\nquxification\n")
    command = ["tokenizer", "extend", world / "run", "--words", tmp_path / "words.txt", "--out", tmp_path / "more"]
    code, out, err = run_command(*command, "--json")
    assert code == 0, err
    assert json.loads(out)["added"] == 2
    assert run_command("fill", tmp_path / "more", "The [MASK].", "--json", "--device", "cpu")[0] == 0
    (tmp_path / "text.txt").write_text((world / "text.txt").read_text(encoding="utf-8")[:50_000], encoding="utf-8")
    doctor = [
        "corpus",
        "doctor",
        tmp_path / "text.txt",
        "--tokenizer",
        world / "tok",
        "--out",
        tmp_path / "doctor.html",
    ]
    code, out, err = run_command(*doctor, "--json")
    assert code == 0, err
    assert json.loads(out)["findings"]
    assert "<svg" in (tmp_path / "doctor.html").read_text(encoding="utf-8")


def test_model_settings_are_refused_together_with_a_model(refused, world: Path, tmp_path: Path) -> None:
    pretrain = [
        "pretrain",
        "bert-tiny",
        "--data",
        world / "shards",
        "--out",
        tmp_path / "run",
        "--model",
        world / "run",
    ]
    refused(*pretrain, "--set", "model.num_layers=3", says="--set model.num_layers=3: with --model")
