from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onroute.algorithms.aggregation import sample_weights
from onroute.core.errors import CheckError, UserError
from onroute.data.plan import balance, equal_counts, microbatch, plan_batch, round_up


def plan(lengths, groups=None, **changed):
    settings = {"ranks": 1, "steps": 1, "layout": "rows", "microbatch_tokens": 100, **changed}
    return plan_batch(lengths, groups or list(range(len(lengths))), **settings)


@pytest.mark.parametrize("layout", ["rows", "packed"])
def test_ranks_of_unequal_lengths_run_the_same_number_of_microbatches(layout):
    lengths = [8, 8, 8, 1, 1, 1]
    per_rank = [microbatch(ranks, lengths, layout, microbatch_tokens=8) for ranks in ([0, 1, 2], [3, 4, 5])]
    assert per_rank == [((0,), (1,), (2,)), ((3, 4, 5),)]
    assert equal_counts(per_rank) == [((0,), (1,), (2,)), ((3, 4, 5), (), ())]


def test_samples_are_balanced_over_ranks_by_tokens():
    # Longest first to the lighter rank: 8 | 8, then 8 to rank 0, then the ones to rank 1.
    assert balance(range(6), [8, 8, 8, 1, 1, 1], 2) == [[0, 2], [1, 3, 4, 5]]


def test_a_rank_without_samples_runs_empty_microbatches_only():
    out = plan([5, 4, 3], ranks=4, microbatch_tokens=5)
    assert out.assignment == ((((0,),),), (((1,),),), (((2,),),), (((),),))
    assert out.samples_of(3) == ()


def test_fillers_and_padding_do_not_enter_the_denominator():
    out = plan([4, 4, 4], ranks=2, microbatch_tokens=4)
    assert out.assignment == ((((0,), (2,)),), (((1,), ()),))
    weights = sample_weights(np.array([4, 4, 4]), "token_mean")
    counted = [weights[i] * 4 for rank in out.assignment for step in rank for mb in step for i in mb]
    assert weights.tolist() == [1 / 12] * 3 and sum(counted) == pytest.approx(1.0)


def test_an_optimizer_step_takes_whole_groups():
    groups = [7, 9, 7, 9, 2, 2, 5]
    out = plan([3] * 7, groups, steps=2, ranks=1)
    assert [sorted(i for mb in step for i in mb) for step in out.assignment[0]] == [[0, 1, 2, 3], [4, 5, 6]]


def test_padded_rows_count_against_the_budget():
    # 12 tokens: two rows of 6, then three rows of at most 4.
    assert microbatch(range(5), [6, 5, 4, 3, 1], "rows", microbatch_tokens=12) == ((0, 1), (2, 3, 4))


def test_a_packed_row_is_filled_with_what_fits():
    assert microbatch(range(5), [6, 5, 4, 3, 1], "packed", microbatch_tokens=10) == ((0, 2), (1, 3, 4))


@pytest.mark.parametrize("layout", ["rows", "packed"])
def test_padding_to_a_multiple_counts_against_the_budget(layout):
    assert microbatch(range(2), [5, 5], layout, microbatch_tokens=15, row_multiple=1) == ((0, 1),)
    # Two rows of 8 are 16 tokens; ten packed tokens take 16.
    assert microbatch(range(2), [5, 5], layout, microbatch_tokens=15, row_multiple=8) == ((0,), (1,))


def test_a_sample_longer_than_a_microbatch_is_refused_with_sample_and_key():
    with pytest.raises(
        UserError, match=r"takes 9 tokens.* holds 8; sample 2 .*data\.microbatch_tokens to at least 9"
    ):
        plan([1, 8, 9], microbatch_tokens=8)
    with pytest.raises(UserError, match="takes 16 tokens"):
        plan([9], microbatch_tokens=15, row_multiple=8)


def test_fewer_prompts_than_optimizer_steps_are_refused():
    with pytest.raises(UserError, match="2 prompts cannot be cut into 3 optimizer steps"):
        plan([1, 1, 1], [0, 1, 1], steps=3)


@pytest.mark.parametrize(("lengths", "groups"), [([], []), ([1, 2], [0]), ([0], [0])])
def test_what_is_no_batch_is_refused(lengths, groups):
    with pytest.raises(CheckError, match="empty or uneven batch"):
        plan_batch(lengths, groups, ranks=1, steps=1, layout="rows", microbatch_tokens=8)


@st.composite
def batches(draw):
    groups = draw(st.lists(st.integers(0, 6), min_size=1, max_size=40))
    lengths = draw(st.lists(st.integers(1, 30), min_size=len(groups), max_size=len(groups)))
    return lengths, groups, {
        "ranks": draw(st.integers(1, 5)),
        "steps": draw(st.integers(1, len(set(groups)))),
        "layout": draw(st.sampled_from(["rows", "packed"])),
        "microbatch_tokens": draw(st.integers(32, 90)),
        "row_multiple": draw(st.sampled_from([1, 2, 8])),
    }  # fmt: skip


@given(batches())
def test_every_sample_is_trained_exactly_once(batch):
    lengths, groups, settings = batch
    out = plan_batch(lengths, groups, **settings)
    assert sorted(i for rank in range(settings["ranks"]) for i in out.samples_of(rank)) == list(
        range(len(lengths))
    )
    assert out.num_samples == len(lengths)


@given(batches())
def test_counts_are_equal_on_all_ranks_and_no_microbatch_is_needless(batch):
    lengths, groups, settings = batch
    out = plan_batch(lengths, groups, **settings)
    assert out.num_ranks == settings["ranks"] and out.num_steps == settings["steps"]
    for step in zip(*out.assignment, strict=True):
        assert len({len(microbatches) for microbatches in step}) == 1
        assert any(microbatches[-1] for microbatches in step)


@given(batches())
def test_no_microbatch_exceeds_the_budget(batch):
    lengths, groups, settings = batch
    out = plan_batch(lengths, groups, **settings)
    multiple = settings["row_multiple"]
    for chosen in (mb for rank in out.assignment for step in rank for mb in step if mb):
        of_chosen = [lengths[i] for i in chosen]
        if settings["layout"] == "rows":
            tokens = len(chosen) * round_up(max(of_chosen), multiple)
        else:
            tokens = round_up(sum(of_chosen), multiple)
        assert tokens <= settings["microbatch_tokens"]


@given(batches())
def test_a_group_is_never_split_over_optimizer_steps(batch):
    lengths, groups, settings = batch
    out = plan_batch(lengths, groups, **settings)
    steps_of: dict[int, set[int]] = {}
    for rank in out.assignment:
        for number, step in enumerate(rank):
            for sample in (i for mb in step for i in mb):
                steps_of.setdefault(groups[sample], set()).add(number)
    assert all(len(steps) == 1 for steps in steps_of.values())


@given(batches())
def test_no_rank_carries_more_than_the_mean_and_one_sample(batch):
    lengths, _, settings = batch
    loads = [
        sum(lengths[i] for i in rank) for rank in balance(range(len(lengths)), lengths, settings["ranks"])
    ]
    assert max(loads) <= sum(loads) / len(loads) + max(lengths)
    assert max(loads) - min(loads) <= max(lengths)


def test_whole_groups_stay_on_one_rank_and_are_balanced_by_their_tokens():
    # groups of 10, 6 and 4 tokens: the first alone, the other two together
    lengths, groups = [5, 5, 3, 3, 2, 2], [7, 7, 8, 8, 9, 9]
    plan = plan_batch(
        lengths, groups, ranks=2, steps=1, layout="packed", microbatch_tokens=100, whole_groups=True
    )
    assert plan.samples_of(0) == (0, 1)
    assert plan.samples_of(1) == (2, 3, 4, 5)


def test_without_whole_groups_samples_go_where_there_is_room():
    lengths, groups = [5, 5, 3, 3], [0, 0, 1, 1]
    plan = plan_batch(lengths, groups, ranks=2, steps=1, layout="packed", microbatch_tokens=100)
    assert plan.samples_of(0) == (0, 2)
    assert plan.samples_of(1) == (1, 3)
