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
