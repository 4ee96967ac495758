"""Each private name of another package that this one uses is in the installed release, which may be a new one."""

from __future__ import annotations

import pytest

from lightning_lockstep.deepspeed.importing import import_deepspeed
from tests.models.package.private_names import is_there, names


@pytest.mark.parametrize(
    # Those of torch_xla are looked up in tests/environments/xla, where it is.
    "package",
    sorted({name.partition(".")[0] for name in names()} - {"torch_xla"}),
)
def test_an_installed_release_has_every_name(package: str) -> None:
    if package == "deepspeed":
        import_deepspeed("cpu")
    assert [name for name in sorted(names()) if name.startswith(f"{package}.") and not is_there(name)] == []
