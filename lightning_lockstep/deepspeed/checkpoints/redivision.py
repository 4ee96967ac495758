"""The state of the optimizer, divided among another number of ranks.

DeepSpeed's own universal checkpoints would do it too, by a second copy on the disk. Those of 0.19.8 are for Adam alone,
leave out buffers and frozen parameters, give every group the options of the first one in stage 3, mix parameters up
under ``round_robin_gradients``, and do not cross from a stage to another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_lockstep._text import listed
from lightning_lockstep.deepspeed.checkpoints.consolidation import master_vectors, put_together
from lightning_lockstep.deepspeed.checkpoints.files import Checkpoint
from lightning_lockstep.distributed.plain_data import Inert, is_plain
from lightning_lockstep.errors import ConfigurationError

_MOST_NAMED = 5  # parameters in one message


class SavedOptimizer:
    """What the optimizers of all ranks of a checkpoint of stage 1, 2 or 3 keep, each value once; nothing is copied."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._folder = checkpoint.folder
        if not checkpoint.optimizer_states:
            raise ConfigurationError(
                f"{self._folder}: holds no optimizer state that is divided among ranks: expected the checkpoint of a"
                " fit in stage 1, 2 or 3, not of an evaluation. Go on with its weights alone, which"
                " `lockstep-consolidate` writes."
            )
        states, vectors = checkpoint.optimizer_states, master_vectors(checkpoint)
        entries_of_ranks = [_entries(state) for state in states]
        first = entries_of_ranks[0]
        # How many values follow those of the parameters in each vector; the float32 copies are saved without.
        paddings = states[0].get("group_paddings") or [0] * len(vectors[0])
        kinds = self._kinds(first, vectors[0], paddings)
        groups = _torch_state(states[0])["param_groups"]
        shapes = checkpoint.model_states[0]["param_shapes"]
        # Float32 weights, by the names of the parameters.
        self._masters = put_together(checkpoint, vectors)
        # One for each value, such as exp_avg: by its key, by the names of the parameters.
        self._moments = {
            name: put_together(
                checkpoint, [[entry[name] for entry in entries] for entries in entries_of_ranks]
            )
            for name, is_moment in kinds.items()
            if is_moment
        }
        # Of each group: what is kept once, such as step; the options, such as lr; the names of the parameters.
        self._shared = [
            {name: first[ids[0]][name] for name in kinds if ids and not kinds[name] and first[ids[0]]}
            for ids in (group["params"] for group in groups)
        ]
        self._options = [
            {name: value for name, value in group.items() if name != "params"} for group in groups
        ]
        self._names = [{name for number in group["params"] for name in shapes[number]} for group in groups]
        # Of DeepSpeed's own optimizer.
        self._overflow = bool(states[0].get("overflow", False))
        scaler = states[0].get("loss_scaler")
        kept = scaler.state if isinstance(scaler, Inert) and isinstance(scaler.state, Mapping) else {}
        self._scaler = {name: value for name, value in kept.items() if is_plain(value)}

    def _kinds(
        self, entries: Sequence[Mapping[str, Any]], vectors: Sequence[Tensor], paddings: Sequence[int]
    ) -> dict[str, bool]:
        """Return whether what an optimizer keeps is one number for each value, or else one for all of them."""
        kinds: dict[str, bool] = {}
        for entry, vector, padding in zip(entries, vectors, paddings, strict=True):
            lengths = (vector.numel(), vector.numel() + padding)
            for name, value in entry.items():
                is_moment = isinstance(value, Tensor) and value.dim() > 0 and value.numel() in lengths
                is_shared = is_plain(value) and (not isinstance(value, Tensor) or value.numel() == 1)
                if not (is_moment or is_shared) or kinds.setdefault(name, is_moment) != is_moment:
                    size = math.prod(value.shape) if isinstance(value, Tensor) else type(value).__name__
                    raise ConfigurationError(
                        f"{self._folder}: its optimizer keeps {name!r} ({size}), which is neither one number nor one"
                        " for each weight: another number of ranks cannot go on with it. Resume on as many ranks as"
                        " wrote it, or with the weights alone, as `lockstep-consolidate` writes them."
                    )
        if any(bool(entry) != bool(entries[0]) for entry in entries):
            raise ConfigurationError(
                f"{self._folder}: its optimizer has made steps with some of its groups and none with others: resume on"
                " as many ranks as wrote it."
            )
        return kinds

    def check(self, adapter: Any) -> None:
        """Raise if the checkpoint is of another model or of another optimizer than an engine has."""
        if adapter.engine.zero_nvme_offload_optimizer():
            raise ConfigurationError(
                f"{self._folder}: was written by another number of ranks or in another stage, and this run keeps the"
                " state of the optimizer on NVMe, where it cannot be redivided. Resume with offload_optimizer='cpu' or"
                " 'none'."
            )
        self._check_parameters(adapter)
        self._check_groups(adapter)

    def _check_parameters(self, adapter: Any) -> None:
        saved = {name: tuple(values.shape) for name, values in self._masters.items()}
        here = {
            name: tuple(getattr(parameter, "ds_shape", parameter.shape))
            for parameter, name in _trained(adapter).items()
        }
        others = [
            f"{name} ({saved.get(name, 'nothing')} in the checkpoint, {here.get(name, 'nothing')} in this run)"
            for name in sorted(here.keys() | saved.keys())
            if here.get(name) != saved.get(name)
        ]
        if others:
            raise ConfigurationError(
                f"{self._folder}: is a checkpoint of another model, because trained parameters differ in shape:"
                f" {listed(others, _MOST_NAMED)}. Expected the model that wrote it, with the same parameters trained."
            )

    def _check_groups(self, adapter: Any) -> None:
        optimizer, known_names = adapter.optimizer.optimizer, adapter.engine.param_names
        kind = type(optimizer).__name__
        here = [{known_names[parameter] for parameter in group} for group in adapter.parameter_groups()]
        if here != self._names:
            moved = sorted(set().union(*(a ^ b for a, b in zip(here, self._names, strict=False))))
            raise ConfigurationError(
                f"{self._folder}: its optimizer has {len(self._names)} groups of parameters, and this run's {kind} has"
                f" {len(here)}, with other parameters ({listed(moved, _MOST_NAMED)}): expected the same ones in each"
                " group."
            )
        known = set(optimizer.defaults)
        for saved, group in zip(self._options, optimizer.param_groups, strict=True):
            missing, unknown = known - set(saved), set(saved) - set(group) - {"step"}
            # An older release of the same optimizer lacks options, and a scheduler leaves some behind.
            if missing and unknown:
                raise ConfigurationError(
                    f"{self._folder}: was written with another optimizer than this run's {kind}: its options are"
                    f" {listed(sorted(unknown), _MOST_NAMED)} and not {listed(sorted(missing), _MOST_NAMED)}. Expected"
                    " the same optimizer, or a plain checkpoint of the weights alone, as `lockstep-consolidate` writes"
                    " it."
                )

    def write_to(self, adapter: Any, rank: int) -> None:
        """Write this rank's part into an engine; of what is in files one parameter at a time is in memory."""
        adapter.load_state(self._state_of_torch(adapter.vectors()))
        for parameter, name in _trained(adapter).items():
            start, length = adapter.range_of(parameter, rank)
            if length:
                adapter.write(parameter, None, self._masters[name].part(start, length))
                for key, moments in self._moments.items():
                    adapter.write(parameter, key, moments[name].part(start, length))
        adapter.set_flags(self._overflow, self._scaler)

    def _state_of_torch(self, groups: Sequence[Sequence[Tensor]]) -> dict[str, Any]:
        """Return options and shared values as torch's optimizer loads them, and empty vectors for the rest."""
        entries: dict[int, dict[str, Any]] = {}
        options = []
        for vectors, shared, saved in zip(groups, self._shared, self._options, strict=True):
            ids = range(len(entries), len(entries) + len(vectors))
            options.append({**saved, "params": list(ids)})
            for number, vector in zip(ids, vectors, strict=True):
                entries[number] = {key: _copy(value) for key, value in shared.items()}
                entries[number] |= {key: torch.zeros_like(vector) for key in self._moments}
        return {
            "state": {number: entry for number, entry in entries.items() if entry},
            "param_groups": options,
        }


def _torch_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of torch's optimizer inside of that of DeepSpeed's."""
    inner = state.get("optimizer_state_dict", state.get("base_optimizer_state"))
    if not isinstance(inner, Mapping):
        raise ConfigurationError(
            "The checkpoint was written with zero_optimization.elastic_checkpoint, whose files lack the options of the"
            " optimizer: expected one without it."
        )
    return inner


def _entries(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what torch's optimizer keeps for each of its vectors, which are numbers there."""
    inner = _torch_state(state)
    total = sum(len(group["params"]) for group in inner["param_groups"])
    return [inner["state"].get(number, {}) for number in range(total)]


def _trained(adapter: Any) -> dict[Any, str]:
    """Return the names of the parameters that the engine's optimizer has."""
    names = adapter.engine.param_names
    return {parameter: names[parameter] for group in adapter.parameter_groups() for parameter in group}


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
