"""A whole search on all ranks: its options, its trials in turn, what people see of it."""

from __future__ import annotations

import gc
import io
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_lockstep._lightning import LightningModule, Trainer
from lightning_lockstep._settings import Faults, is_whole
from lightning_lockstep._system import write_report
from lightning_lockstep._text import counted, plain_table, ranks_in_words, say, size_in_words
from lightning_lockstep.batch_size.loaders import BatchLoaders, SearchRefusedError, loop_of
from lightning_lockstep.batch_size.memory import (
    CPUMeter,
    MemoryMeter,
    keep_freed_memory,
    meter_for,
    parse_bytes,
    return_freed_memory,
)
from lightning_lockstep.batch_size.search import SizeSearch, Trial
from lightning_lockstep.batch_size.trial import TrialRunner
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.c10d_operators import untouched_buckets
from lightning_lockstep.errors import BatchSizeError, ConfigurationError, MissingExtraError
from lightning_lockstep.steps.capabilities import HasEngineTrials, missing_capabilities

# -- The settings of AutoBatchSize, checked together --


@dataclass(frozen=True, kw_only=True)
class AutoBatchSizeSettings:
    """The arguments of :class:`AutoBatchSize`, checked; see there."""

    mode: Literal["model", "binsearch", "power", "off"] = "model"
    steps_per_trial: int = 2
    init_val: int = 2
    max_trials: int = 25
    batch_arg_name: str = "batch_size"
    margin: float = 0.05
    max_val: int = 8192
    memory_limit: str | int | float | None = None
    limit: Literal["shard"] | None = "shard"
    global_batch_size: int | Literal["largest"] | None = None
    on_oom: Literal["raise", "split", "skip"] = "raise"
    loss_reduction: Literal["mean", "sum"] = "mean"
    reuse: bool = True
    plot: bool = False

    def __post_init__(self) -> None:
        faults = Faults()
        faults.choice("mode", self.mode, ("model", "binsearch", "power", "off"))
        faults.number("margin", self.margin, what="a share of the size found", least=0, below=1)
        faults.choice("limit", self.limit, ("shard", None))
        faults.choice("on_oom", self.on_oom, ("raise", "split", "skip"))
        faults.choice("loss_reduction", self.loss_reduction, ("mean", "sum"))
        faults.check(
            bool(self.batch_arg_name), "batch_arg_name", self.batch_arg_name, "the name of an attribute"
        )
        for name in ("steps_per_trial", "init_val", "max_trials", "max_val"):
            faults.whole(name, getattr(self, name))
        size = self.global_batch_size
        faults.check(
            size in (None, "largest") or (is_whole(size) and size >= 1),
            "global_batch_size",
            size,
            "samples in one optimizer step, a whole number from 1; 'largest', what fits; or None, as configured",
        )
        if self.memory_limit is not None:
            try:
                parse_bytes(self.memory_limit)
            except ConfigurationError as error:
                faults.texts += error.faults
        faults.raise_all()


# -- What is refused before any trial --


def refuse_strategy(trainer: Trainer) -> None:
    """Raise where a trial on one rank alone is not possible, with the reason."""
    if isinstance(trainer.strategy, HasEngineTrials):
        refuse_fixed_sizes(trainer, "AutoBatchSize is to choose the batch size")
        if why := trainer.strategy.engine_trials.why_not_possible():
            raise SearchRefusedError(
                f"no batch size can be tried with {type(trainer.strategy).__name__}: {why}."
                " Set the batch size yourself."
            )
        return
    for why in missing_capabilities(trainer.strategy, "step_alone", "sees_out_of_memory"):
        raise SearchRefusedError(
            f"no batch size can be tried with {type(trainer.strategy).__name__}: {why}. Search with"
            " strategy='lockstep_ddp' or on a single device and set the batch size, or use"
            " find_executable_batch_size around the whole run."
        )


def refuse_fixed_sizes(trainer: Trainer, what: str, *, accumulates: bool = False) -> None:
    """Raise where the configuration of an engine says a size that is to be changed."""
    if not isinstance(trainer.strategy, HasEngineTrials):
        return
    trials = trainer.strategy.engine_trials
    why = trials.why_size_is_fixed() or (trials.why_accumulation_is_fixed() if accumulates else "")
    if why:
        raise SearchRefusedError(f"{what}, and {why}.")


def refuse_engine(trainer: Trainer, on_oom: str) -> None:
    """Raise where an engine makes the steps, which cannot be run again in parts."""
    if isinstance(trainer.strategy, HasEngineTrials):
        raise SearchRefusedError(
            f"on_oom={on_oom!r} is not possible with {type(trainer.strategy).__name__}: gradients are reduced"
            " while the backward runs, and a batch that ended half way cannot be finished in parts. Write"
            " on_oom='raise'; the search for a batch size works."
        )


# -- A whole search on all ranks: try, agree, repeat --

# On CPU a malloc that keeps freed blocks needs up to about half as much again as what is in use.
_SHARE_WITH_KEPT_BLOCKS = 0.6


@dataclass(frozen=True)
class SearchResult:
    """What a search found."""

    size: int  # that the run uses [samples per rank and micro-batch]
    largest: int  # that fitted in a trial, before the margin
    accumulate: int  # micro-batches per optimizer step
    ranks: int
    mode: str
    trials: Sequence[Trial]
    seconds: float  # that the search took
    reason: str  # why it ended there
    limit_source: str  # of the memory limit
    tight: bool  # memory on CPU is short, so the process goes on returning freed blocks at once
    line: tuple[float, float] | None  # (a, b) of peak = a + b x size [bytes]
    fingerprint: Mapping[str, Any] = field(default_factory=dict)  # what the answer depends on

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in one optimizer step."""
        return self.size * self.accumulate * self.ranks


def run_search(
    trainer: Trainer,
    module: LightningModule,
    place: BatchLoaders,
    settings: AutoBatchSizeSettings,
    *,
    most: int,  # the largest size to try
    why_none_above: str,
    accumulates: bool,  # whether batches may be accumulated, by the size found
) -> SearchResult:
    """Search on all ranks together until an answer is found."""
    began, communicator = time.perf_counter(), current_communicator()
    meter = _meter_of_run(trainer, settings.memory_limit)
    search = SizeSearch(
        settings.mode,
        settings.init_val,
        max_val=most,
        why_none_above=why_none_above,
        max_trials=settings.max_trials,
        noise=None if meter is None else meter.noise,
    )
    runner = TrialRunner(
        trainer, module, place, steps=settings.steps_per_trial, meter=meter, accumulates=accumulates
    )
    headroom = None
    if meter is not None:
        left = torch.tensor(meter.headroom, dtype=torch.float64)
        headroom = float(communicator.all_reduce(left, "min"))
    trials: list[Trial] = []

    def tried(size: int) -> Trial:
        trial = runner.run(size)
        trials.append(trial)
        say_once(_trial_line(len(trials), trial))
        return trial

    # On CPU, let a size need the same whatever was tried before; the run goes on so where memory is short.
    on_cpu, tight = isinstance(meter, CPUMeter), False
    if on_cpu:
        return_freed_memory()
    gc.freeze()  # the collector would go through all that existed before the search, again and again
    try:
        with runner.preserved():
            while not (proposal := search.propose()).stop:
                search.record(tried(proposal.size))
            if not proposal.size:
                raise BatchSizeError(_nothing_fits(search, proposal.reason, headroom, meter))
            margin = 0.0 if settings.mode == "power" else settings.margin
            size = _with_margin(search, proposal.size, margin, tried)
            last = next(trial for trial in reversed(trials) if trial.size == size)
            tight = on_cpu and _is_short(last)
    finally:
        gc.unfreeze()
        if on_cpu and not tight:
            keep_freed_memory()
    return SearchResult(
        size=size,
        largest=search.low,
        accumulate=trainer.accumulate_grad_batches,
        ranks=communicator.world_size,
        mode=search.mode,
        trials=tuple(trials),
        seconds=time.perf_counter() - began,
        reason=proposal.reason,
        limit_source="" if meter is None else meter.source,
        tight=tight,
        line=search.line(),
    )


def _meter_of_run(trainer: Trainer, memory_limit: str | int | float | None) -> MemoryMeter | None:
    """Return what reads the memory of this rank in trials, or ``None`` where that cannot be read."""
    communicator = current_communicator()
    hosts = communicator.gather(communicator.host)
    return meter_for(
        trainer.strategy.root_device,
        memory_limit=None if memory_limit is None else parse_bytes(memory_limit),
        local_ranks=hosts.count(communicator.host),
        owed=untouched_buckets(trainer.strategy.model),
    )


def _with_margin(search: SizeSearch, size: int, margin: float, tried: Callable[[int], Trial]) -> int:
    """Return the size below ``size`` by the margin, after it was run too."""
    smaller = max(1, int(size * (1 - margin)))
    if size >= search.max_val or smaller == size:
        return size  # nothing larger was ever going to be run: the memory limit is not near
    first = smaller
    while smaller >= 1:
        if tried(smaller).fits:
            return smaller
        # Fragmentation or another process took what was free before: a size must fit when it is tried again.
        smaller = int(smaller * min(1 - margin, 0.9))
    raise BatchSizeError(
        f"batch size {first} did not fit though {size} did just before, nor did any below it"
    )


def _is_short(trial: Trial) -> bool:
    return trial.peak is None or trial.limit is None or trial.peak > _SHARE_WITH_KEPT_BLOCKS * trial.limit


def _nothing_fits(search: SizeSearch, reason: str, headroom: float | None, meter: MemoryMeter | None) -> str:
    smallest = min(search.trials, key=lambda trial: trial.size)
    if smallest.size > 1:
        return f"no batch size fits ({reason}); the smallest tried was {smallest.size}"
    limit = smallest.limit
    mend = (
        "use a smaller model, a lower precision, activation checkpointing, or a strategy that shards or offloads the"
        " optimizer."
    )
    if limit is None or headroom is None or meter is None:
        return f"1 does not fit: one sample needs more memory than there is. To mend it, {mend}"
    # On CPU most of it may be the interpreter's: a network of 10 kB stands in a process of 400 MiB.
    on_cpu = isinstance(meter, CPUMeter)
    who = (
        "this process (Python, its libraries, data, model and optimizer)" if on_cpu else "model and optimizer"
    )
    left = (
        f"one sample needs more than the {size_in_words(headroom)} left"
        if headroom > 0
        else "nothing is left"
    )
    return (
        f"1 does not fit: before the first step {who} {'takes' if on_cpu else 'take'}"
        f" {size_in_words(limit - headroom)} of {size_in_words(limit)} ({meter.source}), and {left}."
        f" Raise the limit if the machine has more, or {mend}"
    )


def fingerprint_of(
    trainer: Any, module: LightningModule, settings: AutoBatchSizeSettings, most: int
) -> dict[str, Any]:
    """Return what the answer of a search depends on, as plain values."""
    parameters = list(module.parameters())
    return {
        "loop": loop_of(trainer),
        "ranks": trainer.world_size,
        "device": trainer.strategy.root_device.type,
        "precision": str(trainer.precision),
        "parameters": sum(p.numel() for p in parameters),
        "trainable": sum(p.numel() for p in parameters if p.requires_grad),
        "optimizers": [type(optimizer).__name__ for optimizer in trainer.strategy.optimizers],
        "most": most,
        "memory_limit": settings.memory_limit,
        "margin": settings.margin,
        "mode": settings.mode,
    }


# -- What people see of a search: a line a trial, a table, a picture, and the file a resumed run reads --


def _trial_line(number: int, trial: Trial) -> str:
    line = f"batch size trial {number}: {trial.size:>6} per rank, "
    if trial.peak is not None:
        line += f"peak {size_in_words(trial.peak)} of {size_in_words(trial.limit)}, "
    if trial.fits:
        return line + "fits"
    first = next(iter(trial.reasons.values()), "")
    return line + f"out of memory on {ranks_in_words(trial.reasons)} ({first[:90]})"


def _table(result: SearchResult) -> str:
    """Return the closing table of a search."""
    rows = [
        (
            each.size,
            size_in_words(each.peak),
            size_in_words(each.limit),
            "fits" if each.fits else "out of memory",
        )
        for each in sorted(result.trials, key=lambda each: each.size)
    ]
    trials = plain_table(("size", "peak", "limit", "verdict"), rows)
    numbers = f"  batch size {result.size} per rank"
    if result.fingerprint.get("loop") == "fit":
        ranks = counted(result.ranks, "rank")
        numbers += f" x {result.accumulate} accumulated x {ranks} = {result.global_batch} per optimizer step"
    head = f"AutoBatchSize ({result.mode}): {len(result.trials)} trials in {result.seconds:.1f} s, {result.reason}"
    return "\n".join([head, trials, numbers])


def say_once(text: str) -> None:
    """Print a line on rank 0 alone."""
    if current_communicator().is_main:
        say(text)


def _file_of(folder: Path, loop: str) -> Path:
    """Return where the result of a search is; one of an evaluation does not replace that of the fit."""
    return folder / ("batch_size.json" if loop == "fit" else f"batch_size_{loop}.json")


def keep_result(trainer: Trainer, folder: Path | None, result: SearchResult, *, plot: bool) -> None:
    """Print the table and write the file, and a picture if asked to; all that on rank 0 alone."""
    if current_communicator().is_main:
        say(_table(result))
        path = _file_of(folder or Path(trainer.default_root_dir), loop_of(trainer))
        if folder is not None:
            write_report(path, json.dumps(asdict(result), indent=2) + "\n")
        if plot:
            write_report(path.with_suffix(".png"), _picture(result))


def known_size(
    trainer: Trainer, found: Mapping[str, Any], folder: Path | None, fingerprint: Mapping[str, Any]
) -> tuple[int, bool] | None:
    """Return (size, tight) that an earlier search found under the same conditions, by checkpoint or file."""
    communicator, known = current_communicator(), None
    if communicator.is_main:
        # Under DeepSpeed the checkpoint is read later than this.
        written = {} if folder is None else _read(_file_of(folder, loop_of(trainer)))
        for earlier in (found, written):
            if known is None and earlier.get("fingerprint") == dict(fingerprint):
                known = int(earlier["size"]), bool(earlier.get("tight"))
    answer: tuple[int, bool] | None = communicator.broadcast(known)
    return answer


def _read(path: Path) -> dict[str, Any]:
    """Return what :func:`keep_result` wrote in an earlier run; empty where there is nothing to read."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) and isinstance(content.get("size"), int) else {}


def _picture(result: SearchResult) -> bytes:
    """Return a PNG of peak memory over batch size, with the limit and the size that was taken."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        needed = "the picture of memory over batch size"
        raise MissingExtraError("matplotlib", extra="plot", needed_for=needed) from error
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    largest = max((t.peak or t.limit or 0.0 for t in result.trials), default=0.0)
    scale, unit = (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
    fits = [t for t in result.trials if t.fits and t.peak is not None]
    failed = [t for t in result.trials if not t.fits]
    limits = [t.limit for t in result.trials if t.limit is not None]
    axes.plot(
        [t.size for t in fits], [t.peak / scale for t in fits if t.peak], "o", color="tab:blue", label="fits"
    )
    if failed:
        heights = [(t.limit or 0.0) / scale for t in failed]
        axes.plot([t.size for t in failed], heights, "x", color="tab:red", ms=9, mew=2, label="out of memory")
    if limits:
        axes.axhline(
            limits[-1] / scale, color="tab:red", ls="--", lw=1, label=f"limit {size_in_words(limits[-1])}"
        )
    if result.line is not None:
        (a, b), ends = result.line, [0.0, 1.03 * max(t.size for t in result.trials)]
        label = f"{size_in_words(a)} + {b / 2**20:.3g} MiB a sample"
        axes.plot(ends, [(a + b * x) / scale for x in ends], color="tab:blue", lw=1, label=label)
    axes.axvline(result.size, color="tab:green", lw=1.5, label=f"chosen: {result.size}")
    axes.set(
        title=f"Batch size {result.size} (largest that fitted: {result.largest})",
        xlabel="batch size per rank [samples]",
        ylabel=f"peak memory [{unit}]",
    )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.12)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    return content.getvalue()
