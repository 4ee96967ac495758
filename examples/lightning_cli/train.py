"""LightningCLI: model, data, strategy and callbacks are all in digits.yaml, by the paths of their classes.

pip install 'lightning-lockstep[demo]' 'jsonargparse[signatures]'
python train.py fit --config digits.yaml                                                    # in this folder
python train.py fit --config digits.yaml --trainer.strategy.init_args.uneven_inputs join
python train.py fit --config digits.yaml --trainer.strategy lockstep_ddp --trainer.callbacks+=StragglerMonitor
"""

from lightning.pytorch.cli import LightningCLI

from lightning_lockstep.callbacks import *  # noqa: F403 # a command line may name them without their package

if __name__ == "__main__":
    LightningCLI()
