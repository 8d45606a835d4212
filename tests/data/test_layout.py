from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from onroute.data.layout import lay_out
from tests.data.builders import make_sample


def sample_of(*ids, prompt_length=1):
    return make_sample(prompt_length, len(ids) - prompt_length, tokens=np.array(ids, dtype=np.int32))


A, B = sample_of(5, 6, 7), sample_of(8, 9)


def test_rows_are_padded_on_the_right_and_positions_go_on():
    batch = lay_out([(4, A), (1, B)], "rows", "cpu")
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert [(s.sample, s.offset, s.length) for s in batch.spans] == [(4, 0, 3), (1, 3, 2)]


def test_packed_samples_restart_their_positions_and_the_padding_is_one_document():
    batch = lay_out([(4, A), (1, B)], "packed", "cpu", row_multiple=8)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert batch.attention_mask is None
    assert [(s.sample, s.offset, s.length) for s in batch.spans] == [(4, 0, 3), (1, 3, 2)]


def test_rows_can_be_padded_to_a_multiple():
    batch = lay_out([(0, A), (1, B)], "rows", "cpu", row_multiple=4)
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert batch.spans[1].offset == 4


@pytest.mark.parametrize("layout", ["rows", "packed"])
def test_no_samples_give_one_dummy_token(layout):
    batch = lay_out([], layout, "cpu", row_multiple=8)
    assert batch.input_ids.tolist() == batch.position_ids.tolist() == [[0]]
    assert (batch.attention_mask.tolist() == [[1]]) if layout == "rows" else (batch.attention_mask is None)
    assert batch.spans == ()


def test_an_end_token_equal_to_the_padding_stays_a_token():
    ends = sample_of(5, 6, 0)
    batch = lay_out([(0, ends), (1, sample_of(1, 2, 3, 4, 5))], "rows", "cpu")
    assert batch.attention_mask[0].tolist() == [1, 1, 1, 0, 0]
    assert [(s.offset, s.length) for s in batch.spans] == [(0, 3), (5, 5)]


def test_token_ids_and_positions_are_int64():
    for layout in ("rows", "packed"):
        batch = lay_out([(0, A), (1, B)], layout, "cpu")
        assert batch.input_ids.dtype == batch.position_ids.dtype == torch.int64


def test_rows_packed_and_single_samples_give_a_stock_model_the_same_logits():
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).eval()
    samples = [(i, make_sample(2, n, seed=i)) for i, n in enumerate([5, 1, 9])]

    def logits(chosen, layout, row_multiple=1):
        batch = lay_out(chosen, layout, "cpu", row_multiple=row_multiple)
        with torch.no_grad():
            out = model(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                position_ids=batch.position_ids,
                use_cache=False,
            ).logits.flatten(0, 1)
        return {s.sample: out[s.offset : s.offset + s.length] for s in batch.spans}

    alone = {index: logits([(index, sample)], "rows")[index] for index, sample in samples}
    for other in (logits(samples, "rows", 8), logits(samples, "packed"), logits(samples, "packed", 16)):
        for index, expected in alone.items():
            assert torch.allclose(other[index], expected, atol=1e-5), index
