from __future__ import annotations

from dataclasses import fields, replace
from typing import get_type_hints

from onroute.core.config.catalog import CatalogEntry
from onroute.core.config.describe import describe, describe_tables, meanings
from onroute.core.config.sections import RunConfig
from tests.core.config.catalogs import CATALOGS, ClipOptions

LINES = {line.key: line for line in describe(CATALOGS)}


def test_every_key_of_every_section_has_a_meaning():
    for name, section in get_type_hints(RunConfig).items():
        for field in fields(section):
            assert LINES[f"{name}.{field.name}"].meaning.endswith((".", ")", "training"))


def test_a_key_without_default_is_required_and_none_is_none():
    assert LINES["model.path"].default == "required"
    assert LINES["engine.top_k"].default == "none"
    assert LINES["optimizer.lr"].default == "1e-6"
    assert LINES["tracking.trackers"].default == '["tensorboard"]'
    assert LINES["routing.start_check"].default == "true"


def test_types_are_told_in_the_words_of_toml():
    assert LINES["model.path"].type == "string"
    assert LINES["engine.top_k"].type == "integer or none"
    assert LINES["optimizer.betas"].type == "array of 2 floats"
    assert LINES["data.layout"].type == 'one of "rows", "packed"'
    assert LINES["environment.options"].type == "table"


def test_options_stand_under_their_table_with_the_entry_they_belong_to():
    line = LINES["algorithm.loss_options.clip_low"]
    assert line.meaning == 'With algorithm.loss = "clipped": Lower bound of the ratio.'
    assert LINES["environment.options.task"].default == "required"


def test_a_meaning_over_two_lines_is_told_on_one():
    assert meanings(ClipOptions)["clip_high"] == "Upper bound of the ratio, over two lines."


def test_a_name_tells_what_it_may_be():
    assert LINES["algorithm.advantage"].meaning.endswith("(grpo: group mean; plain: the reward itself)")


def test_the_options_of_every_variant_are_a_table_of_their_own_after_the_section():
    tables = [(table.name, str(table.variant or "")) for table in describe_tables(CATALOGS)]
    place = tables.index(("algorithm", ""))
    assert tables[place + 1] == ("algorithm.loss_options", 'algorithm.loss = "clipped"')
    assert ("environment.options", 'environment.name = "sorting"') in tables
    assert len(tables) == 11 + 2  # eleven sections, two variants with keys of their own


def test_a_variant_is_active_when_the_run_file_need_not_name_it():
    rude = CatalogEntry(name="rude", target="a:B", summary="another", options=ClipOptions)
    tables = describe_tables(replace(CATALOGS, losses={"rude": rude, **CATALOGS.losses}))
    active = {str(table.variant): table.variant.active for table in tables if table.variant is not None}
    assert active == {
        'environment.name = "sorting"': True,  # required; the first one is the example
        'algorithm.loss = "rude"': False,
        'algorithm.loss = "clipped"': True,  # the default
    }


def test_no_meaning_sends_the_reader_to_the_listing_that_prints_it():
    assert [line.key for line in LINES.values() if "`onroute config`" in line.meaning] == []
