"""Hydra config groups, one component a file. Reached by any Hydra app with `pkg://lightning_lockstep.conf`.

| group | an option is |
| --- | --- |
| `strategy` | how ranks are started and kept in step |
| `callbacks` | one callback; several with `callbacks=[first,second]`, none with `callbacks=none` |
| `trainer` | the Trainer's settings |
| `precision` | one number, `trainer.precision` |
| `model`, `data` | what is trained, on what |
| `logger` | one logger; several with `logger=[csv,tensorboard]` |
| `checkpoint` | what is saved, when |
| `debug`, `experiment` | changes to several of the others at once |

An option that an app's own group hides has a second name: `+lockstep/callbacks=early_stopping` is always the one here,
and composes into the same key `callbacks` (`+lockstep/callbacks@trainer.callbacks=...` into another).
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import OmegaConf

from lightning_lockstep._run_folder import RESOLVERS


class _Group(dict[str, Any]):
    """A group of Hydra's ConfigStore whose options are read when they are selected: all of them take 0.07 s."""

    def __getitem__(self, name: str) -> ConfigNode:
        group = super().__getitem__(name)
        file = resources.files(__name__).joinpath(group).joinpath(name)
        node: Any = OmegaConf.create(file.read_text(encoding="utf-8"))
        return ConfigNode(
            name=name,
            node=node,
            group=f"lockstep/{group}",
            # What options share goes where the option goes, wherever `@` puts that.
            package=None if name.startswith("_") else group,
            provider="lightning-lockstep",
        )


# Hydra imports this package when it reads a config of it, so every app that uses one has the resolvers.
for _name, _function in RESOLVERS.items():
    OmegaConf.register_new_resolver(_name, _function, use_cache=True, replace=True)

ConfigStore.instance().repo["lockstep"] = {
    group: _Group({file.name: group for file in resources.files(__name__).joinpath(group).iterdir()})
    for group in ("callbacks", "checkpoint", "data", "logger", "model", "strategy")
}
