"""A checkpoint folder is whole or not there, also when a rank is lost while it is written."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_lockstep.deepspeed.checkpoints.consolidation import put_together
from lightning_lockstep.deepspeed.checkpoints.file_names import consolidated_name
from lightning_lockstep.deepspeed.checkpoints.files import Checkpoint
from lightning_lockstep.distributed.checkpoint_folder import whole_folder
from lightning_lockstep.errors import ConfigurationError


class Ranks:
    """Ranks as threads, with what they send to each other."""

    def __init__(self, size: int) -> None:
        self._meeting, self._sent = threading.Barrier(size, timeout=20), [None] * size

    def meet(self) -> None:
        self._meeting.wait()

    def abort(self) -> None:
        self._meeting.abort()

    def gather_of(self, rank: int) -> Callable[[Any], list[Any]]:
        def gather(value: Any) -> list[Any]:
            self._sent[rank] = value
            self.meet()
            return list(self._sent)

        return gather


def write(
    target: Path,
    rank: int,
    ranks: Ranks,
    *,
    node: Path | None = None,
    fails: bool = False,
) -> None:
    """What a rank does; ranks with a ``node`` of their own see another disk."""
    seen = target if node is None else node / target.name
    strategy = SimpleNamespace(global_rank=rank, local_rank=0, barrier=ranks.meet, check_failure=lambda: None)
    gather, on_each_node = ranks.gather_of(rank), node is not None
    with whole_folder(strategy, str(seen), gather, on_each_node=on_each_node) as draft:
        Path(draft).mkdir(exist_ok=True)
        (Path(draft) / f"of_{rank}").write_text("new")
        if fails:
            raise OSError("no space left on device")


def on_ranks(
    size: int, function: Callable[[int, Ranks], None], *, aborts: bool = True
) -> list[BaseException]:
    ranks = Ranks(size)
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            function(rank, ranks)
        except BaseException as error:
            if aborts:
                ranks.abort()  # as a failure ends the waits of the others
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("before", ["nothing", "folder", "file"])
def test_a_new_folder_takes_the_place_of_the_old_one(before: str, tmp_path: Path) -> None:
    target = tmp_path / "last.ckpt"
    if before == "folder":
        target.mkdir()
        (target / "old").write_text("old")
    if before == "file":
        target.write_text("a plain checkpoint")
    (tmp_path / "last.ckpt.writing").mkdir()
    (tmp_path / "last.ckpt.writing" / "of a killed run").write_text("half")
    assert on_ranks(3, lambda rank, ranks: write(target, rank, ranks)) == []
    assert names(tmp_path) == ["last.ckpt"]
    assert names(target) == ["of_0", "of_1", "of_2"]


def test_a_rank_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "last.ckpt"
    target.mkdir()
    (target / "old").write_text("old")
    errors = on_ranks(2, lambda rank, ranks: write(target, rank, ranks, fails=rank == 1))
    assert {type(error) for error in errors} == {OSError, threading.BrokenBarrierError}
    assert names(target) == ["old"]


def test_each_node_with_a_disk_of_its_own_gets_its_part(tmp_path: Path) -> None:
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for node in nodes:
        node.mkdir()
    target = nodes[0] / "last.ckpt"
    assert on_ranks(2, lambda rank, ranks: write(target, rank, ranks, node=nodes[rank])) == []
    assert [names(node / "last.ckpt") for node in nodes] == [["of_0"], ["of_1"]]
    assert [names(node) for node in nodes] == [["last.ckpt"]] * 2


def test_a_node_that_cannot_write_is_an_error_of_all(tmp_path: Path) -> None:
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    nodes[0].mkdir()
    nodes[1].write_text("a file")
    target = nodes[0] / "last.ckpt"
    errors = on_ranks(2, lambda rank, ranks: write(target, rank, ranks, node=nodes[rank]), aborts=False)
    assert len(errors) == 2 and len({str(error) for error in errors}) == 1
    assert isinstance(errors[0], OSError) and "node1" in str(errors[0])


def test_an_address_is_written_to_directly() -> None:
    with whole_folder(None, "s3://bucket/last.ckpt", lambda value: [value]) as draft:
        assert draft == "s3://bucket/last.ckpt"


def test_the_name_of_a_consolidated_file() -> None:
    assert consolidated_name(Path("checkpoints/last.ckpt")) == Path("checkpoints/last.consolidated.ckpt")


@pytest.mark.parametrize("held", [3, 6])
@pytest.mark.parametrize("state", [{}, {"fp32_flat_groups": []}], ids=["stage 2", "stage 3"])
def test_a_parameter_of_which_values_lack_is_an_error_and_never_zeros(
    held: int, state: dict[str, Any]
) -> None:
    checkpoint = Checkpoint(Path("last.ckpt"), [{"param_shapes": [{"weight": (2, 2)}]}], [state])
    with pytest.raises(ConfigurationError, match=rf"hold {held} values of .*, expected 4\."):
        put_together(checkpoint, [[torch.ones(held)]])
