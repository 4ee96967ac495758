"""What a run gives to its loggers besides metrics, which packages they need, and where they write."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_lockstep._lightning import Callback, Logger
from lightning_lockstep.errors import MissingExtraError
from lightning_lockstep.launchers.hydra.rerun import freeze
from lightning_lockstep.logs.trackers import WandbLogger, tracking_uri_of

__all__ = ["LogConfiguration", "finish", "is_logger", "missing_package", "places", "plain_configuration"]

# class of a logger -> the packages any of which it works with; the first is named where all are missing
_PACKAGES = {
    "TensorBoardLogger": ("tensorboard", "tensorboardX"),
    "WandbLogger": ("wandb",),
    "MLFlowLogger": ("mlflow",),
}
# Stores of MLflow that are databases, for which mlflow-skinny alone is not enough.
_DATABASES = ("sqlite:", "postgresql", "mysql", "mssql")
_HIDDEN = "***"
# Names of settings and of environment variables whose values are secret.
_SECRET = re.compile(
    r"(?:^|_)(?:(?:api|access|private|secret)_?key|secret|passw(?:or)?d|credentials?|(?:api|auth|access)_?token)$|^token$",
    re.IGNORECASE,
)
_SECRET_VARIABLE = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
_SHORTEST_SECRET = 8  # characters; a shorter value could be part of any text


def is_logger(target: object) -> bool:
    """Whether this is a class of loggers: making one may begin a run."""
    return inspect.isclass(target) and issubclass(target, Logger)


def missing_package(target: Any, key: str, settings: Mapping[Any, Any]) -> MissingExtraError | None:
    """Return the error for a package that a logger needs and that is not installed, or `None`."""
    name = next((cls.__name__ for cls in target.__mro__ if cls.__name__ in _PACKAGES), None)
    if name is None:
        return None
    extra, needed = _PACKAGES[name][0], [_PACKAGES[name]]
    uri = tracking_uri_of("", settings.get("tracking_uri"))
    if name == "MLFlowLogger" and uri.startswith(_DATABASES):
        needed += [("sqlalchemy",), ("alembic",)]
    for choices in needed:
        if not any(importlib.util.find_spec(package) for package in choices):
            return MissingExtraError(choices[0], extra=extra, needed_for=key)
    return None


class LogConfiguration(Callback):
    """Gives the configuration of the run to its loggers as hyperparameters, below the name `config`."""

    def __init__(self, config: DictConfig) -> None:
        self._config = plain_configuration(config)
        self._trains = bool(config.get("fit"))

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Log it once, in the process of the rank, before Lightning logs the model's own hyperparameters."""
        if self._config and (stage == "fit" or not self._trains):
            for logger in trainer.loggers:
                logger.log_hyperparams({"config": self._config})
            self._config = {}


def plain_configuration(config: DictConfig, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return a configuration as plain values, with secrets replaced by `***`.

    Secret are settings named so (`password`, `api_key`, ...), and what the environment has under such a name, where it
    is part of a value.
    """
    environ = os.environ if environ is None else environ
    secrets = [
        value
        for name, value in environ.items()
        if _SECRET_VARIABLE.search(name) and len(value) >= _SHORTEST_SECRET
    ]
    plain = OmegaConf.to_container(freeze(config), resolve=False, enum_to_str=True)
    hidden: dict[str, Any] = _hide(plain, secrets)
    return hidden


def _hide(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, dict):
        return {
            str(key): _HIDDEN if isinstance(item, str) and _SECRET.search(str(key)) else _hide(item, secrets)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_hide(item, secrets) for item in value]
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, _HIDDEN)
    return value


def places(loggers: list[Any]) -> dict[str, str]:
    """Return where each logger has written, as rows of the closing table: a file, a folder or an address."""
    found: dict[str, str] = {}
    for logger in loggers:
        place = getattr(logger, "location", None) or getattr(logger, "log_dir", None)
        # The stand-in of a run without logs has a method for every name.
        if isinstance(place, (str, os.PathLike)):
            metrics = Path(place, "metrics.csv")
            found[f"log ({type(logger).__name__})"] = str(metrics if metrics.exists() else place)
    return found


def finish(loggers: list[Any], *, failed: bool) -> None:
    """End the runs of loggers that hold one open until the process ends, so that the next job begins its own."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.finish(failed=failed)
