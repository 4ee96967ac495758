"""Fixtures that every test gets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.leaks import LeakCheck
from tests.helpers.ranks import stop_server


@pytest.fixture(autouse=True)
def leak_police(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves something behind; ``@pytest.mark.allow_leaks("threads", ...)`` excuses it."""
    before = LeakCheck.now()
    yield
    allowed = [kind for marker in request.node.iter_markers("allow_leaks") for kind in marker.args]
    leaks = before.leaks(allowed)
    before.restore()
    if leaks:
        pytest.fail("the test left something behind:\n  " + "\n  ".join(leaks), pytrace=False)


def pytest_sessionfinish() -> None:
    """End the process that ranks are forked from."""
    stop_server()
