"""The few words of torch.distributed that the trainer needs; without a process group there is one rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def world() -> int:
    """Number of trainer processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's number, 0-based."""
    return dist.get_rank() if world() > 1 else 0


def total(values: Tensor) -> Tensor:
    """Sum over ranks, in place."""
    if world() > 1:
        on = values.to(device())
        dist.all_reduce(on)
        values.copy_(on)
    return values


def merge(values: Tensor, mine: Tensor) -> Tensor:
    """``values`` with every element taken from the rank whose bool mask ``mine`` covers it (each at most once), in place.

    Elements that no rank covers stay as they are.
    """
    if world() > 1:
        covered = total(mine.to(torch.float32)) > 0
        wide = values.to(torch.float32) if values.dtype == torch.bool else values
        shared = total(torch.where(mine, wide, torch.zeros_like(wide)))
        values.copy_(torch.where(covered, shared.to(values.dtype), values))
    return values


def barrier() -> None:
    """Wait for all ranks."""
    if world() > 1:
        dist.barrier()


def device() -> torch.device:
    """Where this rank calculates."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
