"""Long sequences: speed and memory of ModernBERT's training and prediction by length, ours beside `transformers`.

Every measurement of a call has the same number of tokens, in sequences of one length. `transformers` is compiled, with
the attention (SDPA or FlexAttention) and the form of its loss that are fastest at the longest length. A BERT of ours
with as many operations as ModernBERT at the shortest length stands beside them. `--part memory` trains on one sequence
of each length, for the curve of memory. A variant that fails prints the last line of its error, and the next one
follows; so does the end of `--seconds`, and a later call adds what is missing.

    python -m benchmarks.long --part train
    python -m benchmarks.long --part predict
    python -m benchmarks.long --part memory
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.peer_forms import DEVICE, free_memory, measure, peer_steps, pinned, rectangular
from benchmarks.pretrain_gpu import full_batch, our_steps, plain_reason
from benchmarks.record import RESULTS, earlier, keep
from bertsmith.batch import Batch
from bertsmith.formats.saved_config import config_out
from bertsmith.model.config import EncoderConfig
from bertsmith.model.cost import forward_flops
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.model.sizes import encoder_config, modern_config
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.objectives.settings import MaskedLMConfig
from bertsmith.training.settings import TrainConfig

LENGTHS = (512, 1024, 2048, 4096, 8192)
FORMS = (("flex_attention", True), ("sdpa", True), ("flex_attention", False))  # attention; loss of masked words only
OURS, THEIRS, BERT = "bertsmith", "transformers", "bertsmith's BERT of equal operations"
WORDS = MaskedLMConfig(next_sentence=False)
Form = tuple[str, bool]


def modern(size: str) -> EncoderConfig:
    """ModernBERT with its own vocabulary; `smoke` is a shape to try the benchmark with."""
    if size == "smoke":
        tiny = modern_config("tiny")
        return replace(tiny, vocab_size=1200, hidden_size=32, num_heads=2, intermediate_size=48, window=16)
    return replace(modern_config(size), vocab_size=50368)


def bert_of_equal_flops(config: EncoderConfig, length: int) -> EncoderConfig:
    """BERT of the same width, with the number of layers whose operations at this length are nearest to ModernBERT's."""
    width, heads, vocabulary = config.hidden_size, config.num_heads, config.vocab_size
    bert = replace(encoder_config("base"), hidden_size=width, num_heads=heads, intermediate_size=4 * width)
    bert = replace(bert, vocab_size=vocabulary, hidden_dropout=0.0, attention_dropout=0.0)
    wanted = forward_flops(config, [length], length // 7)
    berts = [replace(bert, num_layers=n) for n in range(1, 2 * config.num_layers)]
    return min(berts, key=lambda bert: abs(forward_flops(bert, [length], length // 7) - wanted))


def batch_of(config: EncoderConfig, length: int, tokens: int) -> Batch:
    batch = full_batch(length, tokens, config.vocab_size, config.num_segments)
    labels = {name: values for name, values in batch.labels.items() if name != "next"}
    return replace(batch, labels=labels, counts={"mlm": batch.counts["mlm"]})


def our_training(config: EncoderConfig, batch: Batch) -> Callable[[], None]:
    return our_steps(MaskedLM(Encoder(config), WORDS).to(DEVICE), [batch], TrainConfig(steps=1))


def our_prediction(config: EncoderConfig, batch: Batch) -> Callable[[], None]:
    model = TaskModel(Encoder(config), HeadConfig("single", ("a", "b"))).to(DEVICE).eval()
    given = batch.to(DEVICE)
    return predicting(lambda: model.scores(given))


def predicting(forward: Callable[[], Any]) -> Callable[[], None]:
    def step() -> None:
        with torch.inference_mode(), torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
            forward()

    return step


def their_config(config: EncoderConfig, form: Form) -> Any:
    values = config_out(MaskedLM(Encoder(replace(config, num_layers=1)), WORDS))
    values |= {"num_hidden_layers": config.num_layers, "sparse_prediction": form[1]}
    values = {name: value for name, value in values.items() if name not in ("architectures", "model_type")}
    return transformers.ModernBertConfig(**values, attn_implementation=form[0])


def their_training(config: EncoderConfig, batch: Batch, form: Form) -> Callable[[], None]:
    model = compiled(transformers.ModernBertForMaskedLM(their_config(config, form)))
    return peer_steps(model, [pinned(their_inputs(batch, "input_ids", "labels"))])


def their_prediction(config: EncoderConfig, batch: Batch, form: Form) -> Callable[[], None]:
    model = compiled(transformers.ModernBertForSequenceClassification(their_config(config, form)).eval())
    given = {name: value.to(DEVICE) for name, value in their_inputs(batch, "input_ids").items()}
    return predicting(lambda: model(**given))


def their_inputs(batch: Batch, *names: str) -> dict[str, Any]:
    with_pair = replace(batch, labels={**batch.labels, "next": torch.zeros(1)})
    given = rectangular(with_pair, mask=False)
    return {name: given[name] for name in names}


def compiled(model: Any) -> Any:
    torch._dynamo.reset()
    model = model.to(DEVICE)
    return torch.compile(model) if DEVICE.type == "cuda" else model


class Run:
    """One call: takes measurements until its time is over, and keeps each at once."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.given, self.config = arguments, modern(arguments.size)
        self.end = time.monotonic() + arguments.seconds
        self.warm, self.steps = (1, 1) if arguments.size == "smoke" else (3, 5)

    def take(self, key: str, length: int, tokens: int, make: Callable[[], Callable[[], None]], **facts: Any) -> float:
        """Measure one variant; 0 tokens a second where it fails or the time is over."""
        if time.monotonic() > self.end:
            print(f"{self.given.part}, {key}, {length}: left out, the time is over", flush=True)
            return 0.0
        free_memory()
        try:
            found = measure(make(), self.steps, self.warm)
        except Exception as error:  # a variant that fails must not end the others
            print(f"{self.given.part}, {key}, {length}: {(str(error).strip() or repr(error)).splitlines()[-1]}")
            return 0.0
        speed = tokens / found["seconds"]
        facts |= {"length": length, "tokens": tokens, "tokens_per_second": round(speed)}
        facts |= {"memory_gb": found["memory_gb"], "compile_seconds": round(found["extra"], 1)}
        keep("long", self.given.results, self.given.part, f"{key}, {length}", facts)
        return speed

    def by_length(self) -> None:
        """Ours at every length, then the forms of theirs at the longest, then their best one at the others."""
        lengths, tokens, train = self.given.lengths, self.given.tokens, self.given.part == "train"
        ours = our_training if train else our_prediction
        theirs = their_training if train else their_prediction
        for length in lengths:
            batch = batch_of(self.config, length, tokens)
            self.take(OURS, length, tokens, lambda b=batch: ours(self.config, b), kernels=self.kernels(self.config))  # type: ignore[misc]
        bert, first = bert_of_equal_flops(self.config, lengths[0]), lengths[0]
        share = forward_flops(bert, [first], first // 7) / forward_flops(self.config, [first], first // 7)
        facts = {"layers": bert.num_layers, "operations_of_modern": round(share, 3), "kernels": self.kernels(bert)}
        self.take(BERT, first, tokens, lambda: ours(bert, batch_of(bert, first, tokens)), **facts)
        speeds: dict[Form, float] = {}
        for form in forms_of(train):
            batch = batch_of(self.config, lengths[-1], tokens)
            key = f"{THEIRS}, {words_of(form, train)}"
            speeds[form] = self.take(key, lengths[-1], tokens, lambda f=form, b=batch: theirs(self.config, b, f))  # type: ignore[misc]
        best = max(speeds, key=speeds.__getitem__)
        for length in (lengths[0], *lengths[-2:0:-1]):  # the shortest first: it is compared with BERT
            batch = batch_of(self.config, length, tokens)
            key = f"{THEIRS}, {words_of(best, train)}"
            self.take(key, length, tokens, lambda b=batch: theirs(self.config, b, best))  # type: ignore[misc]

    def memory(self) -> None:
        """Training steps on one sequence of each length; theirs is not compiled, which takes longer than the steps."""
        for length in self.given.lengths:
            batch = batch_of(self.config, length, length)
            self.take(OURS, length, length, lambda b=batch: our_training(self.config, b))  # type: ignore[misc]
            self.take(f"{THEIRS}, sdpa", length, length, lambda b=batch: self.uncompiled(b))  # type: ignore[misc]

    def uncompiled(self, batch: Batch) -> Callable[[], None]:
        model = transformers.ModernBertForMaskedLM(their_config(self.config, ("sdpa", True))).to(DEVICE)
        return peer_steps(model, [pinned(their_inputs(batch, "input_ids", "labels"))])

    def kernels(self, config: EncoderConfig) -> str:
        return plain_reason(Encoder(replace(config, num_layers=1))) or "fused"


def forms_of(train: bool) -> list[Form]:
    """The forms to choose from; a CPU, which only tries the benchmark out, has one."""
    return [form for form in FORMS if (train or form[1]) and (DEVICE.type == "cuda" or form[0] == "sdpa")]


def words_of(form: Form, train: bool) -> str:
    return form[0] + (", masked words alone" if train and form[1] else "")


def points(found: dict[str, Any], value: str) -> Iterator[tuple[str, list[tuple[int, float]]]]:
    """The curves of one part: (length, value) for each variant."""
    names = dict.fromkeys(key.rpartition(", ")[0] for key in found)
    for name in names:
        yield name, sorted((e["length"], e[value]) for key, e in found.items() if key.rpartition(", ")[0] == name)


def plot(results: dict[str, Any], folder: Path) -> Path:
    """Draw tokens a second of training and prediction, and the memory of one sequence, by length."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, places = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    titles = {"train": "training", "predict": "prediction", "memory": "training on one sequence"}
    for place, (part, title) in zip(places, titles.items(), strict=True):
        value = "memory_gb" if part == "memory" else "tokens_per_second"
        for name, curve in points(results.get(part, {}), value):
            place.plot(*zip(*curve, strict=True), marker="o", label=name)
        place.set(title=title, xlabel="tokens of a sequence", ylabel="GB" if part == "memory" else "tokens a second")
        if part != "memory":  # whether it grows with the length alone is seen on a linear scale
            place.set_xscale("log", base=2)
        place.set_ylim(bottom=0)
        if place.lines:
            place.legend(fontsize=7)
    path = folder / "long.svg"
    figure.savefig(path)
    return path


def main() -> None:
    """Take the measurements of one part, and draw all that there are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("train", "predict", "memory", "plot"), default="train")
    parser.add_argument("--size", default="base", help="base, large, tiny or smoke")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of a step")
    parser.add_argument("--seconds", type=float, default=300.0, help="no measurement begins after this time")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    if arguments.part != "plot":
        run = Run(arguments)
        run.memory() if arguments.part == "memory" else run.by_length()
    print(plot(earlier("long", arguments.results), arguments.results))


if __name__ == "__main__":
    main()
