"""Learning rate schedules over steps and over time, and the phases of a run."""

import re
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from runs import cut, settings, weights
from test_safety import signal_in_step

from bertsmith.config import override
from bertsmith.corpus.build import build_corpus
from bertsmith.errors import Interrupted, UserError
from bertsmith.pretraining.run import pretrain
from bertsmith.recipes import recipe
from bertsmith.training import checkpoint, fit, runlog, schedule
from bertsmith.training.schedule import Budget, learning_rate_factor
from bertsmith.training.settings import TrainConfig


def factors(total: int, **changes) -> np.ndarray:
    config = TrainConfig(steps=total, **changes)
    return np.array([learning_rate_factor(config, step, total) for step in range(total)])


def test_linear_schedule_warms_up_and_decays_linearly() -> None:
    rates = factors(100, warmup=0.1)
    assert rates[:10] == pytest.approx(np.arange(1, 11) / 10)
    assert rates[10:] == pytest.approx(np.arange(90, 0, -1) / 90)


def test_cosine_schedule_decays_along_half_a_cosine() -> None:
    rates = factors(100, warmup=0.1, schedule="cosine")
    assert rates[:10] == pytest.approx(np.arange(1, 11) / 10)
    assert rates[10:] == pytest.approx((1 + np.cos(np.pi * np.arange(90) / 90)) / 2)
    assert rates[55] == pytest.approx(0.5)
    assert rates[-1] < 0.001


def test_stable_schedule_warms_up_stays_and_decays() -> None:
    rates = factors(100, warmup=0.1, schedule="stable", decay=0.2)
    assert rates[:10] == pytest.approx(np.arange(1, 11) / 10)
    assert (rates[10:81] == 1).all()
    assert rates[80:] == pytest.approx(np.arange(20, 0, -1) / 20)
    assert (factors(10, warmup=0, schedule="stable", decay=0) == 1).all()


def test_constant_schedule_stays_after_warmup() -> None:
    assert factors(10, warmup=0.2, schedule="constant") == pytest.approx([0.5, *[1] * 9])


@pytest.mark.parametrize("schedule", ["linear", "cosine", "stable", "constant"])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0.0), (1, 0.8), (2, 0.5), (7, 0.01), (50, 0.0), (50, 0.8)])
def test_factors_are_above_0_and_at_most_1(schedule: str, steps: int, warmup: float) -> None:
    rates = factors(steps, warmup=warmup, schedule=schedule, decay=0.2)
    assert (rates > 0).all()
    assert (rates <= 1).all()


@pytest.mark.parametrize("schedule", ["linear", "cosine", "stable"])
def test_learning_rate_reaches_zero_at_the_end_of_the_time(schedule: str) -> None:
    config = TrainConfig(hours=1, warmup=0.1, schedule=schedule)
    times = np.linspace(0, 3600, 3601)
    rates = np.array([learning_rate_factor(config, seconds, 3600.0) for seconds in times])
    assert rates.max() == 1
    assert rates[-1] == pytest.approx(0, abs=1e-9)
    assert np.abs(np.diff(rates)).max() < 0.01  # no jump from one second to the next
    assert rates[180] == pytest.approx(0.5, abs=0.01)  # half of the warm-up


def test_time_budget_counts_the_time_before_a_resume() -> None:
    budget = Budget(None, 100.0, step=7, before=60.0)
    assert budget.done() == pytest.approx(60.0, abs=0.5)
    assert Budget(None, 100.0, before=60.0, compiling=20.0).done() == pytest.approx(40.0, abs=0.5)
    assert Budget(None, 100.0, before=130.0).done() == 100.0
    assert Budget(9, 0.0, step=7).done() == 7


def test_clock_leaves_out_the_first_batch_and_compiling(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step takes a second here, preparing the first batch a thousand, compiling in the third step a hundred."""
    now = [0.0]
    monkeypatch.setattr(schedule, "time", SimpleNamespace(monotonic=lambda: now[0]))
    prefetch, step = fit.prefetch, fit._Loop._step

    def slow_start(*arguments):
        for number, batches in enumerate(prefetch(*arguments)):
            now[0] += 1000 * (number == 0)
            yield batches

    def slow_step(self, *arguments) -> None:
        step(self, *arguments)
        if self.budget.step == 3:
            self.budget.compiling += 100
        now[0] += 1 + 100 * (self.budget.step == 3)

    monkeypatch.setattr(fit, "prefetch", slow_start)
    monkeypatch.setattr(fit._Loop, "_step", slow_step)
    config = settings("train.hours=0.002", "data.long_length=null")  # 7.2 s
    assert pretrain(config, world / "shards", tmp_path / "run", device="cpu")["steps"] == 8


def test_epochs_replace_the_steps_of_a_recipe(world: Path, tmp_path: Path) -> None:
    """A recipe has a million steps, which would otherwise override the epochs that a user sets."""
    run, less = tmp_path / "run", settings("train.epochs=0.02", "data.long_length=null")
    config = settings("train.steps=1000000", "train.epochs=0.04", "data.long_length=null")
    assert (config.train.steps, config.train.epochs) == (None, 0.04)
    assert settings("train.epochs=2", "train.steps=9").train.steps == 9  # the last setting counts
    assert settings("train.steps=9", "train.epochs=null").train.steps == 9
    fast = override(recipe("speedrun"), ["train.steps=200"]).train
    assert (fast.hours, fast.num_steps(10**6)) == (None, 200)
    assert override(recipe("speedrun"), ["train.epochs=2"]).train.num_steps(256 * 5) == 10
    timed = override(recipe("bert-base"), ["train.steps=5", "train.hours=2"]).train
    assert (timed.steps, timed.hours, timed.num_steps(10**6)) == (None, 2, None)
    steps = [pretrain(c, world / "shards", run / str(n), device="cpu")["steps"] for n, c in enumerate((less, config))]
    assert 0 < steps[0] <= steps[1] <= 2 * steps[0] < 1000


CLOCK = ["train.hours=0.00099", "train.save_every=1000", "data.long_length=48", "data.long_share=0.4"]  # 3.56 s


def check_clock(run: Path) -> None:
    records = [r for r in runlog.read(run) if "loss" in r]
    assert 3.2 < records[-1]["seconds"] < 5.0
    assert [r["seconds"] for r in records] == sorted(r["seconds"] for r in records)
    assert records[-1]["learning_rate"] < 0.1 * max(r["learning_rate"] for r in records)
    first = next(r["seconds"] for r in records if r["max_length"] > 32)
    assert first == pytest.approx(0.6 * 3.56, abs=0.3)
    assert all(r["max_length"] <= 32 for r in records if r["seconds"] < first)


@pytest.mark.usefixtures("own_clock")
def test_run_ends_when_its_time_is_over(world: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    scores = pretrain(settings(*CLOCK), world / "shards", tmp_path / "run", device="cpu")
    assert "not identical to the bit" in capfd.readouterr().err
    assert scores["steps"] == runlog.read(tmp_path / "run")[-1]["step"] == 36
    check_clock(tmp_path / "run")
    again = pretrain(settings(*CLOCK), world / "shards", tmp_path / "run", device="cpu", resume=True)
    assert again["steps"] == scores["steps"]


@pytest.mark.usefixtures("own_clock")
def test_elapsed_time_is_restored_on_resume(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, steps = tmp_path / "run", fit._Loop._step

    def signalled(self, *arguments) -> None:
        if self.budget.elapsed > 1.5:
            signal.raise_signal(signal.SIGTERM)
        steps(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(fit._Loop, "_step", signalled)
        with pytest.raises(Interrupted):
            pretrain(settings(*CLOCK), world / "shards", run, device="cpu")
    found = checkpoint.latest_checkpoint(run)
    assert found is not None
    assert found[1].seconds == pytest.approx(1.7)
    assert pretrain(settings(*CLOCK), world / "shards", run, device="cpu", resume=True)["steps"] == 36
    check_clock(run)


def test_timed_run_resumed_at_its_end_trains_no_step(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings("train.hours=1", "data.long_length=48")
    monkeypatch.setattr(Budget, "elapsed", property(lambda self: 3700.0 if self.step == 3 else 0.0))
    with monkeypatch.context() as patched:
        signal_in_step(patched, 2, signal.SIGTERM)
        with pytest.raises(Interrupted):
            pretrain(config, world / "shards", tmp_path / "run", device="cpu")
    assert pretrain(config, world / "shards", tmp_path / "run", device="cpu", resume=True)["steps"] == 3


# --- phases

PHASES = ["train.steps=10", "data.long_length=48", "data.long_share=0.3"]


def test_two_phases_share_one_schedule_and_resume_in_either(world: Path, tmp_path: Path) -> None:
    config = settings(*PHASES, "train.save_every=1", "train.keep=20")
    pretrain(config, world / "shards", tmp_path / "whole", device="cpu")
    records = [r for r in runlog.read(tmp_path / "whole") if "loss" in r]
    assert [r["max_length"] > 32 for r in records] == [False] * 7 + [True] * 3
    rates = [r["learning_rate"] for r in records]
    assert rates == pytest.approx(1e-3 * np.array([1, *np.arange(9, 0, -1) / 9]))  # one schedule over both phases
    for step in (6, 7, 8):  # before, at and after the end of the first phase
        resumed = cut(tmp_path / "whole", tmp_path / f"cut-{step}", step)
        pretrain(config, world / "shards", resumed, device="cpu", resume=True)
        assert weights(resumed) == weights(tmp_path / "whole"), step


SPREAD = [*PHASES, "data.long_last=false"]  # long steps are one and a half times as long: 22 % of the steps


def test_long_steps_can_be_spread_over_a_run_that_resumes(world: Path, tmp_path: Path) -> None:
    config = settings(*SPREAD, "train.steps=18", "train.save_every=1", "train.keep=20", "train.evaluate_every=6")
    pretrain(config, world / "shards", tmp_path / "whole", device="cpu")
    records = [r for r in runlog.read(tmp_path / "whole") if "loss" in r]
    assert [number for number, r in enumerate(records, 1) if r["max_length"] > 32] == [5, 9, 14, 18]
    evaluated = [r for r in runlog.read(tmp_path / "whole") if "dev_mlm_loss" in r]
    assert ["dev_long_mlm_loss" in r for r in evaluated] == [True] * 3
    for step in (4, 8):
        resumed = cut(tmp_path / "whole", tmp_path / f"cut-{step}", step)
        pretrain(config, world / "shards", resumed, device="cpu", resume=True)
        assert weights(resumed) == weights(tmp_path / "whole"), step


def test_spread_long_steps_have_their_share_of_the_tokens() -> None:
    data = settings("data.long_length=128", "data.long_share=0.1", "data.long_last=false").data
    long = data.long_steps * data.long_length
    assert long / (long + (1 - data.long_steps) * data.max_length) == pytest.approx(0.1)
    assert settings("data.long_length=128", "data.long_share=0.1").data.long_steps == 0.1
    assert settings("data.long_length=null").data.long_steps == 0
    with pytest.raises(UserError, match=r"data\.long_last=false spreads long sequences over a run: set data\.long_len"):
        settings("data.long_length=null", "data.long_last=false")


def test_phase_without_a_step_is_skipped_with_a_note(world: Path, tmp_path: Path, capfd) -> None:
    config = settings(*PHASES[1:], "train.steps=3")
    pretrain(config, world / "shards", tmp_path / "run", device="cpu")
    assert "3 steps are too few for the phase of 48 tokens" in capfd.readouterr().err
    assert all(r["max_length"] <= 32 for r in runlog.read(tmp_path / "run") if "loss" in r)


def test_note_reports_long_sequences_that_documents_do_not_fill(world: Path, tmp_path: Path, capfd) -> None:
    lines = [line for line in (world / "text.txt").read_text(encoding="utf-8").splitlines() if line.strip()]
    (tmp_path / "short.txt").write_text("\n\n".join(lines[:200]), encoding="utf-8")
    build_corpus([tmp_path / "short.txt"], world / "tok", tmp_path / "short", workers=1)
    for corpus, expected in ((world / "shards", False), (tmp_path / "short", True)):
        pretrain(settings(*PHASES, "data.long_length=96"), corpus, tmp_path / f"run-{corpus.name}", device="cpu")
        noted = re.search(r"note: sequences of 96 tokens are (\d+)% full, since many", capfd.readouterr().err)
        assert (noted is not None) == expected
        assert noted is None or int(noted[1]) < 60


def test_note_reports_positions_that_the_learning_rates_cannot_train(world: Path, tmp_path: Path, capfd) -> None:
    """Ten steps, three of them long, with learning rates that fall to zero: 1e-3 times (3 + 2 + 1) / 9."""
    rates = "the learning rates of the 3 steps with 48 tokens add up to 0.00067, and no weight moves further"
    cases = {(): True, ("train.learning_rate=0.2",): False, ("data.long_length=null",): False}
    cases |= {("train.optimizer=lamb",): False}  # LAMB scales an update by the norm of the weight
    for number, (changes, expected) in enumerate(cases.items()):
        run = tmp_path / str(number)
        pretrain(settings(*PHASES, *changes), world / "shards", run, device="cpu")
        assert (rates in capfd.readouterr().err) == expected
    pretrain(settings(*SPREAD), world / "shards", tmp_path / "spread", device="cpu")
    # 22 % of 1e-3 times 1 + (9 + 8 + ... + 1) / 9
    assert "the learning rates of the 2 steps with 48 tokens add up to 0.0013, and" in capfd.readouterr().err
    pretrain(settings(*PHASES), world / "shards", tmp_path / "on", model=run / "model", device="cpu")
    assert rates not in capfd.readouterr().err  # a given model may have trained its positions


def test_long_sequences_are_evaluated_once_their_phase_has_begun(
    world: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(*PHASES, "train.evaluate_every=2")
    scores = pretrain(config, world / "shards", tmp_path / "run", device="cpu")
    evaluated = {r["step"]: r for r in runlog.read(tmp_path / "run") if "dev_mlm_loss" in r}
    assert ["dev_long_mlm_loss" in evaluated[step] for step in (2, 4, 6, 8, 10)] == [False] * 3 + [True] * 2
    assert scores["long_mlm_loss"] != scores["mlm_loss"]
    assert "not learnt" not in capfd.readouterr().err
    monkeypatch.setattr("bertsmith.pretraining.checks.WORSE", scores["long_mlm_loss"] - scores["mlm_loss"] - 0.01)
    pretrain(config, world / "shards", tmp_path / "again", device="cpu")
    err = capfd.readouterr().err
    assert f"held-out sequences of 48 tokens have a loss of {scores['long_mlm_loss']:.2f}" in err
    assert "Give them more steps (data.long_share" in err
