"""What is refused before any rank starts, and the pure parts of the strategy."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import lightning_lockstep
from lightning_lockstep import ConfigurationError, LockstepDDPStrategy, LockstepMPIStrategy
from lightning_lockstep._lightning import Trainer
from lightning_lockstep.distributed import Communicator
from lightning_lockstep.numerics.precision import resolve_precision, supported_precisions
from lightning_lockstep.strategies.options import OptionsOfDDP, Placement, mixed_gpus_warning, placement_of
from lightning_lockstep.strategies.uneven_inputs import with_even_batches


def test_unknown_options_are_named_with_their_nearest_of_all_that_a_strategy_takes() -> None:
    with pytest.raises(ConfigurationError) as caught:
        LockstepMPIStrategy(uneven_input="join", static_grph=True, hostfle=None)
    text = str(caught.value)
    assert text.startswith("3 settings cannot be used:")
    assert "no option 'uneven_input'. Did you mean 'uneven_inputs'" in text
    assert "no option 'static_grph'. Did you mean 'static_graph'" in text
    assert "LockstepMPIStrategy has no option 'hostfle'. Did you mean 'hostfile'" in text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"start_method": "popn"},
            "start_method='popn': expected one of 'popen', 'spawn', 'fork', 'forkserver'.",
        ),
        ({"uneven_inputs": "drop"}, "uneven_inputs='drop': expected one of 'error', 'truncate', 'join'"),
        ({"timeout": 0}, "timeout=0: expected seconds, more than 0"),
        ({"timeout": True}, "timeout=True: expected seconds, more than 0"),
        ({"gradient_as_bucket_view": 1}, "gradient_as_bucket_view=1: expected true or false"),
        ({"ddp_comm_hook": "fp16"}, "ddp_comm_hook='fp16': expected one of"),
        ({"grace_period": -1}, "grace_period=-1: expected seconds"),
        ({"threads_per_rank": 0}, "threads_per_rank=0: expected 'auto' or a whole number"),
        ({"guard": "verfy"}, "guard='verfy': expected one of 'off', 'watch', 'verify'"),
        ({"stall_timeout": 0}, "stall_timeout=0: expected seconds, more than 0"),
        ({"on_lost_rank": "go"}, "on_lost_rank='go': expected one of 'end', 'continue'"),
        ({"least_ranks": 0}, "least_ranks=0: expected a whole number of ranks from 1"),
        ({"spares": 1}, "spares=1: expected 0 unless on_lost_rank='continue'"),
    ],
)
def test_values_out_of_range_say_what_was_expected(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigurationError, match="expected") as caught:
        LockstepDDPStrategy(**options)  # type: ignore[arg-type]
    assert text in str(caught.value)


def test_an_environment_variable_turns_watch_into_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_DEBUG", "1")
    assert LockstepDDPStrategy().settings.guard == "verify"
    assert LockstepDDPStrategy(guard="off").settings.guard == "off"


def test_a_precision_that_the_device_lacks_is_refused_by_name() -> None:
    plugin = Trainer(accelerator="cpu", devices=1, logger=False).precision_plugin
    with pytest.raises(ConfigurationError) as caught:
        resolve_precision(plugin, "transformer-engine", "cpu")
    assert "precision='transformer-engine': expected one that this CPU supports: 64-true" in str(caught.value)
    assert "32-true, 16-true, 16-mixed, bf16-true, bf16-mixed." in str(caught.value)
    assert "transformer-engine" not in supported_precisions("cpu")


def test_a_strategy_says_what_it_is() -> None:
    assert repr(LockstepDDPStrategy()) == "LockstepDDPStrategy()"
    given = LockstepMPIStrategy(uneven_inputs="join", threads_per_rank=2)
    assert repr(given) == "LockstepMPIStrategy(threads_per_rank=2, uneven_inputs='join')"
    assert repr(lightning_lockstep.LockstepXLASPMDStrategy()) == "LockstepXLASPMDStrategy()"


def test_a_default_of_torch_is_handed_on_only_where_it_was_given() -> None:
    """Of an option that the installed torch lacks nobody hears."""
    assert LockstepDDPStrategy()._ddp_kwargs == {"gradient_as_bucket_view": True}
    given = LockstepMPIStrategy(static_graph=True, gradient_as_bucket_view=False)._ddp_kwargs
    assert given == {"gradient_as_bucket_view": False, "static_graph": True}


def test_the_options_that_are_handed_on_are_all_of_the_installed_torch() -> None:
    taken = {*inspect.signature(DistributedDataParallel).parameters} - {
        *inspect.signature(LockstepDDPStrategy).parameters
    }
    assert taken - {"module", "device_ids", "output_device", "process_group"} <= OptionsOfDDP.__optional_keys__


def test_a_rank_without_a_batch_cannot_join() -> None:
    trainer: Any = SimpleNamespace(limit_train_batches=1.0, max_steps=-1)
    ranks: Any = SimpleNamespace(world_size=2)
    with pytest.raises(ConfigurationError, match=r"\(rank 0: 0, rank 1: 7\): expected the same on all"):
        with_even_batches([], "join", trainer, ranks, [(0, True), (7, True)])


def gpu(rank: int, name: str, gib: int, capability: tuple[int, int]) -> Placement:
    row = (rank, f"node{rank}", f"cuda:0 {name}", f"{gib} GiB", 4, "0-1")
    return row, (*capability, gib * 2**30, name)


def test_the_slowest_gpu_is_named() -> None:
    gpus = [gpu(0, "H200", 139, (9, 0)), gpu(1, "A100", 80, (8, 0)), gpu(2, "A100", 40, (8, 0))]
    warning = mixed_gpus_warning(gpus)
    assert warning is not None
    assert "rank 2 on node2 has A100 (40 GiB, compute capability 8.0)" in warning
    assert "rank 0 on node0 has H200 (139 GiB, compute capability 9.0)" in warning
    assert "mixed GPUs" in warning
    assert mixed_gpus_warning(gpus[:1] * 4) is None
    on_cpu = placement_of(Communicator(), torch.device("cpu"), threads=1)
    assert mixed_gpus_warning([on_cpu, on_cpu]) is None


def test_a_device_of_another_type_has_a_row_too() -> None:
    row, _ = placement_of(Communicator(), torch.device("xla:0"), threads=1)
    assert row[2:4] == ("xla:0", "-")
