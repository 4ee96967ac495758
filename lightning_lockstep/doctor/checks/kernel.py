"""Linux before 5.5: tested if the version number alone proves nothing."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_lockstep.doctor.machine import Machine, release
from lightning_lockstep.doctor.registry import CheckOptions, Finding, not_applicable, ok, problem, warning

_FIRST_GOOD = (5, 5)
_TEST_TIMEOUT = 10.0
_UPGRADE = "# upgrade the kernel to 5.5 or newer (uname -r shows it), and reboot"


def check(machine: Machine, options: CheckOptions) -> Iterator[Finding]:
    text, subject = (machine.read_text("/proc/sys/kernel/osrelease") or "").strip(), "Linux kernel"
    version = release(text)
    if not version:
        yield not_applicable(subject, f"{text[:80]!r} is not the version of a Linux kernel: this is not Linux.")
    elif version >= _FIRST_GOOD:
        yield ok(subject, f"{text}; hangs are known on versions before 5.5")
    elif error := (tested := machine.probe("shared_memory", timeout=_TEST_TIMEOUT)).error:
        evidence = f"{text} is older than 5.5, and two processes could not share memory: {error}."
        yield problem(subject, evidence, _UPGRADE)
    else:
        evidence = (
            f"{text} is older than 5.5, on which ranks may hang. Two processes added numbers through shared memory"
            f" {tested.facts.get('rounds')} times without an error, so this is a warning only."
        )
        yield warning(subject, evidence, f"{_UPGRADE}, if ranks hang anyway")
