"""The curves of a report: losses and scores, the optimiser, speed and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bertsmith.pages import page
from bertsmith.pages.page import GREY, Limits, Line, Mark, colour_of
from bertsmith.pages.report.runs import (
    DEV,
    FEW,
    Run,
    is_number,
    is_share,
    keys,
    name_of,
    percent,
    phases,
    skips,
    smooth,
)

UNITS = (
    (2 * 86400, 86400, "days"),
    (2 * 3600, 3600, "hours"),
    (120, 60, "minutes"),
    (0, 1, "seconds"),
)  # from this many seconds, divisor, unit
AXES = {"step": "step", "tokens": "tokens seen", "seconds": "time"}
OPTIMISER = {"learning_rate": "Learning rate", "gradient_norm": "Gradient norm"}
SPEED = {
    "tokens_per_second": "Tokens per second",
    "flop_share": "Model FLOPs, share of a large matrix product",
    "memory_gb": "Memory, GB",
    "waiting_share": "Waiting for data, share of the time",
}
EXACT = {"learning_rate", "memory_gb"}  # values without noise, which are not smoothed
NO_SCORES = {*AXES, *OPTIMISER, *SPEED, "skipped", "max_length"}


def group_of(number: int) -> str:
    """Return the CSS class of a run's curves, by which the legend hides them."""
    return f"group{number}"


def headlines(runs: Sequence[Run]) -> list[str]:
    """Return the first held-out score of the pre-training runs, and that of the fine-tuning runs."""
    kinds = ([r for r in runs if r.is_finetuning == kind] for kind in (False, True))
    found = (keys(kind, dev=True) for kind in kinds)
    return list(dict.fromkeys(of_kind[0] for of_kind in found if of_kind))


def learning(runs: Sequence[Run]) -> str:
    """Return charts of losses and scores; a single run has its training and held-out curves in one chart."""
    training, held_out = _scores(keys(runs, dev=False)), _scores(keys(runs, dev=True))
    if len(runs) == 1:
        both = dict.fromkeys([*held_out, *training])
        charts = [_chart(runs, key, name_of(key), "both", limits=_limits(key)) for key in both]
    else:
        charts = list(_compared(runs, training, held_out))
    drawn = [chart for chart in charts if chart]
    return "".join([page.section("Learning"), page.figures(drawn), _notes(runs)]) if drawn else ""


def optimiser(runs: Sequence[Run]) -> str:
    """Return charts of the learning rate and the gradient norm."""
    charts = [
        _chart(runs, key, name, "training", limits="robust" if key == "gradient_norm" else "all")
        for key, name in OPTIMISER.items()
    ]
    drawn = [chart for chart in charts if chart]
    return page.section("Optimiser") + page.figures(drawn) if drawn else ""


def speed(runs: Sequence[Run]) -> str:
    """Return charts of throughput and memory."""
    charts = [_chart(runs, key, name, "training", limits="zero") for key, name in SPEED.items()]
    drawn = [chart for chart in charts if chart]
    return page.figures(drawn) if drawn else ""


def _scores(found: Sequence[str]) -> list[str]:
    """Return the keys that get a chart: no total loss beside its parts, and no perplexity beside its loss."""
    parts = any(key.endswith("_loss") for key in found)
    left_out = NO_SCORES | ({"loss"} if parts else set())
    return [key for key in found if key not in left_out and not key.endswith("perplexity")]


def _compared(runs: Sequence[Run], training: Sequence[str], held_out: Sequence[str]) -> Iterator[str]:
    """Yield charts of held-out scores, the first also over tokens and time; then those of the training data."""
    for key in held_out:
        for x in AXES if key in headlines(runs) else ("step",):
            over = f", over {AXES[x]}" if x != "step" else ""
            yield _chart(runs, key, f"{name_of(key)}, held out{over}", "held out", x, _limits(key))
    for key in training:
        if key.endswith("loss") or key not in held_out:
            yield _chart(runs, key, f"{name_of(key)}, training", "training", limits=_limits(key))


def _limits(key: str) -> Limits:
    return "robust" if key.endswith("loss") else "all"


def _chart(runs: Sequence[Run], key: str, title: str, data: str, x: str = "step", limits: Limits = "all") -> str:
    """Return a chart of one key, or nothing if no run has it."""
    divisor, x_label = _axis(runs, x)
    lines: list[Line] = []
    marks: list[Mark] = []
    for number, run in enumerate(runs):
        own = _lines(run, number, key, data, x, divisor, single=len(runs) == 1)
        if run.is_finetuning and all(len(line.x) == 1 for line in own):
            continue  # evaluated only at the end, so there is no curve
        lines += own
        if own:
            crosses = limits == "robust" and data != "held out"
            marks += _marks(run, number, x, divisor, single=len(runs) == 1, crosses=crosses)
    unit = ", %" if is_share(key) else ""
    return page.chart(title + unit, lines, marks, x_label=x_label, limits=limits) if lines else ""


def _axis(runs: Sequence[Run], x: str) -> tuple[float, str]:
    """Return the divisor of the x values and the name of the axis."""
    if x != "seconds":
        return 1, AXES[x]
    longest = max((run.last("seconds") or 0 for run in runs), default=0)
    _, divisor, unit = next(u for u in UNITS if longest >= u[0])
    return divisor, f"training time, {unit}"


def _lines(run: Run, number: int, key: str, data: str, x: str, divisor: float, *, single: bool) -> list[Line]:
    scale, group, lines = percent(key, 1.0), group_of(number), []
    labels = ("training", "held out") if single and data == "both" else ("", "")
    if data != "held out":
        places, values = _scaled(run, key, x, divisor, scale)
        level = values if key in EXACT else smooth(values)
        if level != values:
            lines.append(Line(places, values, colour_of(number), light=True, group=group))
        if values:
            lines.append(Line(places, level, colour_of(number), labels[0], group=group))
    if data != "training":
        places, values = _scaled(run, DEV + key, x, divisor, scale)
        colour = colour_of(1 if single else number)
        lines += [Line(places, values, colour, labels[1], dots=True, group=group)] if values else []
    return lines


def _scaled(run: Run, key: str, x: str, divisor: float, scale: float) -> tuple[list[float], list[float]]:
    places, values = run.points(key, x)
    return [place / divisor for place in places], [scale * value for value in values]


def _marks(run: Run, number: int, x: str, divisor: float, *, single: bool, crosses: bool) -> Iterator[Mark]:
    """Yield marks for changes of the sequence length and for skipped steps."""
    colour, group = (GREY if single else colour_of(number)), group_of(number)
    for record, length in phases(run):
        if is_number(record.get(x)):
            yield Mark(record[x] / divisor, "line", colour, f"length {length:,.0f}" if single else "", group)
    for record in skips(run) if crosses else ():
        if is_number(record.get(x)):
            yield Mark(record[x] / divisor, "cross", "#dc2626" if single else colour, group=group)


def _notes(runs: Sequence[Run]) -> str:
    """Return an explanation of the marks that the charts contain."""
    notes = []
    if any(len(run.values(key)) >= FEW for run in runs for key in keys([run], dev=False)):
        notes.append("Light lines are the logged values, strong lines their running median.")
    label = (lambda run: "") if len(runs) == 1 else (lambda run: f"{run.label}: ")
    changes = [
        f"{label(run)}{length:,.0f} tokens from step {record['step']:,.0f} on"
        for run in runs
        for record, length in phases(run)
        if is_number(record.get("step"))
    ]
    if changes:
        notes.append(f"Dashed lines: the sequence length changes ({'; '.join(changes)}).")
    if skipped := [f"{label(run)}{run.last('skipped'):,.0f}" for run in runs if skips(run)]:
        notes.append(
            f"Crosses: steps were skipped because their loss was not finite or diverged ({'; '.join(skipped)})."
        )
    late = [run.label for run in runs if run.records and run.last("seconds") is None]
    if 0 < len(late) < len(runs):
        notes.append(f"Not drawn over time, because the log has no times: {', '.join(late)}.")
    return page.paragraph(" ".join(notes), "note") if notes else ""
