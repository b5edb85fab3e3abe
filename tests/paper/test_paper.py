"""The paper's tables as commands: runs are made or reused, missing data is reported, the paper's scores are shown."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from paper_data import write_tasks

from bertsmith.config import override, read_json
from bertsmith.corpus.build import build_corpus
from bertsmith.errors import UserError
from bertsmith.family_recipes import electra
from bertsmith.finetuning import scored as scoring
from bertsmith.finetuning.run import finetune as real_finetune
from bertsmith.finetuning.task_data import Data, find_data
from bertsmith.pages import page
from bertsmith.paper import pages
from bertsmith.paper import reproduce as reproducing
from bertsmith.paper import work as works
from bertsmith.paper.findings import HOLDS, NOISE, REVERSED, judged
from bertsmith.paper.plan import estimate as real_estimate
from bertsmith.paper.plan import pretraining_flops
from bertsmith.paper.reproduce import find_tables, reproduce
from bertsmith.paper.scales import SCALES, find_scale
from bertsmith.paper.tables import TABLES, table5, table6
from bertsmith.recipes import TABLE_6, bert, left_to_right
from bertsmith.tasks.glue_average import PAPER_COLUMNS
from bertsmith.tasks.published import AVERAGES

pytestmark = pytest.mark.usefixtures("one_thread")
SHORT = ("train.steps=10", "train.batch_size=8", "data.long_length=64", "model.max_positions=64")
QUICK = ("train.epochs=1", "data.max_length=32")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks") / "glue").parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A work folder shared by the tests of this file, as by the tables of a user."""
    return tmp_path_factory.mktemp("work")


def run(names, folder, tasks, world, **options):
    settings = {"pretraining": SHORT, "finetuning": QUICK, "data": tasks, "corpus": world / "shards", "device": "cpu"}
    return reproduce([names] if isinstance(names, str) else names, folder, **{**settings, **options})


def test_the_tables_hold_the_papers_figures_once() -> None:
    for name, made in TABLES.items():
        table = made()
        assert table.name == name
        assert all(len(row.paper) == len(table.columns) for row in table.rows)
        assert len({row.name for row in table.rows}) == len(table.rows)
    one, six = TABLES["table1"](), table6()
    base, large = (row for row in one.rows if row.name.startswith("BERT"))
    for place, row in enumerate((base, large)):
        assert [(c.task, c.key) for c in one.columns[:-1]] == list(PAPER_COLUMNS)
        assert round(mean(row.paper[:-1]), 1) == row.paper[-1] == AVERAGES[place]
    assert [row.paper[1] for row in six.rows] == [77.9, 80.6, 81.9, 84.4, 85.7, 86.6]
    assert [row.paper[2:] for row in TABLES["table2"]().rows][-2:] == [(85.1, 91.8), (87.4, 93.2)]
    assert TABLES["table3"]().rows[1].paper == (78.7, 81.9, 80.0, 83.1)


def cell(mean: float, deviation: float | None = 1.0) -> dict[str, Any]:
    return {"mean": mean, "deviation": deviation, "seeds": 4}


def test_the_papers_scores_support_its_findings() -> None:
    found = [(table, finding) for make in TABLES.values() for table in (make(),) for finding in table.findings]
    assert len(found) == 19
    for table, finding in found:
        names = [column.name for column in table.columns]
        assert set(finding.columns) <= set(names)
        rows = [
            {
                "name": row.name,
                "ours": {n: cell(v, None) for n, v in zip(names, row.paper, strict=True) if v is not None},
            }
            for row in table.rows
        ]
        for compared in (c for one in judged(replace(table, findings=(finding,)), rows) for c in one["compared"]):
            assert compared["verdict"] == HOLDS or (finding.or_equal and compared["difference"] > -0.21), compared


def test_findings_are_judged() -> None:
    rows = [{"name": row.name, "ours": {}} for row in table5().rows]
    rows[1]["ours"] = {"MNLI-m": cell(70.0), "MRPC": cell(70.0), "SQuAD": cell(50.0), "RTE": cell(50.0, None)}
    rows[2]["ours"] = {"MNLI-m": cell(60.0), "MRPC": cell(71.0), "SQuAD": cell(52.0), "RTE": cell(49.9, None)}
    rows[3]["ours"] = {"MNLI-m": cell(61.0), "MRPC": cell(73.0)}
    both, spans = judged(table5(), rows)
    assert [c["verdict"] for c in both["compared"]] == [HOLDS, NOISE, REVERSED, HOLDS]
    assert both["compared"][0]["noise"] == pytest.approx(2 * 0.5**0.5)
    assert [(c["column"], c["verdict"]) for c in spans["compared"]] == [("MNLI-m", HOLDS), ("MRPC", REVERSED)]
    (line, _) = pages.findings({"findings": [both, spans], "rows": []})
    assert (
        "Here, holds: MNLI-m +10.0 ± 1.4, RTE +0.1 (one run); within noise: MRPC -1.0 ± 1.4; reversed: SQuAD -2.0"
        in line
    )
    sizes = [{"name": row.name, "ours": {}} for row in table6().rows]
    for row, perplexity in zip(sizes, (9.0, 8.0, 8.5), strict=False):
        row["ours"] = {"LM perplexity": cell(perplexity, None)}
    (larger,) = judged(table6(), sizes)
    assert [c["verdict"] for c in larger["compared"]] == [HOLDS, REVERSED]


def test_figures_have_the_papers_decimals() -> None:
    def row(name: str, *figures: float) -> dict[str, Any]:
        cells = {column: {"mean": figure, "deviation": None} for column, figure in zip("ab", figures, strict=True)}
        return {"name": name, "paper": dict(zip("ab", figures, strict=True)), "ours": cells, "tokens": 0}

    shown = list(pages.lines({"columns": ["a", "b"], "rows": [row("one", 5.84, 94.0), row("two", 4.0, 81.5)]}))
    assert [line[2:4] for line in shown] == [["5.84", "94.0"]] * 2 + [["4.00", "81.5"]] * 2


def test_a_label_of_two_lines_is_drawn() -> None:
    drawn = page.bars("F1", {"paper": [1.0, 2.0], "ours": [2.0, 1.0]}, ["Base", "LTR & No\nNSP"])
    texts = set(re.findall("<text[^>]*>([^<]*)</text>", drawn))
    assert {"Base", "LTR &amp; No", "NSP"} <= texts


def test_scales_keep_the_subject_of_a_row() -> None:
    for scale in SCALES.values():
        shapes = [scale.encoder(row.start.model) for row in table6().rows]
        assert len({(m.num_layers, m.hidden_size, m.num_heads) for m in shapes}) == 6
        assert [m.num_layers for m in shapes] == sorted(m.num_layers for m in shapes)
        budgets = {
            (c.train.steps, c.train.hours, c.data.max_length, c.data.long_length)
            for made in TABLES.values()
            for r in made().rows
            if r.start
            for c in [scale.pretraining(r.start)]
        }
        assert len(budgets) == 1  # the same for every row
    paper = SCALES["paper"]
    assert [
        (m.num_layers, m.hidden_size, m.num_heads) for m in (paper.encoder(r.start.model) for r in table6().rows)
    ] == list(TABLE_6)
    assert override(paper.pretraining(bert("base")), ["train.evaluate_every=0.1"]) == bert("base")
    assert {paper.encoder(row.start.model).init_std for row in table6().rows} == {0.02}
    small = [SCALES["small"].encoder(row.start.model) for row in table6().rows]
    assert {(m.hidden_size, m.init_std) for m in small} == {(256, 0.035), (320, 0.036)}
    assert {(m.hidden_dropout, m.attention_dropout) for m in small} == {(0.0, 0.0)}
    tuned = [c.dropout for s in ("paper", "small") for f in ("", "last") for c in SCALES[s].finetuning("conll2003", f)]
    assert tuned == [None, 0.1, None, 0.1]  # encoders keep their rate; a tagger on features has the paper's
    assert {(c.train.steps, c.train.epochs) for t in ("rte", "squad1") for c in SCALES["small"].finetuning(t)} == {
        (1500, None)  # the same length for every task
    }
    ltr = SCALES["tiny"].pretraining(left_to_right("base"))
    assert (ltr.model.direction, ltr.objective.kind, ltr.model.hidden_size) == ("left-to-right", "causal-lm", 64)
    assert [c.train.learning_rate for c in paper.finetuning("rte")] == [5e-5, 4e-5, 3e-5, 2e-5]
    (squad2,) = paper.finetuning("squad2")
    assert (squad2.train.batch_size, squad2.train.epochs, squad2.train.learning_rate) == (48, 2, 5e-5)
    with pytest.raises(UserError, match="did you mean 'small'"):
        find_scale("smal")


def test_data_is_found_or_reported_as_missing(tasks, tmp_path) -> None:
    assert find_data(tasks, "sst2") == Data(tasks / "glue" / "SST-2")
    squad = tasks / "glue" / "squad"
    assert find_data(tasks, "squad1") == Data(squad / "train-v1.1.SUBSET.json", squad, is_subset=True)
    assert "QNLI has no training file" in find_data(tasks, "qnli")
    assert "has no folder qqp" in find_data(tasks, "qqp")
    assert find_data(None, "rte") == "no --data was given"
    with pytest.raises(UserError, match="no such folder"):
        find_data(tmp_path / "nothing", "rte")


OURS = ["BERT-Base", "No NSP", "LTR & No NSP", "+ BiLSTM", "LTR beside RTL"]


@pytest.mark.slow
def test_table_5(folder, tasks, world) -> None:
    (result,) = run("table5", folder, tasks, world, seeds=2)
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == [*OURS, "OpenAI GPT", "ELMo"]
    for row in (rows[name] for name in OURS):
        assert row["ours"].keys() == {"MNLI-m", "MRPC", "SST-2", "SQuAD", "CoLA", "RTE", "STS-B", "CoNLL-2003"}
        for cell in row["ours"].values():
            assert cell["seeds"] == len(cell["values"]) == 2
            assert -100 <= cell["mean"] <= 100
            assert cell["deviation"] is not None
    assert rows["No NSP"]["paper"]["SQuAD"] == 87.9
    assert len({row["tokens"] for name, row in rows.items() if name in OURS[:4]}) == 1
    assert rows["LTR beside RTL"]["tokens"] == 2 * rows["BERT-Base"]["tokens"]
    assert "give --corpus gpt=FOLDER, of `tokenizer train --kind bpe`" in rows["OpenAI GPT"]["not_run"]
    assert "QNLI has no training file" in result["absent"]["QNLI"]
    assert result["settings"] == [*(f"--set {s}" for s in SHORT), *(f"--tune {s}" for s in QUICK)]
    assert "trained on 24 rows, where the data set has 87,599" in result["partial"]["SQuAD"]
    page = (folder / "tiny" / "table5.html").read_text()
    assert [len(finding["compared"]) for finding in result["findings"]] == [2, 8, 1, 3, 8]
    for text in ("84.4", "LTR &amp; No NSP", "The paper: next sentence", "Missing: QNLI", "Partial: SQuAD", "<svg"):
        assert text in page
    assert read_json(folder / "tiny" / "table5.json") == result
    assert not list(folder.glob("tiny/tuned/**/*.safetensors"))  # scores are kept, models are deleted
    bilstm = read_json(next(folder.glob("tiny/tuned/*bilstm*/sst2/*/seed-1/config.json")))
    assert bilstm["bilstm_layers"] == 1


@pytest.mark.slow
def test_finished_runs_are_reused_and_a_stopped_command_resumes(folder, tasks, world, monkeypatch) -> None:
    run("table5", folder, tasks, world)  # reuses the scores of the test above if it has run
    done = []

    def stops(config, model, *arguments, **options):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(config.task)
        return real_finetune(config, model, *arguments, **options)

    def never(*arguments, **options):
        raise AssertionError("it is there already")

    monkeypatch.setattr(scoring, "finetune", stops)
    with pytest.raises(KeyboardInterrupt):
        run("table1", folder, tasks, world)
    assert done == ["mnli", "sst2"]  # of Large; the tasks of Base are in table 5
    monkeypatch.setattr(
        scoring, "finetune", lambda config, *a, **o: done.append(config.task) or real_finetune(config, *a, **o)
    )
    (result,) = run("table1", folder, tasks, world)
    base = next(row for row in result["rows"] if row["name"] == "BERT-Base")
    assert base["ours"].keys() == {"MNLI-m", "MNLI-mm", "SST-2", "CoLA", "STS-B", "MRPC", "RTE"}
    assert set(result["absent"]) == {"QQP", "QNLI", "average"}
    assert not [note for note in result["notes"] if "not learnt" in note]
    monkeypatch.setattr("bertsmith.pretraining.checks.WORSE", -9.0)
    (result,) = run("table1", folder, tasks, world)
    assert [note.split(":")[0] for note in result["notes"] if "not learnt" in note] == ["bert-base", "bert-large"]
    assert done == ["mnli", "sst2", "cola", "stsb", "mrpc", "rte"]
    monkeypatch.setattr(scoring, "finetune", never)
    monkeypatch.setattr(works, "pretrain", never)
    (again,) = run("table1", folder, tasks, world)
    assert again["rows"] == result["rows"]
    assert next(row for row in result["rows"] if row["name"] == "OpenAI GPT")["not_run"]
    with pytest.raises(UserError, match=r"^train\.steps is 10 .* or another --out$"):
        run("table1", folder, tasks, world, pretraining=("train.steps=11", *SHORT[1:]))
    with pytest.raises(UserError, match=r"train\.epochs is 1"):
        run("table1", folder, tasks, world, finetuning=("train.epochs=2", QUICK[1]))
    (text := folder / "other.txt").write_text("One sentence.\nAnother one.\n\nA third.\n", encoding="utf-8")
    build_corpus([text], world / "tok", other := folder / "other", workers=1)
    with pytest.raises(UserError, match="pre-trained on another corpus"):
        run("table1", folder, tasks, world, corpus=other)


@pytest.mark.slow
def test_several_jobs_give_the_same_results(folder, tasks, world) -> None:
    (before,) = run("table1", folder, tasks, world)
    runs = [run for task in ("rte", "mrpc") for run in folder.glob(f"tiny/tuned/bert-base/{task}/*/seed-1")]
    assert len(runs) == 2
    starts = [folder / "tiny" / "pretrained" / name for name in ("bert-base", "bert-large")]
    weights = [(start / "model" / "model.safetensors").read_bytes() for start in starts]
    for gone in (*runs, *starts):
        shutil.rmtree(gone)
    (after,) = run("table1", folder, tasks, world, jobs=2)
    assert after["rows"] == before["rows"]
    assert [(start / "model" / "model.safetensors").read_bytes() for start in starts] == weights


@pytest.mark.slow
def test_several_jobs_check_a_finished_run_first(folder, tasks, world, monkeypatch) -> None:
    run("table1", folder, tasks, world)
    monkeypatch.setattr(reproducing, "side_by_side", lambda *given, **named: pytest.fail("something was begun"))
    with pytest.raises(UserError, match=r"^train\.steps is 10 .* or another --out$"):
        run(["table1", "table8"], folder, tasks, world, jobs=2, pretraining=("train.steps=11", *SHORT[1:]))


def test_a_model_that_fills_a_device_is_pretrained_alone(tasks, world, tmp_path, monkeypatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(reproducing, "side_by_side", lambda jobs, title, *given, **named: begun.append(title))
    monkeypatch.setattr(works.Work, "pretrained", lambda self, start: begun.append(start.recipe) or {})
    monkeypatch.setattr(reproducing, "run_table", lambda *given: {})
    for scale, expected in (("small", ["pre-training"]), ("base", ["bert-base", "bert-large"])):
        run("table1", tmp_path, tasks, world, jobs=2, scale=scale, pretraining=())
        assert begun == [*expected, "fine-tuning"]
        begun.clear()


@pytest.mark.slow
def test_several_jobs_start_the_longest_runs_first(folder, tasks, world, monkeypatch) -> None:
    run("table5", folder, tasks, world)
    for gone in folder.glob("tiny/tuned/bert-base/*/*/seed-1"):
        shutil.rmtree(gone)
    hours, given = {"sst2": 0.1, "squad1": 3.0, "rte": 0.2, "conll2003": 2.0}, []

    def estimate(*arguments: Any) -> dict[str, Any]:
        plan = real_estimate(*arguments)
        return {"runs": [{**r, "hours": hours.get(r["run"].split("/")[-3], 1.0)} for r in plan["runs"]]}

    monkeypatch.setattr(reproducing, "estimate", estimate)
    monkeypatch.setattr(reproducing, "side_by_side", lambda jobs, title, function, calls, **named: given.extend(calls))
    run("table5", folder, tasks, world, jobs=2)
    tuned = [column.task for _, column, *_ in given]
    assert tuned[:2] == ["squad1", "conll2003"]
    assert set(tuned[2:-2]) == {"mnli", "mrpc", "cola", "stsb"}
    assert tuned[-2:] == ["rte", "sst2"]


@pytest.mark.slow
def test_tables_of_sizes_entities_masks_and_the_curve(folder, tasks, world) -> None:
    six, seven, eight, curve = run(["table6", "table7", "table8", "figure5"], folder, tasks, world)
    assert all(row["ours"]["LM perplexity"]["mean"] > 1 for row in six["rows"])
    assert len({row["ours"]["LM perplexity"]["mean"] for row in six["rows"]}) == 6
    ours = [row for row in seven["rows"] if row["ours"]]
    assert len(ours) == 8
    assert all(row["ours"].keys() == {"dev F1", "test F1"} for row in ours)
    assert all(row["ours"].keys() == {"MNLI-m", "NER, fine-tuned", "NER, features"} for row in eight["rows"])
    starts = list((folder / "tiny" / "pretrained").glob("bert-base-mask-*"))
    assert len(starts) == 5
    steps = [(row["series"], row["steps"]) for row in curve["rows"]]
    assert steps == [(name, n) for name in ("masked words", "left to right") for n in (2, 4, 6, 8, 10)]
    assert all(row["ours"].keys() == {"MNLI-m", "SST-2"} for row in curve["rows"])
    tokens = [row["tokens"] for row in curve["rows"][:5]]
    assert tokens == sorted(set(tokens))
    assert tokens[-1] == read_json(folder / "tiny" / "table5.json")["rows"][0]["tokens"]
    page = (folder / "tiny" / "figure5.html").read_text()
    assert "MNLI-m dev after so many steps" in page
    assert not list((folder / "tiny" / "pretrained").glob("*/checkpoints/*/optimizer.safetensors"))


def test_tables_without_data_give_the_reason(tmp_path, folder, world, monkeypatch) -> None:
    two, three, four = run(["table2", "table3", "table4"], folder, None, world)
    assert two["absent"]["EM"] == two["absent"]["F1"] == "no --data was given"
    assert "not public" in two["absent"]["test F1"]
    assert "not public" in four["absent"]["test"]
    assert not any(row["ours"] for result in (two, three, four) for row in result["rows"])
    monkeypatch.setattr(works, "pretrain", None)  # no model is pre-trained for a table without data
    (two,) = run("table2", tmp_path, None, world)
    assert two["rows"][1]["not_run"] == "no column has data"


def test_dry_run_without_data_or_corpus(tmp_path) -> None:
    """A table's cost can be estimated before anything is downloaded."""
    (plan,) = reproduce(["table2"], tmp_path / "new", dry_run=True, device="cpu")
    assert plan["hours"] > 0
    assert any("tuned" in run["run"] and "squad1" in run["run"] for run in plan["runs"])
    assert any("pretrained" in run["run"] for run in plan["runs"])
    assert "every data set is assumed to have its published size" in plan["note"]
    (base,) = reproduce(["table2"], tmp_path / "new", scale="base", dry_run=True, device="cpu")
    assert base["hours"] > 100 * plan["hours"]
    assert not (tmp_path / "new").exists()


def test_dry_run(tmp_path, tasks, world) -> None:
    (plan,) = run("table5", tmp_path / "new", tasks, world, seeds=3, dry_run=True)
    assert len(plan["runs"]) == 4 + 5 * 8 * 3
    assert plan["hours"] == pytest.approx(sum(r["hours"] for r in plan["runs"]))
    assert plan["hours"] > (len(plan["runs"]) * 3 + 40 * 0.005) / 3600  # each run and each step takes some time
    assert not (tmp_path / "new").exists()
    assert "QNLI" in plan["absent"]
    epochs = [{"pretraining": (*SHORT, f"train.epochs={n}"), "dry_run": True} for n in (10, 20)]
    ten, twenty = (run("table5", tmp_path / "new", tasks, world, **given)[0]["runs"][0]["flops"] for given in epochs)
    assert twenty == pytest.approx(2 * ten, rel=0.1)
    shutil.copytree(tasks / "glue" / "MRPC", tmp_path / "tasks" / "MRPC")
    run("table1", tmp_path / "work", tmp_path / "tasks", world)
    (done,) = run("table1", tmp_path / "work", tmp_path / "tasks", world, dry_run=True)
    assert len(done["runs"]) == 2 + 2  # of Base and of Large
    assert all(r["done"] for r in done["runs"])
    assert done["hours"] == 0
    scale, base = SCALES["paper"], bert("base")
    flops = pretraining_flops(scale.pretraining(base))
    tokens = 1e6 * 256 * (0.9 * 128 + 0.1 * 512)
    assert 6 * 85e6 * tokens < flops < 8 * 110e6 * tokens  # six operations per parameter and token, and attention
    assert pretraining_flops(scale.pretraining(left_to_right("base"))) > flops
    assert pretraining_flops(replace(electra("base"), train=scale.train)) > 1.1 * flops  # its generator is counted


@pytest.mark.slow
def test_the_command_on_the_demos_text(tmp_path, tasks, capsys) -> None:
    from bertsmith.commands.paper import reproduce as command

    arguments = {"tables": ["table2"], "out": tmp_path / "work", "data": tasks, "device": "cpu"}
    command(**arguments, settings=[*SHORT], tune=[*QUICK])
    shown = capsys.readouterr().out
    assert "88.5" in shown
    assert "Missing: test EM" in shown
    command(**arguments, settings=[*SHORT], tune=[*QUICK], as_json=True)
    corpora = {str(tmp_path / "work" / name / "corpus") for name in ("demo", "demo-words")}  # the latter is ELMo's
    assert {*json.loads(capsys.readouterr().out)["corpus"].split(", ")} == corpora
    command(**{**arguments, "tables": ["table3"]}, as_json=True)  # without data nothing is written
    assert json.loads(capsys.readouterr().out)["corpus"] == ""
    command(**{**arguments, "tables": ["table3"]}, dry_run=True)
    assert "Missing: EM" in capsys.readouterr().out


@pytest.mark.parametrize(("width", "tables"), [(80, 2), (60, 3), (20, 9), (200, 1)])
def test_a_wide_table_is_split_for_a_narrow_terminal(width, tables, monkeypatch, capsys) -> None:
    from bertsmith.commands.paper import _show_table

    cell = {"mean": 55.25, "deviation": 0.31}
    columns = [f"task {n}" for n in range(8)]
    rows = [{"name": name, "paper": {}, "ours": dict.fromkeys(columns, cell), "tokens": 2e8} for name in ("a", "b")]
    nothing = {"models": {}, "absent": {}, "partial": {}, "settings": [], "notes": [], "findings": [], "page": "x"}
    monkeypatch.setenv("COLUMNS", str(width))
    _show_table({"table": "table5", "title": "T", "columns": columns, "rows": rows, "seeds": 3, **nothing})
    shown = capsys.readouterr().out
    assert shown.count("┏") == tables
    if width > 20:
        assert all(len(line) <= width for line in shown.splitlines() if "│" in line)
        assert shown.count("55.2 ± 0.3") == 2 * 8
        assert all(name in shown for name in (*columns, "tokens seen", "200M"))


def given(names, folder, tasks, *models, **options):
    settings = {"finetuning": (*QUICK, "features.hidden_size=16"), "data": tasks, "device": "cpu", "models": models}
    return reproduce(names, folder, **{**settings, **options})


def test_given_models_are_not_pre_trained(tmp_path, tasks, world, monkeypatch, capsys) -> None:
    from bertsmith.commands.paper import _show_table

    monkeypatch.setattr(works, "pretrain", None)
    base, work = f"bert-base={world / 'run'}", tmp_path / "work"
    (plan,) = given(["table2"], work, tasks, base, dry_run=True)
    assert [r["run"].split("/")[0] for r in plan["runs"]] == ["paper"]
    assert not work.exists()
    two, five = given(["table2", "figure5"], work, tasks, base)
    rows = {row["name"]: row for row in two["rows"]}
    assert rows["BERT-Base"]["ours"].keys() == {"EM", "F1"}
    assert "tokens" not in rows["BERT-Base"]
    assert rows["BERT-Large"]["not_run"] == "no --model bert-large=… was given"
    assert all("not_run" in row for row in five["rows"])
    assert (two["models"], two["corpus"]) == ({"bert-base": str(world / "run" / "model")}, "")
    assert sorted(path.name for path in work.iterdir()) == ["paper"]
    assert sorted(path.name for path in (work / "paper").iterdir()) == [
        "figure5.html", "figure5.json", "table2.html", "table2.json", "tuned",
    ]  # fmt: skip
    _show_table(two)
    shown = capsys.readouterr().out
    assert f"bert-base is {world / 'run' / 'model'}." in shown
    assert "Fine-tuned as at scale paper." in shown
    monkeypatch.setattr(scoring, "finetune", None)
    assert given(["table2"], work, tasks, base)[0]["rows"] == two["rows"]
    shutil.copytree(world / "run", tmp_path / "other")
    with pytest.raises(UserError, match=r"was fine-tuned from .*run/model, not from .*other/model; give another --out"):
        given(["table2"], work, tasks, f"bert-base={tmp_path / 'other'}")


@pytest.mark.slow
def test_the_second_model_may_be_given(folder, tmp_path, tasks, world) -> None:
    shutil.copytree(tasks / "glue" / "MRPC", tmp_path / "tasks" / "MRPC")
    run("table5", folder, tmp_path / "tasks", world)
    names = ("bert-base-left-to-right", "bert-base-right-to-left")
    models = [f"{name}={folder / 'tiny' / 'pretrained' / name}" for name in names]
    (result,) = given(["table5"], tmp_path / "work", tmp_path / "tasks", *models)
    ran = {row["name"]: row["ours"].keys() for row in result["rows"] if "not_run" not in row}
    assert ran == {name: {"MRPC"} for name in ("LTR & No NSP", "+ BiLSTM", "LTR beside RTL")}


@pytest.mark.parametrize(
    ("models", "settings", "message"),
    [
        (["bert-base-cased"], (), "write the recipe that it replaces before it, as in --model bert-base=bert-base"),
        (["bert-bse=x"], (), "no row starts from 'bert-bse'; did you mean 'bert-base'"),
        (["bert-base=nowhere/at/all"], (), "no such model folder: nowhere/at/all"),
        (
            ["bert-base=x"],
            ("train.steps=9",),
            r"--set train\.steps=9 changes pre-training, and with --model there is none",
        ),
    ],
)
def test_unsuitable_models_are_refused(models, settings, message, tmp_path, tasks) -> None:
    with pytest.raises(UserError, match=message):
        given(["table1"], tmp_path / "work", tasks, *models, pretraining=settings)
    assert not (tmp_path / "work").exists()


def test_bad_options_are_refused_with_the_reason(tmp_path, tasks) -> None:
    with pytest.raises(UserError, match="did you mean 'table5'"):
        find_tables(["tabel5"])
    assert [table.name for table in find_tables(["all"])] == list(TABLES)
    with pytest.raises(UserError, match="--scale base needs text"):
        reproduce(["table5"], tmp_path, scale="base", data=tasks)
    with pytest.raises(UserError, match=r"--tune train\.epocs: unknown setting"):  # before anything is pre-trained
        reproduce(["table5"], tmp_path, data=tasks, finetuning=["train.epocs=1"])
    with pytest.raises(
        UserError, match=r"figure5 evaluates checkpoints by their steps: set train\.steps or train\.hours, not epochs"
    ):
        reproduce(["figure5"], tmp_path, data=tasks, pretraining=["train.epochs=1"])
    assert not list(tmp_path.iterdir())
    shutil.copytree(tasks, tmp_path / "tasks")
    (file,) = (tmp_path / "tasks").glob("*/MRPC/dev.tsv")
    file.write_text("", encoding="utf-8")
    with pytest.raises(UserError, match=r"MRPC/dev\.tsv"):
        reproduce(["table5"], tmp_path / "work", data=tmp_path / "tasks")
    assert not (tmp_path / "work").exists()
    with pytest.raises(UserError, match="--seeds must be at least 1"):
        reproduce(["table5"], tmp_path, seeds=0)
    with pytest.raises(UserError, match="--jobs must be at least 1, not 0"):
        reproduce(["table5"], tmp_path, jobs=0)
