"""How long tests wait."""

from __future__ import annotations

import pytest

from tests.helpers.patience import patience


def test_a_limit_is_longer_beside_other_tests_but_never_as_long_as_that_of_the_whole_test(
    monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    monkeypatch.delenv("LOCKSTEP_TESTS_PATIENCE", raising=False)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    assert patience(20) == 20
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    assert patience(20) == 40
    monkeypatch.setenv("LOCKSTEP_TESTS_PATIENCE", "5")
    assert patience(20) == 100
    assert patience(300) + 30 < float(pytestconfig.getini("timeout"))
