"""What `check` says of a model folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from onroute.core.errors import UserError
from onroute.models.world import World
from onroute.training.check import check_model
from tests.training.conftest import FolderOf

FAMILIES = {
    "qwen3_moe": ("sdpa", (0, 1, 2)),
    "qwen3_5_moe_text": ("sdpa", (0, 1, 2)),
    "glm4_moe_lite": ("sdpa", (1, 2)),
    "deepseek_v3": ("sdpa", (1, 2)),
    "gpt_oss": ("eager", (0, 1, 2)),
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_mixture_of_experts_passes_all_five_checks(folder_of: FolderOf, world: World, model_type: str):
    attention, layers = FAMILIES[model_type]
    found = check_model(folder_of(model_type), world)
    assert (found.model_type, found.attention, found.replay, found.reason) == (
        model_type, attention, "ok", ""
    )  # fmt: skip
    assert found.report is not None
    assert {row.name: row.passed for row in found.report.rows} == {
        "layers_found": True,
        "self_replay_bitwise": True,
        "permutation_changes_logits": True,
        "router_gradient": True,
        "recompute": True,
    }
    assert found.report.map.layers == layers
    assert found.layouts[0] == "rows"


def test_linear_attention_is_not_packed(folder_of: FolderOf, world: World):
    assert check_model(folder_of("qwen3_moe"), world).layouts == ("rows", "packed")
    assert check_model(folder_of("qwen3_5_moe_text"), world).layouts == ("rows",)


def test_a_dense_model_is_a_result_with_its_reason(folder_of: FolderOf, world: World):
    found = check_model(folder_of("qwen3"), world)
    assert found.replay == "refused"
    assert "dense model" in found.reason
    assert found.report is None
    assert found.layouts == ("rows", "packed")


def test_a_folder_without_a_model_is_an_error(world: World, tmp_path: Path):
    with pytest.raises(UserError, match="model-missing"):
        check_model(tmp_path, world)
