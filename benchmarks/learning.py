"""Show that recipes learn: some minutes each on one machine, held-out loss and pair accuracy at the end.

    python -m benchmarks.learning --data SHARDS --out RUNS --minutes 5 bert-small bert-base speedrun

A name may carry changes: `bert-base:train.learning_rate=4e-4`. The runs stay in RUNS, for `bertsmith report`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from benchmarks.record import record
from bertsmith.config import override
from bertsmith.pretraining.run import pretrain
from bertsmith.recipes import recipe
from bertsmith.training import runlog


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--light", action="store_true", help="leave the weights out of RUNS")
    arguments = parser.parse_args()
    results = {}
    for asked in arguments.recipes:
        name, *changes = asked.split(":")
        config = override(recipe(name), [f"train.hours={arguments.minutes / 60}", *changes])
        run = arguments.out / asked.replace(":", "-").replace("=", "-")
        scores = pretrain(config, arguments.data, run)
        results[asked] = summary(run, scores)
        if arguments.light:
            shutil.rmtree(run / "checkpoints", ignore_errors=True)
            (run / "model" / "model.safetensors").unlink()
        print(asked, json.dumps(results[asked]), flush=True)
    print(record("learning", {"minutes": arguments.minutes, "runs": results}))


def summary(run: Path, scores: dict[str, float]) -> dict[str, object]:
    """A run's final scores, from its own log."""
    records = [r for r in runlog.read(run) if "loss" in r]
    seen = {"steps": records[-1]["step"], "tokens": records[-1]["tokens"], "seconds": records[-1]["seconds"]}
    middle = sorted(r["tokens_per_second"] for r in records)[len(records) // 2]
    share = sorted(r.get("flop_share", 0.0) for r in records)[len(records) // 2]
    waiting = sum(r.get("waiting_share", 0.0) for r in records) / len(records)
    speed = {"tokens_per_second": round(middle), "flop_share": round(share, 3), "waiting_share": round(waiting, 4)}
    memory = {"memory_gb": max(r["memory_gb"] for r in records), "skipped": records[-1].get("skipped", 0)}
    held_out = {name: round(value, 4) for name, value in scores.items() if name != "steps"}
    facts = json.loads((run / "run.json").read_text(encoding="utf-8"))
    return {**seen, **speed, **memory, "held_out": held_out, "data": facts["data"], "corpus": facts["corpus"]}


if __name__ == "__main__":
    main()
