"""Processes that work together: those torchrun started, or this one alone."""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed

from imputer.data.batching import Batch


@dataclass(frozen=True)
class Ranks:
    """This process among all that train together."""

    rank: int = 0
    count: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def first(self) -> bool:
        return self.rank == 0

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Element-wise sum over all ranks."""
        if self.count == 1:
            return list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        distributed.all_reduce(tensor)
        return tensor.tolist()

    def moved(self, batch: Batch) -> Batch:
        """The batch with its tensors on this rank's device."""
        tensors: dict[str, Any] = {
            name: value.to(self.device) for name, value in vars(batch).items() if isinstance(value, Tensor)
        }
        return dataclasses.replace(batch, **tensors)

    def gathered(self, thing: Any) -> list[Any]:
        """The objects of all ranks, in their order, on every rank."""
        if self.count == 1:
            return [thing]
        things: list[Any] = [None] * self.count
        distributed.all_gather_object(things, thing)
        return things

    def say(self, text: str) -> None:
        """One line on stderr, from the first rank only."""
        if self.first:
            print(text, file=sys.stderr, flush=True)

    def wait(self) -> None:
        """Wait for every rank."""
        if self.count > 1:
            distributed.barrier()


@contextlib.contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks that torchrun started, or this process alone; a GPU each where there are any."""
    count, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    if count > 1:
        distributed.init_process_group("nccl" if gpu else "gloo")
    try:
        yield Ranks(rank, count, device)
    finally:
        if count > 1:
            distributed.destroy_process_group()
