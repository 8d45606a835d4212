"""Which values a key may have and which keys go together. Checked before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields

from onroute.core.config.catalog import Catalogs
from onroute.core.config.sections import RunConfig
from onroute.core.config.violations import Violation

UNLIMITED = frozenset({"algorithm.max_log_prob_gap", "optimizer.clip_norm"})
"""Limits that may be infinite: the run then goes without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Holds or not for a whole config. `keys` are those it reads; `must` goes on after their values."""

    keys: tuple[str, ...]
    holds: Callable[[RunConfig, Catalogs], bool]
    must: str
    fix: str

    def violation(self, config: RunConfig) -> Violation:
        values = " and ".join(f"{key} = {_value(config, key)!r}" for key in self.keys)
        return Violation(
            code="config-rule",
            what=f"{values} {self.must}",
            where=", ".join(self.keys),
            fix=self.fix,
            keys=self.keys,
        )


def broken_rules(config: RunConfig, catalogs: Catalogs, *, unusable: Collection[str]) -> list[Violation]:
    """Every rule that `config` breaks. A rule that reads one of the `unusable` keys is not asked."""
    violations = [found for found in _not_finite(config) if not _touches(found.keys, unusable)]
    skip = {*unusable, *(key for found in violations for key in found.keys)}
    violations += [
        rule.violation(config)
        for rule in RULES
        if not _touches(rule.keys, skip) and not rule.holds(config, catalogs)
    ]
    return violations


def _touches(keys: Collection[str], tables_and_keys: Collection[str]) -> bool:
    """Whether one of `keys` is among the others or lies in a table that is."""
    return any(key == other or key.startswith(f"{other}.") for key in keys for other in tables_and_keys)


def _value(config: RunConfig, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _number(config: RunConfig, key: str) -> float:
    value = _value(config, key)
    assert isinstance(value, int | float)  # the reader has checked the type of every usable key
    return value


def _above(key: str, limit: float, fix: str | None = None) -> Rule:
    return Rule(
        keys=(key,),
        holds=lambda config, _: _number(config, key) > limit,
        must=f"must be above {limit:g}",
        fix=fix or f"set a number above {limit:g}",
    )


def _at_least(key: str, limit: float, fix: str | None = None) -> Rule:
    return Rule(
        keys=(key,),
        holds=lambda config, _: _number(config, key) >= limit,
        must=f"must be at least {limit:g}",
        fix=fix or f"set {limit:g} or more",
    )


def _not_empty(key: str, fix: str) -> Rule:
    return Rule(
        keys=(key,), holds=lambda config, _: bool(_value(config, key)), must="must not be empty", fix=fix
    )


SMALLEST_GROUP = 2


def _grouped(config: RunConfig, catalogs: Catalogs) -> bool:
    entry = catalogs.advantages.get(config.algorithm.advantage)
    if entry is None or "needs_groups" not in entry.properties:
        return True
    return config.data.samples_per_prompt >= SMALLEST_GROUP


RULES = (
    _not_empty("model.path", "give the folder of a Hugging Face model"),
    _not_empty("run.folder", "give the folder that the run writes to"),
    _above("engine.temperature", 0, "use 1.0 to sample from the model's own distribution"),
    Rule(
        keys=("engine.top_p",),
        holds=lambda c, _: 0 < c.engine.top_p <= 1,
        must="must be above 0 and at most 1",
        fix="use 1.0 to sample from every token",
    ),
    Rule(
        keys=("engine.top_k",),
        holds=lambda c, _: c.engine.top_k is None or c.engine.top_k >= 1,
        must="must be at least 1",
        fix="leave the key out to sample from every token",
    ),
    _at_least("engine.max_new_tokens", 1),
    _at_least("engine.max_batch_size", 1),
    _at_least("engine.push_bucket_mib", 1),
    _at_least("data.prompts_per_step", 1),
    _at_least("data.samples_per_prompt", 1),
    Rule(
        keys=("data.samples_per_prompt", "algorithm.advantage"),
        holds=_grouped,
        must="do not go together: this advantage compares the samples of one prompt",
        fix="set data.samples_per_prompt to 2 or more, or choose another advantage",
    ),
    _at_least("data.optimizer_steps", 1),
    Rule(
        keys=("data.prompts_per_step", "data.optimizer_steps"),
        holds=lambda c, _: (
            c.data.optimizer_steps < 1
            or c.data.prompts_per_step < 1
            or c.data.prompts_per_step % c.data.optimizer_steps == 0
        ),
        must="do not go together: every optimizer step takes the same number of whole prompts",
        fix="set data.prompts_per_step to a multiple of data.optimizer_steps",
    ),
    _at_least("data.microbatch_tokens", 1),
    Rule(
        keys=("engine.max_new_tokens", "data.microbatch_tokens"),
        holds=lambda c, _: c.engine.max_new_tokens < c.data.microbatch_tokens,
        must="do not go together: one forward pass holds a prompt and its longest response",
        fix="raise data.microbatch_tokens or lower engine.max_new_tokens",
    ),
    _above("algorithm.max_log_prob_gap", 0),
    _above("optimizer.lr", 0),
    Rule(
        keys=("optimizer.betas",),
        holds=lambda c, _: all(0 <= beta < 1 for beta in c.optimizer.betas),
        must="must both be at least 0 and below 1",
        fix="use [0.9, 0.95] when in doubt",
    ),
    _at_least("optimizer.eps", 0),
    _at_least("optimizer.weight_decay", 0),
    _above("optimizer.clip_norm", 0, "set a number above 0; inf never clips"),
    _at_least("optimizer.warmup_steps", 0),
    Rule(
        keys=("optimizer.warmup_steps", "run.steps", "data.optimizer_steps"),
        holds=lambda c, _: c.optimizer.warmup_steps <= max(0, c.run.steps) * max(0, c.data.optimizer_steps),
        must="do not go together: the run ends before the learning rate has reached its peak",
        fix="lower optimizer.warmup_steps to at most run.steps x data.optimizer_steps",
    ),
    _at_least("optimizer.max_nonfinite_steps", 1),
    _at_least("environment.workers", 1),
    _above("environment.timeout_s", 0),
    _at_least("parallel.ranks", 1),
    Rule(
        keys=("parallel.engines",),
        holds=lambda c, _: c.parallel.engines == 1,
        must="must be 1: a run has one engine so far",
        fix="set it to 1",
    ),
    _above("parallel.placement_timeout_s", 0),
    _above("parallel.timeout_s", 0),
    _at_least("checkpoint.every", 0),
    _at_least("checkpoint.keep", 1),
    _at_least("checkpoint.recorded_steps", 0),
    _at_least("checkpoint.record_every", 1),
    _at_least("run.steps", 1),
    _at_least("run.seed", 0),
    Rule(
        keys=("run.resume",),
        holds=lambda c, _: not isinstance(c.run.resume, int) or c.run.resume >= 1,
        must="must be a step from 1 on",
        fix='set "auto", "never" or the step of a checkpoint',
    ),
    Rule(
        keys=("run.on", "run.ray_address"),
        holds=lambda c, _: c.run.on == "ray" or not c.run.ray_address,
        must="do not go together: a local run attaches to no cluster",
        fix='set run.on = "ray", or leave run.ray_address out',
    ),
    _at_least("run.restarts", 0),
    _at_least("run.eval_every", 0),
    _at_least("run.eval_prompts", 0),
    _at_least("run.eval_samples", 1),
    _at_least("run.supervised_steps", 0),
    _at_least("run.supervised_samples", 1),
    _above("run.supervised_lr", 0),
    _at_least("run.threads", 1),
)


def _leaves(config: RunConfig) -> Iterator[tuple[str, object]]:
    """Every value under its dotted key, options included; arrays item by item."""
    for section in fields(config):
        table = getattr(config, section.name)
        yield from _flat(section.name, {key.name: getattr(table, key.name) for key in fields(table)})


def _flat(key: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat(f"{key}.{name}", inner)
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from _flat(key, inner)
    else:
        yield key, value


def _not_finite(config: RunConfig) -> list[Violation]:
    return [
        Violation(
            code="config-rule",
            what=f"{key} = {value} must be finite",
            where=key,
            fix="set an ordinary number",
            keys=(key,),
        )
        for key, value in _leaves(config)
        if isinstance(value, float) and not math.isfinite(value) and not (key in UNLIMITED and value > 0)
    ]
