"""A report reads complete and partial runs, draws their metrics, and is one self-contained page."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bertsmith.errors import UserError
from bertsmith.pages import page
from bertsmith.pages.report.page_of_runs import report
from bertsmith.pages.report.runs import duration, read_runs, smooth

CONFIG = {
    "recipe": "bert-tiny",
    "model": {"hidden_size": 128, "num_layers": 2},
    "data": {"max_length": 128},
    "train": {"steps": 1000, "batch_size": 256, "learning_rate": 1e-4, "seed": 1},
    "next_sentence": True,
}
FACTS = {
    "corpus": {"documents": 1234, "sentences": 56789, "tokens": 1_234_567, "tokenizer": "abc"},
    "start": "",
    "model": {"parameters": 4_400_000},
    "machine": {"device": "cuda", "ranks": 2},
    "data": {"sequences": 9876, "held_out_documents": 12, "fullness": 0.9},
}
SAMPLE = {
    "text": "the [MASK] of a list is [MASK]",
    "answers": ["length", "두"],
    "guesses": [[["size", 0.41], ["length", 0.2]], [["a", 0.5], ["b", 0.2], ["c", 0.1], ["두", 0.05], ["d", 0.01]]],
}


def training(step: int, speed: float = 1000.0, **more: Any) -> dict[str, Any]:
    mlm, nsp = 2 + 8 * math.exp(-step / 50), 0.1 + 0.6 * math.exp(-step / 200)
    tokens = step * 256 * 100
    return {
        "step": step,
        "seconds": tokens / speed,
        "tokens": tokens,
        "loss": mlm + nsp,
        "mlm_loss": mlm,
        "nsp_loss": nsp,
        "mlm_accuracy": 0.5,
        "nsp_accuracy": 0.9,
        "learning_rate": 1e-4,
        "gradient_norm": 1.5,
        "tokens_per_second": speed,
        "flop_share": 0.45,
        "memory_gb": 12.5,
        "skipped": 0,
        "max_length": 128,
        **more,
    }


def evaluation(step: int, speed: float = 1000.0, **more: Any) -> dict[str, Any]:
    loss, tokens = 2 + 2 * math.exp(-step / 200), step * 256 * 100
    scores = {"dev_mlm_loss": loss, "dev_mlm_perplexity": math.exp(loss), "dev_mlm_accuracy": 0.6123}
    times = {"step": step, "seconds": tokens / speed, "tokens": tokens}
    return {**times, **scores, "dev_nsp_accuracy": 0.97, "dev_samples": [SAMPLE], **more}


def records(speed: float = 1000.0, last: int = 1000) -> list[dict[str, Any]]:
    found = []
    for step in range(10, last + 1, 10):
        found.append(training(step, speed))
        found += [evaluation(step, speed)] if step % 100 == 0 else []
    return found


def make_run(
    folder: Path,
    lines: list[dict[str, Any]] | None,
    *,
    config: dict[str, Any] = CONFIG,
    facts: dict[str, Any] | None = FACTS,
    finished: bool = True,
) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if facts is not None:
        (folder / "run.json").write_text(json.dumps(facts))
    if lines is not None:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        (folder / "model").mkdir()
    return folder


def written(folders: list[Path], out: Path) -> str:
    assert report(folders, out)["page"] == str(out)
    return out.read_text(encoding="utf-8")


def figures(html: str) -> dict[str, str]:
    """The plots of a page by their titles."""
    found = re.findall(r"<figure><figcaption>(.*?)(?:<span.*?)?</figcaption>(<svg.*?</svg>)</figure>", html, re.S)
    assert len({title for title, _ in found}) == len(found)
    return dict(found)


def curves(svg: str, group: str = "group0") -> list[list[tuple[float, float]]]:
    """The points of a run's curve, in the plot's coordinates, y upwards."""
    parts = re.findall(rf'<g class="{group}">\s*<path d="([^"]*)"', svg)
    return [[(float(x), -float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", part)] for part in parts]


def text_of(html: str) -> str:
    return re.sub(r"<[^>]*>", " ", re.sub(r"<style.*?</style>", "", html, flags=re.S))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of one run."""
    folder = tmp_path_factory.mktemp("report")
    return written([make_run(folder / "first", records())], folder / "page.html")


def test_the_report_of_one_run(first: str) -> None:
    html = first
    words = text_of(html)
    assert "<h1>first: pre-training bert-tiny</h1>" in html
    for fact in ("1,234 documents (1,234,567 tokens)", "in 1,000 steps (25,600,000 tokens seen)", "7 h 6 min", "cuda"):
        assert fact in words
    for figure in ("2.013", "61.2 %", "97.0 %", "25.6M", "45.0 %", "12.5 GB", "9,876", "4,400,000"):
        assert figure in words
    assert "train.batch_size" in words
    assert "not finished" not in words
    drawn = figures(html)
    titles = ["Loss of the masked words", "Accuracy of the masked words, %", "Accuracy of the sentence pairs, %"]
    titles += ["Loss of the sentence pairs", "Learning rate", "Gradient norm", "Tokens per second"]
    assert list(drawn) == [*titles, "Model FLOPs, share of a large matrix product, %", "Memory, GB"]


def test_the_curves_show_the_metrics(first: str) -> None:
    drawn = figures(first)
    raw, level, held_out = curves(drawn["Loss of the masked words"])
    assert 95 < len(raw) <= 100  # the first ones are above the plot
    assert 95 < len(level) <= 100
    assert len(held_out) == 10
    wanted = [2 + 2 * math.exp(-step / 200) for step in range(100, 1001, 100)]
    (x0, y0), (x1, y1) = held_out[0], held_out[-1]
    for i, (x, y) in enumerate(held_out):  # linear scales, so the points are the metrics up to a factor
        assert x == pytest.approx(x0 + (x1 - x0) * i / 9, abs=0.1)
        assert y == pytest.approx(y0 + (y1 - y0) * (wanted[i] - wanted[0]) / (wanted[-1] - wanted[0]), abs=0.1)
    assert [raw[place][0] for place in range(-91, 0, 10)] == pytest.approx([x for x, _ in held_out], abs=0.1)
    assert len(curves(drawn["Learning rate"])) == 1


def test_several_runs_are_compared_over_steps_tokens_and_time(tmp_path: Path) -> None:
    slow, fast = records(1000.0), records(4000.0)
    other = {**CONFIG, "train": {**CONFIG["train"], "learning_rate": 4e-4}}
    runs = [make_run(tmp_path / "slow", slow), make_run(tmp_path / "fast", fast, config=other)]
    html = written(runs, tmp_path / "page.html")
    drawn = figures(html)
    over_time = drawn["Loss of the masked words, held out, over time"]
    assert "training time, hours" in over_time
    assert max(float(tick) for tick in re.findall(r">([\d.kM]+)</text>", over_time)) <= 8
    (first,), (second,) = curves(over_time, "group0"), curves(over_time, "group1")
    assert (first[-1][0] - first[0][0]) == pytest.approx(4 * (second[-1][0] - second[0][0]), rel=0.01)
    over_tokens = drawn["Loss of the masked words, held out, over tokens seen"]
    assert curves(over_tokens, "group0") == curves(over_tokens, "group1")
    differing = html.split("Where the runs differ")[1].split("<details")[0]
    assert re.findall(r"<td class=\w+>(\S*?)</td>", differing) == ["train.learning_rate", "0.0001", "0.0004"]
    for number, colour in enumerate(page.COLOURS[:2]):  # one colour per run, in every plot
        for svg in drawn.values():
            groups = re.findall(rf'<g class="group{number}">.*?</g>', svg, re.S)
            assert groups
            assert all(colour in group for group in groups)


def test_the_best_run_is_named_and_marked(tmp_path: Path) -> None:
    bad = [{**r, **({"dev_mlm_loss": 3.5, "dev_mlm_accuracy": 0.3} if "dev_mlm_loss" in r else {})} for r in records()]
    runs = [make_run(tmp_path / "bad", bad), make_run(tmp_path / "good", records())]
    found = report(runs, tmp_path / "page.html")
    assert found["runs"] == ["bad", "good"]
    assert found["best_held_out_loss"] == {"bad": 3.5, "good": pytest.approx(2 + 2 * math.exp(-5))}
    html = (tmp_path / "page.html").read_text()
    assert "the best first: good (2.013), then bad (3.5)" in html
    row = re.search(r"<tr><td class=\w+>Accuracy of the masked words</td>(.*?)</tr>", html)
    assert row is not None
    assert row[1] == "<td class=short>30.0 %</td><td class=short><span class=right>61.2 %</span></td>"


def test_predictions_of_masked_words_are_shown_over_time(tmp_path: Path) -> None:
    better = {**SAMPLE, "guesses": [[["length", 0.9], ["size", 0.05]], SAMPLE["guesses"][1]]}
    lines = [evaluation(step, dev_samples=[better if step == 900 else SAMPLE]) for step in range(100, 1000, 100)]
    html = written([make_run(tmp_path / "first", lines)], tmp_path / "page.html")
    part = html.split("Filled masks")[1].split("<h2>")[0]
    steps = re.findall(r"<tr><td[^>]*>([\d,]+)</td>", part)
    assert (steps[0], steps[-1], len(steps)) == ("100", "900", 6)
    assert "<span class=mask>length<sup>1</sup></span> of a list" in part
    rows = part.split("<tr>")
    assert "size <small>41 %" in rows[2]
    assert "✓ length <small>20 %" in rows[2]
    assert "✓ length <small>90 %" in rows[-1]
    assert "✓ 4. 두 <small>5.0 %" in rows[2]  # the target is shown although its rank is low
    assert "d <small>1.0 %" not in part
    both = written([tmp_path / "first", make_run(tmp_path / "second", lines)], tmp_path / "both.html")
    assert re.findall(r"<details><summary>Over time: (\w+)", both) == ["first", "second"]


def test_phases_and_skipped_steps_are_marked(first: str, tmp_path: Path) -> None:
    lines = [training(s, max_length=512 if s > 900 else 128, skipped=3 * (s >= 500)) for s in range(10, 1001, 10)]
    plain = figures(first)
    html = written([make_run(tmp_path / "first", lines)], tmp_path / "page.html")
    assert "512 tokens from step 910 on" in html
    assert "skipped because their loss was not finite or diverged (3)" in html
    drawn = figures(html)
    for title, svg in drawn.items():
        assert ("length 512" in svg) == ("stroke-dasharray" in svg) == True  # noqa: E712
        assert "length 512" not in plain[title]
        assert ("#dc2626" in svg) == ("Loss" in title or "norm" in title)
        assert "#dc2626" not in plain[title]


def test_fine_tuning_shows_its_scores(tmp_path: Path) -> None:
    config = {"task": "classify", "train": {"epochs": 3.0}}
    facts = {"start": "/home/me/models/first/model", "labels": ["a", "b"], "rows": 12_345}
    lines: list[dict[str, Any]] = []
    for step in range(10, 101, 10):
        lines += [{"step": step, "loss": 1 / step, "task_loss": 1 / step}]
        lines += [{"step": step, "dev_accuracy": 0.9 - 1 / step, "dev_macro_f1": 0.85}]
    run = make_run(tmp_path / "tuned", lines, config=config, facts=facts)
    html = written([run], tmp_path / "page.html")
    assert "learned the task classify from 12,345 rows with 2 labels, starting from first" in html
    assert "On held-out rows: accuracy 89.0 %, macro F1 85.0." in html
    assert list(figures(html)) == ["Accuracy, %", "Macro F1", "Loss of the task"]
    pretrained = make_run(tmp_path / "pretrained", records())
    both = figures(written([run, pretrained], tmp_path / "both.html"))
    assert {"Accuracy, held out, %", "Loss of the masked words, held out, over time"} <= set(both)


def test_an_unfinished_run_with_a_truncated_line(tmp_path: Path) -> None:
    run = make_run(tmp_path / "going", records(last=400), finished=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 410, "lo')
    html = written([run], tmp_path / "page.html")
    assert "going is not finished: its log ends at step 400 of 1,000." in html
    assert "in 400 of 1,000 steps" in html


def test_runs_with_no_metrics_yet(tmp_path: Path) -> None:
    logs = [None, [], [{}], [{"step": 1}], [{"step": 1, "loss": math.nan}]]
    runs = [make_run(tmp_path / f"new-{number}", lines, finished=False) for number, lines in enumerate(logs)]
    for run in runs:
        html = written([run], tmp_path / "page.html")
        assert f"{run.name} is not finished" in html
        assert "train.batch_size" in html
        assert "<svg" not in html
    html = written([*runs, make_run(tmp_path / "first", records())], tmp_path / "all.html")
    assert curves(figures(html)["Loss of the masked words, held out"], f"group{len(runs)}")


def test_runs_in_the_old_format(world: Path, tmp_path: Path) -> None:
    html = written([world / "run"], tmp_path / "page.html")
    assert {"Loss of the masked words", "Accuracy of the masked words, %", "Learning rate"} <= set(figures(html))
    run = make_run(tmp_path / "older", [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}], facts=None)
    assert list(figures(written([run], tmp_path / "older.html"))) == ["Loss"]
    both = written([run, make_run(tmp_path / "first", records())], tmp_path / "both.html")
    assert "Not drawn over time, because the log has no times: older" in both


def keys_of_every_record() -> list[str]:
    return sorted({key for record in records(last=100) for key in record})


@pytest.mark.parametrize("key", keys_of_every_record())
def test_metrics_with_missing_keys_or_other_types_are_read(
    tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "_svg", lambda figure, title: "<svg></svg>")  # most of the time is spent on the plots
    absent = [{k: v for k, v in r.items() if k != key} for r in records(last=200)]
    odd = [{k: v if k != key else "odd" for k, v in r.items()} for r in records(last=200)]
    none = [{k: v if k != key else None for k, v in r.items()} for r in records(last=200)]
    runs = [make_run(tmp_path / str(i), lines) for i, lines in enumerate([absent, odd, none])]
    assert "<svg" in written([runs[0]], tmp_path / "page.html") or key == "step"
    assert "<svg" in written(runs, tmp_path / "page.html") or key == "step"


@pytest.mark.parametrize(
    "sample",
    [
        {},
        {"text": 3, "guesses": []},
        {"text": "a [MASK]"},
        {"text": "a [MASK] [MASK]", "guesses": [[["b"]]], "answers": []},
        {"text": "a", "guesses": [None, 3]},
    ],
)
def test_malformed_samples_are_ignored(tmp_path: Path, sample: dict[str, Any]) -> None:
    lines = [evaluation(100, dev_samples=[sample, 7]), evaluation(200, dev_samples=sample)]
    assert "<svg" in written([make_run(tmp_path / "first", lines)], tmp_path / "page.html")


class Tags(HTMLParser):
    """The tags and the attributes of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_everything_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script><img src=x onerror=y>"
    sample = {"text": f"{evil} [MASK] {evil}", "answers": [evil], "guesses": [[[evil, 0.5], ["b", 0.1]]]}
    config = {**CONFIG, "recipe": evil, evil: evil}
    facts = {**FACTS, "start": evil, evil: {evil: [evil]}, "machine": {"device": evil}}
    lines = [*records(), evaluation(1010, dev_samples=[sample], **{f"dev_{evil}": 0.5}), training(1010, **{evil: 1.0})]
    name = evil.replace("/", "∕")
    runs = [make_run(tmp_path / name, lines, config=config, facts=facts, finished=False)]
    runs.append(make_run(tmp_path / "other" / name, lines, config=config, facts=facts))
    for folders in (runs[:1], runs):
        tags = Tags(written(folders, tmp_path / "page.html"))
        assert not tags.tags & {"script", "img"}
        assert not tags.attributes & {"onerror", "src"}


def test_the_page_is_self_contained(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, records()) for name in ("한국어", "second")]
    for folders in (runs[:1], runs):
        html = written(folders, tmp_path / "page.html")
        assert not re.search(r"https?:|<link|<script|@import|\bsrc=|url\((?!#)|href=\"[^#]", html)
        assert "한국어" in html
        assert "두" in html
        ids = re.findall(r"\bid=\"?([\w-]+)", html)
        assert len(ids) == len(set(ids))
        assert set(re.findall(r"[(\"]#(\w+)[)\"]", html)) <= set(ids)
    assert written(runs, tmp_path / "page.html") == html


def test_labels_of_runs_are_distinct(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / a / "x" / "run", records()) for a in ("a", "b")]
    folders.append(make_run(tmp_path / "c", records()))
    assert [run.label for run in read_runs(folders)] == ["a/x/run", "b/x/run", "c"]
    assert [run.label for run in read_runs([folders[0], f"{folders[0]}/", folders[0] / ".." / "run"])] == ["run"]


def test_a_folder_that_is_not_a_run_is_refused(world: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "missing", world / "tok", world / "shards", world / "text.txt"):
        with pytest.raises(UserError, match=f"{re.escape(str(folder))} .*a run is a folder that"):
            report([world / "run", folder], tmp_path / "page.html")
    with pytest.raises(UserError, match=f"did you mean {re.escape(str(world / 'run'))}"):
        report([world / "run" / "model"], tmp_path / "page.html")
    with pytest.raises(UserError, match="no run is given"):
        report([], tmp_path / "page.html")
    with pytest.raises(UserError, match=r"ends in \.html"):
        report([world / "run"], world / "run" / "config.json")
    assert not (tmp_path / "page.html").exists()


def test_outliers_do_not_flatten_the_curve() -> None:
    steps = [step / 1000 for step in range(1000)]
    loss = [1000.0 if i < 10 or i == 500 else 5 - 2 * step for i, step in enumerate(steps)]
    svg = page.chart("t", [page.Line(steps, loss, light=True), page.Line(steps, smooth(loss))], limits="robust")
    ticks = re.findall(r">([-−\d.kM]+)</text>", svg)
    assert len(ticks) > 6
    assert max(map(float, ticks)) <= 6
    level = smooth(loss)
    assert level[500] == pytest.approx(4, abs=0.05)
    assert level[-1] == pytest.approx(3, abs=0.05)
    assert smooth([7.0, *[1.0] * 99])[0] == 7  # a steep beginning is kept
    assert smooth([1.0, 5.0]) == [1.0, 5.0]


def test_long_curves_are_thinned_and_keep_their_peaks() -> None:
    values = [0.0] * 50_000
    values[12_345] = 9.0
    svg = page.chart("t", [page.Line(range(50_000), values, group="group0")])
    (points,) = curves(svg)
    assert len(points) <= page.MOST_POINTS + 2
    assert max(y for _, y in points) - min(y for _, y in points) > 100


def test_more_runs_than_the_palette_has_get_distinct_colours() -> None:
    assert len({page.colour_of(i) for i in range(40)}) == 40


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(4.21, "4.2 s"), (45, "45 s"), (125, "2 min 5 s"), (7200, "2 h 0 min"), (190_000, "2 d 4 h"), (59.7, "1 min 0 s")],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words
