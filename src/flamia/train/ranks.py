"""The processes of a training run: one, or those that torchrun started.

Data parallel with FSDP2: weights, gradients and AdamW's moments are split over the ranks, and each rank takes whole documents
of every batch, dealt by the work they are. All ranks read the same stream, so the batches, and what a checkpoint holds,
do not depend on how many ranks there are: a run may go on with another number of them. The loss is the sum over all ranks'
tokens divided by their number, so it is the loss of one process but for the order of FP32 sums.

A document stays whole here; what is longer than a rank's share makes the ranks wait for the one that has it. Ranks for
which a batch has no document take part with zero tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from flamia.integrations.parallel_plan import Piece, deal, visible
from flamia.train.data import IGNORED, Batch
from flamia.train.model import Decoder

TOKEN_PAIRS_PER_WIDTH = 6
"""A token's linear layers do about 24 width^2 operations and a visible pair 4 width: so many pairs per unit of width."""


@dataclass(frozen=True)
class Ranks:
    """This process among all: `rank` of `count`. What needs the others is a collective: all of them must call it."""

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the one that writes files and speaks."""
        return self.rank == 0

    def share(self, batch: Batch, width: int) -> tuple[Batch, int | None]:
        """(this rank's documents of a batch, how many tokens of the whole batch predict something; None for all of it)."""
        if self.count == 1:
            return batch, None
        token_pairs = TOKEN_PAIRS_PER_WIDTH * width

        def cost(piece: Piece) -> float:
            return visible(0, piece.end, None) + token_pairs * piece.end

        dealt, _ = deal([Piece(i, 0, n) for i, n in enumerate(batch.lengths)], self.count, cost)
        mine = sorted(piece.document for piece in dealt if piece.rank == self.rank)
        starts = batch.cu_seqlens.tolist()
        lengths = tuple(batch.lengths[i] for i in mine)
        rows = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in mine] + [torch.arange(0)])
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        part = Batch(batch.tokens[rows], batch.targets[rows], batch.positions[rows], cu_seqlens, lengths)
        return part, int((batch.targets != IGNORED).sum())

    def split(self, model: Decoder, device: torch.device) -> None:
        """Split the model's weights over the ranks, block by block."""
        if self.count == 1:
            return
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh(device.type, (self.count,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def total(self, x: Tensor) -> float:
        """The sum of a number over all ranks."""
        x = x.detach().double().reshape(())
        if self.count > 1:
            dist.all_reduce(x)
        return x.item()

    def whole(self, state: Any) -> Any:
        """A state dict with every split tensor put together again, on every rank."""
        return _mapped(state, lambda x: x.full_tensor() if hasattr(x, "full_tensor") else x)

    def agree(self, what: str, mine: str) -> None:
        """Refuse, on every rank, unless all have the same."""
        if self.count == 1:
            return
        given: list[str] = [""] * self.count
        dist.all_gather_object(given, mine)
        others = [rank for rank, text in enumerate(given) if text != mine]
        if others:
            raise ValueError(
                f"ranks {others} have other {what} than rank {self.rank}: {given[others[0]]} against {mine}"
            )

    def wait(self) -> None:
        if self.count > 1:
            dist.barrier()


ALONE = Ranks()


def place(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Load whole tensors into a model whose weights may be split."""
    named = dict(model.named_parameters())
    model.load_state_dict({name: like(value, named[name]) for name, value in values.items()})


def place_moments(optimizer: torch.optim.Optimizer, values: dict[str, Any]) -> None:
    """The same for an optimiser's moments: tensors of a parameter's shape are split as it is."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    state = {
        index: {name: like(x, weights[index]) if x.shape == weights[index].shape else x for name, x in moments.items()}
        for index, moments in values["state"].items()
    }
    optimizer.load_state_dict({**values, "state": state})


def like(x: Tensor, weight: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(weight, DTensor):
        return x
    return distribute_tensor(x.to(weight.device), weight.device_mesh, weight.placements, src_data_rank=None)


def _mapped(value: Any, change) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, change) for item in value)
    return change(value) if isinstance(value, Tensor) else value


def under_torchrun() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


@contextmanager
def started(device: str | None) -> Iterator[tuple[Ranks, str | None]]:
    """(ranks, device) of this process: joins the others if torchrun started several, and leaves them at the end."""
    if not under_torchrun():
        yield ALONE, device
        return
    cards = torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"
    if cards and device is not None and torch.device(device).index is not None:
        raise ValueError(f"device = {device!r}: under torchrun each rank takes the card of its number; write cuda")
    if cards:
        device = f"cuda:{int(os.environ['LOCAL_RANK'])}"
        torch.cuda.set_device(device)
    store, rank, count = next(rendezvous("env://"))
    # torchrun's store outlives a restart, and so would the addresses of ranks that are gone
    store = dist.PrefixStore(f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group("nccl" if cards else "gloo", store=store, rank=rank, world_size=count)
    yield Ranks(rank, count), device or "cpu"
    dist.destroy_process_group()


@contextmanager
def watched(ranks: Ranks, step, folder: Path | None) -> Iterator[None]:
    """Turn the failure of a collective, which is how a lost rank shows on the others, into words. step: a function."""
    from flamia.train import checkpoint

    try:
        yield
    except RuntimeError as error:
        words = str(error)
        lost = isinstance(error, dist.DistError) or any(word in words for word in ("gloo", "NCCL", "Connection"))
        if ranks.count == 1 or not lost:
            raise
        newest = checkpoint.latest(folder) if folder else None
        kept = (
            f"all up to {newest} is kept" if newest else "there is no checkpoint yet (save_every decides when there is)"
        )
        raise ValueError(
            f"rank {ranks.rank} of {ranks.count} stopped behind step {step()}, since another rank was lost "
            f"({words.splitlines()[0][:200]}); {kept}. Start torchrun again with --resume, or let it restart by itself "
            f"with --max-restarts"
        ) from error
