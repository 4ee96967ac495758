"""The state of the optimizer, divided among another number of ranks.

DeepSpeed's own universal checkpoints would do it too, by a second copy on the disk. Those of 0.19.8 are for Adam alone,
leave out buffers and frozen parameters, give every group the options of the first one in stage 3, mix parameters up
under ``round_robin_gradients``, and do not cross from a stage to another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_lockstep._text import listed
from lightning_lockstep.deepspeed.checkpoints.consolidation import master_vectors, put_together
from lightning_lockstep.deepspeed.checkpoints.files import Checkpoint
from lightning_lockstep.distributed.plain_data import Inert, is_plain
from lightning_lockstep.errors import ConfigurationError

_MOST_NAMED = 5  # parameters in one message
_MASTERS = "float32 weights"


class SavedOptimizer:
    """What the optimizers of all ranks of a checkpoint of stage 1, 2 or 3 keep, each value once; nothing is copied."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self._folder = checkpoint, checkpoint.folder
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
        # `odd`: why values cannot be told apart, or nothing.
        kinds, self.odd = _kinds(first, vectors[0], paddings)
        groups = _torch_state(states[0])["param_groups"]
        shapes = checkpoint.model_states[0]["param_shapes"]
        # Float32 weights, and one for each of their values, such as exp_avg: by the names of the parameters.
        self._values = {_MASTERS: put_together(checkpoint, vectors)}
        for key in (name for name, is_moment in kinds.items() if is_moment):
            of_ranks = [[entry[key] for entry in entries] for entries in entries_of_ranks]
            self._values[key] = put_together(checkpoint, of_ranks)
        # Of each group: what is kept once, such as step; the options, such as lr; the names of the parameters.
        self._shared = [
            {name: first[ids[0]][name] for name in kinds if ids and not kinds[name]}
            for ids in (group["params"] for group in groups)
        ]
        self._options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        self._names = [[name for number in group["params"] for name in shapes[number]] for group in groups]
        # Of DeepSpeed's own optimizer.
        self._overflow = bool(states[0].get("overflow", False))
        scaler = states[0].get("loss_scaler")
        kept = scaler.state if isinstance(scaler, Inert) and isinstance(scaler.state, Mapping) else {}
        self._scaler = {name: value for name, value in kept.items() if is_plain(value)}

    def check(self, adapter: Any) -> None:
        """Raise if the checkpoint is of another model or of another optimizer than an engine has."""
        names = adapter.engine.param_names
        here = {
            names[parameter]: f"{tuple(getattr(parameter, 'ds_shape', parameter.shape))} in group {number}"
            for number, group in enumerate(adapter.parameter_groups())
            for parameter in group
        }
        saved = {
            name: f"{tuple(self._values[_MASTERS][name].shape)} in group {number}"
            for number, group in enumerate(self._names)
            for name in group
        }
        others = [
            f"{name} ({saved.get(name, 'nothing')} of the checkpoint, {here.get(name, 'nothing')} of this run)"
            for name in sorted(here.keys() | saved.keys())
            if here.get(name) != saved.get(name)
        ]
        if others:
            raise ConfigurationError(
                f"{self._folder}: is a checkpoint of another model or with other groups of parameters in the"
                f" optimizer: {listed(others, _MOST_NAMED)}. Expected the same parameters in each group."
            )
        check_options(self._folder, self._options, adapter.torch_optimizer)

    def write_to(self, adapter: Any, rank: int) -> None:
        """Write this rank's part into an engine; nothing else of what is in files is in memory."""
        names = adapter.engine.param_names
        entries: list[dict[str, Any]] = []
        options = []
        for vectors, shared, saved in zip(adapter.pieces(rank), self._shared, self._options, strict=True):
            ids = range(len(entries), len(entries) + len(vectors))
            options.append({**saved, "params": list(ids)})
            for vector, pieces in vectors:
                made = {key: torch.zeros_like(vector.detach()) for key in self._values if key != _MASTERS}
                entries.append({**deepcopy(shared), **made})
                for key, into in {_MASTERS: vector.detach(), **made}.items():
                    for parameter, start, place, length in pieces:
                        values = self._values[key][names[parameter]]
                        values.copy_to(into[place : place + length], start)
        state = {number: entry for number, entry in enumerate(entries) if entry}
        adapter.load_state({"state": state, "param_groups": options})
        adapter.set_flags(self._overflow, self._scaler)


def _kinds(
    entries: Sequence[Mapping[str, Any]], vectors: Sequence[Tensor], paddings: Sequence[int]
) -> tuple[dict[str, bool], str]:
    """Return whether what an optimizer keeps is one number for each value, or else one for all; or why neither."""
    kinds: dict[str, bool] = {}
    for entry, vector, padding in zip(entries, vectors, paddings, strict=True):
        lengths = (vector.numel(), vector.numel() + padding)
        for name, value in entry.items():
            is_moment = isinstance(value, Tensor) and value.dim() > 0 and value.numel() in lengths
            is_shared = is_plain(value) and (not isinstance(value, Tensor) or value.numel() == 1)
            if not (is_moment or is_shared) or kinds.setdefault(name, is_moment) != is_moment:
                size = math.prod(value.shape) if isinstance(value, Tensor) else type(value).__name__
                why = f"the optimizer keeps {name!r} ({size}), neither one number nor one for each weight"
                return {}, why
    if any(entry.keys() != kinds.keys() for entry in entries):
        return {}, "the optimizer keeps other values for some of its groups of parameters than for others"
    return kinds, ""


def check_options(folder: Path, saved: Sequence[Mapping[str, Any]], optimizer: Any) -> None:
    kind, known = type(optimizer).__name__, set(optimizer.defaults)
    for group, of_run in zip(saved, optimizer.param_groups, strict=False):
        missing, unknown = known - set(group), set(group) - set(of_run) - {"step"}
        # An older release of the same optimizer lacks options, and a scheduler leaves some behind.
        if missing and unknown:
            raise ConfigurationError(
                f"{folder}: was written with another optimizer than this run's {kind}: its options are"
                f" {listed(sorted(unknown), _MOST_NAMED)} and not {listed(sorted(missing), _MOST_NAMED)}. Expected the"
                " same optimizer, or a plain checkpoint of the weights alone, as `lockstep-consolidate` writes it."
            )


def _torch_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of torch's optimizer inside that of DeepSpeed's."""
    inner: Mapping[str, Any] = state.get("optimizer_state_dict", state.get("base_optimizer_state"))
    return inner


def _entries(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what torch's optimizer keeps for each of its vectors, which are numbers there."""
    inner = _torch_state(state)
    total = sum(len(group["params"]) for group in inner["param_groups"])
    return [inner["state"].get(number, {}) for number in range(total)]
