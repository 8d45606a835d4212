"""A dense model is told from its configuration alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from onroute.core.errors import UserError
from onroute.models.tiny import TINY, tiny_config
from onroute.routing.dense import expects_routing, expert_count, refuse_dense


@pytest.mark.parametrize("model_type", TINY)
def test_the_families_with_experts_are_told_from_the_dense_one(model_type: str):
    config = tiny_config(model_type)
    assert expert_count(config) == expert_count(config.to_dict()) == (None if model_type == "qwen3" else 8)


def test_a_parsed_config_file_of_a_dense_model_is_refused():
    with pytest.raises(UserError, match=r'no routed experts; model type qwen3; set routing.replay = "off"'):
        refuse_dense({"model_type": "qwen3", "num_hidden_layers": 28, "num_experts_per_tok": None})


def test_experts_of_a_nested_text_configuration_are_found():
    wrapper = {"model_type": "some_vl", "vision_config": {"depth": 2}, "text_config": {"num_experts": 128}}
    assert expert_count(wrapper) == 128
    assert expert_count({"model_type": "omni", "thinker_config": wrapper}) == 128
    assert not expects_routing({"model_type": "some_vl", "text_config": {"num_experts": 0}})


def test_the_question_needs_no_torch():
    code = (
        "import sys, onroute.routing.dense; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
