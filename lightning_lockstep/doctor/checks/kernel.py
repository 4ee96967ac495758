"""Linux before 5.5: tested where the version number alone proves nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lightning_lockstep.doctor.machine import Machine, release
from lightning_lockstep.doctor.registry import (
    CheckOptions,
    Finding,
    check,
    not_applicable,
    ok,
    problem,
    warning,
)

_FIRST_GOOD = (5, 5)
_TEST_TIMEOUT = 10.0
_UBUNTU_WITH_GOOD_KERNEL = (20, 4)  # 5.15 by its hwe packages; those of 18.04 end with 5.4

# What is in the release of a distribution's kernel, and which distribution that is.
_DISTRIBUTIONS = {
    ".el7": "Red Hat 7 and those made from it",
    ".el8": "Red Hat 8 and those made from it",
    "amzn": "Amazon Linux",
    "cray": "Cray",
    "-generic": "Ubuntu",
    "-azure": "Ubuntu for Azure",
    "-gcp": "Ubuntu for Google Cloud",
    "-aws": "Ubuntu for AWS",
    "-default": "SUSE",
    ".uek": "Oracle Linux",
    "tegra": "NVIDIA Jetson",
}
_UPGRADES = {
    "ubuntu": ("sudo apt-get install linux-generic-hwe-{version}", "sudo reboot"),
    "debian": ("sudo apt-get install -t {codename}-backports linux-image-amd64", "sudo reboot"),
    "amzn": ("sudo amazon-linux-extras install kernel-5.15", "sudo reboot"),
    "rhel": (
        "# kernels of elrepo.org for release {major}, or release 9 of the distribution",
        "sudo dnf install https://www.elrepo.org/elrepo-release-{major}.el{major}.elrepo.noarch.rpm",
        "sudo dnf --enablerepo=elrepo-kernel install kernel-ml && sudo reboot",
    ),
}


@check(
    name="kernel",
    summary="Linux before 5.5, on which ranks may hang",
    why="""On Linux before 5.5 ranks may hang without an error message while they pass data through shared memory. The
    version alone proves little, since distributions back-port fixes. So on such a kernel two processes add numbers
    through shared memory many times; if they finish, the version is the only reason for a warning.""",
)
def check_kernel(machine: Machine, options: CheckOptions) -> Iterator[Finding]:
    """Look at the kernel's release, and test an old one."""
    text = (machine.read_text("/proc/sys/kernel/osrelease") or "").strip()
    version = release(text)
    if not text:
        yield not_applicable("Linux kernel", "/proc/sys/kernel/osrelease cannot be read: this is not Linux.")
    elif not version:
        yield warning("Linux kernel", f"{text[:80]!r} is not the version of a Linux kernel.")
    elif version >= _FIRST_GOOD:
        yield ok("Linux kernel", f"{text}; hangs are known on versions before 5.5")
    else:
        yield from _old_kernel(machine, text)


def _old_kernel(machine: Machine, text: str) -> Iterator[Finding]:
    names = [name for mark, name in _DISTRIBUTIONS.items() if mark in text]
    of_whom = f" It is a kernel of {names[0]}, which back-ports fixes." if names else ""
    tested = machine.probe("shared_memory", timeout=_TEST_TIMEOUT)
    fix = _upgrade(_os_release(machine))
    if tested.error:
        yield problem(
            "Linux kernel",
            f"{text} is older than 5.5, and two processes could not add through shared memory:"
            f" {tested.error}.{of_whom}",
            *fix,
        )
    else:
        yield warning(
            "Linux kernel",
            f"{text} is older than 5.5, on which ranks may hang. Two processes added numbers through shared memory"
            f" {tested.facts.get('rounds')} times without an error, so this is a warning only.{of_whom}"
            " Use the lines below if ranks hang anyway.",
            *fix,
        )


def _os_release(machine: Machine) -> dict[str, str]:
    lines = (machine.read_text("/etc/os-release") or "").splitlines()
    pairs = (line.partition("=") for line in lines if "=" in line)
    return {name.strip(): value.strip().strip("\"'") for name, _, value in pairs}


def _upgrade(system: Mapping[str, str]) -> tuple[str, ...]:
    if system.get("ID") == "ubuntu" and release(system.get("VERSION_ID")) < _UBUNTU_WITH_GOOD_KERNEL:
        return (
            f"# the newest kernel of Ubuntu {system.get('VERSION_ID')} is too old as well: upgrade the system",
            "sudo do-release-upgrade",
        )
    kinds = [system.get("ID", ""), *system.get("ID_LIKE", "").split()]
    kind = next((kind for kind in kinds if kind in _UPGRADES), "rhel" if "fedora" in kinds else "")
    version = system.get("VERSION_ID", "")
    lines = _UPGRADES.get(kind, ("# ask the administrator of this machine for a kernel of 5.5 or newer",))
    values = {
        "version": version,
        "major": version.partition(".")[0],
        "codename": system.get("VERSION_CODENAME", "stable"),
    }
    for name, value in values.items():
        lines = tuple(line.replace(f"{{{name}}}", value) for line in lines)
    return lines
