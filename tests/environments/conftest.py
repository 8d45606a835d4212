from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from onroute.core.routing import RoutingTrace
from onroute.core.samples import Completion, SampleRequest
from onroute.environments.catalog import ReasoningGymOptions
from onroute.environments.reasoning_gym import ReasoningGym

ALPHABET = "$ \n" + "".join(map(chr, range(33, 127))).replace("$", "")
STOP = 0


class CharacterCodec:
    """One id a character; 0 is the stop token `$`."""

    def encode(self, text):
        return np.array([ALPHABET.index(c) for c in text], dtype=np.int32)

    def decode(self, tokens):
        return "".join(ALPHABET[int(t)] for t in tokens)


@dataclass
class ScriptedSampler:
    """Answers every request with the ids that `script(index)` gives."""

    script: Callable[[int], Sequence[int]]
    requests: list[SampleRequest] = field(default_factory=list)

    async def sample(self, requests):
        self.requests += requests
        return [self._complete(i, request) for i, request in enumerate(requests)]

    def _complete(self, index, request):
        tokens = np.array(self.script(index), dtype=np.int32)
        total = len(request.prompt_tokens) + len(tokens)
        return Completion(
            id=request.id,
            tokens=tokens,
            log_probs=-np.arange(1, len(tokens) + 1, dtype=np.float32),
            routing=RoutingTrace(
                experts=np.zeros((total, 1, 2), np.uint8),
                layers=(0,),
                num_experts=4,
                valid=np.arange(total) < total - 1,
            ),
            stop_reason="stop" if len(tokens) and tokens[-1] == STOP else "length",
            weight_versions=np.full(len(tokens), 3, np.int32),
        )


SINGLE_DIGITS = {
    "min_numbers": 5,
    "max_numbers": 5,
    "min_decimals": 0,
    "max_decimals": 0,
    "min_value": -0.49,
    "max_value": 9.49,
}


def make(task="number_sorting", parameters=None, rendering="compact", held_out=20, seed=0, stop=(STOP,)):
    if parameters is None:
        parameters = SINGLE_DIGITS if task == "number_sorting" else {}
    options = ReasoningGymOptions(task=task, parameters=parameters, rendering=rendering)
    return ReasoningGym(options, codec=CharacterCodec(), stop_token_ids=stop, held_out=held_out, seed=seed)


@pytest.fixture(scope="session")
def sorting():
    return make()


@pytest.fixture
def make_environment():
    return make


@pytest.fixture
def scripted():
    return ScriptedSampler


@pytest.fixture
def codec():
    return CharacterCodec()
