"""Checks on samples as they arrive, before anything is computed from them.

What a routing trace holds is checked by the routing room; here only that it has one row per token.
"""

from __future__ import annotations

import math

import numpy as np

from onroute.core.errors import CheckError, OnrouteError, UserError
from onroute.core.samples import Group, Sample
from onroute.data.fields import TOKEN_DTYPES

LOG_PROB_SLACK = 1e-4
"""How far above 0 rounding may lift a log-prob."""


def check_group(group: Group, *, context_length: int | None = None) -> None:
    """Check every sample of a group, and that they belong together.

    Raises:
        CheckError, UserError: see `check_sample`; or the group is empty, or holds a sample of another
            prompt, or one id twice.
    """
    where = f"prompt {group.prompt.id}"
    if _kind(group.prompt.tokens) != "int32 of 1 dimension" or not group.prompt.tokens.size:
        what = f"tokens of the prompt are {_kind(group.prompt.tokens)}, expected at least one int32"
        raise CheckError("data-prompt-tokens", what, where, _FIX_ENVIRONMENT)
    if not group.samples:
        raise CheckError("data-empty-group", "group has no samples", where, _FIX_ENVIRONMENT)
    seen: set[str] = set()
    for sample in group.samples:
        check_sample(sample, context_length=context_length)
        if sample.prompt_id != group.prompt.id:
            what = f"sample {sample.id} belongs to prompt {sample.prompt_id}"
            raise CheckError("data-foreign-sample", what, where, _FIX_ENVIRONMENT)
        if sample.id in seen:
            raise CheckError(
                "data-sample-id", f"two samples have the id {sample.id}", where, _FIX_ENVIRONMENT
            )
        seen.add(sample.id)


def check_sample(sample: Sample, *, context_length: int | None = None) -> None:
    """Check the arrays and numbers of one sample; a response without tokens is legal.

    Raises:
        CheckError: it breaks a promise of `Sample`; the line names sample, prompt and position.
        UserError: it is longer than `context_length`.
    """
    _check_arrays(sample)
    _check_tokens(sample)
    _check_policy_tokens(sample)
    if not isinstance(sample.reward, int | float | np.number) or not math.isfinite(sample.reward):
        raise _error(sample, "data-reward", f"reward is {sample.reward}", "make the reward a finite number")
    if context_length is not None and sample.num_tokens > context_length:
        raise UserError(
            "data-context",
            f"{sample.num_tokens} tokens, the context holds {context_length}",
            _where(sample),
            "set engine.max_new_tokens lower or leave out long prompts",
        )


def _check_arrays(sample: Sample) -> None:
    for name, dtype in TOKEN_DTYPES.items():
        array = getattr(sample, name)
        if not (isinstance(array, np.ndarray) and array.dtype == dtype and array.ndim == 1):
            what = f"{name} is {_kind(array)}, expected {np.dtype(dtype)} of 1 dimension"
            raise _error(sample, "data-dtype", what, _FIX_ENVIRONMENT)
        if len(array) != sample.num_tokens:
            what = f"{name} has {len(array)} entries for {sample.num_tokens} tokens"
            raise _error(sample, "data-length", what, _FIX_ENVIRONMENT)
    trace = sample.routing
    if trace is not None and (trace.num_tokens, trace.valid.shape) != (
        sample.num_tokens,
        (sample.num_tokens,),
    ):
        what = f"routing has {trace.num_tokens} rows and validity {list(trace.valid.shape)}"
        raise _error(sample, "data-length", f"{what} for {sample.num_tokens} tokens", _FIX_ENGINE)


def _check_tokens(sample: Sample) -> None:
    if not 1 <= sample.prompt_length <= sample.num_tokens:
        what = f"prompt_length is {sample.prompt_length} of {sample.num_tokens} tokens"
        raise _error(sample, "data-prompt-length", what, "give at least one prompt token")
    if (negative := _first(sample.tokens < 0)) is not None:
        what = f"token id {sample.tokens[negative]} at position {negative}"
        raise _error(sample, "data-token-id", what, _FIX_ENVIRONMENT)
    if (masked := _first(sample.loss_mask[: sample.prompt_length])) is not None:
        what = f"loss_mask is True on prompt position {masked}"
        raise _error(sample, "data-loss-mask", what, _FIX_ENVIRONMENT)


def _check_policy_tokens(sample: Sample) -> None:
    """Where the policy produced a token there is a log-prob and a version, elsewhere 0.0 and -1."""
    mask, log_probs, versions = sample.loss_mask, sample.log_probs, sample.weight_versions
    # Written so that NaN fails: every comparison with it is false.
    possible = np.isfinite(log_probs) & (log_probs <= LOG_PROB_SLACK)
    if (bad := _first(~np.where(mask, possible, log_probs == 0.0))) is not None:
        expected = "a finite number <= 0" if mask[bad] else "0 on a token that the policy did not produce"
        what = f"log-prob {log_probs[bad]} at position {bad}, expected {expected}"
        raise _error(sample, "data-log-prob", what, _FIX_ENGINE)
    if (bad := _first(~np.where(mask, versions >= 0, versions == -1))) is not None:
        expected = ">= 0" if mask[bad] else "-1 on a token that the policy did not produce"
        what = f"weight version {versions[bad]} at position {bad}, expected {expected}"
        raise _error(sample, "data-weight-version", what, _FIX_ENGINE)


_FIX_ENVIRONMENT = "mend the environment that built the sample"
_FIX_ENGINE = "mend the engine that sampled, or the environment that copied its answer"


def _kind(array: object) -> str:
    if not isinstance(array, np.ndarray):
        return type(array).__name__
    return f"{array.dtype} of {array.ndim} dimension" + ("" if array.ndim == 1 else "s")


def _first(flags: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> int | None:
    return int(np.argmax(flags)) if flags.any() else None


def _where(sample: Sample) -> str:
    return f"sample {sample.id} of prompt {sample.prompt_id}"


def _error(sample: Sample, code: str, what: str, fix: str) -> OnrouteError:
    return CheckError(code, what, _where(sample), fix)
