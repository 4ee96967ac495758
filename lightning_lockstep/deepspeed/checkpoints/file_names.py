"""How DeepSpeed names the files of a checkpoint, which of them belong to it, and which are missing."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_lockstep._settings import is_whole
from lightning_lockstep._text import listed
from lightning_lockstep.distributed.checkpoint_folder import BEFORE
from lightning_lockstep.errors import ConfigurationError

_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<part>\d+)_model_states\.pt")
_OPTIMIZER_FILE = re.compile(
    r"(?P<prefix>(?:[a-z]+\d+_)?)zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<part>\d+)_optim_states\.pt"
)
#: How the name of a plain checkpoint ends that was made of a folder.
CONSOLIDATED = ".consolidated.ckpt"
_MOST_NAMED = 20  # missing files in one message


def is_state_file(name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in (_MODEL_FILE, _OPTIMIZER_FILE))


def consolidated_name(folder: Path) -> Path:
    """Return the file next to a checkpoint folder that its weights go to."""
    return folder.with_name(folder.name.removesuffix(BEFORE).removesuffix(".ckpt") + CONSOLIDATED)


@dataclass(frozen=True)
class CheckpointFolder:
    """The files of one checkpoint, which may lie in the folders of several nodes."""

    path: Path  # that messages name
    files: Mapping[str, Path]  # where each is, by its name

    @property
    def has_experts(self) -> bool:
        return any("expert" in name or name.startswith("expp_rank_") for name in self.files)

    def model_file(self) -> Path:
        """Return one file of model states; each says how many ranks have written the checkpoint."""
        models = self._matches(_MODEL_FILE)
        if not models:
            raise ConfigurationError(
                f"{self.path}: no file of model states is there, such as mp_rank_00_model_states.pt. Rank 0 writes one:"
                " name the folders of all nodes, or bring them together in one."
            )
        return self.files[min(match.string for match in models)]

    def check_kind(self) -> None:
        """Refuse a checkpoint that is split otherwise than over data-parallel ranks."""
        matches = (*self._matches(_MODEL_FILE), *self._matches(_OPTIMIZER_FILE))
        if self.has_experts or any(int(match["part"]) for match in matches):
            raise ConfigurationError(
                f"{self.path}: is of a model with experts of DeepSpeed, or split by tensor or pipeline parallelism,"
                " which is not supported. Expected one of plain data parallelism, of ZeRO stage 0, 1, 2 or 3."
            )

    def expected_names(self, model_states: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Return the names of the files that the ranks have written, of model and of optimizer states."""
        ranks = model_states.get("dp_world_size")
        if not is_whole(ranks) or ranks < 1 or not isinstance(model_states.get("module"), dict):
            raise ConfigurationError(
                f"{self.path}: its model states lack weights or the number of ranks: expected those of DeepSpeed."
            )
        prefix = self._only({match["rank"] and "zero_pp_rank_" for match in self._matches(_MODEL_FILE)})
        starts = [f"{prefix}{rank}_" for rank in range(ranks)] if prefix else [""]
        model = [f"{start}mp_rank_00_model_states.pt" for start in starts]
        if model_states.get("param_shapes") is None:  # in stage 0 the optimizer is with the model
            return model, []
        start = self._only({match["prefix"] for match in self._matches(_OPTIMIZER_FILE)}) or ""
        return model, [f"{start}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(ranks)]

    def check_complete(self, model: Sequence[str], optimizer: Sequence[str]) -> None:
        ranks = max(len(model), len(optimizer))
        missing = [name for name in (*model, *optimizer) if name not in self.files]
        if not missing:
            return
        lacking = {rank for group in (model, optimizer) for rank, name in enumerate(group) if name in missing}
        raise ConfigurationError(
            f"{self.path}: {ranks - len(lacking)} of {ranks} ranks' files are there; missing:"
            f" {listed(missing, _MOST_NAMED)}. Each node writes those of its ranks: name the folders of all nodes,"
            " as in `lockstep-consolidate FOLDER_OF_NODE_0 FOLDER_OF_NODE_1 --output FILE`, or bring them together in"
            " one."
        )

    def _only(self, prefixes: Collection[str | None]) -> str | None:
        if len(prefixes) > 1:
            raise ConfigurationError(
                f"{self.path}: holds files of several runs, some of which begin with"
                f" {' and some with '.join(sorted(repr(prefix or 'mp_rank_') for prefix in prefixes))}."
                " Remove those of the older ones."
            )
        return next(iter(prefixes), None)

    def _matches(self, pattern: re.Pattern[str]) -> list[re.Match[str]]:
        return [match for name in self.files if (match := pattern.fullmatch(name)) is not None]
