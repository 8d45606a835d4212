from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import numpy as np
import pytest
import torch

from onroute.algorithms.catalog import ADVANTAGES, LOSSES, ClippedOptions
from onroute.algorithms.losses.base import LossInputs


def resolve(entry):
    module, attribute = entry.target.split(":")
    return getattr(import_module(module), attribute), entry.options() if entry.options else None


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_advantage_gives_one_finite_number_per_sample(name):
    function, options = resolve(ADVANTAGES[name])
    out = function(np.array([0.0, 1.0, 0.5, 2.0]), np.array([0, 0, 1, 1]), options)
    assert out.values.shape == (4,) and out.values.dtype == np.float64 and np.isfinite(out.values).all()
    assert ADVANTAGES[name].name == name


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_keeps_to_its_mask_and_gives_a_gradient(name):
    function, options = resolve(LOSSES[name])
    mask = torch.tensor([[True, False, True]])
    junk = torch.tensor([[0.0, float("nan"), 0.0]])
    log_probs = (junk - 1).requires_grad_()
    terms = function(
        LossInputs(log_probs=log_probs, old_log_probs=junk - 1, advantages=junk + 1, mask=mask), options
    )
    terms.per_token.sum().backward()
    assert terms.per_token[0, 1] == 0 and terms.per_token.isfinite().all()
    assert log_probs.grad[0, 1] == 0 and log_probs.grad[mask].ne(0).all()
    assert all(value.isfinite() for value in terms.sums.values())
    assert LOSSES[name].name == name


def test_the_catalogue_imports_no_torch():
    code = "import sys, onroute.algorithms.catalog; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [("clip_low", -0.1), ("clip_low", 1.1), ("clip_high", -1.0), ("clip_high", float("inf")),
     ("clip_high", float("nan")), ("dual_clip", 1.0), ("dual_clip", float("nan"))],
)  # fmt: skip
def test_clip_options_out_of_range_are_refused_by_name(key, value):
    with pytest.raises(ValueError, match=key):
        ClippedOptions(**{key: value})


def test_only_group_relative_advantages_need_groups():
    assert {name for name, entry in ADVANTAGES.items() if "needs_groups" in entry.properties} == {"grpo"}
