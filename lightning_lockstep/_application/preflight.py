"""`debug=preflight`: the doctor's checks that matter for the chosen strategy, before any rank starts."""

from __future__ import annotations

import sys
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_lockstep._application.config_channel import external_ranks
from lightning_lockstep._application.faults import Fault
from lightning_lockstep.doctor.child import Checks
from lightning_lockstep.doctor.findings import CheckResult, Status
from lightning_lockstep.doctor.options import CheckOptions
from lightning_lockstep.doctor.table import console, print_fixes, print_heading, print_result, print_verdict
from lightning_lockstep.launchers.slurm_step import find_slurm_step

__all__ = ["checks_for", "preflight_faults"]

_ON_GPUS = ("cuda", "devices")
_done: dict[tuple[str, ...], list[Fault]] = {}


def preflight_faults(config: DictConfig) -> list[Fault]:
    """Run the checks if the configuration asks for them, print their table, and return what stops the run.

    The jobs of a sweep with one strategy are checked once.

    Args:
        config: The frozen configuration of one run.

    Ranks: rank 0, before any other is started; starts processes, and ranks of its own on this host where the run
        would start its ranks here.
    """
    if not config.get("preflight"):
        return []
    names, options = checks_for(config)
    if names not in _done:
        _done[names] = _run(names, options)
    return _done[names]


def checks_for(config: DictConfig) -> tuple[tuple[str, ...], CheckOptions]:
    """Return the checks that matter for a configuration, and their options.

    Args:
        config: The frozen configuration of one run.
    """
    strategy = str(OmegaConf.select(config, "hydra.runtime.choices.strategy") or "")
    names: list[str] = ["packages", "kernel"]
    if str(OmegaConf.select(config, "trainer.accelerator")) not in ("cpu", "tpu"):
        names += _ON_GPUS
    names += [name for name in ("deepspeed", "mpi", "xla") if strategy.startswith(name)]
    if find_slurm_step() is not None:
        names.append("slurm")
    devices: Any = OmegaConf.select(config, "trainer.devices")
    ranks = devices if isinstance(devices, int) else None
    if (
        strategy.startswith(("ddp", "mpi", "deepspeed"))
        and ranks is not None
        and ranks > 1
        and external_ranks() is None
    ):
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
