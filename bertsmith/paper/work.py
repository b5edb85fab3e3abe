"""The work folder of the paper's tables: finding data, pre-training each model once, fine-tuning and scoring.

`WORK/SCALE/pretrained/NAME` is a run, as `bertsmith pretrain` writes it; `WORK/SCALE/tuned/…/seed-1` is a fine-tuning
run, which keeps its scores but not its model. Finished runs are reused, so that a stopped command can be resumed and
tables share their runs.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from bertsmith.config import load, override, read_json, to_dict, write_json
from bertsmith.corpus.build import build_corpus
from bertsmith.corpus.shards import MANIFEST, read_manifest
from bertsmith.corpus.vocabulary import train_tokenizer
from bertsmith.demo.text import collect, write_documents
from bertsmith.errors import Diverged, UserError
from bertsmith.finetuning.run import finetune
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.folders import new_file
from bertsmith.formats.saved_config import config_in, read_config
from bertsmith.inference.files import evaluate
from bertsmith.model.config import EncoderConfig
from bertsmith.paper.scales import CHECKPOINTS, Scale
from bertsmith.paper.tables import SHARES, Column, Row, Table
from bertsmith.pretraining.run import pretrain
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.progress import say
from bertsmith.recipes import bert, left_to_right
from bertsmith.tasks.dev_predictions import read_dev_predictions
from bertsmith.tasks.published import SIZES, shortfall
from bertsmith.tasks.reading import find_splits
from bertsmith.tasks.task import find_task
from bertsmith.training import runlog
from bertsmith.training.checkpoint import OPTIMIZER
from bertsmith.training.run import CONFIG, FACTS, MODEL, final_scores, is_finished, same_settings

SCORES = "scores.json"
DEMO_WORDS = 2000  # entries of the vocabulary for the demo's text
FOLDERS = {  # accepted names of a data set's folder, in lower-case letters and digits
    "squad1": ("squad", "squad1", "squad11", "squadv11"),
    "squad2": ("squad", "squad2", "squad20", "squadv20"),
    "conll2003": ("conll2003", "conll", "conll03"),
}
WATCHED = (bert("base").recipe, left_to_right("base").recipe)  # runs whose checkpoints figure 5 evaluates


@dataclass(frozen=True)
class Data:
    """The rows of a task; where `train` is a file, `dev` is the folder with the dev file."""

    train: Path
    dev: Path | None = None
    is_subset: bool = False
    is_assumed: bool = False  # a plan assumes the published size of the data set


Finetuning = tuple[Row, Column, FinetuneConfig, int, Data]


@dataclass(frozen=True)
class Work:
    """A work folder and the settings of its runs."""

    folder: Path
    scale: Scale
    corpus: Path | None
    data: Path | None
    device: str | None = None
    pretraining: tuple[str, ...] = ()  # settings for every pre-training run, as --set takes them
    finetuning: tuple[str, ...] = ()
    models: Mapping[str, Path] = field(default_factory=dict)  # given models by the recipes that they replace
    assumes_data: bool = False  # a plan without `data` assumes that all data sets exist

    def config(self, recipe: PretrainConfig) -> PretrainConfig:
        """Return a recipe of the paper at the scale, with the user's settings."""
        config = override(self.scale.pretraining(recipe), self.pretraining)
        if recipe.recipe in WATCHED and config.train.steps:
            every = max(1, int(config.train.steps * SHARES[0]))
            config = replace(config, train=replace(config.train, save_every=every, keep=CHECKPOINTS + 1))
        return config

    def run_of(self, recipe: PretrainConfig) -> Path:
        return self.folder / self.scale.name / "pretrained" / recipe.recipe

    def finished(self, recipe: PretrainConfig) -> Path:
        """Return the model folder of a recipe: the given one, or that of its finished run."""
        return self.models.get(recipe.recipe) or self.run_of(recipe) / MODEL

    def encoder(self, recipe: PretrainConfig) -> EncoderConfig:
        """Return the encoder configuration of the model for a recipe."""
        given = self.models.get(recipe.recipe)
        return self.config(recipe).model if given is None else config_in(read_config(given), given)

    def pretrained(self, recipe: PretrainConfig) -> dict[str, Any]:
        """Pre-train a model unless that is done; return its held-out scores and the number of tokens seen."""
        if recipe.recipe in self.models:
            return {}
        run, config = self.run_of(recipe), self.config(recipe)
        if is_finished(run):
            stored = load(PretrainConfig, run / CONFIG)
            config = replace(config, model=replace(config.model, vocab_size=stored.model.vocab_size))
            same_settings(to_dict(stored), to_dict(config), run / CONFIG, option="")
            self._check_corpus(run)
        else:
            say(f"pre-training {recipe.recipe} at scale {self.scale.name}: {run}")
            pretrain(config, self.text(), run, device=self.device, resume=True)
        for left in run.glob(
            f"checkpoints/*/{OPTIMIZER}"
        ):  # the models of the checkpoints are kept, their optimiser states are not
            left.unlink()
        last = [record for record in runlog.read(run) if "tokens" in record][-1]
        return {**final_scores(run), "tokens": last["tokens"]}

    def _check_corpus(self, run: Path) -> None:
        """Refuse a finished run on another corpus: the tables would name the wrong one."""
        seen, manifest = read_json(run / FACTS)["corpus"], read_manifest(self.text())
        if (seen["tokens"], seen["tokenizer"]) != (manifest.tokens, manifest.tokenizer):
            raise UserError(
                f"{run} was pre-trained on another corpus than {self.text()}; give that one, or another --out"
            )

    def model(self, row: Row) -> Path:
        """Return the model that a row starts from: the finished one, or an earlier checkpoint."""
        assert row.start is not None
        run = self.run_of(row.start)
        if row.share == 1.0:
            return self.finished(row.start)
        found = run / "checkpoints" / f"step-{self.steps_at(row):08}"
        if not found.is_dir():
            raise UserError(f"{run} has no checkpoint of step {self.steps_at(row)}; remove the run to train it again")
        return found

    def steps_at(self, row: Row) -> int:
        """Return the number of pre-training steps of a row's model."""
        assert row.start is not None
        train = self.config(row.start).train
        steps = train.steps or runlog.read(self.run_of(row.start))[-1]["step"]
        return int(steps) if row.share == 1.0 else round(row.share / SHARES[0]) * train.save_every

    def seen(self, row: Row) -> dict[str, int]:
        """Return the steps and tokens of a row's pre-training, second model included; nothing for a given model."""
        assert row.start is not None
        if row.start.recipe in self.models:
            return {}
        steps = self.steps_at(row)
        seen = [record["tokens"] for record in runlog.read(self.run_of(row.start)) if record["step"] <= steps]
        beside = self.pretrained(row.beside)["tokens"] if row.beside else 0
        return {"steps": steps, "tokens": (int(seen[-1]) if seen else 0) + beside}

    def text(self) -> Path:
        """Return the corpus folder: the user's, or the demo's text, which is prepared once."""
        if self.corpus is not None:
            return self.corpus
        folder = self.folder / "demo"
        if (folder / "corpus" / MANIFEST).exists():
            return folder / "corpus"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_documents(folder / "text.txt", collect(0, 0).documents)
        train_tokenizer([folder / "text.txt"], folder / "tokenizer", vocab_size=DEMO_WORDS)
        build_corpus([folder / "text.txt"], folder / "tokenizer", folder / "corpus")
        return folder / "corpus"

    def tuned(self, row: Row, column: Column, config: FinetuneConfig, seed: int) -> Path:
        """Return the folder of one fine-tuning run."""
        assert row.start is not None
        name = row.start.recipe + (f"-beside-{row.beside.recipe}" if row.beside else "")
        name += f"-bilstm-{row.bilstm_layers}" if row.bilstm_layers else ""
        name += f"-step-{self.steps_at(row)}" if row.share < 1.0 else ""
        task = column.task + (f"-{features}" if (features := row.features or column.features) else "")
        rate = f"rate-{config.train.learning_rate:g}"
        return self.folder / self.scale.name / "tuned" / name / task / rate / f"seed-{seed}"

    def settings(self, row: Row, column: Column) -> list[FinetuneConfig]:
        """Return the fine-tuning settings of a row for a column, apart from the seed."""
        found = []
        for config in self.scale.finetuning(column.task, row.features or column.features):
            beside = str(self.finished(row.beside)) if row.beside else ""
            config = replace(config, bilstm_layers=row.bilstm_layers, beside=beside)
            found.append(override(config, self.finetuning, "--tune"))
        return found

    def scores(self, row: Row, column: Column, config: FinetuneConfig, seed: int, data: Data) -> dict[str, Any]:
        """Fine-tune with a seed unless that is done; return the scores and the reasons why they cannot be compared."""
        assert row.start is not None
        run, model = self.tuned(row, column, config, seed), self.model(row)
        given = str(self.models.get(row.start.recipe, ""))
        config = replace(config, train=replace(config.train, seed=seed))
        config = replace(config, data=replace(config.data, partial=data.is_subset))
        if (run / SCORES).exists():
            done = read_json(run / SCORES)
            same_settings(done["config"], to_dict(config), run / SCORES, option="")
            if done.get("model", "") != given:
                before = done.get("model") or "a model that was pre-trained here"
                raise UserError(f"{run} was fine-tuned from {before}, not from {given or model}; give another --out")
            return {**done, "scores": runlog.rescaled(done["scores"], done.get("scale"))}
        say(f"fine-tuning {row.name} on {column.run}, seed {seed}: {run}")
        try:
            finetune(config, model, data.train, run, dev=data.dev, device=self.device, resume=True)
        except Diverged as error:
            say(f"warning: {run} failed: {error}")
            found: dict[str, Any] = {"config": to_dict(config), "scores": {}, "remarks": [], "failed": str(error)}
        else:
            scores = {**final_scores(run), **self._test_scores(run, column, data)}
            found = {"config": to_dict(config), "scores": scores, "remarks": _remarks(run, column.task, data)}
        with new_file(run / SCORES) as work:
            write_json(work, {**found, "scale": runlog.SCALE, **({"model": given} if given else {})})
        for heavy in (MODEL, "checkpoints"):
            shutil.rmtree(run / heavy, ignore_errors=True)
        return found

    def _test_scores(self, run: Path, column: Column, data: Data) -> dict[str, float]:
        """Return scores on the test rows of CoNLL, the only data set with public test labels."""
        if column.task != "conll2003":
            return {}
        found = find_splits(find_task(column.task), data.dev or data.train).test
        scores = [evaluate(run, path, device=self.device) for paths in found.values() for path in paths]
        return {f"test_{name}": value for each in scores for name, value in each.items()}

    def starts(self, table: Table) -> list[PretrainConfig]:
        """Return the pre-training runs that a table needs: none if no column has data."""
        needed = [start for row in table.rows for start in (row.start, row.beside) if start is not None]
        missing = {start.recipe: start for start in needed if start.recipe not in self.models}
        return list(missing.values()) if self.has_data(table) else []

    def has_data(self, table: Table) -> bool:
        """Return whether any column of a table has data."""
        columns = table.columns[:-1] if table.average else table.columns
        possible = [column for column in columns if not column.why_not]
        return any(not column.task or isinstance(self.find(column.task), Data) for column in possible)

    def finetunings(self, table: Table, seeds: int) -> Iterator[tuple[Path, Finetuning]]:
        """Yield the folder of every fine-tuning run that a table needs, and the arguments of `scores` for it."""
        found = {column.task: self.find(column.task) for column in table.columns if column.task}
        for row, column in product((row for row in table.rows if row.start is not None), table.columns):
            if isinstance(data := found.get(column.task), Data):
                for config, seed in product(self.settings(row, column), range(1, seeds + 1)):
                    yield self.tuned(row, column, config, seed), (row, column, config, seed, data)

    def absent(self, table: Table) -> dict[str, str]:
        """Return the columns of a table without data, and the reasons."""
        whys = {c.name: c.why_not or (self.find(c.task) if c.task else "") for c in table.columns}
        return {name: why for name, why in whys.items() if isinstance(why, str) and why}

    def find(self, task: str) -> Data | str:
        """Return the rows of a task under the user's folder, or the reason why there are none."""
        if self.data is None and self.assumes_data and task in SIZES:
            return Data(Path(task), is_assumed=True)
        return find_data(self.data, task)


def find_data(folder: Path | None, task: str) -> Data | str:
    """Return the folder of a task inside another, up to three levels down, or the reason why it cannot be used.

    Without a complete training file, `train.SUBSET.*` is used, and the scores are marked as partial.
    """
    if folder is None:
        return "no --data was given"
    if not folder.is_dir():
        raise UserError(f"--data {folder}: no such folder")
    wanted, why = FOLDERS.get(task, (task,)), f"{folder} has no folder {FOLDERS.get(task, (task,))[0]}"
    for place in [folder, *(p for depth in ("*", "*/*", "*/*/*") for p in sorted(folder.glob(f"{depth}/")))]:
        if re.sub(r"[^a-z0-9]", "", place.name.lower()) not in wanted:
            continue
        found = _usable(place, task)
        if isinstance(found, Data):
            return found
        why = found
    return why


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


def _remarks(run: Path, task: str, data: Data) -> list[str]:
    """Return the differences from the complete data set."""
    judged = read_dev_predictions(run)
    counts = Counter(str(line["file"]) for line in judged[1]) if judged else Counter()
    rows = read_json(run / "run.json").get("rows")
    found = shortfall(task, rows if isinstance(rows, int) else None, dict(counts))
    return found or ([f"trained on {data.train.name}"] if data.is_subset else [])
