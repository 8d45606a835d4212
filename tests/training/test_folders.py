"""Whenever a process is killed, a folder that was there is found whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from onroute.training import folders
from onroute.training.folders import begin, beside, discard, publish, remove, replaced_name, tidy


def fill(folder: Path, text: str) -> None:
    (folder / "content").write_text(text)


def content(folder: Path) -> str:
    return (folder / "content").read_text()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_has_its_name_only_when_it_is_published(tmp_path: Path):
    folder = tmp_path / "made" / "step-1"
    fill(begin(folder), "one")
    assert names(folder.parent) == [".step-1.writing"]
    publish(folder)
    assert names(folder.parent) == ["step-1"]
    assert content(folder) == "one"


def test_beginning_again_forgets_what_was_half_written(tmp_path: Path):
    fill(begin(tmp_path / "step-1"), "one")
    assert names(begin(tmp_path / "step-1")) == []


class Killed(BaseException):
    pass


@pytest.mark.parametrize("calls", range(8))
def test_a_replacement_that_is_killed_anywhere_leaves_the_old_folder_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
):
    """Dies at the n-th change of the file system: two syncs, two renames, one removal of 2 entries."""
    folder = tmp_path / "step-1"
    fill(begin(folder), "old")
    publish(folder)
    fill(begin(folder), "new")
    left = calls

    def counted(call):
        def counting(*args, **kwargs):
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return call(*args, **kwargs)

        return counting

    with monkeypatch.context() as dying:
        dying.setattr(Path, "rename", counted(Path.rename))
        dying.setattr(folders, "sync", counted(folders.sync))
        dying.setattr(folders.shutil, "rmtree", counted(folders.shutil.rmtree))
        try:
            publish(folder)
            survived = True
        except Killed:
            survived = False
    assert survived == (calls >= 5)
    found = [path for path in tmp_path.iterdir() if path.name == "step-1" or replaced_name(path) == "step-1"]
    assert {content(path) for path in found} <= {"old", "new"}
    assert found
    tidy(tmp_path)
    assert names(tmp_path) == ["step-1"]
    assert content(folder) == ("old" if calls <= 2 else "new")


def test_a_removal_cut_short_leaves_nothing_that_looks_like_a_folder_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "step-1"
    fill(begin(folder), "one")
    publish(folder)

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as dying:
        dying.setattr(folders.shutil, "rmtree", die)
        with pytest.raises(Killed):
            remove(folder)
    assert names(tmp_path) == [".step-1.removing"]
    tidy(tmp_path)
    assert names(tmp_path) == []


def test_tidying_leaves_strangers_alone_and_needs_no_folder(tmp_path: Path):
    (tmp_path / "step-1").mkdir()
    (tmp_path / "notes.writing").mkdir()
    beside(tmp_path / "step-2", "writing").mkdir()
    tidy(tmp_path)
    assert names(tmp_path) == ["notes.writing", "step-1"]
    tidy(tmp_path / "nowhere")
    discard(tmp_path / "nowhere")
