"""Pre-training: a corpus and a configuration to a model folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertsmith import draws
from bertsmith.batch import Batch, Packed
from bertsmith.config import to_dict
from bertsmith.corpus.shards import Corpus
from bertsmith.errors import UserError
from bertsmith.formats.card import write_card
from bertsmith.formats.families import family_of
from bertsmith.formats.hf import Notes, load_folder, save_folder
from bertsmith.formats.hub import find_model
from bertsmith.model.config import EncoderConfig
from bertsmith.model.cost import training_flops
from bertsmith.model.encoder import Encoder
from bertsmith.model.fused_choice import choose_for_run
from bertsmith.objectives.causal_lm import CausalLM
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.pretraining import held_out
from bertsmith.pretraining.loader import DataConfig, Loader, split_documents
from bertsmith.pretraining.memory import MicroBatches
from bertsmith.pretraining.segments import segment_source
from bertsmith.progress import say
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training import distributed, runlog
from bertsmith.training.fit import fit
from bertsmith.training.run import add_facts, facts_of, final_scores, finish_run, open_run
from bertsmith.training.schedule import rate_share
from bertsmith.training.settings import TrainConfig, autocast_dtype, pick_device

WEIGHTS = 104  # a stream of draws
NOT_LEARNT = 0.3  # so much more loss on long sequences than on short ones says that their positions are not learnt
MOVED = 4.0  # times their start is how far positions have to be able to move in a phase to be learnt in it
SIZES = "micro_batch_sizes"  # by the length of the sequences, in run.json
FULL = 0.6  # long sequences that are emptier than this do not teach the last positions
Objective = MaskedLM | CausalLM


@dataclass(frozen=True)
class PretrainConfig:
    """One complete pre-training run. The tokenizer decides `model.vocab_size`.

    An encoder that reads in one direction (`model.direction`) learns the next word instead of masked ones.
    """

    recipe: str
    model: EncoderConfig
    data: DataConfig
    train: TrainConfig
    next_sentence: bool = True  # the pair loss: next sentence, or sentence order where data.pairs says so
    DECIDED = {"recipe": "the command names the recipe"}

    def __post_init__(self) -> None:
        family_of(self.model)  # refuses an encoder that its family cannot express
        if self.data.pairs != "full" and self.model.num_segments < 2:
            raise UserError(
                f"data.pairs={self.data.pairs} needs two segments, and model.num_segments is "
                f"{self.model.num_segments}; set it to 2, or data.pairs=full with next_sentence=false"
            )
        if self.next_sentence and self.data.pairs == "full":
            raise UserError("data.pairs=full has no pairs to learn from: set next_sentence=false")
        if self.next_sentence and self.model.direction != "both":
            raise UserError(
                f"model.direction={self.model.direction} learns the next word alone: set next_sentence=false"
            )


@dataclass(frozen=True, eq=False)
class Phase:
    """A part of a run with one length of sequence: it ends when this share of the run lies behind."""

    end: float
    loader: Loader
    micro_batch_size: int


def pretrain(
    config: PretrainConfig,
    data: str | Path,
    out: str | Path,
    *,
    model: str | Path | None = None,
    device: str | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Pre-train on a corpus folder; `out/model` is the finished model. Gives the held-out scores.

    `model` continues from a saved model instead of random weights; `resume` goes on with an unfinished run. Started by
    `torchrun`, all its processes train one model.
    """
    where = pick_device(device, config.train.precision)
    with distributed.process_group(where), distributed.locked(out):
        return _pretrain(config, Corpus.open(data), Path(out), model, where, resume)


def _pretrain(
    config: PretrainConfig, corpus: Corpus, run: Path, start: str | Path | None, where: torch.device, resume: bool
) -> dict[str, Any]:
    tokenizer = Tokenizer.load(corpus.folder)
    corpus.check_tokenizer(tokenizer.hash, corpus.folder)
    objective, config = _start(config, find_model(start) if start is not None else None, corpus, tokenizer)
    train, kept = split_documents(corpus.manifest.documents, config.data.held_out)
    if not len(kept):
        config.train.refuse_without_scores("raise data.held_out")
    kept_sizes = distributed.on_rank_zero(lambda: facts_of(run).get(SIZES, {})) if resume else {}
    phases = _phases(config, corpus, train, tokenizer, where, kept_sizes)
    sizes = {str(phase.loader.source.max_length): phase.micro_batch_size for phase in phases}
    first = phases[0].loader
    steps = config.train.num_steps(len(first.source))
    _check_length_of_run(config, steps, phases)
    if start is None and steps is not None:
        _say_what_will_not_be_learnt(config, steps)
    facts = {"corpus": {**_counts(corpus), "tokenizer": corpus.manifest.tokenizer}, "start": str(start or "")}
    notes = {"model": _model_facts(objective), "data": _data_facts(first, len(kept)), "machine": _machine(where)}
    notes[SIZES] = sizes
    found, finished = open_run(run, config, facts, resume, notes)
    if finished:
        return {"steps": steps or max((r["step"] for r in runlog.read(run)), default=0), **final_scores(run)}
    if resume and sizes != kept_sizes:
        add_facts(run, **{SIZES: sizes})
    if found is not None and distributed.is_rank_zero():
        loaded = load_folder(found[0], next_sentence=config.next_sentence).model
        assert isinstance(loaded, Objective)
        objective = loaded
    objective.to(where)
    objective.encoder.gradient_checkpointing = config.train.gradient_checkpointing

    def batches(step: int, share: float) -> list[Batch]:
        phase = phases[_number(phases, share)]
        sizes = config.train.batch_size, phase.micro_batch_size
        return phase.loader.step(step, *sizes, distributed.rank(), distributed.world_size())

    reached = 0  # the phase that the run is in

    def watch(share: float) -> None:
        nonlocal reached
        corpus.refuse_faults()
        reached = _number(phases, share)

    def save(folder: Path, tensors: Any) -> None:
        note = Notes(task="pretrain", max_length=None, recipe=config.recipe)
        save_folder(folder, objective, tokenizer, note, tensors)

    def evaluate() -> dict[str, Any]:
        """On the first phase's length, so that a run's figures can be compared, and from the second on at that too."""
        found = held_out.evaluate(objective, loaders[0], samples, dtype)
        for loader in loaders[1 : reached + 1]:
            longer = held_out.evaluate(objective, loader, [], dtype)
            found |= {f"{held_out.LONG}{name}": value for name, value in longer.items()}
        return found

    loaders, samples = [], []
    if len(kept):
        loaders = [_loader(config, corpus, kept, tokenizer, phase.loader.source.max_length) for phase in phases]
        samples = held_out.choose_samples(corpus, kept, tokenizer)
    dtype = autocast_dtype(config.train.precision, where)
    scores = fit(
        objective,
        batches,
        config.train,
        steps,
        run,
        save=save,
        load=lambda folder: load_folder(folder, next_sentence=config.next_sentence).model.state_dict(),
        evaluate=evaluate if loaders else None,
        goal="-mlm_loss" if isinstance(objective, MaskedLM) else "-lm_loss",
        flops=lambda batch: _flops(config.model, batch),
        before_step=watch,
        resume=found,
        capturable=choose_for_run(config.model, where, dtype).fused,
        title=f"pre-training {config.recipe}",
    )

    def save_with_card(folder: Path, tensors: Any) -> None:
        save(folder, tensors)
        told = f"{corpus.manifest.tokens:,} tokens of text"
        write_card(folder, data=told, settings=to_dict(config)["train"], scores=final_scores(run))

    finish_run(run, objective, save_with_card)
    if missed := not_learnt(config.data, scores):
        say(f"note: {missed}")
    return scores


def _start(
    config: PretrainConfig, start: Path | None, corpus: Corpus, tokenizer: Tokenizer
) -> tuple[Objective, PretrainConfig]:
    """The model of a new run, random or from a folder, and the configuration with the facts that it settles."""
    if start is None:
        config = replace(config, model=replace(config.model, vocab_size=tokenizer.vocab_size))
        _check_lengths(config)
        torch.manual_seed(draws.seed(config.train.seed, WEIGHTS))
        encoder = Encoder(config.model)
        return MaskedLM(encoder, config.next_sentence) if config.model.direction == "both" else CausalLM(
            encoder
        ), config
    torch.manual_seed(draws.seed(config.train.seed, WEIGHTS))  # of heads that the folder lacks
    loaded = load_folder(start, next_sentence=config.next_sentence)
    corpus.check_tokenizer(loaded.tokenizer.hash, start)
    config = replace(config, model=loaded.model.encoder.config)
    _check_lengths(config)
    if loaded.missing:
        parts = sorted({name.split(".")[0] for name in loaded.missing})
        say(f"note: {start} has no weights for {', '.join(parts)}; they start at random")
    assert isinstance(loaded.model, Objective)
    return loaded.model, config


def check_length(max_length: int, model: EncoderConfig, name: str = "data.max_length") -> None:
    """Refuse sequences that are longer than the encoder's positions."""
    if max_length > model.max_positions:
        raise UserError(
            f"{name} {max_length} is longer than the encoder's {model.max_positions} positions; "
            f"set it to {model.max_positions} or less, or model.max_positions={max_length} for a new model"
        )


def _check_lengths(config: PretrainConfig) -> None:
    check_length(config.data.max_length, config.model)
    if config.data.long_length is not None:
        check_length(config.data.long_length, config.model, "data.long_length")


def _check_length_of_run(config: PretrainConfig, steps: int | None, phases: list[Phase]) -> None:
    """Refuse a corpus that does not fill a batch; say what a short or timed run, or short documents, do not do."""
    if steps is None:
        say("note: a schedule by the clock depends on the machine's speed: resuming goes on, but not to the bit")
    elif config.data.long_length is not None and steps * config.data.long_share < 1:
        say(f"note: {steps} steps are too few for the phase of {config.data.long_length} tokens; it is left out")
        phases = phases[:1]
    for source in (phase.loader.source for phase in phases):
        if len(source) < config.train.batch_size:
            raise UserError(
                f"the corpus gives {len(source)} sequences of {source.max_length} tokens, fewer than a batch: "
                f"set train.batch_size={len(source)} or less, or add text"
            )
    if len(phases) > 1 and (full := _fullness(phases[1].loader)) < FULL:
        say(
            f"note: sequences of {config.data.long_length} tokens are {full:.0%} full, since many documents are "
            "shorter: the last positions are seldom learnt, which long input needs. Longer documents fill them, or "
            "data.pairs=full with next_sentence=false"
        )


def _phases(
    config: PretrainConfig,
    corpus: Corpus,
    documents: np.ndarray[Any, Any],
    tokenizer: Tokenizer,
    where: torch.device,
    sizes: Mapping[str, int],
) -> list[Phase]:
    """The phases of a run: one, or short sequences and then long ones (BERT paper, appendix A.2).

    `sizes` are the micro-batches that the run was started with, by the length of the sequences.
    """
    data = config.data
    lengths = [(1.0, data.max_length)]
    if data.long_length is not None:
        lengths = [(1.0 - data.long_share, data.max_length), (1.0, data.long_length)]
    masked = data.masking.rate if config.model.direction == "both" else 1.0
    phases = []
    for end, length in lengths:
        size = MicroBatches(config.model, config.train, where, length, masked).size(sizes.get(str(length)))
        phases.append(Phase(end, _loader(config, corpus, documents, tokenizer, length), size))
    return phases


def _number(phases: list[Phase], share: float) -> int:
    """Which phase a run is in when this share of it lies behind."""
    return next((number for number, phase in enumerate(phases) if share < phase.end), len(phases) - 1)


def _say_what_will_not_be_learnt(config: PretrainConfig, steps: int) -> None:
    """Say beforehand that positions will stay as they start: Adam moves a weight by the sum of the rates at most."""
    data, train, std = config.data, config.train, config.model.init_std
    rate = {"adamw": train.learning_rate, "muon": train.rest_learning_rate}.get(train.optimizer)
    if data.long_length is None or not rate or steps * data.long_share < 1:
        return
    begin = round(steps * (1 - data.long_share))
    moved = rate * sum(rate_share(train, step, steps) for step in range(begin, steps))
    if moved < MOVED * std:
        say(
            f"note: the rates of the {steps - begin:,} steps with {data.long_length} tokens add up to {moved:.2g}, and "
            f"no weight moves further: positions from {data.max_length} on, which start {std:g} from 0, are hardly "
            f"learnt. Raise data.long_share ({data.long_share:g} now) or train.steps, or set train.schedule=stable"
        )


def not_learnt(data: DataConfig, scores: Mapping[str, Any]) -> str:
    """Whether long sequences are read worse than short ones, in words: their phase was too short."""
    name = next((name for name in ("mlm_loss", "lm_loss") if f"{held_out.LONG}{name}" in scores), None)
    if name is None or scores[f"{held_out.LONG}{name}"] < scores[name] + NOT_LEARNT:
        return ""
    return (
        f"held-out sequences of {data.long_length} tokens have a loss of {scores[held_out.LONG + name]:.2f}, of "
        f"{data.max_length} {scores[name]:.2f}: the positions from {data.max_length} on are not learnt yet. Give them "
        f"more steps (data.long_share, {data.long_share} now)"
    )


def _loader(
    config: PretrainConfig,
    corpus: Corpus,
    documents: np.ndarray[Any, Any],
    tokenizer: Tokenizer,
    max_length: int,
) -> Loader:
    data = config.data
    source = segment_source(
        data.pairs, corpus, documents, max_length, data.short_share, config.train.seed, tokenizer.frame
    )
    return Loader.of(source, tokenizer, data, direction=config.model.direction)


def _flops(model: EncoderConfig, batch: Batch) -> float:
    if not batch.num_tokens:
        return 0.0
    assert isinstance(batch.layout, Packed)
    words = batch.counts["mlm" if model.direction == "both" else "lm"]
    return training_flops(model, batch.layout.lengths.tolist(), words)


def _counts(corpus: Corpus) -> dict[str, int]:
    return {name: getattr(corpus.manifest, name) for name in ("documents", "sentences", "tokens")}


def _model_facts(objective: Objective) -> dict[str, Any]:
    return {"parameters": sum(p.numel() for p in objective.parameters())}


def _data_facts(loader: Loader, held_out_documents: int) -> dict[str, Any]:
    """How many sequences there are, and how full they are."""
    fullness = round(_fullness(loader), 4)
    return {"sequences": len(loader.source), "held_out_documents": held_out_documents, "fullness": fullness}


def _fullness(loader: Loader) -> float:
    """The share of the sequences' places that have a token, by a sample of them."""
    indices = np.linspace(0, len(loader.source) - 1, 64).astype(np.int64)
    return loader.batch(np.zeros_like(indices), indices).num_tokens / (len(indices) * loader.source.max_length)


def _machine(where: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else where.type
    return {"device": name, "torch": torch.__version__, "ranks": distributed.world_size()}
