"""Loss tokens, their targets and their weights, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from onroute.core.samples import Sample
from onroute.training.microbatch import Microbatch, assemble, split_by_sample
from tests.training.builders import make_batch, make_sample

CPU = torch.device("cpu")


def sample_of(tokens: list[int], prompt: int, log_probs: list[float], number: int) -> Sample:
    sample = make_sample(prompt, len(tokens) - prompt, number=number, layers=None)
    return replace(
        sample, tokens=np.array(tokens, np.int32), log_probs=np.array(log_probs, np.float32)
    )  # fmt: skip


def assembled(samples: list[Sample], indices: tuple[int, ...], layout: str = "rows") -> Microbatch:
    return assemble(
        make_batch(samples, layout=layout),
        indices,
        layout=layout,
        device=CPU,
        advantages=np.array([1.0, -2.0, 3.0, 4.0])[: len(samples)],
        weights=np.array([0.5, 0.25, 0.125, 0.0])[: len(samples)],
    )


THREE = [
    sample_of([11, 12, 13, 14, 15], 2, [0, 0, -0.1, -0.2, -0.3], 0),
    sample_of([21, 22, 23], 3, [0, 0, 0], 1),
    sample_of([31, 32], 1, [0, -0.4], 2),
]
"""Three response tokens; a prompt alone; one response token."""


@pytest.mark.parametrize(
    ("layout", "positions"),
    [("rows", [2, 3, 4, 11]), ("packed", [2, 3, 4, 9])],
)
def test_loss_tokens_stand_where_their_sample_was_laid(layout: str, positions: list[int]):
    # rows: 3 rows of 5, the third begins at 10. packed: 5 + 3 tokens come before the third sample.
    microbatch = assembled(THREE, (0, 1, 2), layout)
    assert microbatch.positions.tolist() == positions
    assert microbatch.targets.tolist() == [13, 14, 15, 32]
    assert microbatch.engine_log_probs.tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4])
    assert microbatch.advantages.tolist() == [1.0, 1.0, 1.0, 3.0]
    assert microbatch.weights.tolist() == [0.5, 0.5, 0.5, 0.125]
    assert microbatch.real_tokens == 10


def test_values_go_back_to_the_samples_in_any_order_of_indices():
    microbatch = assembled(THREE, (2, 1, 0))
    assert microbatch.targets.tolist() == [32, 13, 14, 15]
    assert microbatch.weights.tolist() == [0.125, 0.5, 0.5, 0.5]
    assert microbatch.advantages.tolist() == [3.0, 1.0, 1.0, 1.0]
    parts = split_by_sample(microbatch, dict(enumerate(THREE)), torch.tensor([7.0, 1.0, 2.0, 3.0]))
    assert {index: part.tolist() for index, part in parts.items()} == {2: [7.0], 1: [], 0: [1.0, 2.0, 3.0]}


def test_a_prompt_alone_gives_no_loss_token_and_is_still_computed():
    microbatch = assembled(THREE, (1,))
    assert microbatch.positions.tolist() == microbatch.weights.tolist() == []
    assert microbatch.batch.input_ids.tolist() == [[21, 22, 23]]
    assert split_by_sample(microbatch, dict(enumerate(THREE)), torch.empty(0))[1].tolist() == []


@pytest.mark.parametrize("layout", ["rows", "packed"])
def test_no_samples_make_a_filler_that_counts_nothing(layout: str):
    filler = assembled(THREE, (), layout)
    assert filler.batch.spans == ()
    assert filler.real_tokens == 0
    assert filler.batch.input_ids.shape == (1, 1)
    assert filler.positions.numel() == filler.targets.numel() == filler.advantages.numel() == 0
    assert split_by_sample(filler, {}, torch.empty(0)) == {}


def test_an_end_token_that_is_also_the_padding_token_is_learned():
    # Token 0 pads rows and ends this response; the row of 3 is padded to 5.
    ends = sample_of([9, 5, 0], 1, [0, -1, -2], 1)
    microbatch = assembled([THREE[0], ends], (0, 1))
    assert microbatch.batch.input_ids.tolist()[1] == [9, 5, 0, 0, 0]
    assert microbatch.positions.tolist() == [2, 3, 4, 6, 7]
    assert microbatch.targets.tolist() == [13, 14, 15, 5, 0]


def test_tokens_that_a_tool_put_into_the_response_are_not_learned():
    mixed = replace(THREE[0], loss_mask=np.array([0, 0, 1, 0, 1], np.bool_))
    microbatch = assembled([mixed, THREE[1]], (0, 1))
    assert microbatch.positions.tolist() == [2, 4]
    assert microbatch.engine_log_probs.tolist() == pytest.approx([-0.1, -0.3])


def test_what_stands_on_a_prompt_never_gets_into_a_microbatch():
    spoilt = replace(THREE[0], log_probs=np.array([np.nan, -np.inf, -0.1, -0.2, -0.3], np.float32))
    clean, dirty = assembled(THREE, (0, 1, 2)), assembled([spoilt, *THREE[1:]], (0, 1, 2))
    assert torch.equal(clean.engine_log_probs, dirty.engine_log_probs)
