"""Checks on the user's own machine: a killed and resumed run ends with the same weights as an undisturbed one, and a
model computes the same as in `transformers`.

B sequences, L padded length, T tokens in all, H hidden size.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from bertsmith.batch import Batch, Example, Padded, collate
from bertsmith.config import read_json, to_dict
from bertsmith.errors import UserError
from bertsmith.formats.families.table import family_named, family_of
from bertsmith.formats.graphs import FLOAT32, INT8
from bertsmith.formats.hf import Loaded, load_folder
from bertsmith.formats.onnx import TOLERANCE as GRAPH_TOLERANCE
from bertsmith.formats.onnx import Exported, open_onnx, session
from bertsmith.formats.saved_config import CONFIG, output_of, pools_last, read_config
from bertsmith.model.attention import Trace
from bertsmith.model.config import EncoderConfig
from bertsmith.objectives.discriminator import Discriminator
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.objectives.objective import Objective
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.progress import progress_bar
from bertsmith.training import runlog
from bertsmith.training.checkpoint import checkpoints
from bertsmith.training.run import MODEL

PATIENCE = 0.005  # seconds between two checks of a run
TOLERANCE = 1e-4  # of parity, for values up to 1; larger ones may differ by this share
LENGTHS = (3, 17, 64, 9, 33, 48)  # of the sequences that parity is measured on


def verify_resume(
    config: PretrainConfig,
    data: str | Path,
    *,
    steps: int = 30,
    kills: int = 3,
    device: str | None = None,
    seed: int | None = None,
) -> dict[str, Any]:
    """Run a recipe for some steps twice, once undisturbed, once killed at random moments and resumed, and compare.

    On a CPU the weights must be identical to the bit. Some kernels of a GPU add in varying order: if the weights
    differ, a second undisturbed run shows the difference without kills. `exact` means that the killed run is
    identical, or differs by at most twice as much.
    """
    if steps <= kills or kills < 1:
        raise UserError(f"--kills {kills} and --steps {steps}: there must be a kill, and more steps than kills")
    every = max(1, steps // 8)
    train = replace(config.train, steps=steps, hours=None, epochs=None, save_every=every, evaluate_every=0.0)
    folder, dice = Path(tempfile.mkdtemp(prefix="bertsmith-verify-")), random.Random(seed)
    try:
        written = folder / "config.json"
        written.write_text(json.dumps(to_dict(replace(config, train=train))))
        command = [sys.executable, "-m", "bertsmith", "pretrain", str(written), "--data", str(data)]
        command += ["--device", device] if device else []
        with progress_bar("verifying", kills + 2.0) as advance:
            _finish([*command, "--out", str(folder / "whole")])
            cut, resumed = [*command, "--out", str(folder / "cut"), "--resume"], list[int]()
            for step in sorted(dice.sample(range(1, steps), kills)):
                advance(len(resumed) + 1.0, f"{len(resumed)} kills of {kills}")
                resumed += _kill(cut, folder / "cut", step, dice)
            _finish(cut)
            advance(kills + 2.0, "")
            worst, identical = _difference(folder / "whole", folder / "cut")
            if not identical:
                _finish([*command, "--out", str(folder / "again")])
                noise, _ = _difference(folder / "whole", folder / "again")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not resumed:
        raise UserError("the run was over before it could be killed; give it more --steps")
    found = {"recipe": config.recipe, "steps": steps, "kills": len(resumed), "resumed_after_steps": resumed}
    found |= {"identical": identical, "largest_difference": worst}
    return {**found, "exact": True} if identical else {**found, "without_kills": noise, "exact": worst <= 2 * noise}


def _finish(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=_environment())
    if done.returncode:
        raise UserError(
            f"the run failed: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'no message'}"
        )


def _kill(command: list[str], run: Path, step: int, dice: random.Random) -> list[int]:
    """Start or resume a run and kill it at a random moment after a step.

    Returns the step of the checkpoint that it will resume from; nothing if the run ended before the kill.
    """
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_environment())
    try:
        while process.poll() is None and not any(r["step"] >= step for r in runlog.read(run)[-1:]):
            time.sleep(PATIENCE)
        time.sleep(dice.uniform(0, 10 * PATIENCE))
    finally:
        process.kill()
        process.wait()
    if process.returncode > 0:
        raise UserError("the resumed run failed; `bertsmith pretrain` with --resume and the same settings says why")
    found = checkpoints(run)
    return [int(found[-1].name.split("-")[1]) if found else 0] if process.returncode else []


def _environment() -> dict[str, str]:
    """Return an environment in which this package is imported, and which does not join the ranks of `torchrun`."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), kept.get("PYTHONPATH", "")])}


def _difference(whole: Path, cut: Path) -> tuple[float, bool]:
    """Return the largest difference between the weights of two runs, and whether their files are identical."""
    files = [run / MODEL / "model.safetensors" for run in (whole, cut)]
    first, second = (load_file(file) for file in files)
    worst = max(float((first[name] - second[name]).abs().max()) for name in first)
    return worst, files[0].read_bytes() == files[1].read_bytes()


def need_transformers() -> Any:
    """Import the library that parity is measured against; nothing else in the package needs it."""
    try:
        import transformers
    except ImportError:
        raise UserError(
            "--verify compares with `transformers`, which is not installed; pip install transformers"
        ) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


@torch.inference_mode()
def parity(ours: str | Path, theirs: str | Path, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Return the largest difference between a folder opened here and one opened by `transformers`, layer by layer.

    Both get the same random tokens, of several lengths. `dtype` rounds their weights as ours were rounded. Logits are
    compared if our folder has weights for the head.
    """
    loaded, reference = load_folder(ours), _reference(Path(theirs), dtype)
    loaded.model.eval()
    if isinstance(loaded.model, MaskedLM):
        loaded.model.mask_decoder = None  # `transformers` has none
    batch = _random_batch(loaded.model.encoder.config, packed=False)
    assert isinstance(batch.layout, Padded)
    inputs, mask = _inputs(batch, loaded.model.encoder.config), batch.layout.mask
    outputs, trace = reference.base_model(**inputs, output_hidden_states=True), Trace()
    loaded.model.encoder(batch, trace)
    hidden = [*outputs.hidden_states[:-1], outputs.last_hidden_state]
    pairs = {
        f"layer {i}" if i else "embeddings": (a[mask], b[mask])
        for i, (a, b) in enumerate(zip(trace.hidden, hidden, strict=True))
    }
    if not loaded.missing and not pools_last(loaded.model):  # their head differs there
        scores, expected = _scores(loaded), _their_scores(reference, inputs, loaded, mask)
        pairs |= {f"logits {name}": (scores[name], expected[name]) for name in expected if name in scores}
    found = {name: float((a - b).abs().max()) for name, (a, b) in pairs.items()}
    equal = all(found[name] <= TOLERANCE * max(1.0, float(b.abs().max())) for name, (_, b) in pairs.items())
    facts = {"class": type(reference).__name__, "tokens": int(mask.sum()), "tolerance": TOLERANCE}
    return {**facts, "differences": found, "largest_difference": max(found.values()), "equal": equal}


@torch.inference_mode()
def onnx_parity(exported: str | Path, theirs: str | Path) -> dict[str, Any]:
    """Return the largest difference between the graphs of an ONNX folder, run by ONNX Runtime, and `transformers`.

    Both get the same random tokens. int8 has a tolerance of its own. What `transformers` does not compute, a mask
    decoder or a detector of DeBERTa, is compared with this package.
    """
    exported, reference = Path(exported), _reference(Path(theirs), None)
    described = open_onnx(exported)
    batch = _random_batch(described.config, packed=False)
    assert isinstance(batch.layout, Padded)
    mask = batch.layout.mask
    inputs = _inputs(batch, described.config)
    expected = _own_outputs(Path(theirs), batch) or _their_outputs(reference, inputs, described)
    found, equal = dict[str, float](), True
    for file in (name for name in (FLOAT32, INT8) if (exported / name).exists()):
        graph = session(exported / file, threads=1)
        outputs = graph.run(None, {each.name: inputs[each.name].numpy() for each in graph.get_inputs()})
        for name, values in zip(described.outputs, map(torch.from_numpy, outputs), strict=True):
            of_tokens = values.shape[:2] == mask.shape
            ours, reference_values = (t[mask] if of_tokens else t for t in (values, expected[name]))
            found[f"{file} {name}"] = difference = float((ours - reference_values).abs().max())
            largest = float(reference_values.abs().max())
            equal &= difference <= GRAPH_TOLERANCE[file] * (largest if file == INT8 else max(1.0, largest))
    facts = {"class": type(reference).__name__, "tokens": int(mask.sum()), "tolerance": GRAPH_TOLERANCE[FLOAT32]}
    return {**facts, "differences": found, "largest_difference": max(found.values()), "equal": equal}


def _own_outputs(folder: Path, batch: Batch) -> dict[str, Tensor]:
    """Return what this package computes for a graph where `transformers` lacks a part of the model; empty if not."""
    loaded = load_folder(folder)
    model = loaded.model.eval()
    if not isinstance(model, Objective) or model.lacks_token_head(loaded.missing):
        return {}
    is_encoder = output_of(model).class_name == family_of(model.encoder.config).encoder_class
    has_more = isinstance(model, Discriminator) and len(model.counts(model.config)) > 1
    if not is_encoder and not has_more and getattr(model, "mask_decoder", None) is None:
        return {}
    return {f"{name}_logits": values for name, values in model.dense_logits(batch).items()}


def _their_outputs(reference: Any, inputs: dict[str, Tensor], described: Exported) -> dict[str, Tensor]:
    """Return what `transformers` computes for each output of a graph, in the shape of the graph."""
    if "last_hidden_state" in described.outputs:
        return {"last_hidden_state": reference.base_model(**inputs).last_hidden_state}
    if described.head is not None and described.head.kind == "choice":
        choices = described.head.num_choices or len(inputs["input_ids"])
        inputs = _choices(reference, inputs, choices)
    outputs = reference(**inputs)
    if "start_logits" in outputs:
        return {"logits": torch.stack([outputs.start_logits, outputs.end_logits], -1)}
    if "prediction_logits" in outputs:
        return {"mlm_logits": outputs.prediction_logits, "nsp_logits": outputs[_pair_output(outputs)]}
    return {described.outputs[0]: outputs["mc_logits" if "mc_logits" in outputs else "logits"]}


def _inputs(batch: Batch, config: EncoderConfig) -> dict[str, Tensor]:
    """Return what their models take of a padded batch; GPT, which has no segments, would look them up as tokens."""
    assert isinstance(batch.layout, Padded)
    segments = {"token_type_ids": batch.segments} if config.num_segments else {}
    return {"input_ids": batch.tokens, "attention_mask": batch.layout.mask.long(), **segments}


def _choices(reference: Any, inputs: dict[str, Tensor], choices: int) -> dict[str, Tensor]:
    """Return the inputs of questions with their endings; a model of two heads is told where each one ends."""
    if hasattr(reference, "multiple_choice_head"):  # it takes a mask of sequences, not of questions
        ends = (inputs["attention_mask"].sum(-1) - 1).unflatten(0, (-1, choices))
        return {**inputs, "input_ids": inputs["input_ids"].unflatten(0, (-1, choices)), "mc_token_ids": ends}
    return {name: value.unflatten(0, (-1, choices)) for name, value in inputs.items()}


def _pair_output(outputs: Any) -> str:
    """Return the name of the pair loss's logits: ALBERT's class calls them after sentence order."""
    return next(name for name in ("seq_relationship_logits", "sop_logits") if name in outputs)


def _reference(folder: Path, dtype: torch.dtype | None) -> Any:
    """Open a folder with `transformers`, by the class that the folder names if its family has it."""
    transformers, values = need_transformers(), read_config(folder)
    if values != read_json(folder / CONFIG):
        raise UserError(f"--verify: {folder} holds a larger model, which transformers cannot open; convert it first")
    family = family_named(values, folder / CONFIG)
    name = (values.get("architectures") or [""])[0]
    known = name in family.class_names and hasattr(transformers, name)
    model = (getattr(transformers, name) if known else transformers.AutoModel).from_pretrained(folder).float().eval()
    for parameter in model.parameters() if dtype is not None else ():
        parameter.data = parameter.data.to(dtype).float()
    return model


def _random_batch(config: EncoderConfig, packed: bool) -> Batch:
    """Return the same sequences in either layout, without padding tokens."""
    draw, examples = np.random.default_rng(0), []
    for length in (min(length, config.max_positions) for length in LENGTHS):
        tokens = draw.integers(1, config.vocab_size, length)
        tokens = np.where(tokens == config.pad_token_id, 0 if config.pad_token_id else 1, tokens)
        examples.append(Example(tokens, (np.arange(length) > length // 2) * min(1, max(config.num_segments - 1, 0))))
    return collate(examples, packed=packed, pad=config.pad_token_id)


def _scores(loaded: Loaded) -> dict[str, Tensor]:
    """Return our logits in the packed layout, which the comparison of layers does not use."""
    batch = _random_batch(loaded.model.encoder.config, packed=True)
    if isinstance(loaded.model, Objective):
        batch.labels["masked"] = torch.arange(batch.num_tokens)
        return loaded.model.logits(batch)
    scores = loaded.model.logits(batch)
    kind = loaded.model.head_config.kind
    return {kind: batch.layout.unpad(scores) if kind == "span" else scores}


def _their_scores(reference: Any, inputs: dict[str, Tensor], loaded: Loaded, mask: Tensor) -> dict[str, Tensor]:
    """Return their logits under our names and in our shapes."""
    if isinstance(loaded.model, Objective):
        outputs, fills = reference(**inputs), type(reference).__name__.endswith("ForMaskedLM")
        name = "mlm" if fills else loaded.model.token_loss
        if "prediction_logits" in outputs:
            return {name: outputs.prediction_logits[mask], "nsp": outputs[_pair_output(outputs)]}
        return {name: outputs.logits[mask]} if "logits" in outputs else {}
    head = loaded.model.head_config
    if head.kind == "choice":
        inputs = _choices(reference, inputs, head.num_choices or len(mask))
    outputs = reference(**inputs)
    if "mc_logits" in outputs:
        return {"choice": outputs.mc_logits}
    if head.kind == "span":
        return {"span": torch.stack([outputs.start_logits[mask], outputs.end_logits[mask]], -1)}
    return {head.kind: outputs.logits[mask] if head.kind == "tags" else outputs.logits}
