"""The data of the tables' tasks: found under the user's folder, whole or in part, or the reason why there is none."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bertsmith.config import read_json
from bertsmith.errors import UserError
from bertsmith.tasks.dev_predictions import read_dev_predictions
from bertsmith.tasks.published import shortfall
from bertsmith.tasks.reading import Splits, find_splits
from bertsmith.tasks.task import find_task
from bertsmith.training.run import FACTS

FOLDERS = {  # accepted names of a data set's folder, in lower-case letters and digits
    "squad1": ("squad", "squad1", "squad11", "squadv11"),
    "squad2": ("squad", "squad2", "squad20", "squadv20"),
    "conll2003": ("conll2003", "conll", "conll03"),
    "swag": ("swag", "codah"),
}
OTHER_SETS = {"codah": "CODAH's first fold, not SWAG"}  # data sets in the form of another one, by their folders
# Data sets in the form of a task's training file, which are added where only a part of that file is there.
MORE = {"squad1": ("squadshifts", "SQuADShifts", "*_v1.0.json")}


@dataclass(frozen=True)
class Data:
    """The rows of a task; where `train` is a file, `dev` is the folder with the dev file."""

    train: Path
    dev: Path | None = None
    is_subset: bool = False
    is_assumed: bool = False  # a plan assumes the published size of the data set
    more: tuple[Path, ...] = ()  # further training files, of other data sets
    remark: str = ""  # what differs from the task's own data set, apart from the number of rows

    def splits(self, task: str) -> Splits:
        """The files of the task."""
        found = find_splits(find_task(task), self.train, self.dev)
        return replace(found, train=[*found.train, *self.more])


def find_data(folder: Path | None, task: str) -> Data | str:
    """Return the data of a task inside a folder, up to three levels down, or the reason why it cannot be used.

    Without a complete training file, `train.SUBSET.*` is used, and the scores are marked as partial.
    """
    if folder is None:
        return "no --data was given"
    if not folder.is_dir():
        raise UserError(f"--data {folder}: no such folder")
    names, why = FOLDERS.get(task, (task,)), ""
    for name in names:
        for place in _folders(folder, name):
            found = _usable(place, task)
            if isinstance(found, Data):
                found = replace(found, remark=OTHER_SETS[name], is_subset=True) if name in OTHER_SETS else found
                return _with_more(found, task, folder)
            why = found
    return why or f"{folder} has no folder {names[0]}"


def _folders(folder: Path, name: str) -> Iterator[Path]:
    """Yield the folders of a name, in lower-case letters and digits, inside another and up to three levels down."""
    for place in [folder, *(p for depth in ("*", "*/*", "*/*/*") for p in sorted(folder.glob(f"{depth}/")))]:
        if re.sub(r"[^a-z0-9]", "", place.name.lower()) == name:
            yield place


def _with_more(data: Data, task: str, folder: Path) -> Data:
    """Add the rows of other data sets where a training file is not complete."""
    if not data.is_subset or task not in MORE:
        return data
    name, called, pattern = MORE[task]
    files = tuple(path for place in _folders(folder, name) for path in sorted(place.glob(pattern)))
    return replace(data, more=files, remark=f"the training rows of {called} are among them") if files else data


def _usable(place: Path, task: str) -> Data | str:
    described = find_task(task)
    try:
        return Data(place) if find_splits(described, place).dev else f"{place} has no dev file"
    except UserError:
        subsets = [path for stem in described.train for path in sorted(place.glob(f"{stem}.SUBSET.*"))]
        if not subsets:
            return f"{place} has no training file"
    try:
        return Data(subsets[0], place, is_subset=True) if find_splits(described, subsets[0], place).dev else ""
    except UserError:
        return f"{place} has no dev file"


def remarks(run: Path, task: str, data: Data) -> list[str]:
    """Return the differences of a fine-tuning run's rows from the complete data set."""
    judged = read_dev_predictions(run)
    counts = Counter(str(line["file"]) for line in judged[1]) if judged else Counter()
    rows = read_json(run / FACTS).get("rows")
    found = shortfall(task, rows if isinstance(rows, int) else None, dict(counts))
    found = found or ([f"trained on {data.train.name}"] if data.is_subset else [])
    return [*found, data.remark] if data.remark else found
