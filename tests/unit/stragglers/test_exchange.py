"""How a rank measures its own steps, and how rank 0 takes what the ranks send; without ranks."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_lockstep import ConfigurationError, StragglerMonitor
from tests.models.stragglers.fits import ALL, fit

# -- what rank 0 collects -------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [0, -1, 2.5, True])
def test_settings_that_cannot_be_used_are_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"every_n_steps=.*expected.*\n?.*min_share=1"):
        StragglerMonitor(every_n_steps=given, min_share=1)


@pytest.mark.filterwarnings("ignore")
def test_on_one_rank_there_is_nobody_to_wait_for() -> None:
    alone = fit(ALL, steps=4, strategy="auto", devices=1)
    assert [line for line in alone["lines"] if "there is one rank" in line] == alone["lines"] != []
