"""What is put in place is taken away exactly, whatever happens in between."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_lockstep.steps.patching import put_in_place, replaced


class Owner:
    kind = "class"

    @property
    def fixed(self) -> str:
        return "property"

    def method(self) -> str:
        return "method"


def test_an_attribute_of_the_class_is_found_again():
    owner = Owner()
    with replaced(owner, kind="own", method=lambda: "replaced"):
        assert (owner.kind, owner.method()) == ("own", "replaced")
    assert vars(owner) == {} and (owner.kind, owner.method()) == ("class", "method")


def test_an_attribute_of_its_own_comes_back_after_an_error_and_one_set_by_the_body_goes():
    owner = Owner()
    owner.kind = "before"
    with pytest.raises(ValueError, match="body"), replaced(owner, kind="during", new=1):
        owner.kind, owner.new = "set by the body", 2
        raise ValueError("body")
    assert vars(owner) == {"kind": "before"}


def test_patches_on_patches_and_modules():
    module = nn.Linear(2, 2)
    outer = put_in_place(module, "forward", lambda x: "outer")
    inner = put_in_place(module, "forward", lambda x: "inner")
    assert module(None) == "inner"
    inner()
    assert module(None) == "outer"
    outer()
    assert "forward" not in vars(module)
