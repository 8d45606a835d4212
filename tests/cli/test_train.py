from __future__ import annotations

from pathlib import Path

from tests.cli.test_config import onroute

RUN = """
[model]
path = "{path}"
[environment]
name = "reasoning_gym"
options.task = "number_sorting"
[run]
folder = "{path}/run"
"""


def run_file(folder: Path, text: str = "") -> str:
    file = folder / "run.toml"
    file.write_text(RUN.format(path=folder) + text, encoding="utf-8")
    return str(file)


def test_a_bad_run_file_ends_with_a_line_for_each_mistake_and_code_2(tmp_path):
    done = onroute("train", run_file(tmp_path, "[engine]\ntemperature = 0.0\n"), "--optimizer.lrr=1")
    assert done.returncode == 2
    assert done.stdout == ""
    unknown, rule = done.stderr.splitlines()
    assert unknown == (
        "[config-unknown-key] there is no key optimizer.lrr; --optimizer.lrr on the command line; "
        "did you mean optimizer.lr?"
    )
    assert rule.startswith("[config-rule] engine.temperature = 0.0 must be above 0; engine.temperature in ")
    assert not (tmp_path / "run").exists()


def test_the_catalogues_of_the_rooms_are_asked(tmp_path):
    done = onroute("train", run_file(tmp_path), "--algorithm.loss_options.clip_low=-1", "--engine.name=vlm")
    assert done.returncode == 2
    assert "clip_low is -1.0" in done.stderr
    assert 'there is no "vlm"' in done.stderr


def test_a_missing_run_file_is_one_line(tmp_path):
    done = onroute("train", str(tmp_path / "nope.toml"))
    assert done.returncode == 2
    assert done.stderr == (
        f"[config-file] there is no such file; {tmp_path}/nope.toml; give the path of a run file\n"
    )
