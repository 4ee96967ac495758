"""The configuration of a strategy, from what the user has given to what DeepSpeed gets in each run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lightning_lockstep._settings import Faults
from lightning_lockstep.deepspeed.configuration.adapting import refuse_or_adapt
from lightning_lockstep.deepspeed.configuration.completion import completed
from lightning_lockstep.deepspeed.configuration.device_support import limits
from lightning_lockstep.deepspeed.configuration.given import check_devices, values_given
from lightning_lockstep.deepspeed.configuration.known_keys import check_keys
from lightning_lockstep.deepspeed.configuration.module_optimizer import (
    ModuleOptimizer,
    check_module_optimizer,
    optimizer_of,
)
from lightning_lockstep.deepspeed.configuration.reading import for_evaluation, modern_spelling, without_nulls
from lightning_lockstep.deepspeed.configuration.run_values import run_values, total_steps
from lightning_lockstep.deepspeed.configuration.trainer_values import (
    TrainerValues,
    batch_of,
    check_against_trainer,
)

__all__ = ["RunConfig"]


class RunConfig:
    """What the user has given, without what cannot be done here, and what follows from it for each run."""

    def __init__(self, given: Mapping[str, Any], *, adapt: bool, say: Callable[[str], None]) -> None:
        faults = Faults()
        check_keys(given, faults)
        faults.raise_all()
        self.given = without_nulls(given)  # not completed
        self._may_adapt, self._say = adapt, say  # say prints a line, once for all ranks
        self._accumulation_given = False
        self._accumulation_set: int | None = None  # by a fit before, from the configuration

    def check_trainer(self, devices: Sequence[torch.device], device_type: str) -> None:
        """Hold the configuration against the Trainer under construction and what its devices can do."""
        faults = Faults()
        values = values_given()
        self._accumulation_given = values.accumulate_grad_batches is not None
        check_against_trainer(self.given, values, faults)
        check_devices(devices, faults)
        faults.raise_all()
        self.given = self.adapted(self.given, device_type)

    def adapted(
        self, config: Mapping[str, Any], device_type: str, client_optimizer: type | None = None
    ) -> dict[str, Any]:
        """Return a configuration without what cannot be done on a device; each replacement is said."""
        found = limits(config, device_type, client_optimizer=client_optimizer)
        adapted, replaced = refuse_or_adapt(config, found, self._may_adapt)
        for line in replaced:
            self._say(line)
        return adapted

    def of_fit(self, trainer: Any, *, precision: str, world_size: int) -> dict[str, Any]:
        """Return the complete configuration of a fit that begins; on all ranks together.

        The layers of the module are made by then. The accumulation of the configuration becomes the
        Trainer's, which counts the steps by it.
        """
        values = run_values(
            trainer,
            self.given,
            precision=precision,
            world_size=world_size,
            accumulation=self._accumulation_of(trainer),
        )
        faults = Faults()
        check_against_trainer(self.given, values, faults)
        faults.raise_all()
        # Before the steps are counted, of which there are fewer then.
        trainer.accumulate_grad_batches = batch_of(self.given, values).deduced().accumulation or 1
        self._accumulation_set = trainer.accumulate_grad_batches
        made = self._made_by(trainer.lightning_module)
        values = replace(
            values,
            accumulate_grad_batches=trainer.accumulate_grad_batches,
            total_steps=total_steps(trainer) if self._asks_for_steps() else None,
            optimizer_defaults=made.defaults,
        )
        config = completed(self.given, values)
        check_module_optimizer(config, made, faults)
        faults.raise_all()
        if made.kind is not None and "optimizer" in config:
            self._say(
                f"the optimizer of DeepSpeed's configuration ({config['optimizer'].get('type')}) is used, and of the"
                f" {made.kind} that configure_optimizers returns only what is 'auto' there."
            )
        return config

    def of_evaluation(self, precision: str) -> dict[str, Any]:
        """Return the complete configuration where nothing is trained, or the model is still to be made."""
        needed, values = for_evaluation(modern_spelling(self.given)), TrainerValues(precision=precision)
        faults = Faults()
        check_against_trainer(needed, values, faults)
        faults.raise_all()
        return completed(needed, values)

    def _accumulation_of(self, trainer: Any) -> int | None:
        """Return the accumulation that the user or a callback has asked the Trainer for; ``None`` without one."""
        now: int = trainer.accumulate_grad_batches
        return now if self._accumulation_given or now not in (1, self._accumulation_set) else None

    def _made_by(self, module: Any) -> ModuleOptimizer:
        # Only where the configuration needs it, since that calls the user's hook once more.
        asks = "optimizer" in self.given or "scheduler" in self.given
        return optimizer_of(module) if asks else ModuleOptimizer()

    def _asks_for_steps(self) -> bool:
        params = (self.given.get("scheduler") or {}).get("params") or {}
        return params.get("total_num_steps") == "auto"
