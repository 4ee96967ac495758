"""The smallest Hydra project on lightning-lockstep: a module (net.py), its settings (conf/model/net.yaml), a program.

Run in this folder. Without this program and conf/config.yaml, the module alone:

    lockstep-train --config-dir conf model=net ~data checkpoint=every_epoch trainer.devices=2

With them, a project that has its own defaults:

    python train.py                                     # two ranks
    python train.py trainer.devices=1 model.width=64
    python train.py -m model.width=16,64                # a sweep: two jobs of two ranks
"""

from lightning_lockstep.train import check_training, hydra_main, prepare_training, train


@hydra_main("conf", "config", check=check_training, prepare=prepare_training)
def main(config):
    return train(config)


if __name__ == "__main__":
    main()
