"""Peak memory and time of `bertsmith tokenizer train` on given texts.

python -m benchmarks.tokenizer_memory TEXT…
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.corpus import peak_of
from benchmarks.record import record


def main() -> None:
    """Run the command, watch its memory, write the results."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bertsmith", "tokenizer", "train", *sys.argv[1:], "--json"]
        began = time.perf_counter()
        process = subprocess.Popen(
            [*command, "--out", f"{folder}/tok"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        with peak_of(process) as highest:
            output, _ = process.communicate()
    facts = json.loads(output)
    results = {
        "megabytes": sum(Path(path).stat().st_size for path in sys.argv[1:]) / 1e6,
        "peak_megabytes": highest[0] / 1e6,
        "seconds": time.perf_counter() - began,
        **{name: facts.get(name) for name in ("entries", "sampled", "held_out_tokens_per_word", "held_out_unk_share")},
    }
    print(results)
    record("tokenizer_memory", results)


if __name__ == "__main__":
    main()
