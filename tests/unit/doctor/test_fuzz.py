"""Tools that print nonsense, half of it or nothing never crash a check."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest

from lightning_lockstep.doctor.registry import CHECKS
from tests.common.doctor.imitated_machine import ImitatedMachine, run_check
from tests.common.doctor.machines import Case, cases

SEEDS = 60
CASES = cases()
# What has tripped up readers of such outputs before.
NASTY = [
    "",
    "\n",
    "\0",
    "N/A",
    "[Not Supported]",
    "-1",
    "99999999999999999999",
    "٣",
    "²",
    "{}",
    "[]",
    "null",
    "%s{0}",
    "'",
    '"',
]
PLAIN_VALUES: list[Any] = [None, "", 0, -1, 1e400, [], {}, [None], {"a": None}, "x" * 10_000, True]


def of_check(check: str) -> list[Case]:
    return [case for case in CASES if check in case.expected]


def spoilt_text(text: str, chance: random.Random) -> str:
    match chance.randrange(6):
        case 0:
            return text[: chance.randrange(len(text) + 1)]
        case 1:
            return "".join(chance.choice("0123456789.,;:/ \n\0aé_-") for _ in range(chance.randrange(300)))
        case 2:
            parts = text.split()
            chance.shuffle(parts)
            return " ".join(parts)
        case 3:
            at = chance.randrange(len(text) + 1)
            return text[:at] + chance.choice(NASTY) + text[at + chance.randrange(4) :]
        case 4:
            return bytes(chance.randrange(256) for _ in range(200)).decode("utf-8", "replace")
    return chance.choice(NASTY)


def spoilt(value: Any, chance: random.Random) -> Any:
    """A copy in which some texts are spoilt, some entries missing and some of another type."""
    if isinstance(value, dict):
        kept = {key: entry for key, entry in value.items() if chance.random() > 0.05}
        return {key: spoilt(entry, chance) for key, entry in kept.items()}
    if isinstance(value, list):
        return [spoilt(entry, chance) for entry in value]
    if chance.random() < 0.6:
        return value
    return spoilt_text(value, chance) if isinstance(value, str) else chance.choice(PLAIN_VALUES)


def spoilt_record(record: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    made = copy.deepcopy(record)
    for part in ("commands", "files", "packages", "environment"):
        if part in made:
            made[part] = spoilt(made[part], chance)
    if "probes" in made:  # of another type too: an old probe, another release of torch
        made["probes"] = {
            name: chance.choice(PLAIN_VALUES)
            if chance.random() < 0.1
            else {**spoilt(facts, chance), **strange(facts, chance)}
            for name, facts in made["probes"].items()
        }
    for command, printed in list(made.get("commands", {}).items()):
        if isinstance(printed, dict):
            made["commands"][command] = {"exit": 1, "output": str(printed.get("output", ""))}
    return made


def strange(facts: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    return {name: chance.choice(PLAIN_VALUES) for name in facts if chance.random() < 0.2}


@pytest.mark.parametrize("check", [name for name in CHECKS if of_check(name)])
def test_nonsense_never_crashes_a_check(check: str) -> None:
    for seed in range(SEEDS):
        chance = random.Random(f"{check} {seed}")
        case = chance.choice(of_check(check))
        machine = ImitatedMachine(spoilt_record(case.record, chance))
        try:
            result = run_check(check, machine, case.options())
        except Exception as error:
            raise AssertionError(f"seed {seed} of {case.name}: {error!r}") from error
        assert json.dumps(result.to_json())
