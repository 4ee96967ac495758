"""How a strategy that runs DeepSpeed makes its training steps, and what other features can do with them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager

from lightning_lockstep._lightning import DeepSpeedStrategy, LightningModule
from lightning_lockstep.deepspeed.configuration.run_config import RunConfig
from lightning_lockstep.deepspeed.engine_trials import EngineTrials
from lightning_lockstep.deepspeed.gradient_check import GradientsOfEngine
from lightning_lockstep.deepspeed.plain_step import without_engine
from lightning_lockstep.steps.capabilities import Capabilities

__all__ = ["DeepSpeedSteps"]


class DeepSpeedSteps(DeepSpeedStrategy):
    """Lightning's strategy, with steps that can be looked into, and whose loop steps the optimizer."""

    _run_config: RunConfig

    @property
    def handles_gradient_accumulation(self) -> bool:
        """Whether the engine decides when the optimizer steps: no, Lightning's loop does, as under any strategy.

        Lightning counts from the start of each epoch and steps after its last batch, DeepSpeed goes on counting.
        """
        return False

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Do nothing around an accumulated batch: the engine knows that, and reduces what its stage needs."""
        yield

    @property
    def step_capabilities(self) -> Capabilities:
        """What can be done with a training step: DeepSpeed's engine runs it, on all ranks together."""
        return Capabilities(
            whole_gradients=False, step_alone=False, replays="together" if self.zero_stage_3 else "alone"
        )

    def engine_gradients(self) -> GradientsOfEngine:
        """Return what this rank holds of the gradients, once the engine is set up for a fit."""
        return GradientsOfEngine(self.model, getattr(self.precision_plugin, "history", None))

    @property
    def engine_trials(self) -> EngineTrials:
        """Steps of the engine on one rank alone, to see what memory they need."""
        return EngineTrials(self, self._run_config.given)

    def steps_apart(self, module: LightningModule) -> AbstractContextManager[None]:
        """Let the body run ``module`` by autograd alone, and leave the engine as it was.

        Stages 0 to 2 send nothing; in stage 3 all ranks do it together, since the parameters are gathered.
        """
        return without_engine(self, module, module.trainer.model)
