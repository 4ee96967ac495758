"""A checkpoint folder that ranks write together: on one disk, on one of each node, or an error of all.

Saves that are killed, and those of a rank without space: tests/ranks/strategies/test_fsdp_checkpoints.py.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.checkpoint_folder import whole_folder
from tests.harness import run_ranks


def write(target: Path, *, own_disk: bool = False) -> str:
    """Write a file of this rank; return the error, if there is one."""
    ranks = current_communicator()
    strategy = SimpleNamespace(global_rank=ranks.rank, local_rank=0, barrier=ranks.barrier, check_failure=lambda: None)
    try:
        with whole_folder(strategy, str(target), ranks.gather, on_each_node=own_disk) as draft:
            Path(draft).mkdir(exist_ok=True)
            Path(draft, f"of_{ranks.rank}").touch()
    except OSError as error:
        return str(error)
    return ""


def write_all(folder: Path) -> list[str]:
    own = folder / f"node{current_communicator().rank}"
    said = [write(folder / before / "last.ckpt") for before in ("nothing", "folder", "file")]
    said.append(write(own / "last.ckpt", own_disk=True))
    return [*said, write(folder / own.name.replace("node1", "a file") / "last.ckpt", own_disk=True)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_new_folder_takes_the_place_of_what_was_there_or_all_ranks_say_where_it_cannot(
    tmp_path: Path,
) -> None:
    for name in ("nothing", "folder/last.ckpt", "file", "node0", "node1"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "folder" / "last.ckpt" / "old").touch()
    (tmp_path / "folder" / "last.ckpt.writing").mkdir()
    (tmp_path / "folder" / "last.ckpt.writing" / "of a killed run").touch()
    (tmp_path / "file" / "last.ckpt").write_text("a plain checkpoint")
    (tmp_path / "a file").touch()
    first, second = run_ranks(2, write_all, tmp_path)
    assert first == second and first[:4] == [""] * 4 and "a file" in first[4]
    for before in ("nothing", "folder", "file"):
        assert names(tmp_path / before) == ["last.ckpt"]
        assert names(tmp_path / before / "last.ckpt") == ["of_0", "of_1"]
    for rank in (0, 1):
        assert names(tmp_path / f"node{rank}" / "last.ckpt") == [f"of_{rank}"]


def test_an_address_is_written_to_directly() -> None:
    address = "s3://bucket/last.ckpt"
    with whole_folder(None, address, lambda one: [one]) as draft:
        assert draft == address
