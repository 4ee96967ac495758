"""Two hosts that have IPv6 alone: ranks are started by hand on each."""

from __future__ import annotations

import os
import sys

import pytest

from tests.harness.cluster import Cluster, why_not
from tests.models.strategies.failures import LIMIT, SCRIPT


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_two_hosts_that_have_ipv6_alone() -> None:
    with Cluster(ipv6=True) as hosts:
        nodes = [
            hosts.start(
                node,
                [sys.executable, str(SCRIPT), "nodes"],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(sys.path),
                    "MASTER_ADDR": hosts.addresses[0],
                    "MASTER_PORT": "29500",
                    "NODE_RANK": str(node),
                    "GLOO_SOCKET_IFNAME": hosts.cables[node],
                },
            )
            for node in (0, 1)
        ]
        outputs = [node.communicate(timeout=LIMIT)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert all(f"rank {rank} fitted" in output for rank, output in enumerate(outputs)), outputs
