"""A checkpoint folder is whole or not there, also when a rank is lost while it is written."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_lockstep.deepspeed.checkpoints.saving import consolidated_name, whole_folder


def write(
    target: Path, rank: int, meet: Callable[[], object], *, node: Path | None = None, fails: bool = False
) -> None:
    """What a rank does; ranks with a ``node`` of their own see another disk."""
    seen = target if node is None else node / target.name
    with whole_folder(
        str(seen), is_first=rank == 0, is_first_of_node=rank == 0 or node is not None, meet=meet
    ) as draft:
        Path(draft).mkdir(exist_ok=True)
        (Path(draft) / f"of_{rank}").write_text("new")
        if fails:
            raise OSError("no space left on device")


def on_ranks(size: int, function: Callable[[int, Callable[[], object]], None]) -> list[BaseException]:
    meeting, errors = threading.Barrier(size, timeout=20), []

    def run(rank: int) -> None:
        try:
            function(rank, meeting.wait)
        except BaseException as error:
            meeting.abort()  # as a failure ends the waits of the others
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
    assert on_ranks(3, lambda rank, meet: write(target, rank, meet)) == []
    assert names(tmp_path) == ["last.ckpt"]
    assert names(target) == ["of_0", "of_1", "of_2"]


def test_a_rank_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "last.ckpt"
    target.mkdir()
    (target / "old").write_text("old")
    errors = on_ranks(2, lambda rank, meet: write(target, rank, meet, fails=rank == 1))
    assert {type(error) for error in errors} == {OSError, threading.BrokenBarrierError}
    assert names(target) == ["old"]


def test_each_node_with_a_disk_of_its_own_gets_its_part(tmp_path: Path) -> None:
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for node in nodes:
        node.mkdir()
    target = nodes[0] / "last.ckpt"
    assert on_ranks(2, lambda rank, meet: write(target, rank, meet, node=nodes[rank])) == []
    assert [names(node / "last.ckpt") for node in nodes] == [["of_0"], ["of_1"]]
    assert [names(node) for node in nodes] == [["last.ckpt"]] * 2


def test_an_address_is_written_to_directly() -> None:
    with whole_folder(
        "s3://bucket/last.ckpt", is_first=True, is_first_of_node=True, meet=lambda: None
    ) as draft:
        assert draft == "s3://bucket/last.ckpt"


def test_the_name_of_a_consolidated_file() -> None:
    assert consolidated_name(Path("checkpoints/last.ckpt")) == Path("checkpoints/last.consolidated.ckpt")
