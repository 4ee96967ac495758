"""The estimate against DeepSpeed's own, and against the tensors of real engines."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from lightning_lockstep._text import size_in_words
from lightning_lockstep.deepspeed.memory_estimate import MemoryEstimate, estimate_memory, estimate_table, main
from lightning_lockstep.errors import ConfigurationError
from tests.helpers import run_ranks

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")

P, L = 7_000_000_000, 100_000_000


def estimate(stage: int, **options: Any) -> MemoryEstimate:
    given = {"parameters": P, "largest_layer": L, "ranks": 16, "ranks_per_node": 8, "stage": stage, **options}
    return estimate_memory(**given)


def test_every_part_is_somewhere_once() -> None:
    """Offloading moves weights, master weights and optimizer state; it loses and doubles nothing."""
    for stage in (1, 2, 3):
        plain, offloaded = estimate(stage), estimate(stage, offload_optimizer="cpu")
        for part in ("weights", "master_weights", "optimizer_state"):
            moved = getattr(offloaded.host, part) / 8 + getattr(offloaded.device, part)
            assert moved == getattr(plain.device, part), (stage, part)
        assert offloaded.device.total < plain.device.total
        assert plain.host.total == 0
    everything = estimate(3, offload_optimizer="nvme", offload_param="nvme")
    assert everything.device.weights == everything.host.weights == 0
    assert everything.nvme.weights == 8 * 2 * P // 16
    assert everything.nvme.optimizer_state == 8 * 8 * P // 16
    assert everything.host.total == everything.host.buffers + everything.host.gradients


def test_each_stage_partitions_one_part_more() -> None:
    parts = [estimate(stage).device for stage in (0, 1, 2, 3)]
    assert [part.weights for part in parts] == [2 * P, 2 * P, 2 * P, 2 * P // 16]
    assert [part.gradients for part in parts] == [6 * P, 2 * P + P // 4, 6 * P // 16, 6 * P // 16]
    assert [part.master_weights for part in parts] == [4 * P, *[4 * P // 16] * 3]
    assert [part.optimizer_state for part in parts] == [8 * P, *[8 * P // 16] * 3]
    assert [part.largest_layer for part in parts] == [0, 0, 0, 4 * L]


def test_float32_has_copies_under_zero_too() -> None:
    parts = [estimate(stage, precision="32-true").device for stage in (0, 1, 2, 3)]
    assert [part.weights for part in parts] == [4 * P, 4 * P, 4 * P, 4 * P // 16]
    assert [part.master_weights for part in parts] == [0, *[4 * P // 16] * 3]
    assert parts[0].gradients == 4 * P
    assert estimate(3, precision="32-true", offload_optimizer="cpu").host.master_weights == 8 * 4 * P // 16


def test_the_host_at_start_has_the_model_once_for_each_rank() -> None:
    assert estimate(2).host_at_start == 8 * 4 * P
    assert estimate(3).host_at_start == 8 * 4 * L


def theirs() -> dict[str, tuple[int, int]]:
    from lightning_lockstep.deepspeed.importing import import_deepspeed

    import_deepspeed("cpu")
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as of_stage3
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as of_stage2

    nodes: dict[str, Any] = {"num_gpus_per_node": 8, "num_nodes": 2, "additional_buffer_factor": 1}
    return {
        "2": of_stage2(P, cpu_offload=False, **nodes),
        "2 cpu": of_stage2(P, cpu_offload=True, **nodes),
        "3": of_stage3(P, L, cpu_offload=False, cpu_offload_params=False, **nodes)[:2],
        "3 cpu": of_stage3(P, L, cpu_offload=True, cpu_offload_params=False, **nodes)[:2],
        "3 cpu cpu": of_stage3(P, L, cpu_offload=True, cpu_offload_params=True, **nodes)[:2],
        "3 whole": of_stage3(P, L, cpu_offload=False, zero_init=False, **nodes)[:2],
    }


@needs_deepspeed
def test_against_deepspeeds_own() -> None:
    """Host and device of theirs, with their factor for buffers (1.5 by default) set to 1, and ours without buffers."""
    [given] = run_ranks(1, theirs, backend=None)

    def device(stage: int, **options: Any) -> int:
        parts = estimate(stage, **options).device
        return parts.total - parts.buffers

    # Stage 2: the same.
    assert device(2) == given["2"][1]
    assert device(2, offload_optimizer="cpu") == given["2 cpu"][1]
    # Stage 3 without offloading: theirs leaves out the gradients of 16 bits, 2 P/N.
    assert device(3) == given["3"][1] + 2 * P // 16
    assert device(3, offload_optimizer="cpu") == given["3 cpu"][1]
    assert device(3, offload_optimizer="cpu", offload_param="cpu") == given["3 cpu cpu"][1]
    # Host, nothing offloaded: theirs is what we call the start. Stage 3 as well, with and without zero.Init.
    assert estimate(2).host_at_start == given["2"][0]
    assert estimate(3).host_at_start == given["3"][0]
    assert estimate(2).host_at_start == given["3 whole"][0]
    # Host at stage 2: theirs is the larger of start and states, but counts the ranks of all nodes for each node.
    assert given["2 cpu"][0] == P * max(4 * 16, 16)
    offloaded = estimate(2, offload_optimizer="cpu")
    assert offloaded.host.total - offloaded.host.buffers == P * 16 // 2
    assert offloaded.host.total < offloaded.host_at_start == 8 * 4 * P
    # Host at stage 3: they leave out the gradients of 16 bits again.
    assert estimate(3, offload_optimizer="cpu").host.total == given["3 cpu"][0] + 2 * P // 2
    both = estimate(3, offload_optimizer="cpu", offload_param="cpu")
    assert both.host.total == given["3 cpu cpu"][0] + 2 * P // 2


HIDDEN = 512


ENGINES = [(1, "bf16"), (2, "bf16"), (3, "bf16"), (2, "float32"), (3, "float32")]


def parts_of_engines() -> list[dict[str, int]]:
    from lightning_lockstep.deepspeed.importing import import_deepspeed

    deepspeed = import_deepspeed("cpu")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo does it, and nothing is compiled
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return [parts_of_engine(deepspeed, stage, dtype) for stage, dtype in ENGINES]


def parts_of_engine(deepspeed: Any, stage: int, dtype: str) -> dict[str, int]:
    """Sizes of the tensors of a real engine after a step, on this rank."""
    model = torch.nn.Sequential(*[torch.nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4)])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 10_000,
            "overlap_comm": False,
            "stage3_param_persistence_threshold": 0,
        },
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    optimizer = torch.optim.Adam(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    inputs = torch.ones(1, HIDDEN, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
    engine.backward(engine(inputs).sum())
    engine.step()

    def size(tensors: Any) -> int:
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    zero = engine.optimizer
    whole = list(engine.module.parameters())
    weights = size([p.ds_tensor for p in whole] if stage == 3 else whole)
    masters = zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups
    states = [t for state in zero.optimizer.state.values() for t in state.values() if t.dim()]
    return {
        "weights": weights,
        # Separate from the weights: at stage 3 in float32 DeepSpeed means to share them, and compares a device with
        # its name to find out whether it can.
        "master_weights": size([*whole, *masters]) - size(whole),
        "optimizer_state": size(states),
    }


@needs_deepspeed
def test_against_the_tensors_of_real_engines() -> None:
    of_ranks = run_ranks(2, parts_of_engines, timeout=180)
    for (stage, dtype), *found in zip(ENGINES, *of_ranks, strict=True):
        expected = estimate_memory(
            parameters=4 * HIDDEN**2,
            largest_layer=HIDDEN**2,
            ranks=2,
            ranks_per_node=2,
            stage=stage,
            precision="bf16-mixed" if dtype == "bf16" else "32-true",
        ).device
        for parts in found:
            for part, size in parts.items():
                # What is flattened is padded a little.
                assert size == pytest.approx(getattr(expected, part), rel=0.01), (stage, dtype, part)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stage": 4}, "stage=4: expected one of 0, 1, 2, 3"),
        ({"stage": 2, "offload_param": "cpu"}, "stage=2: expected 3 for offload_param='cpu'"),
        ({"stage": 0, "offload_optimizer": "cpu"}, "stage=0: expected stage 1 or higher"),
        ({"stage": 2, "offload_optimizer": "nvme"}, "stage=2: expected stage 3 or higher"),
        ({"stage": 2, "offload_optimizer": "gpu"}, "offload_optimizer='gpu': expected one of"),
        ({"stage": 2, "precision": "bf16"}, "precision='bf16': expected one of .* Did you mean"),
        ({"stage": 2, "ranks": 7, "ranks_per_node": 2}, "ranks=7: expected a multiple of 2"),
        (
            {"stage": 3, "largest_layer": 8 * 10**9},
            "largest_layer=8000000000: expected part of the parameters",
        ),
        ({"stage": 2, "parameters": 7e9}, "parameters=7000000000.0: expected a whole number"),
    ],
)
def test_values_that_do_not_go_together(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        estimate(**options)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        estimate(9, precision="8-bit", ranks=0)
    assert len(caught.value.faults) == 3


def test_the_table_has_every_stage_and_way_of_offloading() -> None:
    table = estimate_table(parameters=P, ranks=16, ranks_per_node=8)
    rows = [line.split()[:3] for line in table.splitlines()[1:]]
    assert rows == [
        ["0", "none", "none"],
        ["1", "none", "none"],
        ["1", "cpu", "none"],
        ["2", "none", "none"],
        ["2", "cpu", "none"],
        ["3", "none", "none"],
        ["3", "cpu", "none"],
        ["3", "cpu", "cpu"],
        ["3", "nvme", "cpu"],
        ["3", "nvme", "nvme"],
    ]
    assert size_in_words(estimate(0).device.total) in table.splitlines()[1]


def test_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model-params", "7e9", "--gpus", "8", "--nodes", "2", "--largest-layer", "1e8"]) == 0
    printed = capsys.readouterr().out
    assert "7,000,000,000 parameters on 2 x 8 GPUs, bf16-mixed" in printed
    stage3 = next(line for line in printed.splitlines() if re.match(r"\s+3\s+none", line))
    assert size_in_words(estimate(3).device.total) in stage3


def test_the_program_says_what_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model-params", "7.5", "--gpus", "8"])
    assert "7.5: expected a whole number from 1, such as 7e9" in capsys.readouterr().err
