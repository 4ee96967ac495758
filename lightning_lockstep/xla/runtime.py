"""torch-xla in this process: whether it is there, its devices, ranks that are forked."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from typing import Any

import torch

from lightning_lockstep.errors import ConfigurationError, LaunchError, MissingExtraError

# -- What is known of torch-xla and its devices without starting any --

# Variables of torch-xla 2.9 that change what float32 means for a whole process, and what to write instead.
_REFUSED = {
    "XLA_USE_BF16": "precision=bf16-true",
    "XLA_DOWNCAST_BF16": "precision=bf16-true and the strategy's downcast_bf16=True",
}
_NO = ("", "0", "false")


def check_torch_xla(needed_for: str) -> None:
    """Check that torch-xla is installed and not set to cast by itself; imports nothing."""
    # These variables change every float32 tensor of the process without its knowledge: metrics, logged means, counters.
    found = [name for name in _REFUSED if os.environ.get(name, "").lower() not in _NO]
    if found:
        texts = [f"{name}={os.environ[name]}: expected {_REFUSED[name]} instead." for name in found]
        raise ConfigurationError(
            "These variables turn every float32 tensor into 16 bits, also metrics and what is logged, and torch-xla"
            f" has deprecated them. Unset them. {' '.join(texts)}"
        )
    if importlib.util.find_spec("torch_xla") is None:
        raise MissingExtraError("torch_xla", extra="xla", needed_for=needed_for)


def has_devices() -> bool:
    extension = getattr(sys.modules.get("torch_xla"), "_XLAC", None)
    return extension is not None and bool(extension._xla_runtime_is_initialized())


def check_untouched() -> None:
    """Refuse to start ranks from a process that has the devices already: they could not use them."""
    if has_devices():
        raise LaunchError(
            "XLA was already used in this process, so the ranks that it starts could not use the devices: expected no"
            " call of torch_xla.device(), no tensor and no model on an XLA device, and no earlier job in it. Make the"
            " Trainer first and the tensors within its run; in a notebook restart the kernel, and move the model to the"
            " device inside the function that the ranks run. Start each job of a sweep as a separate program."
        )


def find_device_type() -> str:
    """Return the type of the devices that torch-xla has here or would choose: ``CPU`` or ``TPU``."""
    return os.environ.get("PJRT_DEVICE", "TPU" if has_libtpu() and num_tpu_chips() else "CPU").upper()


def has_libtpu() -> bool:
    """Return whether torch-xla finds, or has found, the library without which it does not see a TPU."""
    found = getattr(sys.modules.get("torch_xla"), "_found_libtpu", None)
    if found is not None:
        return bool(found)
    return "TPU_LIBRARY_PATH" in os.environ or importlib.util.find_spec("libtpu") is not None


def num_tpu_chips() -> int:
    return int(importlib.import_module("torch_xla._internal.tpu").num_available_chips())


def check_accelerator(is_tpu: bool) -> None:
    """Refuse to train on the CPU if the Trainer was to train on TPUs."""
    if is_tpu and find_device_type() == "CPU":
        raise ConfigurationError(
            "accelerator='tpu': expected a TPU, but torch-xla takes the CPU. If PJRT_DEVICE=CPU is set, unset it; if"
            " libtpu is missing, pip install 'torch-xla[tpu]==2.9.*'. Or give the Trainer accelerator='cpu' to train on"
            " virtual devices of the CPU."
        )


# -- XLA in ranks that are forked from one process --


def num_xla_ranks() -> int | None:
    """Return how many ranks torch-xla has devices for on this host, without initialising it."""
    # 0: XLA runs on the CPU with any number. ``None``: torch-xla is missing, or the TPU that it is to use.
    if importlib.util.find_spec("torch_xla") is None:
        return None
    if find_device_type() == "CPU":
        return 0
    if not has_libtpu() or not num_tpu_chips():
        return None
    return int(importlib.import_module("torch_xla._internal.tpu").num_local_processes())


def become_xla_rank(rank: int, world_size: int) -> None:  # of this host
    """Set for torch-xla, before it is used here, which rank this process is; on a TPU host its chip."""
    chips = num_xla_ranks()
    if chips is None:
        return
    if chips and world_size not in (1, chips):
        raise ConfigurationError(
            f"num_processes={world_size}: expected 1 or {chips}, one rank per chip of this TPU host."
        )
    os.environ.update(PJRT_LOCAL_PROCESS_RANK=str(rank), PJRT_LOCAL_PROCESS_COUNT=str(world_size))
    if chips and world_size > 1:
        importlib.import_module("torch_xla._internal.tpu").configure_topology(rank, world_size)


# -- torch-xla as it works in this process: devices, random numbers, compilations, pending work --


class XLARuntime:
    """What torch-xla, which is installed, offers here; made before the first tensor on a device."""

    def __init__(self, *, num_devices: int | None = None) -> None:  # None: what there is
        self.device_type = find_device_type()
        if self.device_type == "CPU":  # nothing else is there; torch-xla does the same, with a warning
            os.environ["PJRT_DEVICE"] = "CPU"
        self._num_devices = num_devices
        if num_devices is not None and self.device_type == "CPU" and not has_devices():
            os.environ.setdefault("CPU_NUM_DEVICES", str(num_devices))
        self.torch_xla = importlib.import_module("torch_xla")
        self.runtime = importlib.import_module("torch_xla.runtime")

    @property
    def num_devices(self) -> int:
        """How many devices there are, on all hosts."""
        return int(self.runtime.global_runtime_device_count())

    def be_process(self, local_rank: int, local_processes: int) -> None:
        """Take one device of this host, with its other processes, before the first tensor on a device."""
        if self.runtime.is_spmd():
            raise ConfigurationError(
                "This process has trained on all XLA devices as one (SPMD) before, which torch-xla cannot undo:"
                " expected a separate process for each device. Start another program, or use"
                " strategy='lockstep_xla_spmd'."
            )
        if local_processes == 1:
            self.module("_internal.pjrt").initialize_singleprocess()
            return
        if os.environ.get("PJRT_LOCAL_PROCESS_COUNT") != str(local_processes):
            check_untouched()
        self.module("_internal.pjrt").initialize_multiprocess(local_rank, local_processes)

    def place(self) -> tuple[int, int, int]:
        """Return this process's ordinal, how many devices compute together, and how many of them it has."""
        runtime = self.runtime
        return runtime.global_ordinal(), runtime.world_size(), runtime.addressable_device_count()

    def all_reduce(self, tensors: list[torch.Tensor], *, scale: float = 1.0) -> None:
        """Sum tensors over all devices, in place, and scale them. Ranks: all, together."""
        self.module("core.xla_model").all_reduce("sum", tensors, scale=scale)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all devices joined along the first dimension, by ordinal. Ranks: all, together."""
        return torch.as_tensor(self.module("core.xla_model").all_gather(tensor, dim=0))

    def use_spmd(self) -> None:
        """Let one process compute on all devices as if they were one, before the first tensor on a device."""
        if not self.runtime.is_spmd():
            self.runtime.use_spmd()
        processes = int(self.runtime.process_count())
        if processes > 1:
            raise ConfigurationError(
                f"torch-xla has {self.num_devices} devices in {processes} processes: expected the devices of one host,"
                " in one process, because each process would divide its own batches. Use strategy='lockstep_xla' on"
                " several hosts."
            )
        if self._num_devices not in (None, self.num_devices):
            raise ConfigurationError(
                f"devices={self._num_devices} was given to the Trainer, and torch-xla has {self.num_devices}"
                f" ({self.device_type}) in this process, which takes all of them: expected the same. Give"
                " devices='auto', or for another number on the CPU start another program without CPU_NUM_DEVICES."
            )

    def device(self) -> torch.device:
        return torch.device(self.torch_xla.device())

    def check_backward(self) -> None:
        """Check that autograd knows the devices: it counts them once, at the first backward of a process."""
        try:
            torch.autograd.backward(torch.zeros(1, device=self.device(), requires_grad=True).sum())
        except RuntimeError as error:
            if "device_ready_queues" not in str(error):
                raise
            raise ConfigurationError(
                "A backward ran in this process before torch-xla had its devices, but autograd counts devices at the"
                " first backward only: expected a process that begins with XLA. Run this in a separate process, or"
                " call torch_xla.runtime.global_runtime_device_count() before the first backward."
            ) from None

    def sync(self) -> None:
        """Compile what was called and is pending, if it is new, and begin to run it; on every process."""
        self.torch_xla.sync()

    def seed(self) -> int:
        """Return the state of the devices' random numbers, which this process keeps."""
        return int(self.module("core.xla_model").get_rng_state())

    def set_seed(self, seed: int) -> None:
        self.module("core.xla_model").set_rng_state(seed)

    def seed_devices(self) -> None:
        """Let the devices' random numbers follow from the state of torch's generator, which stays as is."""
        state = hashlib.blake2b(bytes(torch.get_rng_state().tolist()), digest_size=8).digest()
        self.set_seed(int.from_bytes(state, "little") >> 1)

    def module(self, name: str) -> Any:
        return importlib.import_module(f"torch_xla.{name}")


def compilations_so_far() -> tuple[int, float]:
    """Return how many graphs torch-xla has compiled in this process, and how long that took [s]."""
    metrics = importlib.import_module("torch_xla.debug.metrics")
    took = metrics.metric_data("CompileTime")  # how often, and how long in all [ns]
    return int(metrics.counter_value("UncachedCompile") or 0), took[1] / 1e9 if took else 0.0
