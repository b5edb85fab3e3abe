"""Progress: the mean of the last losses, and no time left before there is something to estimate it from."""

import pytest
import torch
from rich.progress import Progress

from bertsmith import progress
from bertsmith.training.speed import SHOWN, Meter


def test_the_loss_that_is_shown_is_the_mean_of_the_last_steps() -> None:
    """Also where every step has a record of its own, as in short runs."""
    meter = Meter(torch.device("cpu"), None)
    assert meter.summary() == ""
    for step in range(SHOWN + 10):
        meter.add({"task": 1.0, "mlm_accuracy": 0.5}, float(step % 2) if step >= 10 else 1e6, [], 8)
        meter.close()
    assert meter.summary().startswith("loss 0.500, mlm 50.0 %, ")
    assert meter.last["loss"] == 1.0  # the log has every record's own mean
    meter.add({"task": 1.0}, 2e9, [], 8)
    assert meter.summary().startswith("loss 1e+08, ")


@pytest.mark.parametrize(("start", "done", "shown"), [(0.0, 0.9, False), (0.0, 1.0, True), (50.0, 50.4, False)])
def test_no_time_left_is_shown_before_a_hundredth_is_done(monkeypatch, capfd, start, done, shown) -> None:
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    with progress.progress_bar("training", 100.0, start) as advance:
        advance(done, "loss 1")
    first = capfd.readouterr().err.splitlines()[0]
    assert first.startswith("training: ")
    assert (" left, " in first) == shown


def test_no_time_left_is_shown_on_a_terminal_either() -> None:
    clock = iter(range(0, 1000, 20))
    with Progress(auto_refresh=False, get_time=lambda: float(next(clock))) as bar:
        task, column = bar.add_task("training", total=100.0, completed=50), progress._TimeLeft(50.0)
        shown = []
        for done in (50.2, 50.4, 51.0):
            bar.update(task, completed=done)
            shown.append(column.render(bar.tasks[0]).plain)
    assert shown[:2] == ["-:--:--", "-:--:--"]
    assert shown[2] != "-:--:--"
