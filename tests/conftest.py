"""Fixtures that every test gets."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.helpers.leaks import LeakCheck
from tests.helpers.ranks import stop_server

# A shell without job control starts what it puts into the background deaf to Ctrl-C, and so would be every
# process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
