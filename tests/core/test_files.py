"""A file is there whole or not at all, and one that can't be written is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from onroute.core.errors import MachineError
from onroute.core.files import naming, replacing
from tests.disk import PAGE, Disk


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_has_its_name_when_the_body_is_done(tmp_path: Path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with replacing(path) as writing:
        writing.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert names(tmp_path) == ["a.json"]


def test_a_body_that_raises_leaves_what_was_there_and_nothing_else(tmp_path: Path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(path) as writing:
        writing.write_text("new")
        raise ZeroDivisionError
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.json"]


@pytest.mark.parametrize("room", [0, PAGE])
def test_a_full_disk_is_one_line_with_the_file_and_leaves_the_old_content(disk: Disk, room: int):
    path = disk.path / "a.json"
    path.write_text("old")
    disk.leave(room)
    with pytest.raises(MachineError) as caught, replacing(path) as writing:
        writing.write_bytes(bytes(2 * PAGE))
    assert str(caught.value) == (
        f"[machine-disk] no space left on the disk; {path}; free some space, then resume"
    )
    assert path.read_text() == "old"
    assert names(disk.path) == ["a.json"]


def test_a_library_that_tells_a_full_disk_in_words_alone_is_understood(tmp_path: Path):
    words = "SafetensorError: I/O error: No space left on device (os error 28)"
    with pytest.raises(MachineError, match=r"machine-disk.*weights;"), naming(tmp_path / "weights"):
        raise RuntimeError(words)


def test_another_failure_to_write_is_told_with_its_reason_and_one_that_is_none_goes_on(tmp_path: Path):
    path = tmp_path / "missing" / "a.json"
    with (
        pytest.raises(MachineError, match=r"machine-write\] .*: No such file or directory; .*a\.json; see"),
        replacing(path) as writing,
    ):
        writing.write_text("new")
    with pytest.raises(KeyError), naming(path):
        raise KeyError("a")
