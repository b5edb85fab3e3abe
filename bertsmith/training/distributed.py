"""Training on several ranks, started by `torchrun`: the process group, DDP and FSDP, and the collectives.

Without `torchrun` there is one process, and the functions here do nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from bertsmith import folders, progress
from bertsmith.errors import UserError
from bertsmith.training.parts import separate_layers, untrained_parameters
from bertsmith.training.settings import Parallel

TIMEOUT = timedelta(minutes=30)  # the other ranks wait while rank 0 builds an index or writes to a slow disk


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_rank_zero() -> bool:
    """Whether this process is the one that writes the run folder and prints messages."""
    return rank() == 0


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Initialise the process group of the ranks that `torchrun` started, and destroy it when the block ends."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield
        return
    if device.type == "mps":
        raise UserError("training on several ranks needs CUDA or the CPU: --device cpu")
    if device.type == "cuda":
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise UserError(
                f"local rank {device.index} has no GPU: this machine has {torch.cuda.device_count()}; "
                f"start torchrun with --nproc-per-node {torch.cuda.device_count()}"
            )
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "cpu:gloo", timeout=TIMEOUT)
    progress.quiet(not is_rank_zero())
    try:
        yield
    finally:
        progress.quiet(False)
        dist.destroy_process_group()


def parallelise(model: nn.Module, parallel: Parallel, device: torch.device) -> nn.Module:
    """Return the model to be trained: unchanged on one rank, else wrapped in DDP or sharded layer by layer (FSDP2)."""
    if world_size() == 1:
        return model
    broadcast_weights(model)
    if parallel == "ddp":
        return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    mesh = init_device_mesh(device.type, (world_size(),))
    shard(model, mesh)
    for method in ("logits", "token_logits", "measures", "scores"):  # called outside the training loop, for evaluation
        if hasattr(model, method):
            register_fsdp_forward_method(model, method)
    return model


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the parameters over the ranks of a mesh (FSDP2): layer by layer where the layers share none."""
    for layer in separate_layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=untrained_parameters(model))


def no_sync(model: nn.Module, last: bool) -> Any:
    """Skip the all-reduce of gradients for all but the last micro-batch of a step."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext()


def all_reduce(values: Sequence[float]) -> list[float]:
    """Return the sum over the ranks of each number."""
    if world_size() == 1:
        return list(values)
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return [float(v) for v in total]


def all_reduce_tensor(values: Tensor) -> Tensor:
    """Sum a tensor over the ranks, in place and on its device."""
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def all_reduce_min(value: float) -> float:
    """Return the smallest of the ranks' numbers."""
    if world_size() == 1:
        return value
    number = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(number, dist.ReduceOp.MIN)
    return float(number)


def broadcast(value: Any, source: int = 0) -> Any:
    """Return one rank's value, anything that JSON can hold, on every rank; torch's own function would unpickle it."""
    if world_size() == 1:
        return value
    written = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = torch.tensor([len(written)])
    dist.broadcast(size, source)
    text = written if rank() == source else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(text, source)
    return json.loads(bytes(text.tolist()))


def on_rank_zero(work: Callable[[], Any]) -> Any:
    """Call a function only on rank 0 and return its result on every rank; its error is raised on every rank."""
    result, failed = None, None
    if is_rank_zero():
        try:
            result = work()
        except (UserError, OSError) as error:
            failed = error
    result, message = broadcast([result, str(failed or "")])
    if failed is not None:
        raise failed
    if message:
        raise UserError(message)
    return result


@contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Lock an output that all ranks write: rank 0 takes the lock, and if it cannot, every rank stops."""
    with ExitStack() as stack:
        on_rank_zero(lambda: stack.enter_context(folders.locked(path)))
        yield


def barrier() -> None:
    """Wait until every rank has called this function."""
    if world_size() > 1:
        all_reduce([0.0])


@torch.no_grad()
def broadcast_weights(model: nn.Module) -> None:
    """Copy rank 0's weights to every rank."""
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, 0)


def broadcast_tensors(tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Return on every rank the named CPU tensors that only rank 0 has."""
    if world_size() == 1:
        assert tensors is not None
        return dict(tensors)
    named = tensors or {}
    result = {}
    described = [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in named.items()]
    for name, shape, dtype in broadcast(described):
        empty = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        value = named[name].contiguous() if is_rank_zero() else empty
        dist.broadcast(value, 0)
        result[name] = value
    return result


def all_gather_objects(value: Any) -> list[Any]:
    """Return the values of all ranks, anything that JSON can hold, in the order of the ranks."""
    return [broadcast(value, source) for source in range(world_size())]


def all_gather(values: Tensor) -> Tensor:
    """Concatenate the ranks' tensors, which have the same shape."""
    raw = values.contiguous().view(torch.uint8)  # every backend supports bytes
    parts = torch.empty(world_size() * raw.shape[0], *raw.shape[1:], dtype=torch.uint8, device=values.device)
    dist.all_gather_into_tensor(parts, raw)
    return parts.view(values.dtype)


def full_tensor(value: Tensor) -> Tensor:
    """Gather a tensor that FSDP has sharded; every rank has to call this."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of a full tensor, sharded and placed as `like` is."""
    if isinstance(like, DTensor) and value.shape == like.shape:
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return value.to(like.device)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DDP's wrapper."""
    return model.module if isinstance(model, DistributedDataParallel) else model
