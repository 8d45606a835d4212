from __future__ import annotations

from dataclasses import dataclass, fields
from typing import get_type_hints

import numpy as np
import pytest
from numpy.typing import NDArray

from onroute.core.errors import CheckError
from onroute.core.routing import RoutingTrace
from onroute.core.samples import Sample
from onroute.data.fields import TOKEN_DTYPES, cut
from tests.data.builders import make_sample


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleWithValues(Sample):
    values: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleWithTexts(Sample):
    texts: list[str]


def token_counts(sample: Sample) -> dict[str, int]:
    """How many tokens each field covers, of every field that is no plain value."""
    counts = {}
    for field in fields(sample):
        value = getattr(sample, field.name)
        if isinstance(value, RoutingTrace):
            counts[f"{field.name}.experts"] = len(value.experts)
            counts[f"{field.name}.valid"] = len(value.valid)
        elif not isinstance(value, str | int | float):
            counts[field.name] = len(value)
    return counts


def extended(kind, sample: Sample, **more):
    return kind(**{field.name: getattr(sample, field.name) for field in fields(sample)}, **more)


def test_every_per_token_field_is_cut_to_the_same_length():
    sample = cut(make_sample(10, 8), 14)
    counts = token_counts(sample)
    assert set(counts) == {*TOKEN_DTYPES, "routing.experts", "routing.valid"}
    assert set(counts.values()) == {14}
    assert sample.prompt_length == 10 and sample.loss_mask.sum() == 4
    assert sample.stop_reason == "length"


def test_what_is_left_is_the_first_part():
    whole = make_sample(10, 8)
    sample = cut(whole, 14)
    for name in TOKEN_DTYPES:
        assert np.array_equal(getattr(sample, name), getattr(whole, name)[:14]), name
    assert np.array_equal(sample.routing.experts, whole.routing.experts[:14])


def test_the_new_last_token_has_no_valid_route_and_the_old_sample_is_untouched():
    whole = make_sample(10, 8)
    sample = cut(whole, 14)
    assert sample.routing.valid.tolist() == [True] * 13 + [False]
    assert whole.routing.valid.tolist() == [True] * 17 + [False]


def test_a_new_array_field_is_cut_without_being_named():
    sample = extended(SampleWithValues, make_sample(10, 8), values=np.arange(18, dtype=np.float32))
    shorter = cut(sample, 14)
    assert isinstance(shorter, SampleWithValues)
    assert set(token_counts(shorter).values()) == {14}
    assert shorter.values.tolist() == list(range(14))


def test_a_new_field_of_an_unknown_kind_is_refused_by_name():
    sample = extended(SampleWithTexts, make_sample(10, 8), texts=["a"] * 18)
    with pytest.raises(TypeError, match="field texts of a sample holds list"):
        cut(sample, 14)


def test_the_table_of_per_token_arrays_names_every_array_of_a_sample():
    arrays = {
        name
        for name, hint in get_type_hints(Sample).items()
        if getattr(hint, "__origin__", None) is np.ndarray
    }
    assert arrays == set(TOKEN_DTYPES)


def test_a_cut_inside_the_prompt_is_refused():
    with pytest.raises(
        CheckError, match="cannot cut to 9 tokens, the prompt alone has 10; sample s0 of prompt p0"
    ):
        cut(make_sample(10, 8), 9)


def test_a_cut_at_the_prompt_leaves_an_empty_response():
    sample = cut(make_sample(10, 8), 10)
    assert sample.num_tokens == 10 and not sample.loss_mask.any()


@pytest.mark.parametrize("num_tokens", [18, 100])
def test_a_sample_that_is_short_enough_stays_itself(num_tokens):
    sample = make_sample(10, 8)
    assert cut(sample, num_tokens) is sample


def test_a_sample_without_routing_is_cut_too():
    assert cut(make_sample(10, 8, routed=False), 14).routing is None
