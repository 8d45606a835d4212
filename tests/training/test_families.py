"""Every routing model type of the installed transformers passes the self-check, or stands in the table."""

from __future__ import annotations

import pytest

from onroute.models.families.refused import REFUSED
from onroute.models.families.scan import routing_families, routing_model_types
from onroute.models.world import World
from onroute.training.check import as_expected, check_family

NEVER_REFUSED = ("qwen3_moe", "qwen3_5_moe", "qwen3_5_moe_text", "glm4_moe_lite")


@pytest.mark.parametrize("model_type", routing_model_types())
def test_a_model_type_replays_exactly_when_the_table_does_not_refuse_it(world: World, model_type: str):
    found = check_family(model_type, world)
    assert as_expected(found), f"{found.replay}: {found.reason}"
    if found.replay == "ok":
        assert found.report is not None
        assert [row.name for row in found.report.rows if row.passed] == [
            "layers_found",
            "self_replay_bitwise",
            "permutation_changes_logits",
            "router_gradient",
            "recompute",
        ]


def test_the_table_names_only_installed_types_and_none_that_must_replay():
    assert set(REFUSED) <= set(routing_model_types())
    assert not set(REFUSED) & set(NEVER_REFUSED)
    assert set(NEVER_REFUSED) <= set(routing_model_types())


def test_at_least_65_families_have_a_type_that_is_not_refused():
    assert sum(not set(types) <= set(REFUSED) for types in routing_families().values()) >= 65
