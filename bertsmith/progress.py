"""Messages and progress on standard error: a bar with the time left on a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

Advance = Callable[[float, str], None]
console = Console(stderr=True, highlight=False)
QUIET_SECONDS = 10.0  # between two lines where there is no terminal
LEAST_SHARE = 0.01  # of the work, before the time left is estimated: the first steps are slow


def quiet(silent: bool) -> None:
    """Print no messages in this process: of several ranks only rank 0 does."""
    console.quiet = silent


def say(message: str) -> None:
    """Print a message on standard error."""
    console.print(message, markup=False, soft_wrap=True)


class _Bar(Progress):
    """A bar with a line of text below it."""

    words = ""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self.words:
            yield Text(f"  {self.words}", style="dim", overflow="ellipsis", no_wrap=True)


class _TimeLeft(TimeRemainingColumn):
    """The time left, from when enough is done to estimate it."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.start = start

    def render(self, task: Task) -> Text:
        known = _share(task.completed, task.total or 0.0, self.start) >= LEAST_SHARE
        return super().render(task) if known else Text("-:--:--", style="progress.remaining")


def _share(done: float, total: float, start: float) -> float:
    """The share of the work since the start that is done."""
    return (done - start) / max(total - start, 1e-9)


@contextmanager
def progress_bar(title: str, total: float, start: float = 0.0) -> Iterator[Advance]:
    """Yield a function that is called with the amount of work that is done, and a short text about it."""
    if console.is_terminal:
        columns = ("{task.description}", BarColumn(None), TextColumn("{task.percentage:>3.0f}%"))
        times = (TimeElapsedColumn(), TextColumn("left"), _TimeLeft(start))
        with _Bar(*columns, *times, console=console, transient=False) as bar:
            task = bar.add_task(title, total=total, completed=int(start))

            def advance(done: float, words: str = "") -> None:
                bar.words = words
                bar.update(task, completed=done)

            yield advance
    else:
        yield from _lines(title, total, start)


def _lines(title: str, total: float, start: float) -> Iterator[Advance]:
    began = shown = time.monotonic()
    last = ""

    def advance(done: float, words: str = "") -> None:
        nonlocal shown, last
        now = time.monotonic()
        elapsed, share = now - began, _share(done, total, start)
        left = f", {clock(elapsed / share - elapsed)} left" if share >= LEAST_SHARE else ""
        last = words
        if now - shown >= QUIET_SECONDS:
            shown = now
            say(f"{title}: {100 * done / max(total, 1e-9):.0f} %{left}{', ' + words if words else ''}")

    yield advance
    if time.monotonic() - began >= 1:
        say(f"{title}: done in {clock(time.monotonic() - began)}{', ' + last if last else ''}")


def short(value: float) -> str:
    """A loss as text: 0.693, or 6.55e+10 where it is large."""
    return f"{value:.3f}" if abs(value) < 1e4 else f"{value:.3g}"


def clock(seconds: float) -> str:
    """A duration as text: 4 s, 2:05, 1:00:00."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
