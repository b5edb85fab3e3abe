"""The curve of the speedrun: scores and held-out loss by minutes of pre-training, by tokens, and what they cost.

    python -m benchmarks.speedrun_curve add benchmark/benchmark.json [--name speedrun]
    python -m benchmarks.speedrun_curve merge FILE …
    python -m benchmarks.speedrun_curve page

A point is a row of what `bertsmith benchmark` writes about a pre-training run. `--name` is that of the curve which it
belongs to, by default the name that the model has in that file; points with the same name and minutes replace each
other. Call `add` on the machine and with the commit that the benchmark ran on, because it records both; `--results` and
`merge` bring the points here. `page` draws the curves and puts the table into docs/experiments.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.family_pages import put_tables
from benchmarks.record import RESULTS, earlier, keep, merge_files
from bertsmith.finetuning.benchmark import COLUMNS

NAME, PART = "speedrun_curve", "points"
PAGE = Path(__file__).parents[1] / "docs" / "experiments.md"
# An H200 SXM on demand at Hyperstack (hyperstack.cloud/gpu-pricing, August 2026).
DOLLARS_PER_HOUR = 3.99
LOSS = "mlm_loss"
Results = dict[str, Any]


def point_of(row: Results, name: str) -> Results:
    """A point of a curve from a row of a benchmark."""
    if "minutes" not in row:
        raise SystemExit(f"{row['model']} is not the end of a pre-training run, so it has no minutes")
    scores = {column: {"median": facts["median"], "values": facts["values"]} for column, facts in row["scores"].items()}
    held_out = {key: round(value, 4) for key, value in row["held_out"].items()}
    found = {"name": name, "minutes": round(row["minutes"], 2), "tokens": row["tokens"], "held_out": held_out}
    found |= {key: row[key] for key in ("layers", "width")}
    return {**found, "scores": scores, "mean": row.get("mean")}


def add(arguments: argparse.Namespace) -> None:
    for file in arguments.names:
        table = json.loads(Path(file).read_text(encoding="utf-8"))
        if table["settings"]:
            raise SystemExit(f"{file} is not by the protocol: {', '.join(table['settings'])}")
        for row in table["rows"]:
            point = point_of(row, arguments.name or row["name"])
            point |= {"seeds": table["seeds"], "protocol": table["protocol"], "partial": table["partial"]}
            keep(NAME, arguments.results, PART, f"{point['name']} {point['minutes']:.0f} min", point)


def curves(results: Results) -> Iterator[tuple[str, list[Results]]]:
    """The points of each curve, by minutes."""
    found = sorted(results.get(PART, {}).values(), key=lambda point: point["minutes"])
    for name in dict.fromkeys(point["name"] for point in found):
        yield name, [point for point in found if point["name"] == name]


def dollars(minutes: float) -> float:
    return minutes / 60 * DOLLARS_PER_HOUR


def table_of(results: Results) -> list[list[str]]:
    """The header and a line for each point."""
    columns = [column.name for column in COLUMNS]
    rows = [["", "minutes", "US$", "million tokens", "masked-word loss", "GLUE-5", *columns]]
    for name, points in curves(results):
        for point in points:
            loss, mean = point["held_out"].get(LOSS), point["mean"]
            cells = [
                name,
                f"{point['minutes']:.0f}",
                f"{dollars(point['minutes']):.2f}",
                f"{point['tokens'] / 1e6:.0f}",
            ]
            cells += ["–" if loss is None else f"{loss:.2f}", "–" if mean is None else f"{mean:.1f}"]
            medians = [point["scores"].get(column, {}).get("median") for column in columns]
            rows.append(cells + ["–" if median is None else f"{median:.1f}" for median in medians])
    return rows


def plot(results: Results, path: Path) -> Path:
    """Draw GLUE-5 and the masked-word loss by minutes and by tokens."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, places = plt.subplots(2, 2, figsize=(9, 6), layout="constrained", sharex="col", sharey="row")
    for name, points in curves(results):
        minutes, tokens = [p["minutes"] for p in points], [p["tokens"] / 1e6 for p in points]
        scores = [p["mean"] for p in points], [p["held_out"].get(LOSS) for p in points]
        for line, values in zip(places, scores, strict=True):
            for place, along in zip(line, (minutes, tokens), strict=True):
                known = [(x, y) for x, y in zip(along, values, strict=True) if y is not None]
                if known:
                    place.plot(*zip(*known, strict=True), marker="o", label=name)
    places[0][0].set(ylabel="GLUE-5", xscale="log")
    places[1][0].set(ylabel="masked-word loss", xlabel="minutes on one H200")
    places[1][1].set(xlabel="million tokens", xscale="log")
    if places[0][0].lines:
        places[0][0].legend(fontsize=8)
    figure.savefig(path)
    return path


def page(arguments: argparse.Namespace) -> None:
    results = earlier(NAME, arguments.results)
    put_tables(arguments.page, {"curve": table_of(results)})
    print(plot(results, arguments.results / f"{NAME}.svg"))


def main(given: list[str] | None = None) -> None:
    commands: dict[str, Callable[[argparse.Namespace], None]] = {
        "add": add, "merge": partial(merge_files, NAME), "page": page,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=commands)
    parser.add_argument("names", nargs="*", help="add: files of `bertsmith benchmark`; merge: files of results")
    parser.add_argument("--name", default="", help="add: the name of the curve")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--page", type=Path, default=PAGE, help="page: the file that the table is put into")
    arguments = parser.parse_args(given)
    commands[arguments.command](arguments)


if __name__ == "__main__":
    main()
