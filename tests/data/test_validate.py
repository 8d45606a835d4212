from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from onroute.core.errors import CheckError, OnrouteError, UserError
from onroute.data.fields import TOKEN_DTYPES, cut
from onroute.data.validate import check_group, check_sample
from tests.data.builders import make_group, make_sample, make_trace

NAN, INF = float("nan"), float("inf")


def with_entry(name, position, value):
    array = getattr(make_sample(4, 3), name).copy()
    array[position] = value
    return make_sample(4, 3, **{name: array})


def test_good_samples_pass():
    check_sample(make_sample(4, 3), context_length=7)
    check_sample(make_sample(4, 3, routed=False))
    check_sample(make_sample(1, 0), context_length=1)
    check_sample(cut(make_sample(4, 3), 5))
    check_sample(with_entry("log_probs", 5, 0.5e-4))
    check_group(make_group("p1", [3, 0, 2]))


def test_tool_output_between_policy_tokens_is_legal():
    mask = np.array([0, 0, 1, 0, 0, 1], dtype=np.bool_)
    check_sample(
        make_sample(
            2, 4, loss_mask=mask,
            log_probs=np.where(mask, -1, 0).astype(np.float32),
            weight_versions=np.where(mask, 0, -1).astype(np.int32),
        )
    )  # fmt: skip


@pytest.mark.parametrize("name", TOKEN_DTYPES)
def test_arrays_of_another_length_are_refused_by_name(name):
    if name == "tokens":
        sample = replace(make_sample(4, 3), tokens=np.zeros(6, dtype=np.int32))
        expected = "has 7 entries for 6 tokens"
    else:
        sample = replace(make_sample(4, 3), **{name: getattr(make_sample(4, 3), name)[:-1]})
        expected = f"{name} has 6 entries for 7 tokens"
    with pytest.raises(CheckError, match=f"{expected}; sample s0 of prompt p0"):
        check_sample(sample)


@pytest.mark.parametrize("name", TOKEN_DTYPES)
def test_arrays_of_another_type_or_shape_are_refused_by_name(name):
    good = getattr(make_sample(4, 3), name)
    for bad in (good.astype(np.float64), good[None], list(good), None):
        with pytest.raises(CheckError, match=f"{name} is .*, expected {np.dtype(TOKEN_DTYPES[name])}"):
            check_sample(make_sample(4, 3, **{name: bad}))


@pytest.mark.parametrize("rows", [6, 8])
def test_a_trace_of_another_length_is_refused(rows):
    with pytest.raises(CheckError, match=f"routing has {rows} rows .* for 7 tokens"):
        check_sample(make_sample(4, 3, routing=make_trace(rows)))


def test_a_validity_mask_of_another_length_is_refused():
    trace = replace(make_trace(7), valid=np.ones(6, dtype=np.bool_))
    with pytest.raises(CheckError, match="routing has 7 rows and validity"):
        check_sample(make_sample(4, 3, routing=trace))


@pytest.mark.parametrize(
    ("name", "position", "value", "says"),
    [
        ("loss_mask", 3, True, "loss_mask is True on prompt position 3"),
        ("tokens", 5, -1, "token id -1 at position 5"),
        ("log_probs", 5, NAN, "log-prob nan at position 5"),
        ("log_probs", 4, -INF, "log-prob -inf at position 4"),
        ("log_probs", 6, 0.01, "at position 6, expected a finite number <= 0"),
        ("log_probs", 2, -1.0, "at position 2, expected 0 on a token"),
        ("log_probs", 2, NAN, "log-prob nan at position 2, expected 0 on a token"),
        ("weight_versions", 5, -1, "weight version -1 at position 5, expected >= 0"),
        ("weight_versions", 0, 0, "weight version 0 at position 0, expected -1"),
    ],
)
def test_a_broken_promise_is_named_with_its_position(name, position, value, says):
    with pytest.raises(CheckError, match=says):
        check_sample(with_entry(name, position, value))


@pytest.mark.parametrize("length", [0, -1, 8])
def test_a_prompt_length_outside_the_tokens_is_refused(length):
    with pytest.raises(CheckError, match=f"prompt_length is {length} of 7 tokens"):
        check_sample(replace(make_sample(4, 3), prompt_length=length))


@pytest.mark.parametrize("reward", [NAN, INF, -INF, None])
def test_a_reward_that_is_no_number_gives_one_line_naming_prompt_and_sample(reward):
    group = make_group("p7", [3, 2])
    broken = replace(group, samples=(group.samples[0], replace(group.samples[1], reward=reward)))
    with pytest.raises(CheckError) as caught:
        check_group(broken)
    assert str(caught.value).startswith(f"[data-reward] reward is {reward}; sample p7/1 of prompt p7; ")
    assert "\n" not in str(caught.value)


def test_a_sample_longer_than_the_context_is_the_users_to_mend():
    with pytest.raises(UserError, match="7 tokens, the context holds 6"):
        check_sample(make_sample(4, 3), context_length=6)


@pytest.mark.parametrize("tokens", [np.zeros(0, dtype=np.int32), np.zeros(3, dtype=np.int64), [1, 2]])
def test_prompt_tokens_of_another_kind_are_refused(tokens):
    group = make_group("p1", [1])
    with pytest.raises(CheckError, match=r"tokens of the prompt are .*; prompt p1"):
        check_group(replace(group, prompt=replace(group.prompt, tokens=tokens)))


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ((), "group has no samples"),
        ((make_sample(3, 1, prompt_id="other"),), "sample s0 belongs to prompt other"),
        (
            (make_sample(3, 1, prompt_id="p1"), make_sample(3, 2, prompt_id="p1")),
            "two samples have the id s0",
        ),
    ],
)
def test_samples_that_make_no_group_are_refused(samples, says):
    with pytest.raises(OnrouteError, match=f"{says}; prompt p1"):
        check_group(replace(make_group("p1", [1]), samples=samples))
