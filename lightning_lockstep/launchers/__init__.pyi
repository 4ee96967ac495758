from lightning_lockstep.launchers.environments.cluster_environment import (
    detect_environment as detect_environment,
)
