"""Compile every fused kernel for a GPU, which the machine need not have: `python tests/model/compile_kernels.py`.

Triton's interpreter, which runs the kernels in the other tests, accepts code that its compiler does not. Prints the
names of the kernels.
"""

from __future__ import annotations

import dataclasses
import sys
from functools import partialmethod
from types import SimpleNamespace

import torch
from test_fused import masked_batch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from bertsmith.model import encoder
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.fused import loss, relative_attention, taught
from bertsmith.model.fused.weights import Sampling
from bertsmith.model.fused_choice import Choice
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.training import muon_kernels

BERT = EncoderConfig(
    vocab_size=100, hidden_size=64, num_layers=2, num_heads=1, intermediate_size=128, max_positions=512
)  # fmt: skip


def compile_only() -> None:
    """Make Triton compile for an H100 and launch nothing."""
    ours = {
        "get_current_device": lambda: 0,
        "get_current_stream": lambda device: 0,
        "get_current_target": lambda: GPUTarget("cuda", 90, 32),
    }
    driver.set_active(SimpleNamespace(**ours))
    JITFunction.run = partialmethod(JITFunction.run, warmup=True)
    JITFunction.__getitem__ = lambda self, grid: lambda *given, **named: self.run(*given, grid=grid, **named)


def compile_model(config: EncoderConfig, lengths: list[int]) -> None:
    model = MaskedLM(Encoder(config))
    with torch.autocast("cpu", torch.bfloat16):
        losses = model(masked_batch(lengths))
    (losses["mlm"] + losses["nsp"]).backward()


def compile_sampling() -> None:
    scores, targets, seed = torch.zeros(2, 128).bfloat16(), torch.zeros(2).long(), torch.tensor([1], dtype=torch.int32)
    for sampling in (Sampling(), Sampling(0.5, disallow_correct=True)):
        loss.cross_entropy(scores, 100, targets, True, seed, sampling)


def compile_taught() -> None:
    scores, targets, one = torch.zeros(2, 128).bfloat16(), torch.zeros(2).long(), torch.ones(())
    *_, sums = taught.taught_losses(scores, scores, 100, targets, 2.0)
    taught.taught_gradients(scores, scores, 100, targets, sums, 2.0, one, one)


def compile_muon(side: int) -> None:
    matrices = torch.randn(2, side, side)
    step = matrices.bfloat16()
    muon_kernels.momentum(matrices, matrices, step, 0.95)
    muon_kernels.change(matrices, step, torch.tensor(0.1), 0.01, 1.0)
    muon_kernels.product(step, step.mT, symmetric=True)
    muon_kernels.product(step, step, step, 1.0, 1.0)


def main() -> None:
    compile_only()
    encoder.choose_now = lambda config, device, layout: Choice()
    for dropout in (0.0, 0.1):
        config = dataclasses.replace(BERT, hidden_dropout=dropout, attention_dropout=dropout)
        for direction in ("both", "left-to-right", "right-to-left"):
            compile_model(dataclasses.replace(config, direction=direction), [20, 3])
            compile_model(dataclasses.replace(config, direction=direction), [20, 300])
        compile_model(dataclasses.replace(config, norm_first=True, bias=False), [20, 300])
        for name in ("gelu_tanh", "relu", "silu"):
            factorised = dataclasses.replace(config, embedding_size=32, num_segments=0, activation=name)
            compile_model(dataclasses.replace(factorised, shared_layers="all"), [20, 3])
        gpt = {"embedding_norm": False, "num_segments": 0, "head_transform": False, "head_bias": False}
        compile_model(dataclasses.replace(config, **gpt, direction="left-to-right"), [20, 300])
        compile_model(dataclasses.replace(config, hidden_size=2048, num_heads=16), [20, 300])
        deberta = dataclasses.replace(config, positions="none", num_segments=0, relative_terms="both")
        compile_model(deberta, [20, 3])
        for relative_attention.KEPT_LENGTH in (0, 512):  # the weights are recomputed, and kept
            compile_model(dataclasses.replace(deberta, key_bias=False, relative_buckets=256), [20, 300])
        windows = dataclasses.replace(config, window=64, global_every=2)
        compile_model(windows, [20, 3])
        compile_model(windows, [20, 300])
        rotary = dataclasses.replace(windows, positions="rotary", gated=True, num_segments=0)
        compile_model(rotary, [20, 300])
        modern = {"norm_first": True, "bias": False, "first_attention_norm": False, "prediction_head": True}
        compile_model(dataclasses.replace(rotary, **modern, intermediate_size=1152), [20, 300])
    compile_sampling()
    compile_taught()
    compile_muon(64)
    compile_muon(128)
    parts = [module for name, module in sys.modules.items() if name.startswith("bertsmith.model.fused.")]
    for part in (*parts, muon_kernels):
        for name, kernel in vars(part).items():
            if isinstance(kernel, JITFunction) and len(kernel.device_caches[0][0]):
                print(name)


if __name__ == "__main__":
    main()
