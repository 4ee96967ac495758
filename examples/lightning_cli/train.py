"""LightningCLI: model, data, strategy and callbacks are all in digits.yaml, by the paths of their classes.

pip install '.[demo]' 'jsonargparse[signatures]'
python train.py fit --config digits.yaml                                                    # in this folder
python train.py fit --config digits.yaml --trainer.strategy.init_args.uneven_inputs join
python train.py fit --config digits.yaml --trainer.callbacks+=lightning_lockstep.StragglerMonitor
python train.py fit --config digits.yaml --trainer.strategy lockstep_ddp
"""

from lightning.pytorch.cli import LightningCLI

import lightning_lockstep  # noqa: F401  registers the strategies by name

if __name__ == "__main__":
    LightningCLI()
