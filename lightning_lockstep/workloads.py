"""The old path of `lightning_lockstep.demo`, removed after the next release."""

from lightning_lockstep._exports import keep_old_paths

keep_old_paths("workloads")
