"""Several processes, started by `torchrun`: who this one is, how models are copied or divided, what is added up.

Without `torchrun` there is one process and every function here does nothing, at no cost.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from bertsmith import folders, progress
from bertsmith.errors import UserError
from bertsmith.training.settings import Parallel

PATIENCE = timedelta(minutes=30)  # the others wait while the first process builds an index or writes to a slow disk


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Whether this process writes the run folder and speaks."""
    return rank() == 0


@contextmanager
def processes(device: torch.device) -> Iterator[None]:
    """Join the other processes that `torchrun` started, until the block ends."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield
        return
    if device.type == "mps":
        raise UserError("several processes need CUDA or the CPU: --device cpu")
    if device.type == "cuda":
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise UserError(
                f"process {device.index} of this machine has no GPU: there are {torch.cuda.device_count()}; "
                f"start torchrun with --nproc-per-node {torch.cuda.device_count()}"
            )
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "cpu:gloo", timeout=PATIENCE)
    progress.quiet(not is_main())
    try:
        yield
    finally:
        progress.quiet(False)
        dist.destroy_process_group()


def divide(model: nn.Module, parallel: Parallel, device: torch.device) -> nn.Module:
    """The model as it is trained: itself in one process, else copied (DDP) or divided layer by layer (FSDP2)."""
    if ranks() == 1:
        return model
    broadcast_weights(model)
    if parallel == "ddp":
        return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    mesh = init_device_mesh(device.type, (ranks(),))
    for part in model.modules():
        if isinstance(part, nn.ModuleList):
            for layer in part:
                fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for method in ("logits", "scores"):  # what others than the loop call: evaluation on held-out text, engines
        if hasattr(model, method):
            register_fsdp_forward_method(model, method)
    return model


def without_sync(model: nn.Module, last: bool) -> Any:
    """Gradients of all but the last micro-batch of a step are added up here before they travel."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext()


def add_up(values: Sequence[float]) -> list[float]:
    """Each number added over the processes."""
    if ranks() == 1:
        return list(values)
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return [float(v) for v in total]


def add_up_tensor(values: Tensor) -> Tensor:
    """A tensor on the device added over the processes, in place."""
    if ranks() > 1:
        dist.all_reduce(values)
    return values


def agree(value: float) -> float:
    """The first process's number, for all."""
    if ranks() == 1:
        return value
    told = torch.tensor([value], dtype=torch.float64)
    dist.broadcast(told, 0)
    return float(told)


def smallest(value: float) -> float:
    """The smallest of all processes' numbers."""
    if ranks() == 1:
        return value
    told = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(told, dist.ReduceOp.MIN)
    return float(told)


def tell(value: Any) -> Any:
    """The first process's value, anything that JSON can hold, for all."""
    if ranks() == 1:
        return value
    written = json.dumps(value).encode()
    text = torch.zeros(int(agree(len(written))), dtype=torch.uint8)
    if is_main():
        text = torch.frombuffer(bytearray(written), dtype=torch.uint8)
    dist.broadcast(text, 0)
    return json.loads(bytes(text.tolist()))


def by_main(work: Callable[[], Any]) -> Any:
    """What the first process alone does, its result for all; where it fails, all stop with its error."""
    result, failed = None, None
    if is_main():
        try:
            result = work()
        except (UserError, OSError) as error:
            failed = error
    result, text = tell([result, str(failed or "")])
    if failed is not None:
        raise failed
    if text:
        raise UserError(text)
    return result


@contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Lock an output that all processes make together: the first one has the lock, and where it fails, all stop."""
    with ExitStack() as stack:
        by_main(lambda: stack.enter_context(folders.locked(path)))
        yield


def wait() -> None:
    """Until all processes have come here."""
    if ranks() > 1:
        add_up([0.0])


@torch.no_grad()
def broadcast_weights(model: nn.Module) -> None:
    """Give every process the first one's weights."""
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, 0)


def broadcast_tensors(tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Named tensors on the CPU that only the first process has, for all."""
    if ranks() == 1:
        assert tensors is not None
        return dict(tensors)
    named = tensors or {}
    result = {}
    for name, shape, dtype in tell([[n, list(t.shape), str(t.dtype).removeprefix("torch.")] for n, t in named.items()]):
        value = named[name].contiguous() if is_main() else torch.empty(shape, dtype=getattr(torch, dtype))
        dist.broadcast(value, 0)
        result[name] = value
    return result


def gather_texts(text: str) -> list[str]:
    """A short text of every process, in their order."""
    if ranks() == 1:
        return [text]
    written = text.encode()[:4096].ljust(4096, b"\0")
    mine = torch.frombuffer(bytearray(written), dtype=torch.uint8)
    all_texts = [torch.empty_like(mine) for _ in range(ranks())]
    dist.all_gather(all_texts, mine)
    return [bytes(t.tolist()).rstrip(b"\0").decode(errors="ignore") for t in all_texts]


def gather(values: Tensor) -> Tensor:
    """The processes' tensors of one shape, one after the other."""
    raw = values.contiguous().view(torch.uint8)  # bytes, which every backend carries
    parts = torch.empty(ranks() * raw.shape[0], *raw.shape[1:], dtype=torch.uint8, device=values.device)
    dist.all_gather_into_tensor(parts, raw)
    return parts.view(values.dtype)


def whole(value: Tensor) -> Tensor:
    """A divided tensor put together again; all processes have to ask for it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def part_like(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor as this process holds `like`: its share of it, where that is divided."""
    if isinstance(like, DTensor) and value.shape == like.shape:
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return value.to(like.device)


def bare(model: nn.Module) -> nn.Module:
    """The model inside DDP's wrapper."""
    return model.module if isinstance(model, DistributedDataParallel) else model
