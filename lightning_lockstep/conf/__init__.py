"""Hydra config groups, one component a file. Reached by any Hydra app with `pkg://lightning_lockstep.conf`.

| group | a choice is |
| --- | --- |
| `strategy` | how ranks are started and kept in step |
| `callbacks` | one callback; several with `callbacks=[first,second]`, none with `callbacks=none` |
| `trainer` | the Trainer's settings |
| `precision` | one number, `trainer.precision` |
| `model`, `data` | what is trained, on what |
| `logger` | one logger; several with `logger=[csv,tensorboard]` |
| `checkpoint` | what is saved, when |
| `debug`, `experiment` | changes to several of the others at once |
"""

from __future__ import annotations

from omegaconf import OmegaConf

from lightning_lockstep.launchers.run_folder import RESOLVERS

# Hydra imports this package when it reads a config of it, so every app that uses one has the resolvers.
for _name, _function in RESOLVERS.items():
    OmegaConf.register_new_resolver(_name, _function, use_cache=True, replace=True)
