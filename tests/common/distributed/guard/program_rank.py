"""What one rank does with a random program: real operations of torch.distributed, under the guard."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from lightning_lockstep.launchers.rank_supervisor import RankSupervisor, SupervisorSettings
from tests.common.distributed.guard.program_model import Program, Step

__all__ = ["UserError", "run_programs"]

_FOR_EVER = 1e6


class UserError(Exception):
    """What the program itself raises on a rank."""


def run_programs(programs: list[Program], guard: Any, stall_timeout: float, grace_period: float) -> int:
    """Run programs one after the other under the guard, as the strategies set it up; return how many were run."""
    settings = SupervisorSettings(
        guard=guard, stall_timeout=stall_timeout, grace_period=grace_period, silence_limit=10.0
    )
    supervisor = RankSupervisor(settings)
    supervisor.ranks_have_met(60.0, prints_report=dist.get_rank() == 0)
    # Each has opened its side channel; in a group of its own, since programs count the calls of the default group.
    everyone = dist.new_group(list(range(dist.get_world_size())))
    dist.barrier(everyone)
    dist.destroy_process_group(everyone)
    return int(supervisor.run(_run_all, programs))


def _run_all(programs: list[Program]) -> int:
    for program in programs:
        groups = [None, *(dist.new_group(list(ranks)) for ranks in program.groups[1:])]
        _run(program.steps_of(dist.get_rank()), groups)
        for group in groups[1:]:
            if isinstance(group, dist.ProcessGroup):
                dist.destroy_process_group(group)
    return len(programs)


def _run(steps: list[Step], groups: list[Any]) -> None:
    waits: list[tuple[int, Any]] = []
    for index, step in enumerate(steps):
        _pause(step)
        work = do_step(step, groups[step.group])
        if step.waited_after and work is not None:
            waits.append((index + step.waited_after, work))
        for due in [one for one in waits if one[0] <= index]:
            due[1].wait()
            waits.remove(due)
    for _, work in waits:
        work.wait()


def _pause(step: Step) -> None:
    if not step.computes:
        time.sleep(step.pause)
        return
    end = time.monotonic() + step.pause
    while time.monotonic() < end:
        torch.ones(50, 50) @ torch.ones(50, 50)


def do_step(step: Step, group: Any) -> Any:
    """Do one operation; return what is to be waited for, if it is asynchronous."""
    name = step.operation
    if name in _FAULTS:
        _FAULTS[name]()
        return None
    if name == "message":
        return _message(step)
    if name == "barrier":
        return dist.barrier(group)
    size = dist.get_world_size(group)
    if name == "all_gather_object":
        return dist.all_gather_object([None] * size, "x" * step.shape[0], group)
    tensor = torch.ones(step.shape, dtype=getattr(torch, step.dtype))
    many = [torch.empty_like(tensor) for _ in range(size)]
    rest = {"group": group, "async_op": bool(step.waited_after)}
    if name == "all_gather":
        return dist.all_gather(many, tensor, **rest)
    if name == "all_gather_into_tensor":
        return dist.all_gather_into_tensor(torch.cat(many), tensor, **rest)
    if name == "reduce_scatter_tensor":
        return dist.reduce_scatter_tensor(tensor.chunk(size)[0].clone(), tensor, **rest)
    if name == "all_to_all_single":
        return dist.all_to_all_single(torch.empty_like(tensor), tensor, **rest)
    if step.root is not None:
        return _rooted(step, tensor, many, rest)
    assert name == "all_reduce"
    return dist.all_reduce(tensor, **rest)


def _rooted(step: Step, tensor: torch.Tensor, many: list[torch.Tensor], rest: dict[str, Any]) -> Any:
    """Do an operation in which one rank sends to all, or receives from all."""
    of_root = many if dist.get_rank() == step.root else None
    if step.operation == "gather":
        return dist.gather(tensor, of_root, dst=step.root, **rest)
    if step.operation == "scatter":
        return dist.scatter(torch.empty_like(tensor), of_root, src=step.root, **rest)
    if step.operation == "broadcast":
        return dist.broadcast(tensor, src=step.root, **rest)
    assert step.operation == "reduce"
    return dist.reduce(tensor, dst=step.root, **rest)


def _message(step: Step) -> None:
    """Send or receive, some by a handle."""
    tensor = torch.ones(step.shape)
    if step.shape[0] % 2:
        is_sender = dist.get_rank() == step.root
        work = dist.isend(tensor, step.receiver) if is_sender else dist.irecv(tensor, step.root)
        assert work is not None
        work.wait()
    elif dist.get_rank() == step.root:
        dist.send(tensor, step.receiver)
    else:
        dist.recv(tensor, step.root)


def _poll() -> None:
    while not os.path.exists("/never/there"):
        time.sleep(0.02)


def _raise() -> None:
    raise UserError("the program is at fault")


_FAULTS = {
    "sleep": lambda: time.sleep(_FOR_EVER),
    "poll": _poll,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": _raise,
}
