"""Rows of a table one by one: by the clock, with several seeds of pre-training, and put together from scores alone."""

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from paper_data import write_tasks
from runs import step_clock

from benchmarks import paper_hour
from benchmarks.record import read_results
from bertsmith.config import read_json
from bertsmith.corpus.build import build_corpus
from bertsmith.corpus.vocabulary import train_tokenizer
from bertsmith.errors import UserError
from bertsmith.finetuning import scored as scoring
from bertsmith.finetuning.task_data import find_data
from bertsmith.paper import work as works
from bertsmith.paper.findings import noise, standard_error
from bertsmith.paper.reproduce import reproduce
from bertsmith.paper.scales import SCALES
from bertsmith.paper.tables import table5
from bertsmith.recipes import left_to_right, recipe, roberta_prenorm
from bertsmith.rows.columns import Columns
from bertsmith.tasks.reading import training_rows
from bertsmith.tasks.task import find_task

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = ("num_layers=1", "hidden_size=16", "num_heads=2", "intermediate_size=16", "max_positions=32")
SHORT = (*(f"model.{change}" for change in SHAPE), "data.max_length=32", "train.batch_size=8", "train.workers=0")
QUICK = ("train.epochs=1", "data.max_length=32")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    """MRPC and SST-2 alone."""
    whole, kept = write_tasks(tmp_path_factory.mktemp("tasks")), tmp_path_factory.mktemp("kept")
    for name in ("MRPC", "SST-2"):
        shutil.copytree(whole / name, kept / name)
    return kept


def run(tables: str, folder: Path, tasks: Path, **options: Any) -> list[dict[str, Any]]:
    settings = {"scale": "hour", "minutes": 0.03, "pretraining": SHORT, "finetuning": QUICK, "device": "cpu"}
    return reproduce(tables.split(), folder, data=tasks, **{**settings, **options})


def scores_in(folder: Path) -> dict[Path, Any]:
    return {path.relative_to(folder): read_json(path) for path in folder.rglob("scores.json")}


@pytest.fixture(scope="module")
def rows(tmp_path_factory, tasks, world) -> list[Path]:
    """Two work folders, as of two machines: one row with two seeds of pre-training, and another row with one."""
    first, second = (tmp_path_factory.mktemp(name) for name in ("first", "second"))
    corpus = world / "shards"
    with pytest.MonkeyPatch.context() as patch:
        step_clock(patch)
        run("table5", first, tasks, corpus=corpus, rows=["LTR & No NSP"], seeds=2, pretraining_seeds=[1, 2])
        run("table5", second, tasks, corpus=corpus, rows=["bert-base-no-nsp"], seeds=2)
    return [first, second]


def copied_scores(folders: list[Path], out: Path) -> Path:
    for folder in folders:
        for file in folder.rglob("scores.json"):
            (out / file.relative_to(folder)).parent.mkdir(parents=True)
            shutil.copy(file, out / file.relative_to(folder))
    return out


def test_scores_of_several_machines_make_one_table(rows, tasks, world, tmp_path, monkeypatch) -> None:
    assert [path.name for path in sorted(rows[0].glob("hour/pretrained/*"))] == [
        "bert-base-left-to-right", "bert-base-left-to-right-seed-2",
    ]  # fmt: skip
    folder = copied_scores(rows, tmp_path / "work")
    monkeypatch.setattr(works, "pretrain", None)
    monkeypatch.setattr(scoring, "finetune", None)
    (result,) = run("table5", folder, tasks, seeds=2, pretraining_seeds=[1, 2], show=True)
    ours = {row["name"]: row for row in result["rows"] if "not_run" not in row}
    assert list(ours) == ["No NSP", "LTR & No NSP"]
    one, two = ours["No NSP"]["ours"]["MRPC"], ours["LTR & No NSP"]["ours"]["MRPC"]
    assert (one["seeds"], two["seeds"]) == (2, 4)
    assert [len(values) for values in two["by_pretraining"]] == [2, 2]
    assert two["values"] == [value for values in two["by_pretraining"] for value in values]
    assert list(result["pretraining"]) == [
        "bert-base-no-nsp", "bert-base-left-to-right", "bert-base-left-to-right-seed-2",
    ]  # fmt: skip
    runs = result["pretraining"].values()
    assert all(run["seconds"] == pytest.approx(1.8, abs=1.0) for run in runs)
    assert [next(iter(run["scores"])) for run in runs] == ["mlm_loss", "lm_loss", "lm_loss"]
    assert ours["LTR & No NSP"]["tokens"] == pytest.approx(sum(r["tokens"] for r in list(runs)[1:]) / 2, abs=1)
    page = (folder / "hour" / "table5.html").read_text()
    assert "2 fine-tuning seeds per score and pre-training run; 2 pre-training runs each (but 1 of No NSP)" in page
    assert "it was not asked for, and its scores are not there" in page
    with pytest.raises(UserError, match=r"bert-base-no-nsp has no model at .*model to fine-tune; remove the run"):
        run("table5", folder, tasks, rows=["no nsp"], seeds=3)
    with pytest.raises(UserError, match=r"train\.hours is 0\.0005 in .*scores\.json and 0\.001 now"):
        run("table5", folder, tasks, rows=["no nsp"], minutes=0.06)
    with pytest.raises(UserError, match="--scale hour needs text"):  # before anything is done
        run("table5", folder, tasks, rows=["BERT-Base"])


def test_the_figure_has_checkpoints_by_the_clock(rows, tasks, world, tmp_path) -> None:
    folder = shutil.copytree(rows[0], tmp_path / "work")
    shutil.rmtree(folder / "hour" / "pretrained" / "bert-base-left-to-right-seed-2")
    (result,) = run("figure5", folder, tasks, corpus=world / "shards", rows=["bert-base-left-to-right"])
    curve = [row for row in result["rows"] if "not_run" not in row]
    assert [row["series"] for row in curve] == ["left to right"] * 5
    steps = [row["steps"] for row in curve]
    assert steps == sorted(set(steps))
    names = sorted(path.name for path in folder.glob("hour/tuned/*-at-*"))
    assert names == [f"bert-base-left-to-right-at-{share}" for share in (0.2, 0.4, 0.6, 0.8)]
    starts = [read_json(next(folder.glob(f"hour/tuned/{name}/sst2/*/seed-1/run.json")))["start"] for name in names]
    assert len(set(starts)) == 4  # each from a checkpoint of its own
    assert starts == sorted(starts)


def test_rows_are_named_as_in_the_table_or_by_their_recipes(tasks, tmp_path) -> None:
    def planned(*rows: str, **options: Any) -> list[str]:
        (plan,) = run("table5", tmp_path, tasks, rows=rows, dry_run=True, **options)
        return [r["run"].removeprefix("hour/") for r in plan["runs"]]

    one = planned("bert-base-left-to-right")
    assert one[0] == "pretrained/bert-base-left-to-right"
    assert {name.split("/")[1] for name in one[1:]} == {"bert-base-left-to-right", "bert-base-left-to-right-bilstm-1"}
    both = planned("bert-base-left-to-right", "bert-base-right-to-left")
    assert any("beside" in name for name in both)
    assert planned("ltr beside rtl")[:2] == [f"pretrained/bert-base-{d}" for d in ("left-to-right", "right-to-left")]
    seeded = planned("No NSP", pretraining_seeds=[2])
    assert seeded[0] == "pretrained/bert-base-no-nsp-seed-2"
    with pytest.raises(UserError, match=r"--row 'bert-base-no-nps': no row of these tables has this .*; did you mean"):
        planned("bert-base-no-nps")
    with pytest.raises(UserError, match="--row 'bert-base-right-to-left': every row with it needs another recipe"):
        planned("bert-base-right-to-left")
    with pytest.raises(UserError, match="--minutes must be more than 0, not -1"):
        planned("No NSP", minutes=-1)
    with pytest.raises(UserError, match="--pretraining-seed must be at least 1, not 0"):
        planned("No NSP", pretraining_seeds=[0])


def test_a_row_with_another_vocabulary_needs_a_corpus_of_its_own(tasks, world, tmp_path) -> None:
    options: dict[str, Any] = {"corpus": world / "shards", "scale": "tiny", "minutes": None, "pretraining": ()}
    with pytest.raises(UserError, match=r"'OpenAI GPT': .* give --corpus gpt=FOLDER, of `tokenizer train --kind bpe`"):
        run("table5", tmp_path, tasks, rows=["gpt"], **options)
    (plan,) = run("table5", tmp_path, tasks, dry_run=True, **options)
    assert not [r["run"] for r in plan["runs"] if "gpt" in r["run"] or "elmo" in r["run"]]
    with pytest.raises(UserError, match=r"--corpus other: .*shards is given for all recipes already"):
        run("table5", tmp_path, tasks, **{**options, "corpus": [world / "shards", "other"]})
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_gpt_and_elmo_are_run_beside_bert(tasks, world, tmp_path) -> None:
    corpora = [str(world / "shards")]
    for name, kind in (("gpt", "bpe"), ("elmo", "words")):
        train_tokenizer([world / "text.txt"], tmp_path / kind, vocab_size=500, kind=kind)
        build_corpus([world / "text.txt"], tmp_path / kind, tmp_path / f"shards-{kind}", workers=1)
        corpora.append(f"{name}={tmp_path / f'shards-{kind}'}")
    options: dict[str, Any] = {
        "scale": "tiny",
        "minutes": None,
        "corpus": corpora,
        "rows": ["bert-base", "gpt", "elmo"],
    }
    options |= {
        "pretraining": ("train.steps=3", "train.batch_size=8"),
        "finetuning": (*QUICK, "features.hidden_size=8"),
    }
    one, five = run("table1 table5", tmp_path / "work", tasks, **options)
    ours = {row["name"]: row["ours"].keys() for row in one["rows"] if row["ours"]}
    assert ours == {name: {"SST-2", "MRPC"} for name in ("BiLSTM+ELMo+Attn", "OpenAI GPT", "BERT-Base")}
    assert [row["name"] for row in five["rows"] if row["ours"]] == ["BERT-Base", "OpenAI GPT", "ELMo"]
    assert [len(finding["compared"]) for finding in one["findings"]] == [4]
    elmo = read_json(tmp_path / "work" / "tiny" / "pretrained" / "elmo" / "scores.json")
    assert elmo["config"]["model"]["layer_type"] == "lstm"
    assert {"forward_loss", "backward_loss"} <= elmo["scores"].keys()
    tuned = read_json(next((tmp_path / "work").glob("tiny/tuned/elmo/mrpc-mix-all/*/seed-1/scores.json")))
    assert tuned["config"]["features"]["variant"] == "mix-all"


def test_the_plan_has_minutes_and_disk_space(tasks, tmp_path) -> None:
    options: dict[str, Any] = {"rows": ["No NSP"], "pretraining": (), "dry_run": True, "seeds": 5}
    (plan,) = run("table5", tmp_path, tasks, minutes=6, **options)
    assert plan["runs"][0]["hours"] == pytest.approx(0.1, abs=0.001)
    assert 0.4 < plan["gigabytes"] < 2  # models of 41 million parameters: the last one and some checkpoints
    (shared,) = run("table5", tmp_path, tasks, minutes=6, jobs=10, **options)
    assert shared["hours"] < plan["hours"]


def test_the_scale_keeps_the_recipe_of_the_pre_norm_encoder() -> None:
    hour, run = SCALES["hour"], roberta_prenorm()
    made = [hour.pretraining(row.start) for row in table5().rows[:5] if row.start is not None]
    names = ("family", "norm_first", "bias", "hidden_dropout", "attention_dropout", "head_size")
    assert all(getattr(c.model, name) == getattr(run.model, name) for c in made for name in names)
    assert {(c.model.num_layers, c.model.hidden_size) for c in made} == {(8, 512)}
    assert hour.trains_alone  # the minutes of a run are its own
    same = ("optimizer", "learning_rate", "rest_learning_rate", "weight_decay", "warmup", "schedule", "beta2")
    assert all(getattr(c.train, name) == getattr(run.train, name) for c in made for name in same)
    rates = [(c.train.learning_rate, c.train.weight_decay) for c in (*made, hour.pretraining(recipe("gpt")))]
    assert {*rates} == {(0.02, 0.1), (0.01, 0.2)}
    tokens = run.train.batch_size * run.data.max_length
    assert all(c.train.batch_size * c.data.max_length == tokens and c.data.long_length is None for c in made)
    assert made[2].model.direction == left_to_right("base").model.direction
    assert {config.dropout for task in ("rte", "squad1") for config in hour.finetuning(task)} == {0.1}


def test_the_error_of_a_mean_counts_pre_training_runs() -> None:
    assert standard_error([[1.0, 2.0]]) is None
    assert standard_error([[1.0, 2.0], []]) is None
    assert standard_error([[10.0, 10.0], [14.0, 14.0]]) == pytest.approx(2.0)  # two runs that differ by 4
    assert standard_error([[1.0, 3.0], [1.0, 3.0]]) == pytest.approx((4 / 3 / 4) ** 0.5)  # alike by chance
    several = {"error": 3.0, "deviation": 1.0, "seeds": 4, "by_pretraining": [[1.0, 2.0], [7.0, 8.0], []]}
    single = {"deviation": 1.0, "seeds": 4}
    assert noise(several, {**several, "error": 4.0}) == pytest.approx(10.0)
    # one of two runs varies by the square root of two times the error of their mean
    assert noise(several, single) == noise(single, several) == pytest.approx(2 * (9 + 18) ** 0.5)
    assert noise(several, {**single, "deviation": 20.0}) == pytest.approx(2 * (9 + 100) ** 0.5)
    assert noise(single, {**single, "error": None}) == pytest.approx(2 * 0.5**0.5)  # seeds of fine-tuning alone
    assert noise(several, {**single, "deviation": None}) is None


def test_a_part_of_squad_is_completed_and_another_set_is_named(tmp_path) -> None:
    folder = write_tasks(tmp_path / "tasks")
    questions = (folder / "squad" / "train-v1.1.SUBSET.json").read_text()
    (folder / "SQuADShifts").mkdir()
    for name in ("new_wiki", "nyt"):
        moved = questions.replace('"answer_start": 11', '"answer_start": 9')  # found again at its place
        (folder / "SQuADShifts" / f"{name}_v1.0.json").write_text(moved)
    data = find_data(tmp_path, "squad1")
    assert [path.name for path in data.more] == ["new_wiki_v1.0.json", "nyt_v1.0.json"]
    rows, notes = training_rows(find_task("squad1"), data.splits("squad1").train, Columns())
    assert len(rows) == 3 * 24
    assert {row.label[0]["answer_start"] for row in rows} == {11}
    assert any("48 answers were found at another place" in note for note in notes)
    assert [path.name for path in data.splits("squad1").dev[""]] == ["dev-v1.1.json"]
    shutil.copy(folder / "squad" / "train-v1.1.SUBSET.json", folder / "squad" / "train-v1.1.json")
    assert find_data(tmp_path, "squad1").more == ()  # the whole training file is there
    (folder / "CODAH").mkdir()
    for part in ("train", "dev"):
        (folder / "CODAH" / f"fold_0_{part}.tsv").write_text("i\tq\ta\tb\tc\td\t1\n")
    assert find_data(tmp_path, "swag").remark == "CODAH's first fold, not SWAG"


def test_scores_of_rows_are_recorded_once_and_make_the_tables_of_the_page(rows, tasks, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.record.RESULTS", tmp_path / "none")
    folder, results = copied_scores(rows[1:], tmp_path / "work"), tmp_path / "results"
    paper_hour.pack(folder / "hour", results)
    before = read_results(paper_hour.NAME, results)
    monkeypatch.setattr("benchmarks.record.machine", lambda: "another machine")
    paper_hour.pack(copied_scores(rows[:1], tmp_path / "work") / "hour", results)
    after = read_results(paper_hour.NAME, results)
    machines = {key: run["taken"]["machine"] for key, run in after["pretraining"].items()}
    assert machines.pop("bert-base-no-nsp") == before["pretraining"]["bert-base-no-nsp"]["taken"]["machine"]
    assert list(machines.values()) == ["another machine"] * 2
    assert paper_hour.seeds_of(after) == [1, 2]
    paper_hour.unpack(after, tmp_path / "unpacked")
    assert scores_in(tmp_path / "unpacked") == scores_in(tmp_path / "work")
    monkeypatch.setattr(paper_hour, "reproduce", partial(run_shown, tasks))
    page = tmp_path / "page.md"
    places = ["runs", "findings", *paper_hour.TABLES]
    page.write_text("".join(f"<!-- hour {name} -->\n<!-- end of hour {name} -->\n" for name in places))
    paper_hour.main(["page", "--data", str(tasks), "--page", str(page), "--results", str(results)])
    lines = page.read_text().splitlines()
    (left,) = (line.split(" | ") for line in lines if line.startswith("| LTR & No NSP |"))
    (masked,) = (line.split(" | ") for line in lines if line.startswith("| No NSP |"))
    assert (left[-2], masked[-2]) == ("2", "1")
    assert "±" in left[1]
    assert sum(line.startswith("| bert-base-") for line in lines) == 3
    assert any("both directions beat left to right" in line for line in lines)
    assert any(line.startswith("| left to right, 100% of the steps |") for line in lines)
    assert "Not measured yet." not in lines


def run_shown(tasks: Path, tables: Sequence[str], folder: str, **options: Any) -> list[dict[str, Any]]:
    given = {"seeds": 2, "minutes": 0.03, "pretraining_seeds": options["pretraining_seeds"], "show": options["show"]}
    return run(" ".join(tables), Path(folder), tasks, **given)
