"""The tasks of `finetune_results`: their files, settings and limits; and a folder of them, small enough to carry.

    python -m benchmarks.finetune_data --data DATA --conll CONLL --model MODEL --out carried

DATA holds `tasks/GLUE`, `tasks/SQuAD`, `tasks/SQuADShifts`, `tasks/CODAH` and `tasks/Korean`; CONLL the three files
`train.txt`, `valid.txt`, `test.txt` of CoNLL-2003; MODEL is a model folder. `carried/data.tar.xz` holds exactly the
files that are read, CoNLL-2003 under `conll`; `carried/model` the weights in float16, half as large. Together they stay
under 60 MB. The repository ignores the folder and holds no data.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertsmith.folders import new_file

OURS, PEER, PADDED = "bertsmith", "transformers, dynamic padding", "transformers, padded to 128"
LARGEST = 60e6  # bytes of all that is carried
SHIFTS = tuple(f"tasks/SQuADShifts/{name}_v1.0.json" for name in ("new_wiki", "nyt", "reddit"))


@dataclass(frozen=True)
class Measured:
    """A task to measure: its files by their places in the data, its settings, who runs it, and remarks.

    Settings are fixed beforehand, not chosen on dev. `partial` says what the data lacks.
    """

    task: str
    train: tuple[str, ...]
    scored: dict[str, str]
    rate: float = 1e-4
    epochs: float = 4
    batch_size: int = 32
    seeds: int = 3
    sides: tuple[str, ...] = (OURS,)
    partial: str = ""
    remarks: tuple[str, ...] = field(default_factory=tuple)


def _glue(task: str, folder: str, **changes: Any) -> Measured:
    return Measured(task, (f"tasks/GLUE/{folder}/train.tsv",), {"dev": f"tasks/GLUE/{folder}/dev.tsv"}, **changes)


BOTH = (OURS, PEER)
TABLE = {
    "sst2-epoch": _glue("sst2", "SST-2", rate=5e-5, epochs=1, sides=(OURS, PEER, PADDED)),
    "rte": _glue("rte", "RTE", epochs=5, seeds=5, sides=BOTH),
    "mrpc": _glue("mrpc", "MRPC", seeds=5, sides=BOTH),
    "cola": _glue("cola", "CoLA", seeds=5, sides=BOTH),
    "stsb": _glue("stsb", "STS-B", seeds=5, sides=BOTH),
    "conll2003": Measured(
        "conll2003", ("conll/train.txt",), {"dev": "conll/valid.txt", "test": "conll/test.txt"}, sides=BOTH
    ),
    "squad1": Measured(
        "squad1",
        ("tasks/SQuAD/train-v1.1.SUBSET.json", *SHIFTS),
        {"dev": "tasks/SQuAD/dev-v1.1.json"},
        epochs=2,
        sides=BOTH,
        partial="trained on 4,000 of SQuAD's 87,599 questions and on SQuADShifts, not on SQuAD's training set",
    ),
    "sst2": _glue("sst2", "SST-2", rate=5e-5, epochs=2),
    "wnli": _glue("wnli", "WNLI", rate=5e-5, epochs=3, remarks=("dev contradicts train: a guess is the best answer",)),
    "codah": Measured(
        "swag",
        ("tasks/CODAH/fold_0_train.tsv",),
        {"dev": "tasks/CODAH/fold_0_dev.tsv", "test": "tasks/CODAH/fold_0_test.tsv"},
        epochs=5,
        batch_size=16,
        partial="the first of CODAH's five folds alone",
    ),
    "nsmc": Measured(
        "nsmc",
        ("tasks/Korean/NSMC/ratings_train.txt",),
        {"test": "tasks/Korean/NSMC/ratings_test.txt"},
        epochs=2,
        remarks=(
            "another split of the same reviews than the published one: not to be compared with published figures",
            "the encoder and its vocabulary are English",
        ),
    ),
    "mnli": Measured(
        "mnli",
        ("tasks/GLUE/MNLI/train.SUBSET.tsv",),
        {"dev matched": "tasks/GLUE/MNLI/dev_matched.tsv"},
        epochs=3,
        partial="trained on 9,888 of MNLI's 392,702 rows, which lack their final full stops",
    ),
}


def training_file(measured: Measured, data: Path, work: Path) -> Path:
    """The file to train on; several in SQuAD's form are joined into one."""
    files = [data / name for name in measured.train]
    if len(files) == 1:
        return files[0]
    path = work / f"{measured.task}-train.json"
    if not path.exists():
        articles = [a for file in files for a in json.loads(file.read_text(encoding="utf-8"))["data"]]
        with new_file(path) as written:
            written.write_text(json.dumps({"version": "1.1", "data": articles}), encoding="utf-8")
    return path


def unpacked(data: Path, work: Path) -> Path:
    """The folder of the data, unpacked where it is an archive."""
    if data.is_dir():
        return data
    folder = work / "data"
    if not folder.exists():
        with tarfile.open(data) as archive:
            archive.extractall(work / "unpacking", filter="data")
        (work / "unpacking").rename(folder)
    return folder


def write_archive(data: Path, conll: Path, path: Path) -> None:
    """All files that are read."""
    names = sorted({name for m in TABLE.values() for name in (*m.train, *m.scored.values())})
    with tarfile.open(path, "w:xz", preset=9) as archive:
        for name in names:
            archive.add(conll / Path(name).name if name.startswith("conll/") else data / name, name)


def write_model(model: Path, folder: Path) -> None:
    """A model folder in float16."""
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copy(model / name, folder)
    weights = load_file(model / "model.safetensors")
    half = {name: value.half() if value.is_floating_point() else value for name, value in weights.items()}
    save_file(half, folder / "model.safetensors", {"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("data", "conll", "model", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True)
    write_archive(arguments.data, arguments.conll, arguments.out / "data.tar.xz")
    write_model(arguments.model, arguments.out / "model")
    sizes = {str(path): path.stat().st_size for path in sorted(arguments.out.rglob("*")) if path.is_file()}
    for path, size in sizes.items():
        print(f"{size / 1e6:8.2f} MB  {path}")
    assert sum(sizes.values()) < LARGEST, "too large to carry"


if __name__ == "__main__":
    main()
