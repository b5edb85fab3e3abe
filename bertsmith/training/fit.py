"""`fit`: the one training loop.

A step is a list of micro-batches, a pure function of its number, which the ranks divide among themselves. Every loss is
a sum with a count of its own (masked tokens, pairs, rows); the counts of the whole step are all-reduced before the
first backward pass, so that splitting the work into micro-batches and ranks of unequal size never changes the result.
"""

from __future__ import annotations

import gc
import math
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
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
from bertsmith.training.divergence import Guard, raise_diverged
from bertsmith.training.optim import make_optimizers
from bertsmith.training.parts import freeze
from bertsmith.training.prefetch import prefetch
from bertsmith.training.run import add_facts
from bertsmith.training.schedule import Budget, learning_rate_factor
from bertsmith.training.settings import TrainConfig, autocast_dtype
from bertsmith.training.speed import Meter
from bertsmith.training.steps import gradients, step_loss, update, weighted_losses
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
    gc.collect()  # the model of an earlier run in this process, which PyTorch's state_dict functions left in a cycle
    device = next(model.parameters()).device
    freeze(model)
    trained = distributed.parallelise(model, config.parallel, device)
    meter = Meter(device, autocast_dtype(config.precision, device), flops)
    optimizers = make_optimizers(model, config)
    loop = _Loop(trained, optimizers, config, Budget.of(config, steps), meter, run, save, evaluate, goal)
    if can_capture(device, optimizers):
        loop.graphs = GraphRunner(trained, optimizers, config, capturable)
    if resume is not None:
        loop.restore(*resume)
    if distributed.is_rank_zero():
        loop.log = runlog.open_log(run, loop.budget.step, tensorboard=config.tensorboard)
    make = _bucketing(batches) if loop.graphs is not None and loop.graphs.captures_passes else batches
    # Closed even after an error: the workers ignore signals, and the process would wait for them forever.
    with ExitStack() as stack:
        if loop.budget.done() < loop.budget.total:
            stack.enter_context(checkpoint.hold_room(run, trained, optimizers))
        request = stack.enter_context(stop_requests())
        made = stack.enter_context(closing(prefetch(make, loop.prefetch_keys(), device, config.workers)))
        scores = loop.train(made, before_step, request, title)
    if loop.graphs is not None and loop.graphs.seconds:
        beside = ", which are no part of its time" if loop.budget.by_clock else ""
        say(f"note: compiling kernels and capturing CUDA graphs took {loop.graphs.seconds:.1f} s{beside}")
    return loop.restore_best(scores, load) if config.keep_best else scores


def _bucketing(batches: MicroBatches) -> MicroBatches:
    """The micro-batches padded to the few sizes that CUDA graphs are captured for."""
    return lambda step, share: [bucketed(batch) for batch in batches(step, share)]


@dataclass(frozen=True)
class StepAgreement:
    """What all ranks agree on before a step: the counts of each loss, how much is done, and whether to stop or save."""

    counts: dict[str, float]
    done: float
    stop: bool
    save: bool
    tokens: int


@dataclass
class _Loop:
    """The state of a training run."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    config: TrainConfig
    budget: Budget
    meter: Meter
    run: Path
    save: checkpoint.Save
    evaluate: Callable[[], dict[str, Any]] | None
    goal: str
    tokens: int = 0
    done: float = 0.0  # of the budget, the same number on every rank
    score: float | None = None  # of the evaluation at this step; higher is better
    best: float | None = None  # score of the run so far
    since_best: int = 0  # evaluations
    scores: dict[str, Any] = field(default_factory=dict)  # the last evaluation
    evaluated_at: int = -1
    saved_at: float = 0.0  # seconds of training time
    saved: tuple[int, Path | None] | None = None  # the step of the last checkpoint, and its path on rank 0
    guard: Guard = field(default_factory=Guard)
    graphs: GraphRunner | None = None
    log: runlog.Append | None = None

    def restore(self, path: Path, state: TrainerState) -> None:
        """Restore the optimisers and the state of the run from a checkpoint."""
        checkpoint.load_optimizers(path, self.model, self.optimizers)
        self.budget.step, self.budget.before = state.step, state.seconds
        self.tokens, self.saved_at, self.saved = state.tokens, state.seconds, (state.step, path)
        self.guard = Guard(state.first_loss, state.skipped, state.in_a_row)
        self.best, self.since_best = state.best, state.since_best

    def prefetch_keys(self) -> Iterator[tuple[int, float]]:
        """The steps of the run, each with the share of the run that is done when its batches are made."""
        budget, step = self.budget, self.budget.step
        while budget.by_clock or step < budget.total:
            yield step, self._share(step)
            step += 1

    def _share(self, step: int) -> float:
        """The share of the run that is done before a step; in a run by the clock, the share that is done now."""
        return (self.done if self.budget.by_clock else step) / self.budget.total

    def train(
        self, steps: Iterator[list[Batch]], before_step: Callable[[float], None], request: Request, title: str
    ) -> dict[str, Any]:
        """Train to the end of the budget; return the last evaluation."""
        budget, total, start = self.budget, self.budget.total, self.budget.step
        self.done = budget.done()
        with progress_bar(title, total, self.done) as advance:
            while budget.by_clock or budget.step < total:
                before_step(self._share(budget.step))
                with self.meter.waiting():
                    micro_batches = next(steps)
                if first := budget.step == start:
                    budget.start()
                agreed = self._agree(micro_batches, request)
                self._between_steps(agreed, request, first)
                if self._out_of_patience() or (budget.by_clock and self.done >= total):
                    break
                self._step(micro_batches, agreed)
                advance(budget.done(), self.meter.summary())
        self._report_skipped()
        if self.evaluated_at != budget.step:
            self._evaluate()
        if self.saved is not None:  # if the model cannot be written, the run can be resumed from its end
            self._save()
        return {"steps": budget.step, **self.scores}

    def _between_steps(self, agreed: StepAgreement, request: Request, first: bool) -> None:
        """Evaluate, save and stop if that is due; nothing is due before the first step of this process."""
        before, self.done = self.done, agreed.done
        if not first and self._is_due(self.config.evaluate_every, before, self.done):
            self._evaluate()
        if not first and agreed.save:
            self._save()
        if agreed.stop:
            self._stop(request)

    def _report_skipped(self) -> None:
        """Warn of skipped steps; a run in which all steps were skipped is an error."""
        skipped, steps = self.guard.skipped, self.budget.step
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
        """All-reduce the state of each rank before a step, so that every rank does the same."""
        names = sorted(micro_batches[0].counts)
        zero = distributed.is_rank_zero()  # whose clock counts
        mine = [float(sum(b.counts[name] for b in micro_batches)) for name in names]
        now = self.budget.done()
        mine += [float(bool(request.signal)), now * zero, float(self._save_due(now) and zero)]
        *counts, stop, done, save, tokens = distributed.all_reduce([*mine, sum(b.num_tokens for b in micro_batches)])
        return StepAgreement(dict(zip(names, counts, strict=True)), done, stop > 0, save > 0, int(tokens))

    def _step(self, micro_batches: list[Batch], agreed: StepAgreement) -> None:
        """One step of training, and its record in the log."""
        budget, config = self.budget, self.config
        factor = learning_rate_factor(config, budget.step if not budget.by_clock else agreed.done, budget.total)
        means, norm = gradients(self.model, micro_batches, agreed.counts, config, budget.step, self.graphs)
        loss = sum(weighted_losses(self.model, means))
        if self.guard.accepts(loss, norm):
            update(self.optimizers, factor, self.graphs)
            self.meter.add(means, loss, micro_batches, agreed.tokens)
        elif self.guard.gives_up:
            model = distributed.unwrap(self.model)  # without DDP, whose backward pass would all-reduce the gradients
            again = lambda number: step_loss(model, micro_batches, number, agreed.counts, config, budget.step)  # noqa: E731
            raise_diverged(model, micro_batches, again, loss, budget.step)
        self._zero_gradients()
        if self.graphs is not None:
            budget.compiling = self.graphs.seconds
        budget.step += 1
        self.score = None
        self.tokens += agreed.tokens
        if self._record_due():
            self._record(micro_batches, config.learning_rate * factor, norm)

    def _record(self, micro_batches: list[Batch], learning_rate: float, norm: float) -> None:
        """Write the means since the last record to the log."""
        record = {**self.meter.close(), "learning_rate": learning_rate, "gradient_norm": norm}
        if self.graphs is not None:
            record["compile_seconds"] = round(self.graphs.seconds, 1)
        record["max_length"] = max(b.layout.max_length for b in micro_batches)
        self._write({**record, **({"skipped": self.guard.skipped} if self.guard.skipped else {})})

    def _zero_gradients(self) -> None:
        """Free the gradients; CUDA graphs keep their memory and have zeroed it, except after a skipped step."""
        if self.graphs is None:
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=True)
        elif self.guard.in_a_row:
            self.graphs.zero()

    def _record_due(self) -> bool:
        """Whether a record is due: about 200 in a run, at the same steps however often it was resumed."""
        budget = self.budget
        if budget.by_clock:
            return self.meter.seconds >= budget.seconds / 200
        return budget.step % max(1, budget.total // 200) == 0 or budget.step == budget.steps

    def _is_due(self, every: float, before: float, now: float) -> bool:
        """Whether a multiple of `every` steps (1 and more) or of this share of the run (under 1) has been reached."""
        if not every:
            return False
        if every >= 1:
            return self.budget.step % int(every) == 0
        width = every * self.budget.total
        width = max(1.0, round(width)) if not self.budget.by_clock else width
        return math.floor(now / width) > math.floor(before / width)

    def _save_due(self, now: float) -> bool:
        late = self.budget.elapsed - self.saved_at >= 60 * self.config.save_minutes
        return late or self._is_due(self.config.save_every, self.done, now)

    def _write(self, record: Mapping[str, Any]) -> None:
        if self.log is not None:
            facts = {"step": self.budget.step, "seconds": round(self.budget.elapsed, 3), "tokens": self.tokens}
            self.log({**facts, **record})

    def _out_of_patience(self) -> bool:
        if self.config.patience is None or self.since_best < self.config.patience:
            return False
        goal = self.goal.lstrip("-")
        say(
            f"stopped after step {self.budget.step}: no better {goal} in {self.since_best} evaluations (train.patience)"
        )
        return True

    def restore_best(self, scores: dict[str, Any], load: checkpoint.Load) -> dict[str, Any]:
        """Load the model of the best checkpoint; return its evaluation."""

        def find() -> list[Any]:
            path = checkpoint.best_checkpoint(checkpoint.checkpoints(self.run))
            if path is None:  # no checkpoint could be written, or no score was finite
                return []
            step = checkpoint.step_of(path)
            return [str(path), step, runlog.last_scores(self.run, step)]

        found = distributed.on_rank_zero(find)
        if not found or found[1] == self.budget.step:
            return scores
        checkpoint.load_model(self.model, load(Path(found[0])) if distributed.is_rank_zero() else None)
        add_facts(self.run, best_step=found[1])
        return {**scores, **found[2], "best_step": found[1]}

    def _evaluate(self) -> None:
        """Evaluate the model, and save it if it is the best so far.

        The settings name the steps of evaluations, independently of checkpoints: when those are written depends on the
        clock, and which model is the best must not.
        """
        if self.evaluate is None:
            return
        with self.meter.paused():
            scores = self.evaluate()
        self._write({f"dev_{name}": value for name, value in scores.items()})
        value = scores.get(self.goal.lstrip("-"))
        value = distributed.broadcast(math.nan if value is None else value)
        if math.isfinite(value):
            self.score = -value if self.goal.startswith("-") else value
        self.scores = {name: value for name, value in scores.items() if isinstance(value, (int, float))}
        self.evaluated_at = self.budget.step
        better = self.score is not None and (self.best is None or self.score > self.best)
        self.best, self.since_best = (self.score, 0) if better else (self.best, self.since_best + 1)
        if better and self.config.keep_best:
            self._save()

    def _save(self) -> Path | None:
        """Write a checkpoint of this step, with the score of its evaluation if there was one.

        A checkpoint of this step that exists is not written again: a crash while it is replaced would lose it.
        """
        budget, guard = self.budget, self.guard
        if self.saved is not None and self.saved[0] == budget.step:
            return self.saved[1]
        self.saved_at = budget.elapsed
        counts = {"first_loss": guard.first, "skipped": guard.skipped, "in_a_row": guard.in_a_row}
        evaluations = {"score": self.score, "best": self.best, "since_best": self.since_best}
        state = TrainerState(budget.step, budget.elapsed, self.tokens, **counts, **evaluations)  # type: ignore[arg-type]
        with self.meter.paused():
            path = checkpoint.save_checkpoint(self.run, state, self.model, self.optimizers, self.save, self.config.keep)
        self.saved = (budget.step, path)
        return path

    def _stop(self, request: Request) -> None:
        """Save and exit, all ranks together: when one exits, the launcher kills the others."""
        path, step = self._save(), self.budget.step
        distributed.barrier()
        saved = f"saved {path}" if path else "this step could not be saved, earlier ones are untouched"
        number = request.signal or signal.SIGTERM
        raise Interrupted(f"stopped after step {step}; {saved}", 128 + number)
