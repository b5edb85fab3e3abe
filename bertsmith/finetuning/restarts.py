"""A run that has collapsed starts again with another seed; `run.json` has the seeds that were tried, with the reasons.

The metrics of attempt n are kept as `collapsed-n.jsonl`; its checkpoints are removed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from bertsmith.progress import say
from bertsmith.training import distributed, runlog
from bertsmith.training.run import add_facts, facts_of

APART = 1000  # between the seeds of two attempts, so that runs with seeds 1, 2, 3, … do not share any
ENOUGH = 50  # steps; a shorter run is too short to have collapsed


def seed_now(run: Path, seed: int, restarts: int) -> int:
    """The seed of the current attempt of a run."""
    tried = distributed.on_rank_zero(lambda: len(facts_of(run).get("collapsed", [])))
    return seed + APART * min(tried, restarts)


def starts_again(run: Path, seed: int, steps: int, restarts: int, reason: str) -> bool:
    """Print and record that a run has collapsed, and return whether it starts again with another seed.

    The record is written last: a run that is killed before that tries the same seed again.
    """
    if steps < ENOUGH:
        say(f"note: {reason}; {steps} steps are few to learn from")
        return False
    before = distributed.on_rank_zero(lambda: facts_of(run).get("collapsed", []))
    collapsed = [entry for entry in before if entry["seed"] != seed] + [{"seed": seed, "why": reason}]
    again = len(collapsed) <= restarts
    if again:
        next_seed = f"It starts again with seed {seed + APART}; restarts=0 would leave it"
        say(f"note: the run has collapsed: {reason}. {next_seed}")
        distributed.on_rank_zero(lambda: _clear(run, len(collapsed)))
    else:
        tried = f" with {len(collapsed)} seeds" if restarts else ""
        say(f"warning: the run has collapsed{tried}: {reason}. Try another train.learning_rate or more train.epochs")
    add_facts(run, collapsed=collapsed, **({"best_step": None} if again else {}))
    return again


def _clear(run: Path, number: int) -> None:
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    if (run / runlog.FILE).exists():
        (run / runlog.FILE).replace(run / f"collapsed-{number}.jsonl")
