"""Each private name of another package that this one uses is in the installed release, which may be a new one."""

from __future__ import annotations

import importlib

import pytest

from lightning_lockstep import _lightning as lightning
from lightning_lockstep.deepspeed.importing import import_deepspeed
from tests.common.package.private_names import is_there, names


@pytest.mark.parametrize(
    # Those of torch_xla are looked up in tests/sites/xla, where it is.
    "package",
    sorted({name.partition(".")[0] for name in names()} - {"torch_xla"}),
)
def test_an_installed_release_has_every_name(package: str) -> None:
    if package == "deepspeed":
        import_deepspeed("cpu")
    assert [name for name in sorted(names()) if name.startswith(f"{package}.") and not is_there(name)] == []


@pytest.mark.parametrize(
    "name", ["torch.gone._x", "torch.nn.Linear._gone", "torch.nn.Linear.forward._gone", "gone._x"]
)
def test_a_name_that_is_gone_is_found_missing(name: str) -> None:
    assert not is_there(name)


def test_a_program_that_has_imported_pytorch_lightning_alone_gets_its_classes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """(`tests/programs/package/test_pytorch_lightning.py` fits with them.)"""
    assert lightning._chosen_family() == ("lightning.pytorch", "lightning.fabric")
    importlib.import_module("pytorch_lightning")
    assert lightning._chosen_family() == ("lightning.pytorch", "lightning.fabric")
    monkeypatch.delitem(lightning.sys.modules, "lightning.pytorch")
    assert lightning._chosen_family() == ("pytorch_lightning", "lightning_fabric")
