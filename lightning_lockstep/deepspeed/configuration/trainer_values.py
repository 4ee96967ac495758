"""The config of DeepSpeed and the Trainer say the same: what contradicts is a fault, what is open is filled in.

Both know the precision, the accumulation, the clipping and the batch size. Lightning's own strategy lets the config
win silently in some of these, and the Trainer in others; DeepSpeed's defaults win where neither says anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_lockstep._settings import Faults
from lightning_lockstep.deepspeed.configuration.batch_sizes import BatchSizes, batch_sizes
from lightning_lockstep.deepspeed.configuration.reading import is_given, modern_spelling, section

__all__ = [
    "PRECISIONS",
    "PRECISION_OF",
    "TrainerValues",
    "batch_of",
    "check_against_trainer",
    "precision_of",
]

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
    """What the Trainer, the model and the loader say that a config of DeepSpeed says too.

    ``None`` is a value that is not known, or that the user has not given.
    """

    precision: str | None = None  # Lightning's name, such as bf16-mixed
    accumulate_grad_batches: int | None = None  # batches for one step of the optimizer
    gradient_clip_val: float | None = None  # largest norm of the gradients; 0: no clipping
    gradient_clip_algorithm: str | None = None  # norm or value
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
    return batch_sizes(
        config, micro=values.batch_size, accumulation=values.accumulate_grad_batches, ranks=values.world_size
    )


def check_against_trainer(config: Mapping[str, Any], values: TrainerValues, faults: Faults) -> None:
    """Add a fault for each thing that the config and the Trainer say differently, with both values.

    ``"auto"`` agrees with everything.
    """
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
