"""A micro-batch computed by two ranks and compared: a device that computes wrongly, though all ranks hold the same.

    every rank, before its n-th batch           the next rank (that of the last one is rank 0)
    ---------------------------------           ----------------------------------------------
    batch, random state, buffers     -------->  runs it forward and backward, apart from the run
    runs it in the same way
    all:  gather a checksum of both results; if a pair differs, all ranks run that batch several times and
          compare what most of them get

Every rank enters each collective here, even if its own part has failed: its error is gathered with the results.
"""

from __future__ import annotations

import io
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.serialization import default_restore_location
from torch.utils import _pytree as pytree

from lightning_lockstep._lightning import LightningModule, Trainer
from lightning_lockstep._text import counted, first_line, listed, plain_table, ranks_in_words
from lightning_lockstep.distributed import Communicator
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.replicas.checksums import Checksums, can_be_read, folded
from lightning_lockstep.replicas.report import parts_of
from lightning_lockstep.steps.capabilities import missing_capabilities
from lightning_lockstep.steps.isolated_step import from_a_state, run_forward_backward, step_arguments
from lightning_lockstep.steps.patching import assigned, do_nothing
from lightning_lockstep.steps.snapshot import RandomState

# How often every rank runs a batch on which two did not agree, which shows a step that is not deterministic.
_AGAIN = 4
_NAMED = 3
_Value = TypeVar("_Value")


def refuse_audit(trainer: Trainer) -> None:
    """Raise if no rank alone can make the step of another one."""
    needed = ("whole_gradients", "step_alone", "runs_at_once", "same_weights")
    for why in missing_capabilities(trainer.strategy, *needed):
        raise ConfigurationError(
            f"ReplicaCheck(audit_every_n_steps=...) does not work with {type(trainer.strategy).__name__}: {why}. Use"
            " lockstep_ddp or lockstep_mpi, where each rank has the whole model, or leave audit_every_n_steps out."
        )


class Audit:
    """Runs the micro-batches of other ranks; one object on every rank. Ranks: all, together, in each method."""

    def __init__(self, trainer: Trainer, module: LightningModule, communicator: Communicator) -> None:
        self._trainer, self._module, self._communicator = trainer, module, communicator
        self.stopped = ""  # why there are no more audits, the same on all ranks
        self._known: set[str] = set()  # ranks that were reported
        kinds = communicator.gather(_kind_of(trainer.strategy.root_device))
        if len(set(kinds)) > 1:
            rows = [(ranks_in_words(ranks), kinds[ranks[0]]) for ranks in parts_of(dict(enumerate(kinds)))]
            raise ConfigurationError(
                "ReplicaCheck(audit_every_n_steps=...) compares results bit by bit: expected one kind of device and"
                " the same number of threads (threads_per_rank=...) on all ranks, not\n\n"
                f"{plain_table(('ranks', 'compute with'), rows)}\n\nLeave audit_every_n_steps out here."
            )

    def run(self, batch: Any, index: int, weights: int) -> str:  # index in the epoch; checksum of the weights
        """Compute with all ranks; return what to report, or nothing. May set ``stopped``."""
        rank, size = self._communicator.rank, self._communicator.world_size
        packed, trouble = _attempt(lambda: self._packed(batch, index))
        received = self._communicator.pass_on(packed or b"")
        own = other = _NOTHING
        if packed and received:
            (own, other), trouble = _attempt(lambda: (self._computed(packed), self._computed(received)), (own, other))
        told = self._told(trouble, (weights, own.fold, other.fold))
        if told is None or len({of_rank[0] for of_rank in told}) > 1:
            return ""  # if the weights differ, the next check says which
        pairs = [(told[r][1], told[(r + 1) % size][2]) for r in range(size)]
        owner = next((r for r, (its_own, other_one) in enumerate(pairs) if its_own != other_one), None)
        if owner is None:
            return ""
        disputed = self._communicator.broadcast(packed, owner)
        firsts = {owner: pairs[owner][0], (owner + 1) % size: pairs[owner][1]}
        return self._settle(disputed, owner, [firsts[rank]] if rank in firsts else [])

    def _told(self, trouble: str, value: _Value) -> list[_Value] | None:
        """Return the values of all ranks, unless one is in trouble."""
        told = self._communicator.gather((trouble, value))
        found = next(((rank, text) for rank, (text, _) in enumerate(told) if text), None)
        if found is None:
            return [of_rank for _, of_rank in told]
        self.stopped = f"the step cannot be repeated alone on rank {found[0]}: {found[1]}"
        return None

    def _settle(self, disputed: bytes | None, owner: int, folds: Sequence[int]) -> str:  # of this rank so far
        """Have all ranks run the batch on which two do not agree; return what to report, or nothing."""
        assert disputed is not None
        results, trouble = _attempt(lambda: [self._computed(disputed) for _ in range(_AGAIN)], [_NOTHING])
        votes = self._told(trouble, (*folds, *(result.fold for result in results)))
        if votes is None:
            return ""
        verdict, last = Verdict.of(votes), results[-1]
        if verdict.why_none:
            self.stopped = verdict.why_none
            return ""
        known = str(verdict.wrong or verdict.groups)
        if known in self._known:
            return ""
        self._known.add(known)
        right = self._communicator.broadcast(last.sums, verdict.reference)
        names = [name for name in right if last.sums.get(name) != right[name]]
        place = f"{self._communicator.host}, {self._trainer.strategy.root_device}"
        count = f"{len(names)} of {len(right)}: {listed(names, _NAMED)}" if names else "none"
        return _report(verdict, owner, self._communicator.gather((place, last.loss, count)))

    def _packed(self, batch: Any, index: int) -> bytes:
        module = self._module
        buffers = [buffer for buffer in module.buffers() if can_be_read(buffer)]
        random = RandomState()
        place = getattr(self._trainer.strategy, "place_of", do_nothing)(batch)
        return packed((step_arguments(module.training_step, batch, index), buffers, random, place))

    def _computed(self, data: bytes) -> Result:
        """Run a micro-batch forward and backward, and leave no trace of it."""
        trainer, module = self._trainer, self._module
        arguments, values, random, place = unpacked(data, trainer.strategy.root_device)
        losses: list[Tensor] = []

        @contextmanager
        def keep(loss: Tensor) -> Iterator[None]:
            losses.append(loss.detach().clone())
            yield

        def restore_buffers() -> None:
            with torch.no_grad():
                buffers = (buffer for buffer in module.buffers() if can_be_read(buffer))
                for buffer, value in zip(buffers, values, strict=True):
                    buffer.copy_(value)

        # cuDNN must not measure which algorithm is fastest: equal GPUs may get different ones, with other bits.
        no_timed_kernels = assigned(torch.backends.cudnn, benchmark=False, deterministic=True)
        with no_timed_kernels, from_a_state(trainer, module, random, restore_buffers):
            step = partial(module.training_step, *arguments)
            run_forward_backward(trainer, module, step, around_backward=keep, place=place)
            named = {f"loss {number}": loss for number, loss in enumerate(losses)}
            for name, parameter in module.named_parameters():
                if parameter.grad is not None and can_be_read(parameter.grad):
                    named[name] = parameter.grad
            sums = Checksums(named).numbers()
            loss = listed([f"{value.float().sum().item():.9g}" for value in losses], 2)
        return Result(loss, sums, folded(sums.items()))


class Result(NamedTuple):
    """What a rank has computed from a micro-batch."""

    loss: str
    sums: Mapping[str, int]  # of losses and gradients, by name
    fold: int  # of all sums


_NOTHING = Result("-", {}, 0)


@dataclass(frozen=True)
class Verdict:
    """Which ranks have other results than most, as far as that can be said."""

    groups: list[list[int]]  # ranks that agree in their last result, the most first
    wrong: list[int]
    why_none: str = ""  # why the results tell nothing of the devices

    @classmethod
    def of(cls, votes: Sequence[Sequence[int]]) -> Verdict:  # by rank, all its results of one batch
        """Decide by the results of all ranks."""
        groups = parts_of({rank: folds[-1] for rank, folds in enumerate(votes)})
        unstable = [rank for rank, folds in enumerate(votes) if len(set(folds)) > 1]
        if 2 * len(unstable) > len(votes):
            return cls(groups, [], _NOT_DETERMINISTIC)
        counts = Counter(fold for folds in votes for fold in dict.fromkeys(folds)).most_common(2)
        if counts[0][1] > counts[1][1]:
            return cls(groups, [rank for rank, folds in enumerate(votes) if {*folds} != {counts[0][0]}])
        if len(groups) == len(votes) > 2:
            return cls(groups, [], _NOT_DETERMINISTIC)
        return cls(groups, unstable)

    @property
    def reference(self) -> int:
        return next((rank for group in self.groups for rank in group if rank not in self.wrong), 0)


_NOT_DETERMINISTIC = (
    "the step is not deterministic (torch.use_deterministic_algorithms(True) says which operation), or depends on what"
    " a rank alone holds, such as an attribute made from its earlier batches"
)


def _report(verdict: Verdict, owner: int, rows: Sequence[tuple[str, str, str]]) -> str:
    """Return what is said of a batch of the owner; rows by rank: host and device, loss, which results differ."""
    wrong = verdict.wrong
    shown = sorted({*range(len(rows))[:4], owner, verdict.reference, *wrong[:4]})
    table = plain_table(
        ("rank", "host, device", "loss", "results that differ", ""),
        [(rank, *rows[rank], "<- differs" if rank in wrong else "") for rank in shown],
    )
    if wrong:
        who, verb = ranks_in_words(wrong), "computes" if len(wrong) == 1 else "compute"
        places = listed([rows[rank][0] for rank in wrong], 4)
        first = f"{who} (host {places}) {verb} other values than the other ranks"
        device = f"The device of {who}"
    else:
        who = listed([ranks_in_words(group) for group in verdict.groups], 4)
        first = f"{who} compute different values, and no majority agrees"
        device = "A device of theirs"
    return (
        f"{first}: a batch of rank {owner}, run again with the same weights, buffers and random numbers, gave another"
        f" loss or other gradients\n\n{table}\n\nLikely reasons:\n  1. {device} computes wrongly: test or replace it."
        "\n  2. A hook, a module, a library or an attribute is not the same on all ranks."
    )


def _attempt(function: Callable[[], _Value], otherwise: Any = None) -> tuple[_Value, str]:
    """Return what a function gives and nothing, or another value and what it has raised."""
    try:
        return function(), ""
    except Exception as error:  # raised by the user's step: the other ranks wait in a collective
        return otherwise, f"{type(error).__name__}: {first_line(error)}"


def _kind_of(device: torch.device) -> str:
    """Return what the last bits of results may depend on, for the same computation."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    threads = counted(torch.get_num_threads(), "thread")
    vectors = torch.backends.cpu.get_cpu_capability()
    return f"{model or platform.machine()} ({vectors}), {threads}, torch {torch.__version__}"


# -- A micro-batch as bytes, between ranks of one process group, as torch sends its objects --


def packed(value: Any) -> bytes:
    """Return a value as bytes, each tensor without the rest of the memory that it is a view of."""
    file = io.BytesIO()
    copies = pytree.tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), value)
    torch.save(copies, file)
    return file.getvalue()


def unpacked(data: bytes, device: torch.device) -> Any:
    """Return the value; tensors from a device of the sender are put on ``device``."""

    def placed(storage: Any, place: str) -> Any:
        if place == "cpu":
            return storage
        return default_restore_location(storage, str(device))  # type: ignore[no-untyped-call]

    # From a rank of this job, over its process group.
    return torch.load(io.BytesIO(data), map_location=placed, weights_only=False)
