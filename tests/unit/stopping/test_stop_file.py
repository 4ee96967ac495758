"""A stop file on a disk that answers with an error for a while."""

from __future__ import annotations

from pathlib import Path

from lightning_lockstep.stopping.stop_requests import StopFile


def test_a_stop_file_is_obeyed_once_its_disk_answers_again(tmp_path: Path) -> None:
    disk, back = tmp_path / "disk", tmp_path / "back"
    disk.symlink_to("n" * 300)  # Looking up anything below it is an OSError (ENAMETOOLONG), also for root.
    back.mkdir()
    (back / "stop").touch()
    reasons: list[str] = []
    file = StopFile(disk / "stop", reasons.append, interval=0)
    file.look()
    assert not reasons
    disk.unlink()
    disk.symlink_to(back)
    file.look()
    file.look()
    assert reasons == [f"found the stop file {disk / 'stop'}"]
    file.remove()
    assert not (back / "stop").exists()
