"""Each private name of another package that this one uses is in the installed release, which may be a new one."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_lockstep._doors import Door, _is_there, lightning, lightning_internals, torch_internals
from lightning_lockstep._doors.__main__ import main
from lightning_lockstep._doors.deepspeed_engines import DEEPSPEED, EngineAdapter
from lightning_lockstep._doors.torch_internals import TORCH, TORCH_IF_THERE, TORCHMETRICS
from lightning_lockstep.deepspeed.importing import import_deepspeed
from lightning_lockstep.errors import LockstepError

FAMILIES = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


def names_of_lightning(family: str) -> list[str]:
    """The names of the door, and those that it touches in Lightning's objects, in one of its two packages."""
    roots = {"pytorch": family, "fabric": FAMILIES[family]}
    found = [f"{roots[path.partition('.')[0]]}.{path.partition('.')[2]}" for path in lightning.NAMES.values()]
    for path in {**lightning_internals.TOUCHED, **lightning_internals.INHERITED}:
        module = lightning_internals.OWNERS[path.partition(".")[0]]
        found.append(".".join(filter(None, [family, module, path])))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_lightning_has_every_name(family: str) -> None:
    importlib.import_module(family)
    assert [path for path in names_of_lightning(family) if not _is_there(path)] == []


@pytest.mark.parametrize("door", [TORCH, TORCHMETRICS, DEEPSPEED], ids=lambda door: door.package)
def test_another_package_has_every_name(door: Door) -> None:
    if door is DEEPSPEED:
        import_deepspeed("cpu")
    assert door.missing() == []


def test_what_some_builds_of_torch_lack_is_there_on_objects_or_not_needed() -> None:
    assert set(TORCH_IF_THERE.missing()) <= {
        "torch._C._distributed_c10d._dump_nccl_trace",  # of builds with CUDA
        "torch.distributed.distributed_c10d._FR_SELF_RECORDING_BACKENDS",  # from 2.15 on
        "torch.nn.Module.state_dict._metadata",  # of what it returns
    }
    assert torch_internals.versions_of_modules(nn.Linear(1, 1).state_dict()) == {"": {"version": 1}}
    assert torch_internals.versions_of_modules({}) is None
    assert [name for name, _ in torch_internals.flight_recorders()]


def test_versions_and_checks_are_those_of_torch() -> None:
    version, tensor = torch_internals.version_getter(), torch.zeros(1)
    before = version(tensor)
    tensor.add_(1)
    assert version(tensor) == before + 1
    flag = torch.zeros(1)
    torch_internals.non_finite_check()([tensor, torch.tensor([float("inf")])], flag, torch.ones(()))
    assert flag.item() == 1


def test_a_name_that_is_gone_is_one_clear_error() -> None:
    gone = {f"torch.nn.Linear._gone_{n}": "it says something" for n in range(2)}
    assert Door("torch", gone).missing() == [*gone]
    with pytest.raises(
        LockstepError, match=r"torch 2\S+ has no torch\.nn\.Linear\._gone_0, .* it says something"
    ):
        Door("torch", gone).find("torch.nn.Linear._gone_0")
    with pytest.raises(
        LockstepError, match=r"deepspeed .* has no deepspeed\.runtime\.engine\..*\.param_names, which"
    ):
        EngineAdapter(SimpleNamespace(optimizer=None)).parameter_names()


def test_all_names_are_printed_with_their_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    said = capsys.readouterr().out
    for door in (TORCH, TORCH_IF_THERE, TORCHMETRICS, DEEPSPEED):
        assert all(f"\n    {name}: {why}\n" in said for name, why in door.names.items())
    for name, why in {**lightning_internals.TOUCHED, **lightning_internals.INHERITED}.items():
        assert f"\n    {name}: {why}\n" in said


def test_a_program_that_has_imported_pytorch_lightning_alone_gets_its_classes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """(`tests/programs/package/test_pytorch_lightning.py` fits with them.)"""
    assert lightning._chosen_family() == ("lightning.pytorch", "lightning.fabric")
    importlib.import_module("pytorch_lightning")
    assert lightning._chosen_family() == ("lightning.pytorch", "lightning.fabric")
    monkeypatch.delitem(lightning.sys.modules, "lightning.pytorch")
    assert lightning._chosen_family() == ("pytorch_lightning", "lightning_fabric")
