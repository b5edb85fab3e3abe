"""The command line: one table of commands, each a thin layer over a function."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bertsmith import __version__
from bertsmith.config import override, to_dict
from bertsmith.errors import UserError

Inputs = Annotated[
    list[str], typer.Argument(help="Text files or folders: .txt, .jsonl, .parquet, also .gz .xz .bz2 .zst")
]
Out = Annotated[Path, typer.Option("--out", help="The folder to write; must be new or empty")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be repeated")]
Seed = Annotated[int, typer.Option("--seed", help="The seed of everything random")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda or mps; the best there is by default")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output instead of a table")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an unfinished run")]
Field = Annotated[str, typer.Option("--field", help="The field of JSON lines and parquet that holds the text")]
Model = Annotated[str, typer.Argument(help="A model folder, a run or a hub name")]


def tokenizer_train(
    text: Inputs,
    out: Out,
    vocab_size: Annotated[int, typer.Option("--vocab-size", help="Entries of the vocabulary")] = 30_000,
    cased: Annotated[bool, typer.Option("--cased", help="Keep capitals and accents")] = False,
    jamo: Annotated[bool, typer.Option("--jamo", help="Break Hangul into jamo, as the original uncased form")] = False,
    field: Field = "text",
    as_json: Json = False,
) -> None:
    r"""Train a WordPiece vocabulary on text.

    \b
    Example: bertsmith tokenizer train corpus.txt --out tok --vocab-size 8000
    """
    from bertsmith.data.vocabulary import train_tokenizer

    trained = train_tokenizer(text, out, vocab_size=vocab_size, cased=cased, jamo=jamo, field=field)
    tokenizer, held_out = trained.tokenizer, trained.coverage
    facts: dict[str, Any] = {
        "tokenizer": str(out),
        "entries": tokenizer.vocab_size,
        "cased": cased,
        "hash": tokenizer.hash,
    }
    if trained.sampled:
        facts["sampled"] = trained.sampled
    if held_out is not None:
        facts |= {f"held_out_{name}": value for name, value in to_dict(held_out).items()}
    _show(facts, as_json)


def tokenizer_extend(
    source: Annotated[
        str, typer.Argument(metavar="MODEL", help="A tokenizer folder, a model folder, a run or a hub name")
    ],
    out: Out,
    words: Annotated[Path | None, typer.Option("--words", help="A file with a word a line")] = None,
    texts: Annotated[list[str] | None, typer.Option("--from", help="Text whose most useful words are added")] = None,
    count: Annotated[int, typer.Option("--count", help="How many words of --from are added")] = 1000,
    as_json: Json = False,
) -> None:
    r"""Add domain words to a vocabulary and its model; new rows start from the mean of their old pieces.

    \b
    Example: bertsmith tokenizer extend run --from domain.txt --count 500 --out extended
    """
    from bertsmith.extend import extend, read_words

    listed = read_words(words) if words is not None else []
    _show(extend(source, out, words=listed, texts=texts or [], count=count), as_json)


def corpus_doctor(
    text: Inputs,
    tokenizer: Annotated[Path | None, typer.Option("--tokenizer", help="A tokenizer or model folder")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The page to write")] = None,
    field: Field = "text",
    as_json: Json = False,
) -> None:
    r"""Say what would spoil the training before it is run, of raw text or of a corpus folder.

    \b
    Example: bertsmith corpus doctor corpus.txt --tokenizer tok --out doctor.html
    """
    from bertsmith.data.doctor import describe, examine, write_report

    diagnosis = examine(text, tokenizer=tokenizer, text_field=field)
    if out is not None:
        write_report(diagnosis, out)
    if as_json:
        _show(to_dict(diagnosis), as_json)
    else:
        for line in describe(diagnosis):
            print(line)


def corpus_build(
    text: Inputs,
    tokenizer: Annotated[Path, typer.Option("--tokenizer", help="A tokenizer or model folder")],
    out: Annotated[str, typer.Option("--out", help="The folder to write, a path or a URL")],
    workers: Annotated[int | None, typer.Option("--workers", help="Processes; all cores by default")] = None,
    engine: Annotated[str, typer.Option("--engine", help="local or ray")] = "local",
    address: Annotated[str | None, typer.Option("--address", help="The Ray cluster's address")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Pass over bad records and files, and say so")] = False,
    field: Field = "text",
    settings: Set = None,
    as_json: Json = False,
) -> None:
    r"""Turn text into memory-mapped shards of tokens; started again after it was stopped, it goes on.

    \b
    Example: bertsmith corpus build corpus.txt --tokenizer tok --out shards
    Cleaning: --set clean.duplicate_paragraphs=false --set clean.script=hangul --set clean.min_length=200
    """
    from bertsmith.data.build import BuildConfig, build_corpus

    if engine not in ("local", "ray"):
        raise UserError(f"--engine {engine!r} is not one of 'local', 'ray'")
    config = override(BuildConfig(skip_bad=skip_bad, text_field=field), settings or [])
    corpus = build_corpus(text, tokenizer, out, config=config, workers=workers, engine=engine, address=address)  # type: ignore[arg-type]
    facts = corpus.manifest
    counts = {name: getattr(facts, name) for name in ("documents", "sentences", "tokens")}
    size = sum(shard.bytes for shard in facts.shards)
    _show({"corpus": out, **counts, **facts.cleaning, "shards": len(facts.shards), "bytes": size}, as_json)


def pretrain(
    recipe: Annotated[str, typer.Argument(help="A recipe's name (see `bertsmith recipes`) or a run's config.json")],
    data: Annotated[Path, typer.Option("--data", help="A corpus folder")],
    out: Out,
    model: Annotated[
        str | None, typer.Option("--model", help="Go on from this model instead of random weights")
    ] = None,
    seed: Seed = 1,
    settings: Set = None,
    device: Device = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    r"""Pre-train an encoder: masked words and next sentences.

    \b
    Example: bertsmith pretrain bert-tiny --data shards --out run --set train.steps=200
    """
    from bertsmith.pretrain import pretrain as function
    from bertsmith.recipes import recipe as find

    config = override(find(recipe), [f"train.seed={seed}", *(settings or [])])
    scores = function(config, data, out, model=model, device=device, resume=resume)
    _show({"model": str(out / "model"), **scores}, as_json)


def fill(
    model: Model,
    text: Annotated[str, typer.Argument(help="A text with [MASK] in it")],
    top: Annotated[int, typer.Option("--top", help="How many words to show")] = 5,
    device: Device = None,
    as_json: Json = False,
) -> None:
    r"""Show the likeliest words for each [MASK] of a text.

    \b
    Example: bertsmith fill run "The [MASK] of a list is its number of items."
    """
    from bertsmith.predict import fill as function

    masks = function(model, text, top=top, device=device)
    if as_json:
        _show({"text": text, "masks": masks}, as_json)
        return
    for number, candidates in enumerate(masks, 1):
        table = Table("word", "probability", title=f"mask {number}" if len(masks) > 1 else None)
        for candidate in candidates:
            table.add_row(candidate["token"], f"{candidate['probability']:.4f}")
        Console().print(table)


def finetune(
    task: Annotated[str, typer.Argument(help="What to learn: classify or regress")],
    model: Annotated[str, typer.Option("--model", help="A model folder, a run or a hub name")],
    data: Annotated[Path, typer.Option("--data", help="Training rows: .csv, .tsv, .jsonl or .parquet")],
    out: Out,
    dev: Annotated[Path | None, typer.Option("--dev", help="Rows to score on")] = None,
    seed: Seed = 1,
    settings: Set = None,
    device: Device = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    r"""Fine-tune a model on labelled rows (columns text and label, unless data.columns says otherwise).

    \b
    Example: bertsmith finetune classify --model run --data train.csv --dev dev.csv --out run2
    """
    from bertsmith.finetune import FinetuneConfig
    from bertsmith.finetune import finetune as function

    config = override(FinetuneConfig(task), [f"train.seed={seed}", *(settings or [])])
    scores = function(config, model, data, out, dev=dev, device=device, resume=resume)
    _show({"model": str(out / "model"), **scores}, as_json)


def evaluate(
    model: Model,
    data: Annotated[Path, typer.Option("--data", help="Labelled rows")],
    device: Device = None,
    as_json: Json = False,
) -> None:
    r"""Score a fine-tuned model on labelled rows.

    \b
    Example: bertsmith evaluate run2 --data dev.csv
    """
    from bertsmith.predict import evaluate as function

    _show(function(model, data, device=device), as_json)


def predict(
    model: Model,
    data: Annotated[Path, typer.Argument(metavar="INPUT", help="Rows to answer: .csv, .tsv, .jsonl or .parquet")],
    out: Annotated[Path, typer.Option("--out", help="The file to write, one JSON object a row")],
    device: Device = None,
    as_json: Json = False,
) -> None:
    r"""Answer every row of a file, in order: label, score and scores.

    \b
    Example: bertsmith predict run2 input.csv --out out.jsonl
    """
    from bertsmith.predict import predict as function

    _show({"predictions": str(out), "rows": function(model, data, out, device=device)}, as_json)


def recipes(as_json: Json = False) -> None:
    r"""List every named recipe with a line on what it is.

    \b
    Example: bertsmith recipes
    """
    from bertsmith.recipes import describe

    _show(describe(), as_json, "recipe", "what it is")


def demo(
    out: Out = Path("demo"),
    text_only: Annotated[bool, typer.Option("--text-only", help="Write the text and the labelled rows alone")] = False,
    as_json: Json = False,
) -> None:
    r"""The whole path on the text that every Python installation carries: some minutes on two cores.

    \b
    Example: bertsmith demo --out demo
    """
    from bertsmith import demo as demonstration

    if text_only:
        text = demonstration.write_text(out)
        counts = {"documents": len(text.documents), "train_rows": len(text.train), "dev_rows": len(text.held_out)}
        _show({"folder": str(out), **counts}, as_json)
    else:
        demonstration.demo(out, as_json=as_json)


COMMANDS: dict[str, Callable[..., None]] = {
    "tokenizer train": tokenizer_train,
    "tokenizer extend": tokenizer_extend,
    "corpus doctor": corpus_doctor,
    "corpus build": corpus_build,
    "pretrain": pretrain,
    "fill": fill,
    "finetune": finetune,
    "evaluate": evaluate,
    "predict": predict,
    "recipes": recipes,
    "demo": demo,
}
GROUPS = {"tokenizer": "Vocabularies.", "corpus": "Text to shards of tokens."}


def _app() -> typer.Typer:
    options: dict[str, Any] = {"no_args_is_help": True, "add_completion": False, "pretty_exceptions_enable": False}
    app = typer.Typer(help="bertsmith: raw text to a working BERT.", rich_markup_mode=None, **options)
    groups = {name: typer.Typer(help=text, rich_markup_mode=None, **options) for name, text in GROUPS.items()}
    for name, group in groups.items():
        app.add_typer(group, name=name)
    for name, function in COMMANDS.items():
        *group_name, verb = name.split()
        (groups[group_name[0]] if group_name else app).command(verb)(function)

    @app.callback(invoke_without_command=True)
    def version(show: Annotated[bool, typer.Option("--version", help="Print the version")] = False) -> None:
        if show:
            print(__version__)
            raise typer.Exit

    return app


def _show(values: dict[str, Any], as_json: bool, *header: str) -> None:
    """Results: a JSON object for programs, a table for people."""
    if as_json:
        print(json.dumps(values, ensure_ascii=False))
        return
    table = Table(*(header or ("", "")), show_header=bool(header))
    for name, value in values.items():
        table.add_row(name.replace("_", " ") if not header else name, _cell(value))
    Console().print(table)


def _cell(value: Any) -> str:
    """A value as people read it; of a long list the beginning."""
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, list):
        items = [" ".join(map(str, item)) if isinstance(item, list) else str(item) for item in value[:10]]
        return ", ".join(items) + (f", … ({len(value):,} in all)" if len(value) > 10 else "")
    return f"{value:,}" if type(value) is int else str(value)


def main() -> None:
    """Run a command; what the user can mend is one line and exit code 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "passive"
    )  # threads that spin stall each other on a machine that is shared
    try:
        _app()()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"error: {error.strerror or error}{f': {error.filename}' if error.filename else ''}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
