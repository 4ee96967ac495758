"""From the command line to the program's own function, on every rank; how an error leaves a job."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import hydra.utils
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins

# Hydra writes what a job has logged when it ends; so does a job that is not run by Hydra.
from hydra.core.utils import _flush_loggers, configure_log, env_override, setup_globals
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

import lightning_lockstep
from lightning_lockstep._application.config_channel import ConfigChannel, Message
from lightning_lockstep._application.configs import Loader, search_path_of
from lightning_lockstep._application.masking import Mask
from lightning_lockstep._application.overrides import (
    REFUSED,
    JobCheck,
    Sweep,
    check_command_line,
    read_arguments,
    run_requested,
    whole_message,
)
from lightning_lockstep._application.signatures import is_left_out, show_faults, trace
from lightning_lockstep._run_folder import forget_run_folders, without_claiming
from lightning_lockstep._text import first_line, say
from lightning_lockstep.distributed.failure.process_exit import error_from_bytes, error_to_bytes, exit_plan
from lightning_lockstep.errors import ConfigurationError, LaunchError
from lightning_lockstep.launchers.external_ranks import external_ranks
from lightning_lockstep.launchers.hydra import (
    config_from_text,
    config_to_text,
    current_hydra_config,
    for_other_ranks,
    freeze,
    program_arguments,
    received_config,
    set_sender,
    without_hydra,
)

# -- How an error of the program gets past Hydra, and out of the process of a job, to the program that prints it --


class Stop(BaseException):
    """Carries an error past Hydra, which would print it in its own way and lose its exit code."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class StopElsewhere(Exception):  # noqa: N818
    """Carries an error out of a job in another process: the program that reads the job's result finds a `Stop`."""

    def __reduce__(self) -> tuple[Any, ...]:
        (error,) = self.args
        error = error.error if isinstance(error, Stop) else error
        return _stop, (error_to_bytes(error),)


def _stop(sent: bytes) -> Stop:
    return Stop(error_from_bytes(sent))


def _rank_in_group() -> int | None:
    """The rank of this process among those that have connected; None if it is alone."""
    if "torch" not in sys.modules:
        return None
    # Not above: it imports torch, which a program that looks at its command line does without.
    from lightning_lockstep.distributed.process_group import current_group

    group = current_group()
    return None if group is None else group.rank


# -- From the command line to the program's own function, on every rank --

Program = Callable[[DictConfig], Any]
#: Exit code of a command line or configuration that cannot be used.
UNUSABLE = 2
# How long another rank waits for rank 0 to report the same settings before it does so itself [s].
_SAME_FAULT = 10.0


def hydra_main(
    config_path: str | None = None,  # relative to the program's file; or `pkg://package.of.configs`
    config_name: str | None = None,
    *,
    version_base: str | None = "1.3",
    check: JobCheck | None = None,  # looks at the configuration of each job before it is started
    prepare: Callable[[DictConfig], None] | None = None,  # changes one just before it is frozen
) -> Callable[[Program], Callable[[], Any]]:
    """Decorate a function as `hydra.main` does, for programs of several ranks.

    In addition to `hydra.main`: all errors in the command line are reported in one message with exit code 2,
    before anything is started; rank 0 resolves the configuration once, and every rank uses that; other ranks
    create no folder and no job log, however they were started. Under torchrun or srun rank 0 sends the
    configuration to the others: one write to the store per job.

    Args:
        config_path: Folder of the program's configs, relative to its file; or `pkg://package.of.configs`.
        config_name: Primary config.
        version_base: As in `hydra.main`.
        check: Called with the configuration of each job before it is started, and with `None`, or, if something is
            wrong already, with the keys on the first level that are given and right; returns what is wrong with it.
        prepare: Changes the configuration of a job just before it is frozen.

    Ranks: every rank of a program calls the decorated function. Only rank 0 reads the command line; under
        torchrun or srun it sends the configuration of each job to the others, one write to the store per job.
    """

    def decorate(program: Program) -> Callable[[], Any]:
        @functools.wraps(program)
        def decorated(passed: DictConfig | None = None) -> Any:
            if passed is not None:
                return program(passed)
            exit_plan.install_excepthook()
            if "--version" in sys.argv[1:]:  # Hydra's says its own only
                version = lightning_lockstep.__version__
                sys.stdout.write(f"lightning-lockstep {version}, Hydra {hydra.__version__}\n")
                return None
            arguments = read_arguments(sys.argv[1:])
            if arguments.experimental_rerun is not None:  # a rank that rank 0 has started
                config = received_config()
                assert config is not None
                return _run_sent(config, program, None)
            ranks, runs = external_ranks(), run_requested(arguments)
            if ranks is not None and ranks.rank > 0:
                # Rank 0 alone shows help, or the configuration, and then nobody waits for anybody.
                return _follow(ConfigChannel(ranks), program) if runs else None
            channel = ConfigChannel(ranks if runs else None)
            application = _Application(
                program, config_path, config_name, version_base, check, prepare, arguments, channel
            )
            try:
                return application.run()
            except Stop as stop:
                error = stop.error
            # Outside the handler, in which nothing of Hydra is shown.
            _end_if_about_settings(error)
            raise error

        return decorated

    return decorate


@dataclass
class _Application:
    """One command line on rank 0."""

    program: Program
    config_path: str | None
    config_name: str | None
    version_base: str | None
    check: JobCheck | None
    prepare: Callable[[DictConfig], None] | None
    arguments: argparse.Namespace
    channel: ConfigChannel
    sent: bool = False  # to another process, by a launcher of sweeps
    command: Any = None  # of this program, in that process
    sweep: Sweep = field(default_factory=Sweep)

    def __getstate__(self) -> dict[str, Any]:
        command = None
        with suppress(LaunchError):  # a job of one rank needs none
            command = program_arguments(str(Path.cwd()))
        return {**self.__dict__, "sent": True, "check": None, "command": command}

    def run(self) -> None:
        """Check the command line, then let Hydra run its jobs."""
        forget_run_folders()
        with _closing(self.channel):
            if self.arguments.help:
                self._help()
                return
            if run_requested(self.arguments):
                self._check()
            try:
                hydra.main(self.config_path, self.config_name, self.version_base)(self._job())()
            finally:
                if report := self.sweep.report():  # above an error, which is shown last
                    say(report)

    def _check(self) -> None:
        search_path = search_path_of(self.program, self.config_path, self.arguments)
        before, alone = list(sys.path), self.channel.ranks is None
        _import_from(str(Path.cwd()))
        faults, config, values = check_command_line(
            self.arguments, search_path, self.config_name, self.check, alone=alone
        )
        sys.path[:] = before  # which the processes of a sweep get, before they look for Hydra's plugins
        with suppress(OmegaConfBaseException):
            self.channel.nodes = None if config is None else OmegaConf.select(config, "trainer.num_nodes")
        if faults:
            _refuse(faults)
        if config is not None and config.hydra.runtime.choices["hydra/sweeper"] == "basic":
            left_out, name = (*self.arguments.overrides, "-m", "--multirun"), program_name()
            command = ["python", sys.argv[0]] if name.endswith(".py") else [name]
            self.sweep.plan(values, command + [word for word in sys.argv[1:] if word not in left_out])

    def _help(self) -> None:
        search_path = search_path_of(self.program, self.config_path, self.arguments)
        name = self.arguments.config_name or self.config_name
        setup_globals()
        groups = [word for word in self.arguments.overrides if "=" not in word and word[0] not in "-~"]
        overrides = [word for word in self.arguments.overrides if word not in groups]
        try:
            loader = Loader(search_path, name, overrides)
            text = "".join(map(loader.help_of, groups)) or loader.help(program_name(), overrides)
        except REFUSED as error:
            _refuse([whole_message(error)])
        sys.stdout.write(text)

    def _job(self) -> Program:
        """The function that Hydra calls for each job, in this process or in another."""

        @functools.wraps(self.program)
        def job(_: DictConfig) -> Any:
            if not self.sent:
                return self._run_job(self.channel)
            try:
                return self._run_job_elsewhere()
            except SystemExit:
                raise  # whoever asked this process to end (a preempted job begins again) waits for no result
            except BaseException as error:
                exit_plan.failure_returned = True
                raise StopElsewhere(error) from None

        return job

    def _run_job(self, channel: ConfigChannel) -> Any:
        _import_from(hydra.utils.get_original_cwd())
        config = self._freeze_job()
        task = without_hydra(config)
        _keep_frozen(config, task)
        last = config.hydra.mode != RunMode.MULTIRUN or self.sent
        if channel.ranks is not None:
            channel.send(Message(for_other_ranks(config), last=last))
        try:
            objective = self.program(task)
            if not last:
                self.sweep.note(config, objective, None)
            return objective
        except BaseException as error:
            if not last:
                self.sweep.note(config, None, error)
            if not isinstance(error, Exception):
                raise
            # A sweep goes on after a job that failed, unless its ranks exist already and have reached their end.
            stays = exit_plan.forced_exit is not None and channel.ranks is not None
            if last or stays or isinstance(error, ConfigurationError):
                raise Stop(error) from None
            what = f"{type(error).__name__}: {first_line(error)}"
            say(f"lightning-lockstep: job {config.hydra.job.num} failed: {what}")
            # Not above: it imports torch and Lightning, which a look at the command line does without.
            from lightning_lockstep.launchers.subprocess_script import forget_earlier_job

            forget_earlier_job()  # the next one starts ranks of its own
            exit_plan.cancel_forced_exit()
            raise

    def _run_job_elsewhere(self) -> Any:
        """Run one job in the process that a launcher of sweeps has made for it (joblib, submitit)."""
        if exit_plan.forced_exit:
            raise LaunchError("Job skipped: ranks of an earlier job of this sweep failed in this process.")
        set_sender(self.command)
        ranks = external_ranks()
        channel = ConfigChannel(ranks)
        if ranks is not None and ranks.rank > 0:
            try:
                return _follow(channel, self.program)
            except SystemExit as end:
                # submitit reads the result of rank 0 only if every task has left one.
                text = f"Rank {ranks.rank} ended with code {end.code}; see the message of rank 0."
                raise LaunchError(text) from end
        with _closing(channel):
            return self._run_job(channel)

    def _freeze_job(self) -> DictConfig:
        """Resolve the configuration of the job that begins, for all ranks, this one too."""
        whole = current_hydra_config()
        assert whole is not None
        if self.prepare is not None:
            with flag_override(whole, ["readonly", "struct"], [False, False]):
                self.prepare(whole)
        with without_claiming():  # a single run does not need the folder of a sweep
            # By way of text on rank 0 too: all ranks have the same kinds of values, and no copy of a class.
            config = config_from_text(config_to_text(freeze(whole)))
        assert config is not None
        HydraConfig.instance().set_config(config)
        return config


def _keep_frozen(config: DictConfig, task: DictConfig) -> None:
    """Write what is used to `.hydra/frozen.yaml`, without secrets, and mask those in what Hydra has written."""
    subdir, mask = config.hydra.output_subdir, Mask(task)
    written = [Path(config.hydra.sweep.dir, "multirun.yaml")] if config.hydra.mode == RunMode.MULTIRUN else []
    if subdir is not None:
        folder = Path(config.hydra.runtime.output_dir, subdir)
        written += [folder / name for name in ("config.yaml", "hydra.yaml", "overrides.yaml")]
        # Resolved values may be secrets that no name tells: for this user's eyes only, in a new file, since one that is
        # there already may be open elsewhere.
        path = folder / "frozen.yaml"
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            OmegaConf.save(OmegaConf.create(mask.masked(task)), file)
    mask.in_files(*written)


def _import_from(started_in: str) -> None:
    """Let a `_target_` name what is in the folder where the program was started, as under `python -m`."""
    # Last, so that no file of that folder takes the place of an installed module, and after Hydra has run all that a
    # `hydra_plugins` contains; not if Python is told to leave it out.
    Plugins.instance()
    if started_in not in sys.path and not is_left_out():
        sys.path.append(started_in)


@contextmanager
def _closing(channel: ConfigChannel) -> Iterator[None]:
    """Let the other ranks end when the body has ended, however it did."""
    exit_code = 1
    try:
        yield
        exit_code = 0
    except SystemExit as leave:
        exit_code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
        raise
    finally:
        # Once the process group exists, every rank raises the same error by itself.
        unusable = exit_code == UNUSABLE and _rank_in_group() is None
        # After a failure within a job a rank may be dead, and waiting for it could take forever. One that has caught
        # the failure, as rank 0's program may have done, asks for the next job all the same.
        failed = exit_plan.forced_exit is not None
        channel.close(exit_code, unusable=unusable and not failed, wait=not failed)


def _follow(channel: ConfigChannel, program: Program) -> None:
    while True:
        message = channel.receive()
        if message.config is None:
            sys.exit(message.exit_code)
        _run_sent(message.config, program, channel)
        if message.last:
            return


def _run_sent(config: DictConfig, program: Program, channel: ConfigChannel | None) -> None:
    """Run a job of rank 0 on another rank; settings that cannot be used are printed only if rank 0 does not."""
    try:
        # Not returned, as Hydra does not on rank 0: a console command exits with what its function returns.
        _run_frozen(config, program)
    except ConfigurationError as error:
        if exit_plan.forced_exit:
            raise  # this rank failed alone, and rank 0 reports it
        if not _rank_in_group():  # else every rank raises it, and rank 0 prints it
            with suppress(LaunchError):
                if channel is not None:
                    channel.receive(patience=_SAME_FAULT)
                    sys.exit(UNUSABLE)
            _end_if_about_settings(error)
        sys.exit(UNUSABLE)


def _run_frozen(config: DictConfig, program: Program) -> Any:
    """Run one job on a finished configuration, with Hydra's surroundings but none of its files."""
    setup_globals()
    _import_from(str(config.hydra.runtime.cwd))
    configure_log(config.hydra.job_logging, config.hydra.verbose)
    HydraConfig.instance().set_config(config)
    if config.hydra.job.chdir:
        folder = Path(config.hydra.runtime.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
    try:
        with env_override(dict(config.hydra.job.env_set)):
            return program(without_hydra(config))
    finally:
        _flush_loggers()


def _end_if_about_settings(error: BaseException) -> None:
    """End this process with a message if `error` is about settings; else return."""
    if isinstance(error, ConfigurationError):
        trace(error)
        exit_plan.expected_exit_code = UNUSABLE  # every rank raises it, and ends so
        _refuse(error.faults, "the run has ended")


def _refuse(faults: Sequence[str], outcome: str = "nothing was started") -> NoReturn:
    show_faults(program_name(), faults, outcome=outcome)
    sys.exit(UNUSABLE)


def program_name() -> str:
    name = Path(sys.argv[0]).name
    return "lockstep-train" if name == "train.py" and "lightning_lockstep" in sys.argv[0] else name
