"""The environment of a run, built alike in every process that needs one."""

from __future__ import annotations

from pathlib import Path

from onroute.core.config.sections import RunConfig
from onroute.core.environment import Environment
from onroute.core.errors import UserError
from onroute.core.samples import Prompt
from onroute.environments.catalog import ENVIRONMENTS
from onroute.environments.codec import HuggingFaceCodec
from onroute.models.load import context_length, load_tokenizer, read_config, stop_token_ids


def build_environment(config: RunConfig) -> Environment:
    """The environment of the run, speaking the model's own tokens.

    Raises UserError when the model can't be read, or when a first prompt and its longest response do not
    fit its context.
    """
    path = Path(config.model.path)
    limit = context_length(read_config(path))
    tokenizer = load_tokenizer(path)
    entry = ENVIRONMENTS[config.environment.name]
    environment: Environment = entry.load()(
        entry.build_options(config.environment.options),
        codec=HuggingFaceCodec(tokenizer),
        stop_token_ids=stop_token_ids(path, tokenizer),
        held_out=config.run.eval_prompts,
        seed=config.run.seed,
    )
    _require_room(environment.prompt("train", 0), config, limit)
    return environment


def _require_room(prompt: Prompt, config: RunConfig, limit: int) -> None:
    length, new = len(prompt.tokens), config.engine.max_new_tokens
    if length + new > limit:
        raise UserError(
            "run-context",
            f"a prompt of {length} tokens and a response of {new} exceed the context of {limit}",
            f"prompt {prompt.id}",
            f"lower engine.max_new_tokens to at most {max(1, limit - length)}, or choose shorter prompts",
        )
    room = config.data.microbatch_tokens
    if length + new > room:
        raise UserError(
            "run-microbatch",
            f"a prompt of {length} tokens and a response of {new} exceed a microbatch of {room}",
            f"prompt {prompt.id}",
            f"set data.microbatch_tokens to at least {length + new}",
        )
