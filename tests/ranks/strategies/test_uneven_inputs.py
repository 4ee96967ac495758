"""Loaders that give different numbers of batches on two real ranks, or other numbers than their length says.

Starting ranks is what costs, so two pairs of ranks run all the fits.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from lightning_lockstep import (
    ConfigurationError,
    LockstepDDPStrategy,
    LockstepDeepSpeedStrategy,
)
from lightning_lockstep._lightning import (
    CombinedLoader,
    LightningModule,
    MisconfigurationException,
    Trainer,
)
from tests.harness import logged, run_ranks
from tests.ranks.strategies.test_fits import QUIET

PROMISED, GIVEN = 5, (5, 3)
POLICIES = ("error", "truncate", "join")


def this_rank() -> int:
    return int(os.environ["RANK"])


class Stream(IterableDataset[Any]):
    """Gives this many batches of four on each rank, and says another number."""

    def __init__(self, given: tuple[int, ...], promised: int) -> None:
        self.given, self.promised = given[this_rank()], promised

    def __len__(self) -> int:
        return self.promised * 4

    def __iter__(self) -> Iterator[Any]:
        for batch in range(self.given):
            for row in range(4):
                yield torch.full((8,), 0.1 * batch + 0.01 * row + this_rank())


class WithoutLength(IterableDataset[Any]):
    """Gives what another one gives."""

    def __init__(self, given: tuple[int, ...]) -> None:
        self.stream = Stream(given, 0)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.stream)


def without_length(given: tuple[int, ...] = GIVEN) -> DataLoader[Any]:
    return DataLoader(WithoutLength(given), 4)


def stream(given: tuple[int, ...] = GIVEN, promised: int = PROMISED, **options: Any) -> DataLoader[Any]:
    return DataLoader(Stream(given, promised), 4, **options)


def rows(batches: int, **options: Any) -> DataLoader[Any]:
    """Return a loader of the rows of a :class:`Stream` that keeps its promise."""
    stream = Stream((batches, batches), batches)
    return DataLoader(TensorDataset(torch.stack(list(stream))), 4, collate_fn=first_of_each, **options)


def first_of_each(samples: Any) -> torch.Tensor:
    return torch.stack([sample[0] for sample in samples])


class Short(Sampler[int]):
    """A sampler of one's own that ends early on rank 1."""

    def __len__(self) -> int:
        return PROMISED * 4

    def __iter__(self) -> Iterator[int]:
        return iter(range(GIVEN[this_rank()] * 4))


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
        self.seen: list[float] = []
        self.evaluated = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        batch = batch[0] if isinstance(batch, list) else batch
        self.seen.append(round(batch[0, 0].item(), 2))
        return self.layers(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluated += 1
        self.log("loss", self.layers(batch).square().mean(), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layers(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    def digest(self) -> float:
        return sum(parameter.detach().double().abs().sum().item() for parameter in self.parameters())


def fitted(policy: Any, data: Any, *others: Any, net: Net | None = None, stage: Any = None, **options: Any) -> Any:
    """Return (steps, batches that this rank has seen, weights) of a fit, or the error that it ends with."""
    net, strategy = net or Net(), LockstepDDPStrategy(uneven_inputs=policy)
    if stage is not None:
        strategy = LockstepDeepSpeedStrategy(stage=stage, uneven_inputs=policy)
    trainer = Trainer(**{**QUIET, "max_epochs": 2, **options}, strategy=strategy)
    try:
        trainer.fit(net, data, *others)
    except (ConfigurationError, MisconfigurationException) as error:
        return str(error)
    return trainer.global_step, net.seen, net.digest()


def with_other(mode: str, other: int, first: Any = None) -> CombinedLoader:
    return CombinedLoader([stream() if first is None else first, rows(other)], mode)


def own_rows() -> DataLoader[Any]:
    return rows(GIVEN[this_rank()])


LACKS = "different numbers of training batches (rank 0: more than 3, rank 1: 3): expected"
#: policy, case -> the loader, options of the fit, and its optimizer steps or error
CASES: dict[tuple[Any, str], tuple[Callable[[], Any], dict[str, Any], int | str]] = {
    ("error", "shorter"): (stream, {}, LACKS),
    ("error", "accumulated"): (stream, {"accumulate_grad_batches": 2}, LACKS),
    ("error", "sampler"): (lambda: rows(5, sampler=Short()), {}, LACKS),
    ("error", "unlike"): (lambda: stream(promised=5 - this_rank()), {}, "(rank 0: 5, rank 1: 4)"),
    ("error", "shorter on all"): (lambda: stream((3, 3)), {}, 6),
    ("error", "longer"): (lambda: stream((7, 6)), {}, 10),
    ("truncate", "shorter"): (stream, {}, 6),
    ("truncate", "accumulated"): (stream, {"accumulate_grad_batches": 2}, 4),
    ("truncate", "cycle, longer"): (lambda: with_other("max_size_cycle", 8), {}, 16),
    ("join", "shorter"): (stream, {}, 10),
    ("join", "longer"): (lambda: stream((7, 3)), {}, 14),
    ("join", "sampler"): (lambda: rows(5, sampler=Short()), {}, 10),
    ("join", "accumulated"): (stream, {"accumulate_grad_batches": 2}, 6),
    ("join", "cycle, longer"): (lambda: with_other("max_size_cycle", 8), {}, 16),
    ("join", "true length"): (own_rows, {}, 10),
    ("error", "true length"): (own_rows, {}, "(rank 0: 5, rank 1: 3): expected"),
    ("error", "as far as the loop goes"): (own_rows, {"limit_train_batches": 2}, 4),
    ("error", "as far as the loop goes, steps"): (own_rows, {"max_steps": 3}, 3),
    ("truncate", "true length"): (own_rows, {}, 6),
    ("truncate", "true length, min_size"): (lambda: with_other("min_size", 2, own_rows()), {}, 4),
    ("truncate", "true length, cycle"): (lambda: with_other("max_size_cycle", 8, own_rows()), {}, 16),
    ("error", "no length"): (without_length, {}, LACKS),
    ("error", "no length, even"): (lambda: without_length((4, 4)), {}, 8),
    ("truncate", "no length"): (without_length, {}, 6),
    ("join", "no length"): (without_length, {}, 10),
}


def all_cases() -> tuple[dict[Any, Any], list[str]]:
    with logged(level=logging.WARNING) as texts:
        found = {key: fitted(key[0], make(), **options) for key, (make, options, _) in CASES.items()}
    return found, [text for text in texts if "uneven_inputs" in text]


def test_each_policy_does_what_it_says_whatever_the_lengths_promise() -> None:
    (first, said), (second, said_by_second) = run_ranks(2, all_cases, backend=None, timeout=240)
    for key, (_, _, expected) in CASES.items():
        if isinstance(expected, str):
            assert expected in first[key] == second[key], key
        else:
            assert first[key][0] == second[key][0] == expected, key
            assert first[key][2] == second[key][2], key
    for policy, steps in (("truncate", 3), ("join", 5)):
        assert first[policy, "no length"] == first[policy, "true length"]
        notice = f"every rank takes {steps} steps an epoch (rank 0: 5, rank 1: 3)."
        assert f"uneven_inputs={policy!r}: {notice}" in said
    assert said_by_second == [], "rank 0 alone says it"
    assert first["truncate", "true length"][2] != first["join", "true length"][2]
    assert "uneven_inputs='truncate'" in first["error", "true length"]
    assert first["join", "shorter"][2] == pytest.approx(first["join", "true length"][2], abs=1e-6)
    assert second["join", "shorter"][1] == [1.0, 1.1, 1.2, 1.2, 1.2] * 2


class FromLastToFirst(torch.nn.Sequential):
    """Layers whose gradients arrive in another order than those of most models, which DeepSpeed goes by."""

    def forward(self, rows: Any) -> Any:
        for layer in reversed(list(self)):
            rows = layer(rows)
        return rows


class Linear(Net):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = FromLastToFirst(torch.nn.Linear(8, 4), torch.nn.Linear(8, 8))


def under_deepspeed() -> dict[Any, Any]:
    return {
        # With several micro-batches a step DeepSpeed cannot know how many samples the last ones have.
        (policy, stage): fitted(
            policy,
            stream(),
            net=Linear(),
            stage=stage,
            accumulate_grad_batches={"truncate": 2, "join": 1}[policy],
        )
        for policy in ("truncate", "join")
        for stage in (None, 2)
    }


def test_deepspeed_steps_as_ddp_does(found: Found) -> None:
    first, second = found["deepspeed"]
    for policy, steps in (("truncate", 4), ("join", 10)):
        assert first[policy, None][0] == first[policy, 2][0] == second[policy, 2][0] == steps
        assert first[policy, 2][2] == pytest.approx(first[policy, None][2], abs=1e-5)


def other_loops() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for policy in POLICIES:
        net = Net()
        found[policy] = *fitted(policy, rows(4), stream(), net=net), net.evaluated
    net = Net()
    fitted("truncate", stream(), rows(2), net=net)
    found["early end"] = net.evaluated
    trainer = Trainer(**QUIET, strategy=LockstepDDPStrategy())
    (metrics,) = trainer.test(net, stream(), verbose=False)
    found["test"] = metrics["loss"]
    found["predict"] = len(trainer.predict(net, stream()) or ())
    return found


def test_in_validation_each_rank_has_its_own_number_of_batches(found: Found) -> None:
    both = found["other loops"]
    for answers, count in zip(both, GIVEN, strict=True):
        for policy in POLICIES:
            steps, _, _, evaluated = answers[policy]
            assert (steps, evaluated) == (8, 2 * count)
        assert answers["predict"] == count
        assert answers["early end"] == 4, "an epoch that ends early is followed by its validation"
    assert both[0]["test"] == both[1]["test"]


# -- One group of ranks for what is quick --

Found = dict[str, tuple[Any, Any]]


def quick() -> dict[str, Any]:
    return {
        "other loops": other_loops(),
        "deepspeed": under_deepspeed(),
    }


@pytest.fixture(scope="module")
def found() -> Found:
    """What came of each, by rank."""
    first, second = run_ranks(2, quick, backend=None, timeout=240)
    return {name: (first[name], second[name]) for name in first}
