from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from onroute.cli.catalogs import CATALOGS
from onroute.cli.listing import listing, skeleton
from onroute.core.config.catalog import CatalogEntry
from onroute.core.config.describe import describe_tables
from onroute.core.config.load import load_config
from onroute.core.config.sections import RunConfig
from onroute.core.config.violations import ConfigError
from tests.core.config.catalogs import CATALOGS as SMALL
from tests.core.config.catalogs import ClipOptions

TABLES = describe_tables(CATALOGS)
FILLED_IN = {'path = ""': 'path = "m"', 'task = ""': 'task = "number_sorting"', 'folder = ""': 'folder = "r"'}


def load(folder: Path, text: str) -> RunConfig:
    file = folder / "run.toml"
    file.write_text(text, encoding="utf-8")
    return load_config(file, (), CATALOGS)


def filled_in(text: str) -> str:
    for empty, value in FILLED_IN.items():
        assert text.count(f"\n{empty}") == 1
        text = text.replace(f"\n{empty}", f"\n{value}")
    return text


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_line_is_wider_than_the_terminal_unless_a_key_with_its_default_is(width):
    lines = list(listing(TABLES, width))
    too_wide = [line for line in lines if len(line) > width and not line.startswith("[")]
    assert too_wide == []


def test_a_type_without_room_beside_its_key_stands_beneath():
    [section] = [table for table in TABLES if table.name == "data"]
    [layout] = [key for key in section.keys if key.key == "data.layout"]
    table = replace(section, keys=(layout,))
    wide = 'layout = "rows"  # one of "rows", "packed"'  # 42 characters
    assert next(iter(list(listing([table], 42))[1:])) == wide
    assert list(listing([table], 41))[1:3] == ['layout = "rows"', '    One of "rows", "packed".']


def test_a_key_that_may_be_left_out_has_no_default_and_a_required_one_says_so():
    lines = list(listing(TABLES, 80))
    assert "top_k =  # integer, not set by default" in lines
    assert "folder =  # string, required" in lines


def test_a_skeleton_loads_to_the_defaults_once_model_environment_and_folder_are_filled_in(tmp_path):
    config = load(tmp_path, filled_in("\n".join(skeleton(TABLES, 80))))
    smallest = (
        'model.path = "m"\nenvironment.name = "reasoning_gym"\n'
        'environment.options.task = "number_sorting"\nrun.folder = "r"\n'
    )
    assert config == load(tmp_path, smallest)


def test_a_skeleton_complains_of_the_empty_places_alone(tmp_path):
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, "\n".join(skeleton(TABLES, 80)))
    assert [violation.keys for violation in raised.value.violations] == [("model.path",), ("run.folder",)]


def test_every_key_of_a_skeleton_may_be_uncommented_as_it_stands(tmp_path):
    text = filled_in("\n".join(skeleton(TABLES, 80)))
    # A key without default waits for a value; all others are complete.
    uncommented = re.sub(r"^#(?=\w+ = )", "", text, flags=re.MULTILINE)
    uncommented = re.sub(r"^(?=\w+ =  #)", "#", uncommented, flags=re.MULTILINE)
    assert len(tomllib.loads(uncommented)["optimizer"]) == 8
    assert load(tmp_path, uncommented) == load(tmp_path, text)


def test_the_keys_of_a_variant_that_is_not_chosen_are_a_commented_table():
    rude = CatalogEntry(name="rude", target="a:B", summary="another", options=ClipOptions)
    tables = describe_tables(replace(SMALL, losses={"rude": rude, **SMALL.losses}))
    lines = list(skeleton(tables, 80))
    assert '#[algorithm.loss_options]  # with algorithm.loss = "rude"' in lines
    assert '[algorithm.loss_options]  # with algorithm.loss = "clipped"' in lines
    tomllib.loads("\n".join(lines))
