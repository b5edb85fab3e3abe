"""The demo's gain of pre-training and its time."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.record import record
from bertsmith.demo.run import demo


def main() -> None:
    """Run the demo in a folder of its own and write what it found."""
    with tempfile.TemporaryDirectory() as folder:
        result = demo(Path(folder) / "demo")
    pairs = zip(result.accuracy["pre-trained"], result.accuracy["random"], strict=True)
    record(
        "demo",
        {
            "accuracy": result.accuracy,
            "gain": result.gain,
            "lowest_gain_of_a_seed": min(trained - random for trained, random in pairs),
            "seconds": result.seconds,
            **result.scores,
        },
    )


if __name__ == "__main__":
    main()
