"""`fit`: the one training loop.

A step is a list of micro-batches, a pure function of its number; the processes divide the list among them. Every loss
is a sum with a count of its own (masked words, pairs, rows); the counts of the whole step are added up over all
processes before the first backward pass, so dividing the work into micro-batches and processes of unequal size never
changes the mathematics.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bertsmith.batch import Batch, bucketed
from bertsmith.errors import Diverged, Interrupted
from bertsmith.progress import progress_bar, say
from bertsmith.training import checkpoint, distributed, runlog
from bertsmith.training.checkpoint import TrainerState
from bertsmith.training.cuda_graphs import GraphRunner, can_capture
from bertsmith.training.divergence import Guard, give_up
from bertsmith.training.optim import make_optimizers
from bertsmith.training.parts import freeze
from bertsmith.training.prefetch import prefetch
from bertsmith.training.run import add_facts
from bertsmith.training.schedule import Course, course_of, rate_share
from bertsmith.training.settings import TrainConfig, autocast_dtype
from bertsmith.training.speed import Meter
from bertsmith.training.steps import RIGHT, gradients, step_loss, update
from bertsmith.training.stopping import Request, stop_requests

MicroBatches = Callable[[int, float], list[Batch]]


def fit(
    model: nn.Module,
    batches: MicroBatches,
    config: TrainConfig,
    steps: int | None,
    run: Path,
    *,
    save: checkpoint.Save,
    load: checkpoint.Load,
    evaluate: Callable[[], dict[str, Any]] | None = None,
    goal: str = "",
    flops: Callable[[Batch], float] | None = None,
    before_step: Callable[[float], None] = lambda share: None,
    resume: tuple[Path, TrainerState] | None = None,
    capturable: bool = False,
    title: str = "training",
) -> dict[str, Any]:
    """Train a model; return the evaluation of the model that was kept, and the number of steps.

    `batches(step, share)` returns this rank's micro-batches of a step, where `share` is the part of the run that is
    done; `save(folder, tensors)` writes the model and `load(folder)` returns its tensors; `evaluate()` scores it, and
    `goal` names the score that makes a checkpoint the best one (`-loss`: lower is better). `flops` counts the
    operations of a batch. `before_step(share)` is called before every step and raises an error if the data turned out
    to be bad: `batches` may run in worker processes. `resume` is a checkpoint of this run, from which the model has
    been loaded; `fit` restores the optimisers. `capturable` says whether the model's forward and backward passes can be
    captured as CUDA graphs (see `cuda_graphs.py`).
    """
    device = next(model.parameters()).device
    freeze(model)
    trained = distributed.parallelise(model, config.parallel, device)
    meter = Meter(device, autocast_dtype(config.precision, device), flops)
    course, optimizers = course_of(config, steps), make_optimizers(model, config)
    loop = _Loop(trained, optimizers, config, course, meter, run, save, evaluate, goal)
    make = batches
    if can_capture(device, optimizers):
        loop.recorder = GraphRunner(trained, optimizers, config, capturable)
        if loop.recorder.captures_passes:
            make = lambda step, share: [bucketed(batch) for batch in batches(step, share)]  # noqa: E731
    if resume is not None:
        loop.restore(*resume)
    if distributed.is_rank_zero():
        loop.log = runlog.open_log(run, loop.course.step, tensorboard=config.tensorboard)
    # Closed whatever happens: the workers, who heed no signal, would otherwise be waited for without end.
    with stop_requests() as request, closing(prefetch(make, loop.keys(), device, config.workers)) as made:
        scores = loop.go(made, before_step, request, title)
    if loop.recorder is not None and loop.recorder.seconds:
        say(f"note: compiling kernels and recording steps took {loop.recorder.seconds:.1f} s")
    return loop.take_best(scores, load) if config.keep_best else scores


@dataclass(frozen=True)
class StepAgreement:
    """What the processes agree on before a step: the counts of all, how far the run is, whether to stop or save."""

    counts: dict[str, float]
    done: float
    stop: bool
    save: bool
    tokens: int


@dataclass
class _Loop:
    """A run on its way."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    config: TrainConfig
    course: Course
    meter: Meter
    run: Path
    save: checkpoint.Save
    evaluate: Callable[[], dict[str, Any]] | None
    goal: str
    tokens: int = 0
    done: float = 0.0  # of the course, as the processes have agreed
    score: float | None = None  # of the evaluation at the present step; higher is better
    best: float | None = None  # score of the run so far
    since_best: int = 0  # evaluations
    scores: dict[str, Any] = field(default_factory=dict)  # the last evaluation
    evaluated_at: int = -1
    saved_at: float = 0.0  # seconds of training time
    saved: tuple[int, Path | None] | None = None  # the last checkpoint: its step, and where this process wrote it
    guard: Guard = field(default_factory=Guard)
    recorder: GraphRunner | None = None
    log: runlog.Append | None = None

    def restore(self, path: Path, state: TrainerState) -> None:
        """Take up the state of a checkpoint."""
        checkpoint.load_optimizers(path, self.model, self.optimizers)
        self.course.step, self.course.before = state.step, state.seconds
        self.tokens, self.saved_at, self.saved = state.tokens, state.seconds, (state.step, path)
        self.guard = Guard(state.first_loss, state.skipped, state.in_a_row)
        self.best, self.since_best = state.best, state.since_best

    def keys(self) -> Iterator[tuple[int, float]]:
        """The steps of the course, each with the share of the run before it, as far as it is known when asked."""
        course, step = self.course, self.course.step
        while course.by_clock or step < course.total:
            yield step, self._share(step)
            step += 1

    def _share(self, step: int) -> float:
        """The share of the run before a step, as far as it is known."""
        return (self.done if self.course.by_clock else step) / self.course.total

    def go(
        self, steps: Iterator[list[Batch]], before_step: Callable[[float], None], request: Request, title: str
    ) -> dict[str, Any]:
        """All steps up to the end of the course; gives the last evaluation."""
        course, total, start = self.course, self.course.total, self.course.step
        self.done = course.done()
        with progress_bar(title, total, self.done) as advance:
            while course.by_clock or course.step < total:
                before_step(self._share(course.step))
                with self.meter.waiting():
                    micro_batches = next(steps)
                agreed = self._agree(micro_batches, request)
                before, self.done = self.done, agreed.done
                if course.step > start and self._due(self.config.evaluate_every, before, self.done):
                    self._evaluate()
                if agreed.save and course.step > start:
                    self._save()
                if agreed.stop:
                    self._stop(request)
                if self._out_of_patience() or (course.by_clock and self.done >= total):
                    break
                self._step(micro_batches, agreed)
                advance(course.done(), self.meter.words())
        self._say_skipped()
        if self.evaluated_at != course.step:
            self._evaluate()
        if self.saved is not None:  # so that a run whose model cannot be written goes on from its end
            self._save()
        return {"steps": course.step, **self.scores}

    def _say_skipped(self) -> None:
        """Tell people of steps that taught nothing; a run that has no others is an error."""
        skipped, steps = self.guard.skipped, self.course.step
        if skipped and skipped >= steps:
            raise Diverged(
                f"all {steps} steps were skipped, since their losses or gradients were not finite: nothing was learnt. "
                "Lower train.learning_rate, raise train.warmup, or look at the data and the weights"
            )
        if skipped:
            say(
                f"warning: {skipped} of {steps} steps were skipped, since their losses or gradients were not finite or "
                "far above the first ones"
            )

    def _agree(self, micro_batches: list[Batch], request: Request) -> StepAgreement:
        """Tell the other processes what this one knows; all get the same answer."""
        names = sorted(micro_batches[0].counts)
        main = distributed.is_rank_zero()
        mine = [float(sum(b.counts[name] for b in micro_batches)) for name in names]
        mine += [float(bool(request.signal)), self.course.done() * main, float(self._save_due() and main)]
        *counts, stop, done, save, tokens = distributed.all_reduce([*mine, sum(b.num_tokens for b in micro_batches)])
        return StepAgreement(dict(zip(names, counts, strict=True)), done, stop > 0, save > 0, int(tokens))

    def _step(self, micro_batches: list[Batch], agreed: StepAgreement) -> None:
        """One step of training, and its record."""
        course, config = self.course, self.config
        share = rate_share(config, course.step if not course.by_clock else agreed.done, course.total)
        means, norm = gradients(self.model, micro_batches, agreed.counts, config, course.step, self.recorder)
        loss = sum(value for name, value in means.items() if not name.endswith(RIGHT))
        if self.guard.accepts(loss, norm):
            update(self.optimizers, share, self.recorder)
            self.meter.add(means, loss, micro_batches, agreed.tokens)
        elif self.guard.gives_up:
            bare = distributed.unwrap(self.model)  # whose gradients are not yet added up
            again = lambda number: step_loss(bare, micro_batches, number, agreed.counts, config, course.step)  # noqa: E731
            give_up(bare, micro_batches, again, loss, course.step)
        self._forget_gradients()
        course.step += 1
        self.score = None
        self.tokens += agreed.tokens
        if self._record_due():
            record = {**self.meter.close(), "learning_rate": config.learning_rate * share, "gradient_norm": norm}
            if self.recorder is not None:
                record["compile_seconds"] = round(self.recorder.seconds, 1)
            record["max_length"] = max(b.layout.max_length for b in micro_batches)
            self._write({**record, **({"skipped": self.guard.skipped} if self.guard.skipped else {})})

    def _forget_gradients(self) -> None:
        """Zero, or nothing at all: a recorder has zeroed them where the step counted."""
        if self.recorder is None:
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=True)
        elif self.guard.in_a_row:
            self.recorder.zero()

    def _record_due(self) -> bool:
        """About 200 records in a run, at the same steps however often it was resumed."""
        course = self.course
        if course.by_clock:
            return self.meter.seconds >= course.seconds / 200
        return course.step % max(1, course.total // 200) == 0 or course.step == course.steps

    def _due(self, every: float, before: float, now: float) -> bool:
        """Whether a multiple of so many steps (1 and more) or of this share of the run (under 1) has been passed."""
        if not every:
            return False
        if every >= 1:
            return self.course.step % int(every) == 0
        width = every * self.course.total
        width = max(1.0, round(width)) if not self.course.by_clock else width
        return math.floor(now / width) > math.floor(before / width)

    def _save_due(self) -> bool:
        config, course = self.config, self.course
        late = course.elapsed - self.saved_at >= 60 * config.save_minutes
        return late or bool(config.save_every and course.step % config.save_every == 0)

    def _write(self, record: Mapping[str, Any]) -> None:
        if self.log is not None:
            facts = {"step": self.course.step, "seconds": round(self.course.elapsed, 3), "tokens": self.tokens}
            self.log({**facts, **record})

    def _out_of_patience(self) -> bool:
        if self.config.patience is None or self.since_best < self.config.patience:
            return False
        goal = self.goal.lstrip("-")
        say(
            f"stopped after step {self.course.step}: no better {goal} in {self.since_best} evaluations (train.patience)"
        )
        return True

    def take_best(self, scores: dict[str, Any], load: checkpoint.Load) -> dict[str, Any]:
        """Go back to the best checkpoint, and give its evaluation."""

        def look() -> list[Any]:
            path = checkpoint.best_checkpoint(checkpoint.checkpoints(self.run))
            if path is None:  # none could be written, or no score was a number
                return []
            step = checkpoint.step_of(path)
            return [str(path), step, runlog.last_scores(self.run, step)]

        found = distributed.on_rank_zero(look)
        if not found or found[1] == self.course.step:
            return scores
        checkpoint.load_model(self.model, load(Path(found[0])) if distributed.is_rank_zero() else None)
        add_facts(self.run, best_step=found[1])
        return {**scores, **found[2], "best_step": found[1]}

    def _evaluate(self) -> None:
        """Score the model as it is, and keep it where it is the best so far.

        Evaluations come at steps that the settings name, never with a checkpoint: when those are written depends on
        the clock, and the best model must not.
        """
        if self.evaluate is None:
            return
        with self.meter.paused():
            scores = self.evaluate()
        self._write({f"dev_{name}": value for name, value in scores.items()})
        reached = scores.get(self.goal.lstrip("-"))
        reached = distributed.broadcast(math.nan if reached is None else reached)
        if math.isfinite(reached):
            self.score = -reached if self.goal.startswith("-") else reached
        self.scores = {name: value for name, value in scores.items() if isinstance(value, (int, float))}
        self.evaluated_at = self.course.step
        better = self.score is not None and (self.best is None or self.score > self.best)
        self.best, self.since_best = (self.score, 0) if better else (self.best, self.since_best + 1)
        if better and self.config.keep_best:
            self._save()

    def _save(self) -> Path | None:
        """A checkpoint of this step, with its score where it has been evaluated.

        Where there is one already it stays as it is: while it was written again, it would be in danger.
        """
        course, guard = self.course, self.guard
        if self.saved is not None and self.saved[0] == course.step:
            return self.saved[1]
        self.saved_at = course.elapsed
        counts = {"first_loss": guard.first, "skipped": guard.skipped, "in_a_row": guard.in_a_row}
        evaluations = {"score": self.score, "best": self.best, "since_best": self.since_best}
        state = TrainerState(course.step, course.elapsed, self.tokens, **counts, **evaluations)  # type: ignore[arg-type]
        with self.meter.paused():
            path = checkpoint.save_checkpoint(self.run, state, self.model, self.optimizers, self.save, self.config.keep)
        self.saved = (course.step, path)
        return path

    def _stop(self, request: Request) -> None:
        """Save and leave, all processes together: when one is gone, the launcher ends the others."""
        path, step = self._save(), self.course.step
        distributed.barrier()
        saved = f"saved {path}" if path else "this step could not be saved, earlier ones are untouched"
        number = request.signal or signal.SIGTERM
        raise Interrupted(f"stopped after step {step}; {saved}", 128 + number)
