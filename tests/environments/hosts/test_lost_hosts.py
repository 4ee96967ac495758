"""A run on two hosts outlives ranks, and a host: each is a network namespace, where one process starts two ranks."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness import ScriptOutcome
from tests.harness.cluster import Cluster, why_not
from tests.harness.patience import patience, wait_until
from tests.models.strategies.outliving import LIMIT, SCRIPT, Fit, check_same, fit

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with Cluster() as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Fit:
    return fit(tmp_path_factory.mktemp("whole") / "run", "end", max_epochs=2)


def fit_on(
    hosts: Cluster, folder: Path, *orders: str, spares: int = 0, event: Callable[[int], object] | None = None
) -> tuple[Fit, ScriptOutcome]:
    """Fit on two hosts; with the process id of host 1 call ``event`` in the middle; return what each host has left."""
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "MASTER_ADDR": hosts.addresses[0],
        "MASTER_PORT": "29500",
        "OPTIONS": json.dumps({"num_nodes": 2, "max_epochs": 2, "spares": spares}),
        "PAUSE": "0.05" if event else "0",
    }
    folder.mkdir()
    started = [
        hosts.start(
            host,
            [sys.executable, str(SCRIPT), str(folder), "continue", *orders],
            env={**environ, "NODE_RANK": str(host), "GLOO_SOCKET_IFNAME": hosts.cables[host]},
        )
        for host in (0, 1)
    ]
    if event is not None:
        begun = wait_until(
            lambda: any('"step": 6' in path.read_text() for path in folder.glob("journal.*")),
            patience(LIMIT),
            0.02,
        )
        assert begun, started[0].poll()
        event(started[1].pid)
    outputs = [one.communicate(timeout=patience(LIMIT))[0] for one in started]
    left = tuple(str(pid) for host in (0, 1) for pid in hosts.pids_on(host))
    first, other = (
        ScriptOutcome(one.returncode, "", output, 0.0, False, left)
        for one, output in zip(started, outputs, strict=True)
    )
    return Fit(folder, first), other


def test_killed_ranks_on_both_hosts_until_the_other_host_alone_has_one(
    hosts: Cluster, undisturbed: Fit, tmp_path: Path
) -> None:
    orders = ("2:backward:4", "0:save:10", "1:validation:13")
    disturbed, other = fit_on(hosts, tmp_path / "run", *orders)
    check_same(disturbed, undisturbed)
    assert other.returncode == 0, other.output
    lost = [line.partition(" was ")[0] for line in disturbed.lost()]
    assert lost == [f"lightning-lockstep: rank {rank}" for rank in (2, 0, 1)]


def test_the_process_that_has_started_the_ranks_of_a_host_is_killed_and_a_spare_takes_one_place(
    hosts: Cluster, undisturbed: Fit, tmp_path: Path
) -> None:
    """Of the two spare processes the other one is on that host."""
    disturbed, other = fit_on(hosts, tmp_path / "run", spares=1, event=lambda pid: os.kill(pid, signal.SIGKILL))
    check_same(disturbed, undisturbed)
    assert other.returncode == -signal.SIGKILL
    (line,) = disturbed.lost()
    assert "ranks 2-3 were lost at epoch 0" in line and "(host beta); went on with 3 ranks" in line


def test_a_host_that_is_cut_off_for_good_is_lost_and_ends_its_ranks(
    hosts: Cluster, undisturbed: Fit, tmp_path: Path
) -> None:
    try:
        disturbed, other = fit_on(hosts, tmp_path / "run", event=lambda pid: hosts.cut())
    finally:
        hosts.mend()
    check_same(disturbed, undisturbed)
    (line,) = disturbed.lost()
    assert "ranks 2-3 were lost at epoch 0" in line and "(host beta); went on with 2 ranks" in line
    assert other.returncode == 1
    assert "host beta has lost the first host of the run (the network is cut" in other.output
