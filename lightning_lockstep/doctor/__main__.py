"""``python -m lightning_lockstep.doctor`` is ``lockstep-doctor``."""

from lightning_lockstep.doctor.command import main

if __name__ == "__main__":
    main()
