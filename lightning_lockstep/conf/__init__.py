"""Hydra config groups, one component a file. Reached by any Hydra app with `pkg://lightning_lockstep.conf`.

An option that an app's own group hides has a second name: `+lockstep/callbacks=early_stopping` is always the one here,
and composes into the same key `callbacks` (`+lockstep/callbacks@trainer.callbacks=...` into another).
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from lightning_lockstep._run_folder import RESOLVERS

# Hydra imports this package when it reads a config of it, so every app that uses one has the resolvers.
for _name, _function in RESOLVERS.items():
    OmegaConf.register_new_resolver(_name, _function, use_cache=True, replace=True)

for _group in ("callbacks", "checkpoint", "data", "logger", "model", "strategy"):
    for _file in resources.files(__name__).joinpath(_group).iterdir():
        _node: Any = OmegaConf.create(_file.read_text(encoding="utf-8"))
        # What options share goes where the option goes, wherever `@` puts that.
        _package = None if _file.name.startswith("_") else _group
        ConfigStore.instance().store(
            _file.name, _node, group=f"lockstep/{_group}", package=_package, provider="lightning-lockstep"
        )
