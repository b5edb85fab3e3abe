"""A run that has collapsed starts again with another seed; `run.json` says which seeds were tried, and why not kept.

The metrics of attempt n stay as `collapsed-n.jsonl`; its checkpoints go.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from bertsmith.progress import say
from bertsmith.training import distributed, runlog
from bertsmith.training.run import add_facts, facts_of

APART = 1000  # seeds of two attempts, so that runs with seeds 1, 2, 3, … do not repeat each other
ENOUGH = 50  # steps: a shorter run has not collapsed, it has hardly begun


def seed_now(run: Path, seed: int, restarts: int) -> int:
    """The seed of the attempt that a run is at."""
    tried = distributed.on_rank_zero(lambda: len(facts_of(run).get("collapsed", [])))
    return seed + APART * min(tried, restarts)


def starts_again(run: Path, seed: int, steps: int, restarts: int, why: str) -> bool:
    """Say that a run has collapsed, note it, and make the run ready for another seed where it may have one.

    Notes come last: a run that is killed before them tries the same seed once more.
    """
    if steps < ENOUGH:
        say(f"note: {why}; {steps} steps are few to learn from")
        return False
    before = distributed.on_rank_zero(lambda: facts_of(run).get("collapsed", []))
    collapsed = [entry for entry in before if entry["seed"] != seed] + [{"seed": seed, "why": why}]
    again = len(collapsed) <= restarts
    if again:
        say(f"note: the run has collapsed: {why}. It starts again with seed {seed + APART}; restarts=0 would leave it")
        distributed.on_rank_zero(lambda: _clear(run, len(collapsed)))
    else:
        tried = f" with {len(collapsed)} seeds" if restarts else ""
        say(f"warning: the run has collapsed{tried}: {why}. Try another train.learning_rate or more train.epochs")
    add_facts(run, collapsed=collapsed, **({"best_step": None} if again else {}))
    return again


def _clear(run: Path, number: int) -> None:
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    if (run / runlog.FILE).exists():
        (run / runlog.FILE).replace(run / f"collapsed-{number}.jsonl")
