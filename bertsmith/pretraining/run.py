"""Pre-training: a corpus and a configuration to a model folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertsmith.batch import Batch, Packed
from bertsmith.config import to_dict
from bertsmith.corpus.shards import Corpus
from bertsmith.formats.card import write_card
from bertsmith.formats.hf import Notes
from bertsmith.model.encoder import Encoder
from bertsmith.model.fused_choice import choose_for_run
from bertsmith.objectives.objective import Objective
from bertsmith.pretraining import checks, held_out
from bertsmith.pretraining.doubts import doubts, learnt_little, loss_without_context
from bertsmith.pretraining.loader import Loader, split_documents
from bertsmith.pretraining.models import load_tensors, restore, save_model, start_model
from bertsmith.pretraining.phases import Phases, make_loader, make_phases
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.pretraining.teacher import with_teacher
from bertsmith.progress import say
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training import distributed, runlog
from bertsmith.training.fit import fit
from bertsmith.training.parts import untrained_parameters
from bertsmith.training.run import MODEL, Found, add_facts, facts_of, final_scores, finish_run, open_run
from bertsmith.training.settings import autocast_dtype, pick_device

SIZES = "micro_batch_sizes"  # by the length of the sequences, in run.json


def pretrain(
    config: PretrainConfig,
    data: str | Path,
    out: str | Path,
    *,
    model: str | Path | None = None,
    teacher: str | Path | None = None,
    device: str | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Pre-train on a corpus folder and return the held-out scores; `out/model` is the finished model.

    `model` continues from a saved model instead of random weights; `teacher` is a model with the same vocabulary that
    the new one is distilled from; `resume` resumes an unfinished run. Started by `torchrun`, all its processes train
    one model.
    """
    if teacher is not None:
        config = with_teacher(config, teacher)
    where = pick_device(device, config.train.precision)
    with distributed.process_group(where), distributed.locked(out):
        return _pretrain(config, Corpus.open(data), Path(out), model, where, resume)


def _pretrain(
    config: PretrainConfig, corpus: Corpus, run: Path, start: str | Path | None, where: torch.device, resume: bool
) -> dict[str, Any]:
    """Prepare the model and the data, then train unless the run is finished."""
    tokenizer = Tokenizer.load(corpus.folder)
    corpus.check_tokenizer(tokenizer.hash, corpus.folder)
    objective, config, start_facts = start_model(config, corpus, tokenizer, start)
    if config.model.reads_characters:
        tokenizer = replace(tokenizer, spells=True)
    documents, kept = split_documents(corpus.manifest.documents, config.data.held_out)
    if not len(kept):
        config.train.refuse_without_scores("raise data.held_out")
    sizes = distributed.on_rank_zero(lambda: facts_of(run).get(SIZES, {})) if resume else {}
    phases = make_phases(config, objective, corpus, documents, tokenizer, where, sizes)
    steps = config.train.num_steps(len(phases.parts[0].loader.source))
    checks.check_run_length(config, steps, phases)
    if start is None and steps is not None:
        checks.note_unreachable_positions(config, steps)
    for note in doubts(config, corpus, kept):
        say(f"note: {note}")
    lengths = [phase.length for phase in phases.parts] if len(kept) else []
    judged = held_out.settings_of(config)
    loaders = [make_loader(judged, corpus, kept, tokenizer, length) for length in lengths]
    without_context = loss_without_context(corpus, documents, loaders[0]) if loaders else None
    facts = {"corpus": _corpus_facts(corpus), **start_facts}
    notes = {**_notes(objective, phases, len(kept), where), "loss_without_context": without_context}
    found, finished = open_run(run, config, facts, resume, notes)
    if finished:
        return {"steps": steps or max((r["step"] for r in runlog.read(run)), default=0), **final_scores(run)}
    if resume and sizes != phases.micro_batch_sizes:
        add_facts(run, **{SIZES: phases.micro_batch_sizes})
    positions = config.model.max_positions
    fills = len(kept) > 0 and objective.fills_masks
    samples = held_out.choose_samples(corpus, kept, tokenizer, positions) if fills else []
    prepared = _Run(config, run, corpus, tokenizer, objective, phases, loaders, samples, where, without_context)
    return prepared.train(steps, found)


@dataclass(eq=False)
class _Run:
    """A run whose model and data are ready, with the functions that `fit` calls."""

    config: PretrainConfig
    folder: Path
    corpus: Corpus
    tokenizer: Tokenizer
    objective: Objective
    phases: Phases
    held_out_loaders: list[Loader]  # one for each phase; none if nothing is held out
    samples: list[held_out.Sample]
    where: torch.device
    without_context: float | None  # the held-out loss of a model that ignores the context
    phase: int = 0  # the number of the last phase that has begun
    caution: str = ""  # on the finished model

    @property
    def dtype(self) -> torch.dtype | None:
        """The type of autocast; None: there is none."""
        return autocast_dtype(self.config.train.precision, self.where)

    @property
    def capturable(self) -> bool:
        """Whether all encoders, also one that is not trained, run on the fused kernels; a note says if one does not."""
        encoders = [part for part in self.objective.modules() if isinstance(part, Encoder)]
        return all(choose_for_run(encoder.config, self.where, self.dtype).fused for encoder in encoders)

    def train(self, steps: int | None, checkpoint: Found | None) -> dict[str, Any]:
        """Train to the end, from a checkpoint where there is one, write the model and return its held-out scores."""
        config, objective = self.config, self.objective
        if checkpoint is not None and distributed.is_rank_zero():
            restore(objective, checkpoint[0])
        objective.to(self.where)
        for encoder in objective.encoders:
            encoder.gradient_checkpointing = config.train.gradient_checkpointing
        scores = fit(
            objective,
            self.phases.batches,
            config.train,
            steps,
            self.folder,
            save=self.save,
            load=lambda folder: load_tensors(folder, config.objective),
            evaluate=self.evaluate if self.held_out_loaders else None,
            goal=objective.goal,
            flops=self.flops,
            before_step=self.before_step,
            resume=checkpoint,
            capturable=self.capturable,
            title=f"pre-training {config.recipe}",
        )
        self.caution = learnt_little(objective, scores, self.without_context)
        finish_run(self.folder, objective, self.save_with_card)
        if note := checks.unlearnt_positions(config.data, scores):
            say(f"note: {note}")
        if self.caution:
            say(f"note: {self.folder / MODEL}: {self.caution}. It needs more steps (--steps or --hours) or more text")
        return scores

    def before_step(self, share: float) -> None:
        """Refuse a damaged corpus, and note the phase that the run is in."""
        self.corpus.refuse_faults()
        self.phase = self.phases.begun(share)

    def evaluate(self) -> dict[str, Any]:
        """Held-out scores at the first phase's length, so that runs can be compared, and at that of later phases."""
        scores = held_out.evaluate(self.objective, self.held_out_loaders[0], self.samples, self.dtype)
        for loader in self.held_out_loaders[1 : self.phase + 1]:
            longer = held_out.evaluate(self.objective, loader, [], self.dtype)
            scores |= {f"{held_out.LONG}{name}": value for name, value in longer.items()}
        return scores

    def flops(self, batch: Batch) -> float:
        """The operations of a training step on a batch."""
        if not batch.num_tokens:
            return 0.0
        assert isinstance(batch.layout, Packed)
        predicted = batch.counts[self.objective.token_loss]
        return self.objective.flops(batch.layout.lengths.tolist(), predicted)

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the model as a model folder."""
        notes = Notes(task="pretrain", max_length=None, recipe=self.config.recipe, caution=self.caution)
        save_model(folder, self.objective, self.tokenizer, notes, tensors)

    def save_with_card(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the finished model with its model card."""
        self.save(folder, tensors)
        data = f"{self.corpus.manifest.tokens:,} tokens of text"
        write_card(folder, data=data, settings=to_dict(self.config)["train"], scores=final_scores(self.folder))


def _corpus_facts(corpus: Corpus) -> dict[str, Any]:
    """The facts about the corpus that must be the same when a run is resumed."""
    counts = {name: getattr(corpus.manifest, name) for name in ("documents", "sentences", "tokens")}
    return {**counts, "tokenizer": corpus.manifest.tokenizer}


def _notes(objective: Objective, phases: Phases, held_out_documents: int, where: torch.device) -> dict[str, Any]:
    """The notes on the model, the data and the machine in `run.json`."""
    first, frozen = phases.parts[0], untrained_parameters(objective)
    sequences = {"sequences": len(first.loader.source), "held_out_documents": held_out_documents}
    device = torch.cuda.get_device_name(where) if where.type == "cuda" else where.type
    return {
        "model": {"parameters": sum(p.numel() for p in objective.parameters() if p not in frozen)},
        "data": {**sequences, "fullness": round(first.fullness(), 4)},
        "machine": {"device": device, "torch": torch.__version__, "ranks": distributed.world_size()},
        SIZES: phases.micro_batch_sizes,
    }
