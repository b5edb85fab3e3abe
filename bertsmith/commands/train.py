"""Commands that train: pre-training, fine-tuning, GLUE's table, the check of resuming, recipes, the demo."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bertsmith.commands.options import (
    UNNAMED,
    BatchSize,
    Device,
    Epochs,
    Json,
    LearningRate,
    MaxLength,
    Out,
    Resume,
    Seed,
    Set,
    Steps,
)
from bertsmith.commands.show import show, show_glue, show_groups, show_summary
from bertsmith.config import override, with_short
from bertsmith.errors import UserError

if TYPE_CHECKING:
    from bertsmith.finetuning.settings import FinetuneConfig

TaskName = Annotated[
    str,
    typer.Argument(
        help="A data set (cola, mnli, squad2, klue-ner, …), or classify, pair, regress, tag, answer, choose"
    ),
]
TrainingRows = Annotated[
    Path, typer.Option("--data", help="The folder of a data set, or training rows: .csv, .tsv, .jsonl, .parquet")
]
DevRows = Annotated[
    Path | None, typer.Option("--dev", help="Rows to evaluate on; default for a folder: its own dev file")
]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Skip rows that cannot be used, such as those without a text or a label")
]
Seeds = Annotated[
    int | None, typer.Option("--seeds", help="Train with this many consecutive seeds; gives mean and deviation")
]
Grid = Annotated[
    str | None,
    typer.Option("--grid", help='paper, glue or "KEY=A,B KEY=C,D": train with every setting, keep the best on dev'),
]
Jobs = Annotated[
    int | None, typer.Option("--jobs", help="With --seeds or --grid: this many runs at the same time on the device")
]
FeatureVariant = Annotated[
    str | None,
    typer.Option(
        "--features", help="Train a BiLSTM on the frozen encoder: last, concat-last-four, … (Table 7); mix-all for ELMo"
    ),
]


def pretrain(
    recipe: Annotated[
        str, typer.Argument(help="The name of a recipe (see `bertsmith recipes`), or the config.json of a run")
    ],
    data: Annotated[Path, typer.Option("--data", help="A corpus folder")],
    out: Out,
    model: Annotated[
        str | None, typer.Option("--model", help="Start from this model instead of random weights")
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option("--teacher", help="Distil this model of the same vocabulary into the new one (objective.teacher)"),
    ] = None,
    learning_rate: LearningRate = None,
    steps: Steps = None,
    epochs: Epochs = None,
    hours: Annotated[
        float | None,
        typer.Option("--hours", help="Train for this many hours; the schedule follows the clock (train.hours)"),
    ] = None,
    batch_size: BatchSize = None,
    max_length: Annotated[
        int | None, typer.Option("--max-length", help="The tokens of a sequence (data.max_length)")
    ] = None,
    seed: Seed = None,
    settings: Set = None,
    device: Device = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Pre-train an encoder, for example on masked words and next sentences.

    \b
    Example: bertsmith pretrain bert-tiny --data shards --out run --steps 200
    By the clock: bertsmith pretrain speedrun --data shards --out run --hours 2
    Half of a BERT: bertsmith pretrain distilbert --teacher run --data shards --out half
    Several GPUs: torchrun --nproc-per-node 8 -m bertsmith pretrain bert-base --data shards --out run
    """
    from bertsmith.pretraining.run import pretrain as function
    from bertsmith.pretraining.teacher import refuse_sizes, with_teacher
    from bertsmith.recipes import recipe as find

    if model is not None and (changed := [s for s in settings or [] if s.startswith("model.")]):
        raise UserError(f"--set {changed[0]}: with --model the encoder is the one of {model}; leave it out")
    short = {"learning_rate": learning_rate, "steps": steps, "epochs": epochs, "hours": hours}
    short |= {"batch_size": batch_size, "max_length": max_length, "seed": seed}
    start = find(recipe) if teacher is None else with_teacher(find(recipe), teacher)
    config = override(start, with_short(settings or [], **short))
    refuse_sizes(config, settings or [])
    scores = function(config, data, out, model=model, device=device, resume=resume)
    show({"model": str(out / "model"), **scores}, as_json)


def finetune(
    task: TaskName,
    data: TrainingRows,
    out: Out,
    model: Annotated[
        str | None,
        typer.Option("--model", help=f"A model folder, a run folder or a hub name; {UNNAMED}"),
    ] = None,
    dev: DevRows = None,
    text: Annotated[str | None, typer.Option("--text", help="The column of the text (data.columns.text)")] = None,
    pair: Annotated[str | None, typer.Option("--pair", help="The column of a second text (data.columns.pair)")] = None,
    label: Annotated[str | None, typer.Option("--label", help="The column of the label (data.columns.label)")] = None,
    learning_rate: LearningRate = None,
    epochs: Epochs = None,
    steps: Steps = None,
    batch_size: BatchSize = None,
    max_length: MaxLength = None,
    windows: Annotated[
        int | None,
        typer.Option("--windows", help="Read longer texts in up to this many windows, instead of truncating them"),
    ] = None,
    skip_bad: SkipBad = False,
    seeds: Seeds = None,
    grid: Grid = None,
    jobs: Jobs = None,
    features: FeatureVariant = None,
    teacher: Annotated[
        str | None,
        typer.Option("--teacher", help="Learn the predictions of this fine-tuned model, too (distillation.teacher)"),
    ] = None,
    seed: Seed = None,
    settings: Set = None,
    device: Device = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Fine-tune a model on a data set or on rows of your own (columns that are not named are guessed).

    \b
    Example: bertsmith finetune classify --model run --data train.csv --dev dev.csv --out run2
    From the default model: bertsmith finetune classify --data train.csv --out run2
    Columns and settings: bertsmith finetune classify … --text body --label topic --lr 3e-5 --epochs 4
    Long documents: bertsmith finetune classify --model run --data train.csv --windows 8 --out run2
    A data set: bertsmith finetune mnli --model run --data glue/MNLI --out mnli
    Entities by their characters: bertsmith finetune tag --model run --data entities.jsonl --out tagger
    Five seeds of every setting: bertsmith finetune rte --model run --data glue/RTE --out rte --grid paper --seeds 5
    From a fine-tuned teacher: bertsmith finetune sst2 --model half --teacher sst2 --data glue/SST-2 --out small
    Features: bertsmith finetune conll2003 --model run --data conll --out tagger --features concat-last-four
    """
    from bertsmith.finetuning.run import finetune as function

    model = model or None  # an empty one names none
    short = {"text": text, "pair": pair, "label": label, "learning_rate": learning_rate, "epochs": epochs}
    short |= {"steps": steps, "batch_size": batch_size, "max_length": max_length, "windows": windows, "seed": seed}
    changes = with_short(settings or [], **short, skip_bad=skip_bad or None, teacher=teacher)
    config = _finetune_config(task, features, changes)
    options: dict[str, Any] = {"dev": dev, "device": device, "resume": resume}
    if seeds is not None or grid is not None:
        _finetune_many(config, changes, model, data, out, seeds, grid, jobs, options, as_json)
        return
    if jobs is not None:
        raise UserError(f"--jobs {jobs}: there is only one run; --seeds or --grid make several")
    show({"model": str(out / "model"), **function(config, model, data, out, **options)}, as_json)


def _finetune_config(task: str, features: str | None, changes: list[str]) -> FinetuneConfig:
    from bertsmith.finetuning.settings import FinetuneConfig
    from bertsmith.recipes import feature_based

    config = override(FinetuneConfig(task) if features is None else feature_based(task, features), changes)
    if config.task != task:
        raise UserError(f"--set task={config.task}: the command names the task {task}; name the other one there")
    return config


def _finetune_many(
    config: FinetuneConfig,
    changes: list[str],
    model: str | None,
    data: Path,
    out: Path,
    seeds: int | None,
    grid: str | None,
    jobs: int | None,
    options: dict[str, Any],
    as_json: bool,
) -> None:
    from bertsmith.finetuning.protocols import find_grid, finetune_many

    if fixed := [s for s in changes if s.partition("=")[0].strip() in find_grid(grid, config.task)]:
        raise UserError(f"{fixed[0]}: --grid changes this setting, too; leave one of them out")
    count, several = 1 if seeds is None else seeds, 1 if jobs is None else jobs
    summary = finetune_many(config, model, data, out, seeds=count, grid=grid, jobs=several, **options)
    show_summary({"model": str(out / "model"), **summary}, as_json)


def glue(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER…", help="Folders of finished runs of GLUE tasks, or the runs themselves"),
    ],
    as_json: Json = False,
) -> None:
    """Show the GLUE table on dev with both averages: each task alone, and small tasks started from MNLI.

    \b
    Example: bertsmith glue runs
    """
    from bertsmith.finetuning.protocols import glue as function

    show_glue(function(runs), as_json)


def verify_resume(
    recipe: Annotated[str, typer.Argument(help="The name of a recipe, or the config.json of a run")],
    data: Annotated[Path, typer.Option("--data", help="A corpus folder")],
    steps: Annotated[int, typer.Option("--steps", help="The number of steps of the run")] = 30,
    kills: Annotated[int, typer.Option("--kills", help="How many times the run is killed")] = 3,
    settings: Set = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Check that a run that is killed (-9) and resumed ends with the same weights.

    \b
    Example: bertsmith verify resume bert-tiny --data shards --steps 40 --device cpu
    """
    from bertsmith.recipes import recipe as find
    from bertsmith.verify import verify_resume as function

    found = function(override(find(recipe), settings or []), data, steps=steps, kills=kills, device=device)
    show(found, as_json)
    if not found["exact"]:
        raise typer.Exit(1)


def recipes(as_json: Json = False) -> None:
    """List the recipes for pre-training: which to start with and when, the families, the ablations.

    \b
    Example: bertsmith recipes
    """
    from bertsmith.commands.recipe_list import describe, grouped

    if as_json:
        show(describe(), as_json)
    else:
        show_groups(grouped())


def demo(
    out: Out = Path("demo"),
    text_only: Annotated[bool, typer.Option("--text-only", help="Write only the text and the labelled rows")] = False,
    as_json: Json = False,
) -> None:
    """Show the default model, then run the whole path on Python's own documentation, in minutes on two cores.

    \b
    Example: bertsmith demo --out demo
    """
    from bertsmith.demo import run as demonstration

    if text_only:
        text = demonstration.write_text(out)
        counts = {"documents": len(text.documents), "train_rows": len(text.train), "dev_rows": len(text.held_out)}
        show({"folder": str(out), **counts}, as_json)
    else:
        demonstration.demo(out, as_json=as_json)
