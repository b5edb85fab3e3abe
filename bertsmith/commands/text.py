"""Commands that turn text into vocabularies and corpora."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bertsmith.commands.options import Encoding, Field, Inputs, Json, Out, Set
from bertsmith.commands.show import show
from bertsmith.config import override, to_dict
from bertsmith.errors import UserError
from bertsmith.text.safe import safe_argument

SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Skip records and files that cannot be read, and report them")
]


def tokenizer_train(
    text: Inputs,
    out: Out,
    vocab_size: Annotated[int, typer.Option("--vocab-size", help="The number of entries of the vocabulary")] = 30_000,
    kind: Annotated[
        str,
        typer.Option(
            "--kind", help="wordpiece (BERT), bytes (RoBERTa), unigram (ALBERT), bpe (OpenAI GPT) or words (ELMo)"
        ),
    ] = "wordpiece",
    cased: Annotated[
        bool | None,
        typer.Option("--cased/--uncased", help="Keep upper case and accents; the default of the kinds bytes and words"),
    ] = None,
    jamo: Annotated[
        bool, typer.Option("--jamo", help="Decompose Hangul into jamo, as the original uncased BERT does")
    ] = False,
    morphemes: Annotated[
        str,
        typer.Option(
            "--morphemes",
            help="kiwi: entries end where Korean particles and endings begin (pip install 'bertsmith[korean]'); "
            "the tokenizer itself needs no Kiwi",
        ),
    ] = "",
    normalise: Annotated[
        list[str] | None,
        typer.Option(
            "--normalise",
            help="nfc or nfkc (Unicode form; default: nfc, and nfkc for unigram), width (full-width and half-width "
            "characters), repeats=N (at most N of a repeated mark: ㅋㅋㅋㅋ, !!!!), numbers (each digit becomes 0); "
            "may be given several times",
        ),
    ] = None,
    skip_bad: SkipBad = False,
    field: Field = "text",
    encoding: Encoding = "",
    as_json: Json = False,
) -> None:
    """Train a vocabulary on text.

    \b
    Example: bertsmith tokenizer train corpus.txt --out tok --vocab-size 8000
    For RoBERTa: bertsmith tokenizer train corpus.txt --out tok --vocab-size 50000 --kind bytes
    For ALBERT: bertsmith tokenizer train corpus.txt --out tok --vocab-size 30000 --kind unigram
    For ELMo: bertsmith tokenizer train corpus.txt --out tok --vocab-size 100000 --kind words
    For OpenAI GPT: bertsmith tokenizer train corpus.txt --out tok --vocab-size 40478 --kind bpe
    For Korean: bertsmith tokenizer train korean.txt --out tok --vocab-size 32000 --morphemes kiwi
    For chat: bertsmith tokenizer train chat.txt --out tok --normalise width --normalise repeats=2
    """
    from bertsmith.corpus.vocabulary import train_tokenizer

    trained = train_tokenizer(
        text,
        out,
        vocab_size=vocab_size,
        kind=kind,  # type: ignore[arg-type]
        cased=cased,
        jamo=jamo,
        normalise=normalise or [],
        morphemes=morphemes,
        field=field,
        encoding=encoding,
        skip_bad=skip_bad,
    )
    tokenizer, held_out = trained.tokenizer, trained.coverage
    facts: dict[str, Any] = {
        "tokenizer": str(out),
        "entries": tokenizer.vocab_size,
        "kind": tokenizer.kind,
        "cased": not tokenizer.lowercase,
        "hash": tokenizer.hash,
    }
    if trained.sampled:
        facts["sampled"] = trained.sampled
    if held_out is not None:
        facts |= {f"held_out_{name}": value for name, value in to_dict(held_out).items()}
    show(facts, as_json)


def tokenizer_extend(
    source: Annotated[
        str, typer.Argument(metavar="MODEL", help="A tokenizer folder, a model folder, a run folder or a hub name")
    ],
    out: Out,
    words: Annotated[Path | None, typer.Option("--words", help="A file with one word per line")] = None,
    texts: Annotated[
        list[str] | None, typer.Option("--from", help="Text files whose most useful words are added")
    ] = None,
    count: Annotated[int, typer.Option("--count", help="The number of words to add from --from")] = 1000,
    skip_bad: SkipBad = False,
    field: Field = "text",
    encoding: Encoding = "",
    as_json: Json = False,
) -> None:
    """Add domain words to a vocabulary and its model; their embeddings start as the mean of their old sub-tokens.

    \b
    Example: bertsmith tokenizer extend run --from domain.txt --count 500 --out extended
    """
    from bertsmith.extend import extend, read_words

    listed = read_words(words) if words is not None else []
    facts = extend(
        source, out, words=listed, texts=texts or [], count=count, field=field, encoding=encoding, skip_bad=skip_bad
    )
    show(facts, as_json)


def tokenizer_encode(
    source: Annotated[
        str, typer.Argument(metavar="MODEL", help="A tokenizer folder, a model folder, a run folder or a hub name")
    ],
    text: Annotated[str, typer.Argument(help="The text to tokenise", callback=safe_argument)],
    as_json: Json = False,
) -> None:
    """Show the tokens of a text with their ids and character offsets.

    \b
    Example: bertsmith tokenizer encode tok "The length of a list."
    """
    from bertsmith.extend import find_tokenizer
    from bertsmith.text.tokenizer import Tokenizer

    found = Tokenizer.load(find_tokenizer(source)[0]).encode_aligned([text])[0]
    if as_json:
        show({"text": text, "tokens": found.tokens, "ids": found.ids, "offsets": found.offsets}, as_json)
        return
    table = Table("token", "id", "from", "to", "text")
    for token, number, (begin, end) in zip(found.tokens, found.ids, found.offsets, strict=True):
        table.add_row(Text(token), str(number), str(begin), str(end), Text(text[begin:end]))
    Console().print(table)


def corpus_doctor(
    text: Inputs,
    tokenizer: Annotated[Path | None, typer.Option("--tokenizer", help="A tokenizer or model folder")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The HTML page to write")] = None,
    answers: Annotated[
        Path | None,
        typer.Option("--answers", help="Questions in SQuAD's form: do their answers end at tokens of the vocabulary?"),
    ] = None,
    field: Field = "text",
    encoding: Encoding = "",
    as_json: Json = False,
) -> None:
    """Find what would spoil the training, in raw text or in a corpus folder, before the training is run.

    \b
    Example: bertsmith corpus doctor corpus.txt --tokenizer tok --out doctor.html
    """
    from bertsmith.corpus.doctor.examination import describe, examine
    from bertsmith.pages.doctor import write_report

    diagnosis = examine(text, tokenizer=tokenizer, text_field=field, encoding=encoding, answers=answers)
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
    out: Annotated[str, typer.Option("--out", help="The output folder: a path or a URL")],
    workers: Annotated[
        int | None, typer.Option("--workers", help="The number of worker processes; default: one per core")
    ] = None,
    engine: Annotated[str, typer.Option("--engine", help="Where the workers run: local or ray")] = "local",
    address: Annotated[str | None, typer.Option("--address", help="The address of the Ray cluster")] = None,
    skip_bad: SkipBad = False,
    field: Field = "text",
    encoding: Encoding = "",
    settings: Set = None,
    as_json: Json = False,
) -> None:
    """Turn text into memory-mapped shards of tokens; the same command resumes a build that was stopped.

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
