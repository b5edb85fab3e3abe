"""The work folder of the paper's tables: pre-training each model once, fine-tuning and scoring.

`WORK/SCALE/pretrained/NAME` is a run, as `bertsmith pretrain` writes it; `WORK/SCALE/tuned/…/seed-1` is a fine-tuning
run, which keeps its scores but not its model. Finished runs are reused, so that a stopped command can be resumed and
tables share their runs. Every finished run has a `scores.json`, and a table needs nothing else of it: rows that were
run on another machine are added by copying these files.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from bertsmith.config import from_dict, override, read_json, to_dict, write_json
from bertsmith.corpus.build import build_corpus
from bertsmith.corpus.shards import MANIFEST, read_manifest
from bertsmith.corpus.vocabulary import train_tokenizer
from bertsmith.demo.text import collect, write_documents
from bertsmith.errors import UserError
from bertsmith.finetuning.scored import SCORES, scored
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.finetuning.task_data import Data, find_data, remarks
from bertsmith.folders import new_file
from bertsmith.formats.families.table import family_of
from bertsmith.formats.saved_config import config_in, read_config
from bertsmith.inference.files import evaluate
from bertsmith.model.config import EncoderConfig
from bertsmith.paper.scales import BASE, CHECKPOINTS, Scale
from bertsmith.paper.tables import SHARES, Column, Row, Table, is_chosen, run_name, with_seed
from bertsmith.pretraining.run import pretrain
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.progress import say
from bertsmith.recipes import bert, left_to_right
from bertsmith.tasks.published import SIZES
from bertsmith.tasks.reading import find_splits
from bertsmith.tasks.task import find_task
from bertsmith.text.tokenizer import Kind, Tokenizer
from bertsmith.training import runlog
from bertsmith.training.checkpoint import OPTIMIZER, STATE, checkpoints
from bertsmith.training.run import CONFIG, FACTS, MODEL, final_scores, is_finished, same_settings

DEMO_WORDS = 2000  # entries of the vocabulary for the demo's text
STOPS = 3  # how often a run may be stopped before a checkpoint that figure 5 evaluates is removed for a newer one
WATCHED = (bert("base").recipe, left_to_right("base").recipe)  # runs whose checkpoints figure 5 evaluates

Finetuning = tuple[Row, Column, FinetuneConfig, int, Data]


@dataclass(frozen=True)
class Work:
    """A work folder and the settings of its runs."""

    folder: Path
    scale: Scale
    corpora: Mapping[str, Path]  # the corpus folders by the recipes that they are for; the empty name: all others
    data: Path | None
    device: str | None = None
    pretraining: tuple[str, ...] = ()  # settings for every pre-training run, as --set takes them
    finetuning: tuple[str, ...] = ()
    models: Mapping[str, Path] = field(default_factory=dict)  # given models by the recipes that they replace
    assumes_data: bool = False  # a plan without `data` assumes that all data sets exist
    seeds: Sequence[int] = (1,)  # of pre-training
    chosen: frozenset[str] | None = None  # names and recipes of the rows to run; None: all

    def rows(self, row: Row) -> list[Row]:
        """Return a row once for each seed of pre-training; rows of given models once."""
        return [with_seed(row, seed) for seed in self.seeds]

    def runs(self, row: Row) -> bool:
        """Return whether a row is to be run."""
        chosen = row.start is not None and (self.chosen is None or is_chosen(row, self.chosen))
        return chosen and not self.why_no_text(row)

    def why_no_text(self, row: Row) -> str:
        """Return the reason why no given corpus has the vocabulary of a row; empty if one has, or none is needed."""
        if not self.corpora or self.is_pretrained(row):
            return ""
        for start in (start for start in row.starts if self.corpus_of(start) is None):
            kind, name = _vocabulary(start), start.recipe.split("-")[0]
            return f"it has another vocabulary: give --corpus {name}=FOLDER, of `tokenizer train --kind {kind}`"
        return ""

    def config(self, recipe: PretrainConfig) -> PretrainConfig:
        """Return a recipe of the paper at the scale, with the user's settings."""
        config = override(self.scale.pretraining(recipe), self.pretraining)
        train = config.train
        if recipe.recipe in WATCHED and (train.hours or train.steps):
            every = SHARES[0] if train.hours else max(1, int((train.steps or 0) * SHARES[0]))
            keep = CHECKPOINTS + (STOPS if train.hours else 1)
            config = replace(config, train=replace(train, save_every=every, keep=keep))
        return config

    def run_of(self, recipe: PretrainConfig) -> Path:
        return self.folder / self.scale.name / "pretrained" / run_name(recipe)

    def finished(self, recipe: PretrainConfig) -> Path:
        """Return the model folder of a recipe: the given one, or that of its finished run."""
        return self.models.get(recipe.recipe) or self.run_of(recipe) / MODEL

    def encoder(self, recipe: PretrainConfig) -> EncoderConfig:
        """Return the encoder configuration of the model for a recipe."""
        given = self.models.get(recipe.recipe)
        return self.config(recipe).model if given is None else config_in(read_config(given), given)

    def pretrained(self, recipe: PretrainConfig) -> dict[str, Any]:
        """Pre-train a model unless that is done; return its held-out scores and what it has seen."""
        if recipe.recipe in self.models:
            return {}
        run, config = self.run_of(recipe), self.config(recipe)
        if not (run / SCORES).exists():
            if not is_finished(run):
                say(f"pre-training {run_name(recipe)} at scale {self.scale.name}: {run}")
                pretrain(config, self.text(recipe), run, device=self.device, resume=True)
            with new_file(run / SCORES) as work:
                write_json(work, _pretraining_scores(run))
        for left in run.glob(f"checkpoints/*/{OPTIMIZER}"):  # the models of the checkpoints are kept
            left.unlink()
        done = read_json(run / SCORES)
        self._check_run(recipe, config, done)
        return done

    def is_pretrained(self, row: Row) -> bool:
        """Return whether the scores of a row's pre-training are there, or its models were given."""
        return all(start.recipe in self.models or (self.run_of(start) / SCORES).exists() for start in row.starts)

    def _check_run(self, recipe: PretrainConfig, config: PretrainConfig, done: Mapping[str, Any]) -> None:
        """Refuse a finished run with other settings or on another corpus: the tables would name the wrong ones."""
        run = self.run_of(recipe)
        stored = from_dict(PretrainConfig, done["config"], str(run / SCORES))
        decided = {name: getattr(stored.model, name) for name in (*EncoderConfig.DECIDED, "num_segments")}
        config = replace(config, model=replace(config.model, **decided))  # the tokenizer decides these
        same_settings(to_dict(stored), to_dict(config), run / SCORES, option="")
        if self.corpus_of(recipe) is None and self.scale.name != "tiny":
            return  # nothing is pre-trained, and the scores are of a run elsewhere
        seen, manifest = done["corpus"], read_manifest(self.text(recipe))
        if (seen["tokens"], seen["tokenizer"]) != (manifest.tokens, manifest.tokenizer):
            raise UserError(
                f"{run} was pre-trained on another corpus than {self.text(recipe)}; give that one, or another --out"
            )

    def model(self, row: Row) -> Path:
        """Return the model that a row starts from: the finished one, or an earlier checkpoint."""
        assert row.start is not None
        run = self.run_of(row.start)
        if row.share == 1.0:
            found = self.finished(row.start)
        else:
            found = self._checkpoint(row) or run / "checkpoints" / f"step-{self.steps_at(row):08}"
        if not found.is_dir():
            raise UserError(f"{run} has no model at {found} to fine-tune; remove the run to train it again")
        return found

    def _checkpoint(self, row: Row) -> Path | None:
        """Return the checkpoint after a share of a run by the clock; None if there is none."""
        assert row.start is not None
        seconds = row.share * 3600 * (self.config(row.start).train.hours or 0.0)
        found = checkpoints(self.run_of(row.start)) if seconds else []
        return next((path for path in found if read_json(path / STATE)["seconds"] >= seconds), None)

    def steps_at(self, row: Row) -> int:
        """Return the number of pre-training steps of a row's model."""
        assert row.start is not None
        train = self.config(row.start).train
        if row.share == 1.0 or train.hours:
            return int(self._reached(row)["step"])
        return round(row.share / SHARES[0]) * int(train.save_every)

    def _reached(self, row: Row) -> dict[str, Any]:
        """Return the last record of a row's pre-training, or the last one before its share of the time."""
        assert row.start is not None
        curve, hours = read_json(self.run_of(row.start) / SCORES)["curve"], self.config(row.start).train.hours
        if row.share == 1.0 or not hours:
            return curve[-1]  # type: ignore[no-any-return]
        return next((r for r in reversed(curve) if r["seconds"] <= row.share * 3600 * hours), curve[0])

    def seen(self, row: Row) -> dict[str, int]:
        """Return the steps and tokens of a row's pre-training, second model included; nothing for a given model."""
        assert row.start is not None
        if row.start.recipe in self.models:
            return {}
        steps, curve = self.steps_at(row), read_json(self.run_of(row.start) / SCORES)["curve"]
        seen = [record["tokens"] for record in curve if record["step"] <= steps]
        beside = self.pretrained(row.beside)["tokens"] if row.beside else 0
        return {"steps": steps, "tokens": (int(seen[-1]) if seen else 0) + beside}

    def corpus_of(self, recipe: PretrainConfig) -> Path | None:
        """Return the corpus that was given for a recipe: by its name, by the first word of its name, or for all.

        That for all is not for another family than BERT which was published with another kind of vocabulary.
        """
        name = recipe.recipe
        found = next((self.corpora[key] for key in (name, name.split("-")[0]) if key in self.corpora), None)
        if found is not None or "" not in self.corpora:
            return found
        fits = recipe.model.family == BASE.family or _vocabulary_in(self.corpora[""]) == _vocabulary(recipe)
        return self.corpora[""] if fits else None

    def text(self, recipe: PretrainConfig) -> Path:
        """Return the corpus folder of a recipe: the user's, or the demo's text, which is prepared once."""
        if (given := self.corpus_of(recipe)) is not None:
            return given
        if self.scale.name != "tiny":
            raise UserError(f"--scale {self.scale.name} needs text: give a corpus folder with --corpus")
        kind = _vocabulary(recipe) or "wordpiece"
        folder = self.folder / ("demo" if kind == "wordpiece" else f"demo-{kind}")
        if (folder / "corpus" / MANIFEST).exists():
            return folder / "corpus"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_documents(folder / "text.txt", collect(0, 0).documents)
        train_tokenizer([folder / "text.txt"], folder / "tokenizer", vocab_size=DEMO_WORDS, kind=kind)
        build_corpus([folder / "text.txt"], folder / "tokenizer", folder / "corpus")
        return folder / "corpus"

    def tuned(self, row: Row, column: Column, config: FinetuneConfig, seed: int) -> Path:
        """Return the folder of one fine-tuning run."""
        assert row.start is not None
        name = run_name(row.start) + (f"-beside-{row.beside.recipe}" if row.beside else "")
        name += f"-bilstm-{row.bilstm_layers}" if row.bilstm_layers else ""
        if row.share < 1.0:
            name += f"-at-{row.share:g}" if self.config(row.start).train.hours else f"-step-{self.steps_at(row)}"
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
        run = self.tuned(row, column, config, seed)
        given = str(self.models.get(row.start.recipe, ""))
        config = replace(config, train=replace(config.train, seed=seed))
        config = replace(config, data=replace(config.data, partial=data.is_subset))
        if (run / SCORES).exists():
            return self._known_scores(row, run, config)
        say(f"fine-tuning {row.name} on {column.run}, seed {seed}: {run}")

        def judge(run: Path) -> dict[str, Any]:
            scores = {**final_scores(run), **self._test_scores(run, column, data)}
            return {"scores": scores, "remarks": remarks(run, column.task, data)}

        facts = {"model": given} if given else {}
        rows = data.splits(column.task)
        return scored(config, self.model(row), rows, run, device=self.device, facts=facts, judge=judge)

    def _known_scores(self, row: Row, run: Path, config: FinetuneConfig) -> dict[str, Any]:
        """Return the scores of a finished fine-tuning run, which must have had the same settings and model."""
        assert row.start is not None
        done, given = read_json(run / SCORES), str(self.models.get(row.start.recipe, ""))
        if row.beside and row.beside.recipe not in self.models:  # its folder, on the machine where it was trained
            config = replace(config, beside=done["config"]["beside"])
        same_settings(done["config"], to_dict(config), run / SCORES, option="")
        if done.get("model", "") != given:
            before = done.get("model") or "a model that was pre-trained here"
            raise UserError(
                f"{run} was fine-tuned from {before}, not from {given or self.model(row)}; give another --out"
            )
        return {**done, "scores": runlog.rescaled(done["scores"], done.get("scale"))}

    def _test_scores(self, run: Path, column: Column, data: Data) -> dict[str, float]:
        """Return scores on the test rows of CoNLL, the only data set with public test labels."""
        if column.task != "conll2003":
            return {}
        found = find_splits(find_task(column.task), data.dev or data.train).test
        scores = [evaluate(run, path, device=self.device) for paths in found.values() for path in paths]
        return {f"test_{name}": value for each in scores for name, value in each.items()}

    def starts(self, table: Table) -> list[PretrainConfig]:
        """Return the pre-training runs that a table needs: none if no column has data."""
        rows = [each for row in table.rows if self.runs(row) for each in self.rows(row)]
        needed = [start for row in rows for start in row.starts]
        missing = {run_name(start): start for start in needed if start.recipe not in self.models}
        return list(missing.values()) if self.has_data(table) else []

    def has_data(self, table: Table) -> bool:
        """Return whether any column of a table has data."""
        columns = table.columns[:-1] if table.average else table.columns
        possible = [column for column in columns if not column.why_not]
        return any(not column.task or isinstance(self.find(column.task), Data) for column in possible)

    def finetunings(self, table: Table, seeds: int) -> Iterator[tuple[Path, Finetuning]]:
        """Yield the folder of every fine-tuning run that a table needs, and the arguments of `scores` for it."""
        found = {column.task: self.find(column.task) for column in table.columns if column.task}
        rows = [each for row in table.rows if self.runs(row) for each in self.rows(row)]
        for row, column in product(rows, table.columns):
            if isinstance(data := found.get(column.task), Data):
                for config, seed in product(self.settings(row, column), range(1, seeds + 1)):
                    yield self.tuned(row, column, config, seed), (row, column, config, seed, data)

    def is_known(self, row: Row, column: Column, seeds: int) -> bool:
        """Return whether all scores of a row in a column are there."""
        runs = [self.tuned(row, column, c, s) for c in self.settings(row, column) for s in range(1, seeds + 1)]
        return all((run / SCORES).exists() for run in runs)

    def absent(self, table: Table) -> dict[str, str]:
        """Return the columns of a table without data, and the reasons."""
        whys = {c.name: c.why_not or (self.find(c.task) if c.task else "") for c in table.columns}
        return {name: why for name, why in whys.items() if isinstance(why, str) and why}

    def find(self, task: str) -> Data | str:
        """Return the rows of a task under the user's folder, or the reason why there are none."""
        if self.data is None and self.assumes_data and task in SIZES:
            return Data(Path(task), is_assumed=True)
        return find_data(self.data, task)


@cache
def _vocabulary_in(corpus: Path) -> Kind:
    """Return the kind of vocabulary of a corpus."""
    return Tokenizer.load(corpus).kind


def _vocabulary(recipe: PretrainConfig) -> Kind | None:
    """Return the kind of vocabulary that a recipe's family was published with."""
    return family_of(recipe.model).vocabulary


def _pretraining_scores(run: Path) -> dict[str, Any]:
    """Return what the tables need of a finished pre-training run: settings, corpus, held-out scores and the curve."""
    curve = [record for record in runlog.read(run) if "tokens" in record]
    return {
        "config": read_json(run / CONFIG),
        "corpus": read_json(run / FACTS)["corpus"],
        "scores": final_scores(run),
        **{name: curve[-1][name] for name in ("tokens", "seconds")},
        "curve": [_plotted(record) for record in curve],
    }


def _plotted(record: Mapping[str, Any]) -> dict[str, float]:
    """Return what a record of training or of an evaluation has for a curve."""
    plotted = ("step", "tokens", "seconds", "loss", "tokens_per_second")
    numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
    return {n: v for n, v in numbers.items() if n in plotted or n.startswith("dev_")}
