"""`benchmark`: one protocol for every model and task, medians over the seeds, scores reused, and its table and page."""

import json
import shutil
from statistics import mean, median

import pytest
from paper_data import write_tasks

from bertsmith.errors import Diverged, Interrupted, UserError
from bertsmith.finetuning import scored as scoring
from bertsmith.finetuning.benchmark import COLUMNS, TRAIN, benchmark, find_entries
from bertsmith.finetuning.run import finetune as real_finetune
from bertsmith.pages.benchmark import header, lines, remarks

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK = ("train.epochs=1", "data.max_length=32")
GLUE = [column for column in COLUMNS if column.counts]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = write_tasks(tmp_path_factory.mktemp("tasks") / "glue").parent
    shutil.rmtree(folder / "glue" / "squad")
    return folder


@pytest.fixture(scope="module")
def tiny_run(world):
    return world / "run"


@pytest.fixture(scope="module")
def done(tmp_path_factory, tiny_run, tasks):
    """The benchmark of a run with two seeds, and its folder."""
    out = tmp_path_factory.mktemp("benchmark") / "out"
    return out, benchmark([tiny_run], tasks, out, seeds=2, device="cpu", settings=QUICK)


def test_table_has_medians_and_their_mean(done, tiny_run) -> None:
    out, result = done
    (row,) = result["rows"]
    assert result["columns"] == [*(column.name for column in GLUE), "CoNLL-2003"]
    for column in GLUE:
        files = [out / "runs" / row["name"] / column.task / f"seed-{seed}" / "scores.json" for seed in (1, 2)]
        values = [json.loads(file.read_text())["scores"][column.metric] for file in files]
        assert row["scores"][column.name]["values"] == pytest.approx(values)
        assert row["scores"][column.name]["median"] == pytest.approx(median(values))
    assert row["mean"] == pytest.approx(mean(row["scores"][column.name]["median"] for column in GLUE))
    assert row["tokens"] > 0
    assert row["minutes"] > 0
    assert row["held_out"]["mlm_loss"] > 0
    assert result["absent"].keys() == {"SQuAD 1.1"}
    assert json.loads((out / "benchmark.json").read_text()) == result
    assert not list(out.rglob("*.safetensors"))


def test_settings_are_those_of_the_protocol_with_no_second_try(done) -> None:
    out, _ = done
    configs = [json.loads(path.read_text()) for path in out.glob("runs/*/*/*/config.json")]
    assert len(configs) == 12
    assert {config["train"]["learning_rate"] for config in configs} == {TRAIN.learning_rate}
    assert {config["restarts"] for config in configs} == {0}
    assert {config["train"]["seed"] for config in configs} == {1, 2}


def test_lines_and_remarks(done) -> None:
    _, result = done
    ours, base, crammed = lines(result)
    assert len(ours) == len(header(result)) == len(base)
    assert base[5] == "78.4"
    assert crammed[5] == "76.0"
    assert ours[5] == f"{result['rows'][0]['mean']:.1f}"
    words = " ".join(remarks(result))
    assert "medians over 2 seeds" in words
    assert "Changed by --set: train.epochs=1 data.max_length=32." in words
    assert "Missing: SQuAD 1.1: " in words


def test_finished_runs_are_reused_and_seeds_added(done, tiny_run, tasks, tmp_path, monkeypatch) -> None:
    out = tmp_path / "copy"
    shutil.copytree(done[0], out)
    begun = []
    monkeypatch.setattr(
        scoring, "finetune", lambda config, *a, **o: begun.append(config.train.seed) or real_finetune(config, *a, **o)
    )
    again = benchmark([tiny_run], tasks, out, seeds=3, tasks=["rte"], device="cpu", settings=QUICK)
    assert begun == [3]
    before = done[1]["rows"][0]["scores"]["RTE"]["values"]
    assert again["rows"][0]["scores"]["RTE"]["values"][:2] == before
    assert "mean" not in again["rows"][0]
    with pytest.raises(UserError, match=r"train\.epochs"):
        benchmark([tiny_run], tasks, out, tasks=["rte"], device="cpu", settings=("train.epochs=2", QUICK[1]))
    other = tmp_path / tiny_run.name
    shutil.copytree(tiny_run / "model", other)
    weights = other / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\1")
    with pytest.raises(UserError, match="other weights"):
        benchmark([other], tasks, out, tasks=["rte"], device="cpu", settings=QUICK)


def test_a_run_that_diverges_counts_as_nothing_learnt(tiny_run, tasks, tmp_path, monkeypatch) -> None:
    def diverges(config, model, data, run, **options):
        run.mkdir(parents=True)
        raise Diverged("the loss is nan at step 1")

    monkeypatch.setattr(scoring, "finetune", diverges)
    result = benchmark([tiny_run], tasks, tmp_path / "out", seeds=1, tasks=["rte"], device="cpu")
    assert result["rows"][0]["scores"]["RTE"]["failed"] == 1
    assert result["rows"][0]["scores"]["RTE"]["median"] == 0
    assert "0.0, 1 failed" in next(lines(result))


def test_a_stopped_benchmark_leaves_a_table_of_the_tasks_that_are_done(
    done, tiny_run, tasks, tmp_path, monkeypatch
) -> None:
    out = shutil.copytree(done[0], tmp_path / "out")
    name = done[1]["rows"][0]["name"]

    def stop(*given, **options) -> None:
        raise Interrupted("stopped", 130)

    def stopped() -> str:
        shutil.rmtree(out / "runs" / name / "rte" / "seed-2", ignore_errors=True)
        with monkeypatch.context() as patched:
            patched.setattr(scoring, "finetune", stop)
            with pytest.raises(Interrupted) as error:
                benchmark([tiny_run], tasks, out, seeds=2, device="cpu", settings=QUICK)
        return error.value.advice

    assert stopped() == "The same command resumes it"
    assert json.loads((out / "benchmark.json").read_text()) == done[1], "a whole table stays"
    (out / "benchmark.json").unlink()
    for _ in range(2):
        assert stopped().endswith("benchmark.json has the tasks that are done")
        table = json.loads((out / "benchmark.json").read_text())
        assert table["columns"] == [column for column in done[1]["columns"] if column != "RTE"]
        assert table["rows"][0]["scores"]["CoLA"] == done[1]["rows"][0]["scores"]["CoLA"]
        assert "mean" not in table["rows"][0]
        assert "Missing: RTE: the command was stopped before all of its runs were done." in remarks(table)
    assert benchmark([tiny_run], tasks, out, seeds=2, device="cpu", settings=QUICK) == done[1]


def test_models_have_names_of_their_own(tiny_run, tmp_path) -> None:
    for place in ("a", "b"):
        shutil.copytree(tiny_run / "model", tmp_path / place / "run" / "model")
    names = [entry.name for entry in find_entries([tmp_path / "a" / "run", tmp_path / "b" / "run"])]
    assert names == ["a-run", "b-run"]
    with pytest.raises(UserError, match="named twice"):
        find_entries([tiny_run, tiny_run])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ["cole"]}, "did you mean 'cola'"),
        ({"seeds": 0}, "--seeds must be at least 1, not 0"),
        ({"settings": ("train.seed=4",)}, "cannot change the task or the seed"),
        ({"tasks": ["squad1"]}, "squad"),
    ],
)
def test_bad_options_are_refused(options, message, tiny_run, tasks, tmp_path) -> None:
    with pytest.raises(UserError, match=message):
        benchmark([tiny_run], tasks, tmp_path / "out", device="cpu", **options)
    assert not (tmp_path / "out").exists()


def command(done, tiny_run, tasks) -> list[object]:
    settings = [part for setting in QUICK for part in ("--set", setting)]
    return ["benchmark", tiny_run, "--data", tasks, "--out", done[0], "--seeds", 2, "--device", "cpu", *settings]


@pytest.mark.parametrize("width", [80, 200])
def test_table_breaks_no_word(width, done, tiny_run, tasks, run_command, monkeypatch) -> None:
    """A row for each model where there is room, else a column."""
    monkeypatch.setenv("COLUMNS", str(width))
    code, shown, _ = run_command(*command(done, tiny_run, tasks))
    assert code == 0
    table = [line for line in shown.splitlines() if line.startswith(("┃", "│"))]
    cells = [[cell.strip() for cell in line.strip("┃│").replace("┃", "│").split("│")] for line in table]
    names = ["shape", "minutes", "tokens", "loss", "GLUE-5", *done[1]["columns"]]
    assert [name for name in ([row[0] for row in cells] if width == 80 else cells[0]) if name in names] == names
    median = f"{done[1]['rows'][0]['scores']['CoLA']['median']:.1f}"
    rows = cells if width == 80 else list(zip(*cells, strict=True))
    assert next(row for row in rows if row[0] == "CoLA")[1].startswith(median)
    assert "…" not in "".join(table)


def test_the_command_writes_a_page(done, tiny_run, tasks, run_command) -> None:
    out, result = done
    code, shown, _ = run_command(*command(done, tiny_run, tasks), "--json")
    assert code == 0
    assert json.loads(shown)["rows"] == result["rows"]
    page = (out / "benchmark.html").read_text()
    assert "78.4" in page
    assert page.count("<figure") == 6
