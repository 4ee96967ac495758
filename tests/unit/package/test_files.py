"""Files that are there whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_lockstep._system import write_whole


@pytest.mark.parametrize(("content", "written"), [("é\n", "é\n".encode()), (b"\x00", b"\x00")])
def test_a_file_is_written_into_a_folder_that_is_made(content: str | bytes, written: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    assert write_whole(path, content) is None
    assert path.read_bytes() == written
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_is_there_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    with path.open() as reader:
        assert write_whole(path, "after") is None
        assert (reader.read(), path.read_text()) == ("before", "after")


def test_why_it_cannot_be_written_is_returned_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert write_whole(tmp_path / "folder", "text") == "Is a directory"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    (tmp_path / "file").touch()
    assert write_whole(tmp_path / "file" / "below", "text") in ("Not a directory", "File exists")
