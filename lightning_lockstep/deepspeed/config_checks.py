"""The configuration compared with what the Trainer was given and with the run that begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_lockstep._doors.lightning_internals import data_source, given_to_trainer
from lightning_lockstep._settings import Faults, is_whole
from lightning_lockstep.deepspeed.config import is_given, modern_spelling, section
from lightning_lockstep.numerics.precision import requested_precision

# -- The sizes of a batch, as far as the config and the Trainer say them --


@dataclass(frozen=True)
class BatchSizes:
    """Sizes of a batch; ``None`` for what is not known."""

    whole: int | None  # samples of all ranks for one step of the optimizer
    micro: int | None  # samples of one rank for one backward
    accumulation: int | None  # batches of one rank for one step of the optimizer
    ranks: int | None  # how many

    def deduced(self) -> BatchSizes:
        """Return the batch with what follows from the rest, as DeepSpeed deduces it."""
        micro, accumulation = self.micro, self.accumulation
        if self.whole is not None and self.ranks is not None:
            per_rank = self.whole // self.ranks
            if micro is None:
                micro = per_rank // (accumulation or 1)
            accumulation = accumulation or (per_rank // micro if micro else None)
        return BatchSizes(self.whole, micro or None, accumulation or None, self.ranks)


# -- The config of DeepSpeed and the Trainer say the same: a contradiction is an error, what is open is
# filled in
#
# Both know the precision, the accumulation, the clipping and the batch size. Lightning's own strategy lets
# the config win silently in some of these, and the Trainer in others; DeepSpeed's defaults win where
# neither says anything.

#: Section of the config that a precision of Lightning switches on; None for neither. DeepSpeed has no others.
PRECISIONS: Mapping[str, str | None] = {
    "32-true": None,
    "16-mixed": "fp16",
    "16-true": "fp16",
    "bf16-mixed": "bf16",
    "bf16-true": "bf16",
}
#: And the precision that a section asks for.
PRECISION_OF = {"fp16": "16-mixed", "bf16": "bf16-mixed"}


@dataclass(frozen=True, kw_only=True)
class TrainerValues:
    """What the Trainer, the model and the loader say that a config of DeepSpeed says too."""

    # ``None`` is a value that is not known, or that the user has not given.

    precision: str | None = None  # Lightning's name, such as bf16-mixed
    accumulate_grad_batches: int | None = None  # batches for one step of the optimizer
    gradient_clip_val: float | None = None  # largest norm of the gradients; 0: no clipping
    gradient_clip_algorithm: str | None = None  # norm or value, or the enum of Lightning that equals it
    batch_size: int | None = None  # samples in a batch of one rank
    world_size: int | None = None
    total_steps: int | None = None  # of the optimizer, in the whole run
    optimizer_defaults: Mapping[str, Any] | None = None  # of configure_optimizers, such as lr
    hidden_size: int | None = None  # width of the model, by which Transformers chooses ZeRO's buckets


def precision_of(config: Mapping[str, Any]) -> str | None:
    """Return what a config asks for, ``16-mixed`` or ``bf16-mixed``; ``None`` for neither or both."""
    modern = modern_spelling(config)
    on = [name for name in PRECISION_OF if section(modern, name).get("enabled") is True]
    return PRECISION_OF[on[0]] if len(on) == 1 else None


def batch_of(config: Mapping[str, Any], values: TrainerValues) -> BatchSizes:
    """Return the sizes of a batch that a config says, and for the others those of the Trainer."""

    def size(key: str, otherwise: int | None) -> int | None:
        written = config.get(key)
        return written if is_whole(written) and written > 0 else otherwise

    return BatchSizes(
        whole=size("train_batch_size", None),
        micro=size("train_micro_batch_size_per_gpu", values.batch_size),
        accumulation=size("gradient_accumulation_steps", values.accumulate_grad_batches),
        ranks=values.world_size,
    )


def check_against_trainer(config: Mapping[str, Any], values: TrainerValues, faults: Faults) -> None:
    """Add an error for each thing that the config and the Trainer say differently, with both values."""
    # ``"auto"`` agrees with everything.
    config = modern_spelling(config)
    _check_precision(config, values.precision, faults)
    _check_clipping(config, values, faults)
    if _check_sizes(config, faults):
        for key, given, name in (
            (
                "gradient_accumulation_steps",
                values.accumulate_grad_batches,
                "accumulate_grad_batches={} of the Trainer",
            ),
            ("train_micro_batch_size_per_gpu", values.batch_size, "batch_size={} of the training loader"),
        ):
            written = config.get(key)
            if is_given(written) and given is not None and written != given:
                _add_clash(key, written, name.format(given), faults)
        _check_whole_batch(batch_of(config, values), faults)


def _check_precision(config: Mapping[str, Any], precision: str | None, faults: Faults) -> None:
    on = {name: section(config, name).get("enabled") for name in PRECISION_OF}
    for name, enabled in on.items():
        if is_given(enabled):
            faults.flag(f"{name}.enabled", enabled)
    if on["fp16"] is True and on["bf16"] is True:
        faults.add(
            "fp16.enabled=True and bf16.enabled=True: expected at most one of the two; remove one section."
        )
        return
    if precision is None or not faults.choice("precision", precision, list(PRECISIONS)):
        return
    wanted = PRECISIONS[precision]
    for name, enabled in on.items():
        if is_given(enabled) and enabled is not (name == wanted):
            _add_clash(f"{name}.enabled", enabled, f"precision={precision!r} of the Trainer", faults)
    if wanted is not None and section(config, "torch_autocast").get("enabled") is True:
        faults.add(
            f"torch_autocast.enabled=True in the config and precision={precision!r} of the Trainer: expected one of the"
            " two, as both lower the precision. Remove torch_autocast, or write precision='32-true'."
        )


def _check_clipping(config: Mapping[str, Any], values: TrainerValues, faults: Faults) -> None:
    written, given = config.get("gradient_clipping"), values.gradient_clip_val
    if values.gradient_clip_algorithm == "value":
        faults.add(
            "gradient_clip_algorithm='value': expected 'norm' or None, as DeepSpeed clips gradients by their norm"
            " only."
        )
    if not is_given(written):
        return
    is_norm = faults.number("gradient_clipping", written, what="a norm", least=0, such_as=1.0)
    if is_norm and given is not None and written != given:
        _add_clash("gradient_clipping", written, f"gradient_clip_val={given!r} of the Trainer", faults)


def _check_sizes(config: Mapping[str, Any], faults: Faults) -> bool:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    found = [
        faults.whole(key, config[key], what="a whole number") for key in keys if is_given(config.get(key))
    ]
    return all(found)


def _check_whole_batch(batch: BatchSizes, faults: Faults) -> None:
    if batch.whole is None or batch.ranks is None:
        return
    micro, accumulation = batch.micro or 1, batch.accumulation or 1
    product = f"train_micro_batch_size_per_gpu={batch.micro} x " if batch.micro else ""
    product += f"gradient_accumulation_steps={batch.accumulation} x " if batch.accumulation else ""
    product += f"{batch.ranks} {'rank' if batch.ranks == 1 else 'ranks'}"
    least = micro * accumulation * batch.ranks
    if batch.micro and batch.accumulation:
        if batch.whole != least:
            faults.add(
                f"train_batch_size={batch.whole}: expected {least}, which is {product}. Leave train_batch_size out, or"
                " write 'auto'."
            )
    elif batch.whole % least:
        faults.add(f"train_batch_size={batch.whole}: expected a multiple of {least}, which is {product}.")


def _add_clash(key: str, written: object, other: str, faults: Faults) -> None:
    faults.add(
        f"{key}={written!r} in the config and {other}: expected the same in both. Set {key} to 'auto', or remove it"
        " from the config, to use the other value."
    )


# -- What the Trainer under construction was given, before anything of a run is known --


def values_given() -> TrainerValues:
    """Return what the Trainer under construction was given; ``None`` for what it was not."""
    # An accumulation of 1, the default, counts as not given: a program such as ours gives the Trainer all its
    # defaults.
    accumulation = given_to_trainer("accumulate_grad_batches")
    return TrainerValues(
        precision=requested_precision(),
        accumulate_grad_batches=None if accumulation == 1 else accumulation,
        gradient_clip_val=given_to_trainer("gradient_clip_val"),
        gradient_clip_algorithm=given_to_trainer("gradient_clip_algorithm"),
    )


def device_type_given() -> str | None:
    """Return the type of the devices that DeepSpeed is to be imported for, where that is known."""
    accelerator = given_to_trainer("accelerator")
    if accelerator == "cpu" or not torch.accelerator.is_available():
        return "cpu"
    return "cuda" if accelerator in ("gpu", "cuda") and torch.cuda.is_available() else None


def check_devices(devices: Sequence[torch.device], faults: Faults) -> None:
    """Note GPUs that DeepSpeed would take for others."""
    indices = [device.index for device in devices if device.type == "cuda"]
    faults.check(
        indices == list(range(len(indices))),
        "devices",
        indices,
        "the first GPUs in their order, since DeepSpeed takes the local rank for the index of the GPU: leave out"
        " those that are not to be used with CUDA_VISIBLE_DEVICES",
    )


# -- What DeepSpeed's configuration needs to know of a run that begins --


def run_values(
    trainer: Any, config: Mapping[str, Any], *, precision: str, world_size: int, accumulation: int | None
) -> TrainerValues:
    """Return the values of a Trainer whose fit begins, but for those that depend on the accumulation."""
    # The loader is asked only where the configuration needs it, since that calls the user's hooks.
    sizes = {"train_micro_batch_size_per_gpu", "train_batch_size"}
    return TrainerValues(
        precision=precision,
        accumulate_grad_batches=accumulation,
        gradient_clip_val=trainer.gradient_clip_val,
        gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        batch_size=_batch_size(trainer) if sizes & config.keys() else None,
        world_size=world_size,
        hidden_size=_hidden_size(trainer.lightning_module),
    )


def total_steps(trainer: Any) -> int | None:
    """Return the optimizer steps of a fit by the Trainer's accumulation; ``None`` where nobody knows."""
    steps = trainer.estimated_stepping_batches  # makes the loaders, on all ranks together
    return int(steps) if steps != float("inf") and steps > 0 else None


def _batch_size(trainer: Any) -> int | None:
    """Return the size of the batches of the training loader, if it has one loader and says so."""
    source = data_source(trainer.fit_loop)
    if not source.is_defined():
        return None
    loader = source.dataloader()
    sampler = getattr(loader, "batch_sampler", None)
    size = getattr(sampler, "batch_size", None) or getattr(loader, "batch_size", None)
    return size if isinstance(size, int) else None


def _hidden_size(module: Any) -> int | None:
    """Return the hidden size that a model of Transformers inside the module states, if there is one."""
    for one in module.modules():
        config = getattr(one, "config", None)
        for holder in (config, getattr(config, "text_config", None)):
            sizes = getattr(holder, "hidden_sizes", None)
            size = getattr(holder, "hidden_size", None) or (max(sizes) if sizes else None)
            if isinstance(size, int):
                return size
    return None
