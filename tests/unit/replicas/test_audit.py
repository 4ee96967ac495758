"""Who is wrong by what ranks have found, what is sent, and where no rank can make the step of another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy

from lightning_lockstep import ConfigurationError, LockstepDDPStrategy
from lightning_lockstep.replicas.audit import Verdict, packed, refuse_audit, unpacked
from lightning_lockstep.steps.capabilities import Capabilities


def test_who_is_wrong() -> None:
    def wrong(*votes: list[int]) -> list[int] | str:
        verdict = Verdict.of(votes)
        return verdict.why_none or verdict.wrong

    assert wrong([1, 1], [2, 2], [1, 1]) == [1]
    assert wrong([1, 1], [2, 2]) == []
    assert wrong([1, 1], [2, 1]) == [1], "it is not always wrong"
    assert wrong([1, 1], [2, 3]) == [1], "it is wrong in another way each time"
    assert wrong([1, 1], [2, 2], [1, 1], [2, 2]) == [], "two kinds of hosts"
    assert wrong([1, 1], [2, 2], [1, 1], [3, 3], [1, 1]) == [1, 3]
    assert "deterministic" in str(wrong([1, 2], [3, 4], [5, 6]))
    assert "alone holds" in str(wrong([1, 1], [2, 2], [3, 3]))


def test_what_is_sent_is_the_batch_and_no_more() -> None:
    whole = torch.arange(1_000_000.0)
    part = whole[10:20].requires_grad_()
    data = packed({"x": part, "again": part, "text": "some", "mask": torch.ones(2, 2).T})
    assert len(data) < 10_000
    back = unpacked(data, torch.device("cpu"))
    assert torch.equal(back["x"], part) and back["x"].requires_grad and back["text"] == "some"
    assert back["mask"].stride() == (1, 2)


@pytest.mark.parametrize(
    "strategy",
    [
        FSDPStrategy(),
        SimpleNamespace(step_capabilities=Capabilities(runs_at_once=False)),
        SimpleNamespace(step_capabilities=Capabilities(whole_gradients=False)),
        LockstepDDPStrategy(model_averaging_period=2),
    ],
    ids=["FSDP", "XLA", "DeepSpeed", "model averaging"],
)
def test_it_is_refused_where_no_rank_alone_can_make_a_step(strategy: Any) -> None:
    given: Any = SimpleNamespace(strategy=strategy)
    with pytest.raises(ConfigurationError, match=r"audit_every_n_steps=.* does not work with .*: it "):
        refuse_audit(given)
