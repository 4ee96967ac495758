"""`debug=preflight`: the doctor's checks that matter for the chosen strategy, before any rank starts."""

from __future__ import annotations

import sys
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_lockstep._application.command_line.faults import Fault
from lightning_lockstep._application.config_channel import external_ranks
from lightning_lockstep.doctor.check_runner import Checks
from lightning_lockstep.doctor.findings import CheckResult, Status
from lightning_lockstep.doctor.options import CheckOptions
from lightning_lockstep.doctor.table import console, print_fixes, print_heading, print_result, print_verdict
from lightning_lockstep.launchers.environments.slurm_step import find_slurm_step

__all__ = ["checks_for", "preflight_faults"]

_ON_GPUS = ("cuda", "devices")
_WITHOUT_GPUS = ("cpu", "tpu")
_done: dict[tuple[tuple[str, ...], CheckOptions], list[Fault]] = {}


def preflight_faults(config: DictConfig) -> list[Fault]:
    """Run the checks if the configuration asks for them, print their table, and return what stops the run.

    The jobs of a sweep that ask for the same are checked once. Rank 0 calls this before any other rank is started: it
    starts processes, and ranks of its own on this host where the run would start its ranks here.
    """
    if not config.get("preflight"):
        return []
    names, options = checks_for(config)
    if (names, options) not in _done:
        _done[names, options] = _run(names, options)
    return _done[names, options]


def checks_for(config: DictConfig) -> tuple[tuple[str, ...], CheckOptions]:
    """Return the checks that matter for a configuration, and their options."""
    strategy = str(OmegaConf.select(config, "hydra.runtime.choices.strategy") or "")
    names: list[str] = ["packages", "kernel"]
    if str(OmegaConf.select(config, "trainer.accelerator")) not in _WITHOUT_GPUS:
        names += _ON_GPUS
    names += [name for name in ("deepspeed", "mpi", "xla") if strategy.startswith(name)]
    if find_slurm_step() is not None:
        names.append("slurm")
    ranks = _ranks_here(config)
    if strategy.startswith(("ddp", "mpi", "deepspeed")) and ranks > 1 and external_ranks() is None:
        names.append("network")
    hostfile = OmegaConf.select(config, "strategy.hostfile")
    ssh_args = OmegaConf.select(config, "strategy.ssh_args") or ()
    options = CheckOptions(
        nproc=ranks,
        hostfile=str(hostfile) if hostfile else None,
        ssh_args=tuple(map(str, ssh_args)),
        strategy=strategy,
    )
    return tuple(names), options


def _ranks_here(config: DictConfig) -> int:
    """Return how many ranks the run starts on this host: one for each device that the configuration names."""
    devices: Any = OmegaConf.select(config, "trainer.devices")
    listed = OmegaConf.is_list(devices) or (isinstance(devices, str) and "," in devices)
    if listed:
        return len(
            [part for part in (devices.split(",") if isinstance(devices, str) else devices) if part != ""]
        )
    if str(devices) not in ("auto", "-1"):
        return int(devices) if str(devices).isdecimal() else 1
    if str(OmegaConf.select(config, "trainer.accelerator")) in _WITHOUT_GPUS:
        return 1
    import torch

    return max(torch.cuda.device_count(), 1)  # asks the driver, and starts nothing on the devices


def _run(names: tuple[str, ...], options: CheckOptions) -> list[Fault]:
    checks, to = Checks(names, options), console(is_error=True)
    results: list[CheckResult] = []
    print_heading(to)
    for result in checks.results():
        results.append(result)
        print_result(to, result, least=Status.WARNING if result.status is not Status.OK else Status.OK)
    print_fixes(to, results, least=Status.WARNING)
    print_verdict(to, results, sum(result.seconds for result in results))
    sys.stderr.flush()
    bad = [result.check for result in results if result.status is Status.PROBLEM]
    if not bad:
        return []
    listed = ", ".join(bad)
    return [
        Fault(
            f"debug=preflight: the checks above found problems ({listed}). Fix them, or leave out debug=preflight."
        )
    ]
