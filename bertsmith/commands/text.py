"""Commands that turn text into vocabularies and corpora."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bertsmith.commands.options import Encoding, Field, Inputs, Json, Out, Set, show
from bertsmith.config import override, to_dict
from bertsmith.errors import UserError
from bertsmith.text.safe import safe_argument


def tokenizer_train(
    text: Inputs,
    out: Out,
    vocab_size: Annotated[int, typer.Option("--vocab-size", help="Entries of the vocabulary")] = 30_000,
    cased: Annotated[bool, typer.Option("--cased", help="Keep capitals and accents")] = False,
    jamo: Annotated[bool, typer.Option("--jamo", help="Break Hangul into jamo, as the original uncased form")] = False,
    field: Field = "text",
    encoding: Encoding = "",
    as_json: Json = False,
) -> None:
    """Train a WordPiece vocabulary on text.

    \b
    Example: bertsmith tokenizer train corpus.txt --out tok --vocab-size 8000
    """
    from bertsmith.corpus.vocabulary import train_tokenizer

    trained = train_tokenizer(text, out, vocab_size=vocab_size, cased=cased, jamo=jamo, field=field, encoding=encoding)
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
    show(facts, as_json)


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
    """Add domain words to a vocabulary and its model; new rows start from the mean of their old pieces.

    \b
    Example: bertsmith tokenizer extend run --from domain.txt --count 500 --out extended
    """
    from bertsmith.extend import extend, read_words

    listed = read_words(words) if words is not None else []
    show(extend(source, out, words=listed, texts=texts or [], count=count), as_json)


def tokenizer_encode(
    source: Annotated[
        str, typer.Argument(metavar="MODEL", help="A tokenizer folder, a model folder, a run or a hub name")
    ],
    text: Annotated[str, typer.Argument(help="The text to cut into pieces", callback=safe_argument)],
    as_json: Json = False,
) -> None:
    """Show the pieces that a text is cut into, with their ids and their places in the text.

    \b
    Example: bertsmith tokenizer encode tok "The length of a list."
    """
    from bertsmith.extend import find_tokenizer
    from bertsmith.text.tokenizer import Tokenizer

    found = Tokenizer.load(find_tokenizer(source)[0]).encode_aligned([text])[0]
    if as_json:
        show({"text": text, "tokens": found.tokens, "ids": found.ids, "offsets": found.offsets}, as_json)
        return
    table = Table("piece", "id", "from", "to", "text")
    for token, number, (begin, end) in zip(found.tokens, found.ids, found.offsets, strict=True):
        table.add_row(Text(token), str(number), str(begin), str(end), Text(text[begin:end]))
    Console().print(table)


def corpus_doctor(
    text: Inputs,
    tokenizer: Annotated[Path | None, typer.Option("--tokenizer", help="A tokenizer or model folder")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The page to write")] = None,
    field: Field = "text",
    encoding: Encoding = "",
    as_json: Json = False,
) -> None:
    """Say what would spoil the training before it is run, of raw text or of a corpus folder.

    \b
    Example: bertsmith corpus doctor corpus.txt --tokenizer tok --out doctor.html
    """
    from bertsmith.corpus.doctor.examination import describe, examine
    from bertsmith.pages.doctor import write_report

    diagnosis = examine(text, tokenizer=tokenizer, text_field=field, encoding=encoding)
    if out is not None:
        write_report(diagnosis, out)
    if as_json:
        show(to_dict(diagnosis), as_json)
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
    encoding: Encoding = "",
    settings: Set = None,
    as_json: Json = False,
) -> None:
    """Turn text into memory-mapped shards of tokens; started again after it was stopped, it goes on.

    \b
    Example: bertsmith corpus build corpus.txt --tokenizer tok --out shards
    Cleaning: --set clean.duplicate_paragraphs=false --set clean.script=hangul --set clean.min_length=200
    """
    from bertsmith.corpus.build import BuildConfig, build_corpus

    if engine not in ("local", "ray"):
        raise UserError(f"--engine {engine!r} is not one of 'local', 'ray'")
    config = override(BuildConfig(skip_bad=skip_bad, text_field=field, encoding=encoding), settings or [])
    corpus = build_corpus(text, tokenizer, out, config=config, workers=workers, engine=engine, address=address)  # type: ignore[arg-type]
    facts = corpus.manifest
    counts = {name: getattr(facts, name) for name in ("documents", "sentences", "tokens")}
    size = sum(shard.bytes for shard in facts.shards)
    unknown = {"unk_share": (facts.unknown or 0) / max(1, facts.tokens)}
    show({"corpus": out, **counts, **unknown, **facts.cleaning, "shards": len(facts.shards), "bytes": size}, as_json)
