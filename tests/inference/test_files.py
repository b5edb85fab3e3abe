"""Predictions for files: every format in and out, in order, in constant memory, identical after a killed run."""

import csv
import datetime
import io
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bertsmith.errors import UserError
from bertsmith.inference import files, journal, output, writers
from bertsmith.inference import predictor as predicting
from bertsmith.inference.files import predict, predict_file
from bertsmith.inference.output import partial_folder
from bertsmith.rows.columns import Columns, read_rows
from bertsmith.tasks.task import find_task
from bertsmith.text.unknown import Unknowns

LABELS = ("files", "numbers")


class Stub(predicting.Predictor):
    """A predictor that labels by the length of the text and records how many rows each window had."""

    columns, shortened, max_length, task, members = Columns(), 0, 16, find_task("classify"), ()
    engine, unknowns = "stub", Unknowns(None)  # the stub does not tokenise

    def __init__(self, folder: Path, fail_after: int | None = None) -> None:
        self.folders, self.fail_after, self.windows = (folder,), fail_after, []

    def predict_rows(self, rows):
        window = []
        for row in rows:
            window.append(row)
            if len(window) == predicting.WINDOW:
                yield from self._predictions(window)
                window = []
        yield from self._predictions(window)

    def _predictions(self, window):
        self.windows.append(len(window))
        if self.fail_after is not None and len(self.windows) > self.fail_after:
            raise KeyboardInterrupt
        # the other rows of the window change the score, as in a model, where they change the last bits
        characters = sum(len(row.text) for row in window)
        for row in window:
            share = len(row.text) / characters
            yield {"label": LABELS[len(row.text) % 2], "score": share, "scores": {"files": share, "numbers": 1 - share}}


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Replaces `Predictor.load` by a stub; windows hold ten rows."""
    monkeypatch.setattr(predicting, "WINDOW", 10)
    monkeypatch.setattr(writers, "ROWS_AT_ONCE", 7)

    def put(**options):
        made = Stub(tmp_path / "model", **options)
        monkeypatch.setattr(files.Predictor, "load", lambda name, device=None, **options: made)
        return made

    (tmp_path / "model").mkdir()
    put()
    return put


def table(count: int = 25) -> list[dict]:
    return [
        {"id": i, "text": f"text {'x' * (i % 7)} é\n{i}", "note": None if i < 12 else f"n{i}"} for i in range(count)
    ]


def write(path: Path, rows: list[dict]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=4)
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path: Path) -> list[dict]:
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("kind_out", [".jsonl", ".csv", ".parquet"])
@pytest.mark.parametrize("kind_in", [".jsonl", ".csv", ".parquet"])
def test_every_format_in_and_out(kind_in, kind_out, stub, tmp_path):
    data, out = write(tmp_path / f"in{kind_in}", table()), tmp_path / f"out{kind_out}"
    assert predict("m", data, out, keep=["text", "id", "note"]) == 25
    found = read(out)
    assert [str(row["id"]) for row in found] == [str(i) for i in range(25)]
    assert [row["text"] for row in found] == [row["text"] for row in table()]
    assert list(found[0])[:5] == ["text", "id", "note", "label", "score"]
    assert [row["label"] for row in found] == [LABELS[len(row["text"]) % 2] for row in table()]
    scores = [row["scores.numbers"] if kind_out == ".csv" else row["scores"]["numbers"] for row in found]
    assert all(float(row["score"]) + float(score) == pytest.approx(1) for row, score in zip(found, scores, strict=True))
    assert found[-1]["note"] == "n24"
    assert found[0]["note"] in ("", None)
    assert not partial_folder(out).exists()


def test_parquet_keeps_numbers_as_numbers_and_dates_as_text(stub, tmp_path):
    rows = [{"text": "a", "id": 1 if i < 8 else 0.5} for i in range(10)]  # the first block has only integers
    predict("m", write(tmp_path / "in.jsonl", rows), tmp_path / "out.parquet", keep=["id"])
    assert [row["id"] for row in read(tmp_path / "out.parquet")] == [1.0] * 8 + [0.5] * 2
    days = [{"text": "a", "day": datetime.date(2024, 1, 31)}]
    predict("m", write(tmp_path / "in.parquet", days), tmp_path / "days.parquet", keep=["day"])
    assert read(tmp_path / "days.parquet")[0]["day"] == "2024-01-31"


def feed(monkeypatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


@pytest.mark.parametrize("text", ["one\n\n{three\n", '{"text": "one"}\n{"text": ""}\n\n{"text": "{three"}\n'])
def test_standard_input_to_standard_output(text, stub, monkeypatch, capsys):
    feed(monkeypatch, text)
    assert predict("m", "-", "-", keep=["text"]) == 3
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["text"] for row in found] == ["one", "", "{three"]


def test_empty_standard_input_is_refused(stub, monkeypatch, tmp_path):
    feed(monkeypatch, "")
    with pytest.raises(UserError, match="standard input is empty"):
        predict("m", "-", tmp_path / "out.jsonl")
    assert not partial_folder(tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".parquet"])
@pytest.mark.parametrize("rows", [20, 25])
@pytest.mark.parametrize("cut", [0, 1, 9])
def test_a_resumed_run_gives_identical_bytes(kind, rows, cut, stub, tmp_path):
    data, out = write(tmp_path / "in.jsonl", table(rows)), tmp_path / f"out{kind}"
    predict("m", data, tmp_path / f"whole{kind}", keep=["id"])
    stub(fail_after=1)
    with pytest.raises(KeyboardInterrupt):
        predict("m", data, out, keep=["id"])
    assert not out.exists()
    partial = partial_folder(out) / journal.LINES
    assert len(partial.read_text().splitlines()) == 10
    lines = partial.read_bytes().splitlines(keepends=True)
    partial.write_bytes(b"".join(lines) + b"".join(lines[:cut]) + lines[0][:9])  # half a window, and a truncated line
    with pytest.raises(UserError, match="add --resume"):
        predict("m", data, out, keep=["id"])
    again = stub()
    assert predict("m", data, out, keep=["id"], resume=True) == rows
    assert sum(again.windows) == rows - 10
    assert out.read_bytes() == (tmp_path / f"whole{kind}").read_bytes()
    assert not partial_folder(out).exists()


def test_resume_with_an_empty_partial_folder_starts_from_the_first_row(stub, tmp_path):
    out = tmp_path / "out.jsonl"
    partial_folder(out).mkdir()  # killed before the first row
    assert predict("m", write(tmp_path / "in.csv", table(3)), out, resume=True) == 3


def test_resume_with_other_options_model_or_input_is_refused(stub, tmp_path):
    data, out = write(tmp_path / "in.jsonl", table()), tmp_path / "out.jsonl"
    stub(fail_after=1)
    with pytest.raises(KeyboardInterrupt):
        predict("m", data, out)
    with pytest.raises(UserError, match="begun with another keep"):
        predict("m", data, out, keep=["id"], resume=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="begun with another model"):
        predict("m", data, out, resume=True)
    (tmp_path / "model" / "config.json").unlink()
    os.utime(data, (1, 1))
    with pytest.raises(UserError, match="begun with another input_file"):
        predict("m", data, out, resume=True)


def test_a_bad_row_keeps_the_partial_run_and_a_bad_first_row_leaves_no_files(stub, tmp_path):
    rows = table()
    rows[17] = {"id": 17}
    data, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    with pytest.raises(UserError, match=r"in\.jsonl, line 18: nothing in column 'text'"):
        predict("m", data, out)
    assert partial_folder(out).exists()
    write(data, [{"id": 0}])
    with pytest.raises(UserError, match="no column 'text'"):
        predict("m", data, tmp_path / "other.csv")
    assert not partial_folder(tmp_path / "other.csv").exists()


def test_bad_options_are_refused_with_the_reason(stub, tmp_path):
    data = write(tmp_path / "in.jsonl", table())
    for options, message in (
        ({"out": tmp_path / "out.txt"}, "unknown kind of file '.txt'"),
        ({"out": data}, "is the input"),
        ({"out": tmp_path / "o.csv", "keep": ["nota"]}, "no column 'nota'; did you mean 'note'"),
        ({"out": "-", "resume": True}, "--out - has none"),
        ({"out": tmp_path / "o.csv", "text": "txt"}, "no column 'txt'; did you mean 'text'"),
    ):
        with pytest.raises(UserError, match=message):
            predict("m", data, **options)
    write(data, [{"text": "a", "label": "x"}])
    with pytest.raises(UserError, match="--keep label"):
        predict("m", data, tmp_path / "o.csv", keep=["label"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "model"]


def test_parquet_reads_only_the_needed_columns(tmp_path):
    data = write(tmp_path / "in.parquet", table())
    with pytest.raises(UserError, match=r"no column 'txt'; did you mean 'text'.*id, text, note"):
        list(read_rows(data, Columns("txt"), labelled=False))
    shares = []
    rows = list(read_rows(data, Columns(), labelled=False, keep=["note"], on_progress=shares.append))
    assert [row.kept for row in rows] == [{"note": row["note"]} for row in table()]
    assert shares == [(i + 1) / 25 for i in range(25)]


MEMORY = """
    import resource, sys
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from test_files import Stub
    from bertsmith.inference.files import predict_file
    from bertsmith.rows.columns import Columns
    for data in {data!r}:
        out = Path(data).with_name("out-" + Path(data).name).with_suffix({out!r})
        count = predict_file(Stub(Path({folder!r})), data, out, Columns(), ["id"])
        print(count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "out"), [(".parquet", ".parquet"), (".csv", ".jsonl")])
def test_memory_does_not_grow_with_the_file(kind, out, tmp_path):
    """A separate process reads 20,000 and then 200,000 rows; all of them in memory would take over 100 MB."""
    files = []
    for count in (20_000, 200_000):
        files.append(tmp_path / f"{count}{kind}")
        columns = {"id": range(count), "text": [f"a short text {i}" for i in range(count)]}
        if kind == ".parquet":
            pq.write_table(pa.table(columns), files[-1], row_group_size=10_000)
        else:
            files[-1].write_text("id,text\n" + "".join(f"{i},a short text {i}\n" for i in range(count)))
    names = {"tests": str(Path(__file__).parent), "folder": str(tmp_path), "data": list(map(str, files)), "out": out}
    code = textwrap.dedent(MEMORY).format(**names)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    small, large = (tuple(map(int, line.split())) for line in done.stdout.splitlines())
    assert (small[0], large[0]) == (20_000, 200_000)
    assert (large[1] - small[1]) / 1024 < 25


KILLED = """
    import sys, time
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from test_files import Stub, predicting
    from bertsmith.inference.files import predict_file
    from bertsmith.rows.columns import Columns
    predicting.WINDOW = 50
    class Slow(Stub):
        def _predictions(self, window):
            time.sleep(0.05)
            yield from super()._predictions(window)
    predict_file(Slow(Path({folder!r})), {data!r}, Path({out!r}), Columns(), ["id"])
"""


@pytest.mark.slow
def test_a_run_that_is_killed_twice_is_resumed(tmp_path, monkeypatch):
    data, out = write(tmp_path / "in.jsonl", table(1033)), tmp_path / "out.csv"
    (tmp_path / "model").mkdir()
    names = {"tests": str(Path(__file__).parent), "folder": str(tmp_path / "model"), "data": str(data), "out": str(out)}
    partial, sizes = partial_folder(out) / journal.LINES, [0]
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(KILLED).format(**names)])
        deadline = time.monotonic() + 60
        while not partial.exists() or partial.stat().st_size <= sizes[-1]:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
        process.wait()
        assert not out.exists()
        sizes.append(partial.stat().st_size)
    monkeypatch.setattr(predicting, "WINDOW", 50)
    rest = Stub(tmp_path / "model")
    assert predict_file(rest, str(data), out, Columns(), ["id"]) == 1033
    assert 0 < sum(rest.windows) < 1033
    predict_file(Stub(tmp_path / "model"), str(data), tmp_path / "whole.csv", Columns(), ["id"])
    assert out.read_bytes() == (tmp_path / "whole.csv").read_bytes()


def test_an_existing_output_is_overwritten_only_with_force(stub, tmp_path):
    data, out = write(tmp_path / "in.jsonl", table()), tmp_path / "out.jsonl"
    out.write_text("mine\n")
    for resume in (False, True):
        with pytest.raises(UserError, match="is there already; add --force"):
            predict("m", data, out, resume=resume)
    assert out.read_text() == "mine\n"
    assert predict("m", data, out, force=True) == 25
    whole = out.read_bytes()
    assert len(whole.splitlines()) == 25
    stub(fail_after=1)
    with pytest.raises(KeyboardInterrupt):
        predict("m", data, out, force=True)
    stub()
    with pytest.raises(UserError, match="add --resume to continue it, or --force"):
        predict("m", data, out)
    assert predict("m", data, out, resume=True) == 25
    assert out.read_bytes() == whole


def test_resume_with_another_engine_is_refused(stub, tmp_path):
    data, out = write(tmp_path / "in.jsonl", table()), tmp_path / "out.jsonl"
    stub(fail_after=1)
    with pytest.raises(KeyboardInterrupt):
        predict("m", data, out)
    stub().engine = "onnxruntime, int8"
    with pytest.raises(UserError, match="begun with another engine"):
        predict("m", data, out, resume=True)


@pytest.mark.parametrize("window", [0, 1])
def test_a_window_with_a_flipped_byte_is_predicted_again(window, stub, tmp_path, capsys):
    data, out = write(tmp_path / "in.jsonl", table()), tmp_path / "out.jsonl"
    predict("m", data, tmp_path / "whole.jsonl")
    stub(fail_after=2)
    with pytest.raises(KeyboardInterrupt):
        predict("m", data, out)
    path = partial_folder(out) / journal.LINES
    damaged = bytearray(path.read_bytes())
    damaged[window * len(damaged) // 2 + 20] ^= 1
    path.write_bytes(damaged)
    again = stub()
    assert predict("m", data, out, resume=True) == 25
    assert sum(again.windows) == 25 - 10 * window
    assert "is damaged after byte" in capsys.readouterr().err
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_damaged_facts_of_a_stopped_run_are_a_one_line_error(stub, tmp_path):
    data, out = write(tmp_path / "in.jsonl", table()), tmp_path / "out.jsonl"
    stub(fail_after=1)
    with pytest.raises(KeyboardInterrupt):
        predict("m", data, out)
    (partial_folder(out) / output.FACTS).write_text('{"model": ')
    with pytest.raises(UserError, match=r"facts\.json is not valid JSON"):
        predict("m", data, out, resume=True)


def test_an_input_that_is_truncated_while_it_is_read_is_an_error(stub, tmp_path):
    data, out = write(tmp_path / "in.jsonl", table(4000)), tmp_path / "out.jsonl"

    class Cuts(Stub):
        def _predictions(self, window):
            os.truncate(data, 100_000)
            return super()._predictions(window)

    made = Cuts(tmp_path / "model")
    files.Predictor.load = lambda name, device=None, **options: made  # undone by the fixture
    with pytest.raises(UserError, match=r"in\.jsonl was changed while it was read|in\.jsonl, line"):
        predict("m", data, out)
    assert not out.exists()


def test_n_best_keeps_the_likeliest_labels(stub, tmp_path):
    data = write(tmp_path / "in.jsonl", table())
    predict("m", data, tmp_path / "out.jsonl", n_best=1)
    assert all(list(row["scores"].values()) == [max(row["scores"].values())] for row in read(tmp_path / "out.jsonl"))
    with pytest.raises(UserError, match="--n-best 0 must be at least 1"):
        predict("m", data, tmp_path / "other.jsonl", n_best=0)
