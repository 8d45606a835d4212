"""Which sample is trained on which rank, in which optimizer step and microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

from onroute.core.batches import BatchPlan, Layout
from onroute.core.errors import CheckError, UserError

Microbatches: TypeAlias = tuple[tuple[int, ...], ...]


def plan_batch(
    lengths: Sequence[int],
    groups: Sequence[int],
    *,
    ranks: int,
    steps: int,
    layout: Layout,
    microbatch_tokens: int,
    row_multiple: int = 1,
    whole_groups: bool = False,
) -> BatchPlan:
    """Plan one batch; the same arguments give the same plan on every rank.

    lengths: tokens of each sample, prompt included. groups: its group number; a group is never
    split over optimizer steps. Steps take the groups in order of appearance, equally many or one
    more. The samples of a step are balanced over ranks by tokens, and every rank gets the same number
    of microbatches, empty ones where it runs out; a rank may have only those.

    microbatch_tokens bounds the tokens of a microbatch, padding included. row_multiple is what
    `lay_out` pads rows to. whole_groups keeps the samples of a group on one rank, so that they travel
    once; balance is then by groups.

    Raises:
        CheckError: no samples, or lengths and groups that do not match.
        UserError: a sample that fits no microbatch, or fewer groups than optimizer steps.
    """
    _check(lengths, groups, steps=steps, microbatch_tokens=microbatch_tokens, row_multiple=row_multiple)
    planned = []
    for step in _split_by_group(groups, steps):
        per_rank = (
            balance_groups(step, groups, lengths, ranks) if whole_groups else balance(step, lengths, ranks)
        )
        cut = partial(
            microbatch,
            lengths=lengths,
            layout=layout,
            microbatch_tokens=microbatch_tokens,
            row_multiple=row_multiple,
        )
        planned.append(equal_counts([cut(samples) for samples in per_rank]))
    return BatchPlan(
        num_samples=len(lengths),
        assignment=tuple(tuple(step[rank] for step in planned) for rank in range(ranks)),
    )


def balance(samples: Sequence[int], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Spread samples over ranks: longest first, each to the rank with the fewest tokens so far.

    The heaviest rank carries at most 4/3 of the best possible (Graham 1969).
    """
    chosen: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for sample in _longest_first(samples, lengths):
        rank = min(range(ranks), key=lambda r: (load[r], len(chosen[r]), r))
        chosen[rank].append(sample)
        load[rank] += lengths[sample]
    return chosen


def balance_groups(
    samples: Sequence[int], groups: Sequence[int], lengths: Sequence[int], ranks: int
) -> list[list[int]]:
    """The same with whole groups in place of samples."""
    members: dict[int, list[int]] = {}
    for sample in samples:
        members.setdefault(groups[sample], []).append(sample)
    units = list(members.values())
    sizes = [sum(lengths[sample] for sample in unit) for unit in units]
    spread = balance(range(len(units)), sizes, ranks)
    return [[sample for unit in chosen for sample in units[unit]] for chosen in spread]


def microbatch(
    samples: Sequence[int],
    lengths: Sequence[int],
    layout: Layout,
    *,
    microbatch_tokens: int,
    row_multiple: int = 1,
) -> Microbatches:
    """Cut the samples of a rank into microbatches within the budget, the one with the longest sample
    first, so that memory that does not suffice shows at once."""
    ordered = _longest_first(samples, lengths)
    if layout == "rows":
        bins = _equal_rows(ordered, [round_up(length, row_multiple) for length in lengths], microbatch_tokens)
    else:
        bins = _first_fit(ordered, lengths, microbatch_tokens // row_multiple * row_multiple)
    return tuple(tuple(sorted(chosen)) for chosen in bins)


def equal_counts(per_rank: Sequence[Microbatches]) -> list[Microbatches]:
    """Add empty microbatches until all ranks have as many, at least one: collectives must meet."""
    count = max(1, *(len(microbatches) for microbatches in per_rank))
    return [microbatches + ((),) * (count - len(microbatches)) for microbatches in per_rank]


def round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _longest_first(samples: Sequence[int], lengths: Sequence[int]) -> list[int]:
    return sorted(samples, key=lambda i: (-lengths[i], i))


def _equal_rows(ordered: Sequence[int], columns: Sequence[int], budget: int) -> list[list[int]]:
    """Fill microbatches in order: rows * the columns of the first, which is the longest, <= budget."""
    bins: list[list[int]] = []
    rows = 0
    for sample in ordered:
        if not bins or len(bins[-1]) == rows:
            bins.append([])
            rows = budget // columns[sample]
        bins[-1].append(sample)
    return bins


def _first_fit(ordered: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Put each sample into the first microbatch that has room for it."""
    bins: list[list[int]] = []
    used: list[int] = []
    for sample in ordered:
        place = next((b for b, n in enumerate(used) if n + lengths[sample] <= budget), len(bins))
        if place == len(bins):
            bins.append([])
            used.append(0)
        bins[place].append(sample)
        used[place] += lengths[sample]
    return bins


def _split_by_group(groups: Sequence[int], steps: int) -> list[list[int]]:
    """Sample indices of each optimizer step: whole groups, their counts differing by one at most."""
    order = list(dict.fromkeys(groups))
    step_of = {group: position * steps // len(order) for position, group in enumerate(order)}
    split: list[list[int]] = [[] for _ in range(steps)]
    for sample, group in enumerate(groups):
        split[step_of[group]].append(sample)
    return split


def _check(
    lengths: Sequence[int], groups: Sequence[int], *, steps: int, microbatch_tokens: int, row_multiple: int
) -> None:
    if not lengths or len(lengths) != len(groups) or min(lengths) < 1:
        shortest = min(lengths, default=0)
        raise CheckError(
            "data-batch",
            f"empty or uneven batch: {len(lengths)} lengths (smallest {shortest}), {len(groups)} groups",
            "plan of a batch",
            "give at least one sample, each with at least one token and a group number",
        )
    longest = max(range(len(lengths)), key=lambda i: (lengths[i], -i))
    needed = round_up(lengths[longest], row_multiple)
    if needed > microbatch_tokens:
        raise UserError(
            "data-sample-too-long",
            f"a sample takes {needed} tokens, a microbatch holds {microbatch_tokens}",
            f"sample {longest} of the batch",
            f"set data.microbatch_tokens to at least {needed}, or engine.max_new_tokens lower",
        )
    num_groups = len(set(groups))
    if num_groups < steps:
        raise UserError(
            "data-optimizer-steps",
            f"{num_groups} prompts cannot be cut into {steps} optimizer steps",
            "plan of a batch",
            f"set data.optimizer_steps to at most {num_groups}",
        )
