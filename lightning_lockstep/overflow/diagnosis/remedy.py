"""Which modules have to run in float32, found by trying them on the batch that failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from lightning_lockstep.numerics.float32 import run_in_fp32, runs_in_fp32, undo_run_in_fp32
from lightning_lockstep.numerics.module_values import module_names, parent_name
from lightning_lockstep.overflow.diagnosis.frames import Producer

__all__ = ["Remedy", "advice", "search"]

_ROUNDS = 16


@dataclass(frozen=True)
class Remedy:
    """What to do about it."""

    modules: tuple[str, ...] = ()  # to run in float32; empty: that does not help
    tried: bool = False  # the batch was replayed with them in float32 and passed
    text: str = ""  # advice

    def lines(self) -> list[str]:
        """Return the lines to paste, and the advice."""
        lines = []
        if self.modules:
            names = ", ".join(f'"{name}"' for name in self.modules)
            tried = "the batch was run again this way and passed" if self.tried else "not tried"
            lines += [
                f"Remedy ({tried}):",
                f"    in Python:            FP32Modules([{names}])",
                f"    on the command line:  '{command_line(self.modules)}'",
            ]
        if self.text:
            lines.append(f"Advice: {self.text}")
        return lines


def command_line(modules: Sequence[str]) -> str:
    """Return the Hydra override that runs these modules in float32."""
    return f"callbacks.fp32_modules.modules=[{','.join(modules)}]"


def search(root: nn.Module, first: Producer, run: Callable[[], Producer | None]) -> Remedy | None:
    """Find modules which, run in float32, let the batch pass; ``None`` where float32 does not help.

    Begins with the module that produced the first bad value. Where its output is too large for the dtype that
    it goes back to, the module around it is tried; where another module fails next, that one is added. Each
    attempt is one replay, 16 at most: ``run`` returns what produces the first bad value now.
    """
    by_name = {name: module for module, name in module_names(root).items()}
    chosen: list[str] = []
    candidate = first.module
    for _ in range(_ROUNDS):
        if not candidate or candidate not in by_name:
            return None
        chosen = [name for name in chosen if not _inside(name, candidate)] + [candidate]
        with _in_float32([by_name[name] for name in chosen]):
            now = run()
        if now is None:
            return Remedy(tuple(_shorter(chosen, by_name, run)), tried=True)
        if now.kind in ("weight", "batch"):
            return None
        # Still inside a module that runs in float32: its result does not fit the dtype it goes back to.
        stuck = next((name for name in chosen if _inside(now.module, name)), None)
        candidate = parent_name(stuck) if stuck else now.module
    return None


def _shorter(
    chosen: list[str], by_name: dict[str, nn.Module], run: Callable[[], Producer | None]
) -> list[str]:
    """Return the one module that holds all the chosen ones, where it does as well as they do."""
    parents = {parent_name(name) for name in chosen}
    parent = next(iter(parents))
    if len(chosen) == 1 or len(parents) > 1 or parent not in by_name or not parent:
        return chosen
    with _in_float32([by_name[parent]]):
        return [parent] if run() is None else chosen


def advice(producer: Producer) -> str:
    """Return advice as text, for when float32 modules cannot or do not help."""
    if producer.kind == "batch":
        return "The batch itself holds nan or inf. Check the samples named above, and the code that prepares them."
    if producer.kind == "weight":
        return (
            "An earlier optimizer step made the weights nan or inf. Lower the learning rate,"
            " raise the optimizer's eps, or use action='skip' from the start of the run."
        )
    if producer.low_precision:
        return (
            "Running modules in float32 did not help on this batch. Check the inputs of the first bad module (frames"
            " above), clip gradients, lower the learning rate, or train in bf16-mixed or 32-true."
        )
    return (
        "It computed in float32 already. Where its weights or inputs have become huge (frames above), lower the"
        " learning rate or clip gradients. Otherwise look for a logarithm or division of zero, an exponential of a"
        " large number, a mask that hides a whole row."
    )


def _inside(name: str, container: str) -> bool:
    return name == container or name.startswith(f"{container}.")


@contextmanager
def _in_float32(modules: Sequence[nn.Module]) -> Iterator[None]:
    changed = [module for module in modules if not runs_in_fp32(module)]
    try:
        for module in changed:
            run_in_fp32(module)
        yield
    finally:
        for module in changed:
            undo_run_in_fp32(module)
