"""The checks of ``--hosts``: each host runs the doctor, by ssh, and one table shows them all."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from lightning_lockstep._text import exit_in_words
from lightning_lockstep.doctor.check_runner import Checks
from lightning_lockstep.doctor.findings import CheckResult, problem
from lightning_lockstep.doctor.machines.machine import Completed
from lightning_lockstep.doctor.machines.processes import end_programs, last_line, run_program
from lightning_lockstep.doctor.options import CheckOptions
from lightning_lockstep.doctor.several_hosts.merging import merged
from lightning_lockstep.launchers.mpirun.hostfile import Host
from lightning_lockstep.launchers.mpirun.hosts import HostReport, host_fix, ssh_advice
from lightning_lockstep.launchers.mpirun.remote import python_on

__all__ = ["ChecksOnHosts"]

# Those that look at all hosts at once, from here.
_FROM_HERE = ("mpi", "network", "run")
_LONGEST = 180.0  # for all checks of a host, where the user gives no limit [s]
_SSH_FAILED = 255
_BEGINS = "LOCKSTEP-DOCTOR"  # printed before the answer; a shell there may have printed something already


class ChecksOnHosts:
    """The checks of one call, on several hosts; used as :class:`.check_runner.Checks`."""

    def __init__(self, names: Sequence[str], options: CheckOptions, hosts: Sequence[Host]) -> None:
        self.names = tuple(names)
        self._options, self._hosts = options, hosts
        self._there = [name for name in names if name not in _FROM_HERE]
        self._here = Checks([name for name in names if name in _FROM_HERE], options)
        self._began: float | None = None

    def running(self) -> dict[str, float]:
        there = {} if self._began is None else {f"{len(self._hosts)} hosts": time.monotonic() - self._began}
        return {**there, **self._here.running()}

    def results(self, tick: Callable[[], None] = lambda: None) -> Iterator[CheckResult]:
        if self._there:
            yield from self._on_hosts(tick)
        yield from self._here.results(tick)

    def _on_hosts(self, tick: Callable[[], None]) -> Iterator[CheckResult]:
        self._began = time.monotonic()
        with ThreadPoolExecutor(len(self._hosts)) as pool:
            asked = {host.name: pool.submit(self._ask, host.name) for host in self._hosts}
            try:
                while not all(future.done() for future in asked.values()):
                    tick()
                    time.sleep(0.05)
            except BaseException:  # such as Ctrl-C, which these ssh do not receive
                end_programs()
                raise
        self._began = None
        answers = {host: future.result() for host, future in asked.items()}
        fault = [answer for answer in answers.values() if isinstance(answer, CheckResult)]
        if fault:
            yield CheckResult("hosts", tuple(finding for result in fault for finding in result.findings))
        yield from merged({host: found for host, found in answers.items() if isinstance(found, list)})

    def _ask(self, host: str) -> list[CheckResult] | CheckResult:
        """Return what a host has found, or why it was not asked."""
        given = ["-m", "lightning_lockstep.doctor", *self._there, "--json"]
        for option, value in (
            ("--model-parameters", self._options.model_parameters),
            ("--gpus", self._options.gpus),
        ):
            given += [option, f"{value:.12g}"] if value is not None else []
        limit = _LONGEST
        if self._options.timeout is not None:
            given += ["--timeout", f"{self._options.timeout:g}"]
            limit = 30 + self._options.timeout * len(self._there)
        done = run_program(python_on(host, given, self._options.ssh_args, first=_BEGINS), limit)
        if done.is_missing:
            return _not_asked(host, "there is no ssh command on this host", "sudo apt install openssh-client")
        if done.timed_out:
            return _not_asked(host, f"no answer within {limit:.0f} s", f"ssh {host} true")
        try:
            answer = done.output.rpartition(f"{_BEGINS}\n")[2]
            return [CheckResult.from_json(result) for result in json.loads(answer)["checks"]]
        except (ValueError, KeyError, TypeError):
            return _unusable(host, done)


def _unusable(host: str, done: Completed) -> CheckResult:
    last = last_line(done.error) or f"{exit_in_words(done.returncode)}, no output"
    if done.returncode == _SSH_FAILED:
        report = HostReport(host, last)
        return _not_asked(host, ssh_advice(report), *host_fix(report))
    if "No module named" in last:
        why = f"the package is not installed there, or not in this Python: {last}"
        return _not_asked(host, why, *host_fix(HostReport(host, "ok")))
    return _not_asked(host, f"the doctor fails there: {last}", f"ssh {host} lockstep-doctor")


def _not_asked(host: str, why: str, *fix: str) -> CheckResult:
    return CheckResult("hosts", (problem("host", f"{host}: {why}", *fix),))
