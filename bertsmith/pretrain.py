"""Pre-training: a corpus and a configuration to a model folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertsmith import draws
from bertsmith.config import to_dict
from bertsmith.data.loader import DataConfig, Loader, split_documents
from bertsmith.data.segments import segment_source
from bertsmith.data.shards import Corpus
from bertsmith.errors import UserError
from bertsmith.formats.hf import Notes, load_folder, save_folder
from bertsmith.formats.hub import find_model
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.progress import say
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training import runlog
from bertsmith.training.fit import fit
from bertsmith.training.run import finish_run, is_finished, open_run
from bertsmith.training.settings import TrainConfig, pick_device

WEIGHTS = 104  # a stream of draws
EVALUATION_SAMPLES = 512


@dataclass(frozen=True)
class PretrainConfig:
    """One complete pre-training run. The tokenizer decides `model.vocab_size`."""

    recipe: str
    model: EncoderConfig
    data: DataConfig
    train: TrainConfig
    next_sentence: bool = True


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

    `model` continues from a saved model instead of random weights; `resume` goes on with an unfinished run.
    """
    corpus, run, where = Corpus.open(data), Path(out), pick_device(device)
    tokenizer = Tokenizer.load(corpus.folder)
    corpus.check_tokenizer(tokenizer.hash, corpus.folder)
    start = find_model(model) if model is not None else None
    objective, config = _start(config, start, corpus, tokenizer)
    loaders = _loaders(config, corpus, tokenizer)
    steps = config.train.num_steps(len(loaders[0].source))
    facts = {
        "corpus": {"tokens": corpus.manifest.tokens, "tokenizer": corpus.manifest.tokenizer},
        "start": str(model or ""),
    }
    checkpoint = open_run(run, to_dict(config), facts, resume)
    if is_finished(run):
        return {"steps": steps, **runlog.last_scores(run)}
    if checkpoint is not None:
        loaded = load_folder(checkpoint[0], next_sentence=config.next_sentence).model
        assert isinstance(loaded, MaskedLM)
        objective = loaded
    objective.to(where)
    objective.encoder.gradient_checkpointing = config.train.gradient_checkpointing
    notes = Notes(task="pretrain", max_length=None, recipe=config.recipe)

    def save(folder: Path) -> None:
        save_folder(folder, objective, tokenizer, notes)

    train, held_out = loaders
    scores = fit(
        objective,
        lambda step: train.step(step, config.train.batch_size, config.train.micro_size),
        config.train,
        steps,
        run,
        save=save,
        evaluate=(lambda: evaluate_objective(objective, held_out)) if held_out is not None else None,
        resume=checkpoint,
        title=f"pre-training {config.recipe}",
    )
    finish_run(run, save)
    return {"steps": steps, **scores}


def _start(
    config: PretrainConfig, start: Path | None, corpus: Corpus, tokenizer: Tokenizer
) -> tuple[MaskedLM, PretrainConfig]:
    """The model of a new run, random or from a folder, and the configuration with the facts that it settles."""
    if start is None:
        config = replace(config, model=replace(config.model, vocab_size=tokenizer.vocab_size))
        check_length(config.data.max_length, config.model)
        torch.manual_seed(draws.seed(config.train.seed, WEIGHTS))
        return MaskedLM(Encoder(config.model), config.next_sentence), config
    loaded = load_folder(start, next_sentence=config.next_sentence)
    corpus.check_tokenizer(loaded.tokenizer.hash, start)
    config = replace(config, model=loaded.model.encoder.config)
    check_length(config.data.max_length, config.model)
    if loaded.missing:
        parts = sorted({name.split(".")[0] for name in loaded.missing})
        say(f"note: {start} has no weights for {', '.join(parts)}; they start at random")
    assert isinstance(loaded.model, MaskedLM)
    return loaded.model, config


def check_length(max_length: int, model: EncoderConfig) -> None:
    """Refuse sequences that are longer than the encoder's positions."""
    if max_length > model.max_positions:
        raise UserError(
            f"data.max_length {max_length} is longer than the encoder's {model.max_positions} positions; "
            f"set it to {model.max_positions} or less"
        )


def _loaders(config: PretrainConfig, corpus: Corpus, tokenizer: Tokenizer) -> tuple[Loader, Loader | None]:
    """Training batches, and held-out ones where documents are held out."""
    train, held_out = split_documents(corpus.manifest.documents, config.data.held_out)

    def loader(documents: np.ndarray[Any, Any]) -> Loader:
        data = config.data
        source = segment_source(data.pairs, corpus, documents, data.max_length, data.short_share, config.train.seed)
        return Loader.of(source, tokenizer, data)

    return loader(train), loader(held_out) if len(held_out) else None


@torch.inference_mode()
def evaluate_objective(objective: MaskedLM, loader: Loader) -> dict[str, float]:
    """Loss, perplexity and accuracy of the masked words, and accuracy of the pairs, on held-out text."""
    objective.eval()
    device = next(objective.parameters()).device
    count = min(len(loader.source), EVALUATION_SAMPLES)
    loss = right = words = pairs_right = pairs = 0.0
    for begin in range(0, count, 32):
        indices = draws.permute(np.arange(begin, min(begin + 32, count)), len(loader.source), 0)
        batch = loader.batch(np.zeros_like(indices), indices).to(device)
        scores = objective.logits(batch)
        targets = batch.labels["targets"]
        loss += torch.nn.functional.cross_entropy(scores["mlm"], targets, reduction="sum").item()
        right += (scores["mlm"].argmax(-1) == targets).sum().item()
        words += len(targets)
        if "nsp" in scores:
            pairs_right += (scores["nsp"].argmax(-1) == batch.labels["next"]).sum().item()
            pairs += len(indices)
    result = {"mlm_loss": loss / words, "mlm_perplexity": float(np.exp(loss / words)), "mlm_accuracy": right / words}
    return {**result, "nsp_accuracy": pairs_right / pairs} if pairs else result
