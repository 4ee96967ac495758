"""Experiment trackers: Lightning's loggers for Weights & Biases and MLflow, on this machine unless told otherwise.

Making one of these writes nothing and asks nobody: the run begins when rank 0 first logs to it. So a configuration can
be checked, and every rank can hold the same logger.
"""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from lightning_lockstep._doors.lightning import MLFlowLogger as _MLFlowLogger
from lightning_lockstep._doors.lightning import WandbLogger as _WandbLogger
from lightning_lockstep._doors.lightning import rank_zero_experiment
from lightning_lockstep._settings import Faults
from lightning_lockstep.distributed.failure.process_exit import keep_hook

_SQLITE = "sqlite:///"
# A client of a server connects when it is first asked for something, one of a local store makes that store at once.
_NOT_YET = "http://127.0.0.1:9"


class WandbLogger(_WandbLogger):
    """Lightning's logger for Weights & Biases, offline without a login."""

    def __init__(
        self,
        *,
        save_dir: str | os.PathLike[str] = ".",  # in which wandb makes its folder `wandb`
        project: str | None = None,  # None: `WANDB_PROJECT`
        name: str | None = None,
        entity: str | None = None,  # user or team that the project belongs to
        group: str | None = None,  # that several runs share
        tags: list[str] | None = None,
        offline: bool | None = None,  # None: as `WANDB_MODE` says, else online if there is an API key
        # Upload checkpoints: True at the end, "all" as they are saved.
        log_model: Literal["all"] | bool = False,
        prefix: str = "",
    ) -> None:
        if offline is None and not os.environ.get("WANDB_MODE"):
            offline = not has_wandb_account()
        faults = Faults()
        faults.check(
            not (offline and log_model),
            "log_model",
            log_model,
            "false for a run that is offline: log in with `wandb login`, or give offline=false",
        )
        faults.raise_all()
        if offline:
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._silent = os.environ.get("WANDB_SILENT", "true").lower() in ("1", "true")
        super().__init__(
            save_dir=os.fspath(save_dir),
            project=project,
            name=name,
            log_model=log_model,
            prefix=prefix,
            entity=entity,
            group=group,
            tags=tags,
            mode=None if offline is None else "offline" if offline else "online",
            resume=None if offline else "allow",
            settings={"silent": self._silent},
        )
        self._wandb_init.pop("anonymous", None)

    def __getstate__(self) -> dict[str, Any]:
        import wandb

        # Lightning begins the run here, and asks wandb for what has long been its default; wandb would say so.
        wandb.setup(settings=wandb.Settings(silent=self._silent))
        return super().__getstate__()

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The run (`wandb.Run`), begun when first asked for; above rank 0 a stand-in that does nothing."""
        with keep_hook():  # wandb's prints the traceback, and has the one before print it again
            return super().experiment

    @property
    def location(self) -> str:
        """Where the run is: its address, or its folder where it is offline."""
        run = self._experiment
        if run is None:
            return str(Path(self.save_dir or ".", "wandb"))
        return str(run.settings.sync_dir if run.offline else run.url)

    def finish(self, *, failed: bool = False) -> None:
        """End the run, after uploads, so that the next logger of this process begins another."""
        if self._experiment is not None:
            self._experiment.finish(exit_code=int(failed))


class MLFlowLogger(_MLFlowLogger):
    """Lightning's logger for MLflow, with a SQLite file as the store unless another is named."""

    def __init__(
        self,
        *,
        save_dir: str | os.PathLike[str] = "mlflow",  # of the local store: `mlflow.db` and `artifacts`
        tracking_uri: str | None = None,  # None: `MLFLOW_TRACKING_URI`, else the local store
        experiment_name: str = "lightning_logs",
        run_name: str | None = None,
        tags: dict[str, Any] | None = None,
        # Store checkpoints too: True at the end, "all" as they are saved.
        log_model: Literal["all"] | bool = False,
        prefix: str = "",
        artifact_location: str | None = None,  # of the files of a new experiment; None leaves it to the store
    ) -> None:
        uri = tracking_uri_of(save_dir, tracking_uri)
        local = uri == tracking_uri_of(save_dir, None, {})
        if local:
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
            artifact_location = artifact_location or Path(save_dir, "artifacts").absolute().as_uri()
        super().__init__(
            experiment_name=experiment_name,
            run_name=run_name,
            tracking_uri=_NOT_YET,
            tags=tags,
            log_model=log_model,
            prefix=prefix,
            artifact_location=artifact_location,
        )
        self._tracking_uri = uri

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The client of the store (`MlflowClient`), with a run begun; above rank 0 a stand-in."""
        if not self._initialized:
            from mlflow.tracking import MlflowClient

            if self._tracking_uri.startswith(_SQLITE):
                Path(self._tracking_uri.removeprefix(_SQLITE)).parent.mkdir(parents=True, exist_ok=True)
            self._mlflow_client = MlflowClient(self._tracking_uri)
        return super().experiment

    @property
    def location(self) -> str:
        """Where the runs are: the address of a server, or the file or folder of a local store."""
        return self._tracking_uri.removeprefix(_SQLITE).removeprefix("file://")


def has_wandb_account() -> bool:
    """Return whether wandb finds an API key here: in `WANDB_API_KEY`, or where `wandb login` has put it."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    given = os.environ.get("NETRC")
    for file in [given] if given else ["~/.netrc", "~/_netrc"]:
        with suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(Path(file).expanduser()).authenticators(host) is not None:
                return True
    return False


def tracking_uri_of(
    save_dir: str | os.PathLike[str], given: str | None, environ: Mapping[str, str] | None = None
) -> str:
    """Return the address of the MLflow store: that given, of the environment, or of a file in `save_dir`."""
    environ = os.environ if environ is None else environ
    local = f"{_SQLITE}{Path(save_dir).absolute() / 'mlflow.db'}"
    return given or environ.get("MLFLOW_TRACKING_URI") or local
