"""A recording holds what the routers chose, once per router, and changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onroute.core.errors import CheckError
from onroute.models.tiny import tiny_model
from onroute.routing.capture import RouteRecorder, trace_of
from tests.routing.builders import flat_map, logits_of, rigged, token_ids, watched_choices


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
def test_the_record_is_what_the_experts_were_handed(model_type: str):
    with rigged(tiny_model(model_type)) as rig, torch.no_grad(), watched_choices(rig) as handed:
        stock = logits_of(rig.model, token_ids(2, 5))
        handed.clear()
        with RouteRecorder(rig.hooks).recording() as record:
            recorded = logits_of(rig.model, token_ids(2, 5))
    assert record.ids.dtype == torch.int64
    assert record.ids.shape == (len(rig.map.sites), 2 * 5, 2)
    assert torch.equal(record.ids, torch.stack(handed))
    assert torch.equal(stock, recorded)


def test_two_passes_or_none_are_not_one_record():
    with rigged(tiny_model("deepseek_v3")) as rig, torch.no_grad():
        recorder = RouteRecorder(rig.hooks)
        with pytest.raises(CheckError, match=r"2 of 2 routers.*layer 1: 2, layer 2: 2"), recorder.recording():
            logits_of(rig.model, token_ids(1, 3))
            logits_of(rig.model, token_ids(1, 3))
        with pytest.raises(CheckError, match=r"layer 1: 0, layer 2: 0"), recorder.recording():
            pass


def test_an_open_record_cannot_be_read_and_a_failing_body_shows_its_own_error():
    with rigged(tiny_model("qwen3_moe")) as rig:
        recorder = RouteRecorder(rig.hooks)
        with recorder.recording() as record:
            with pytest.raises(CheckError, match="routing-record-open"):
                _ = record.ids
            logits_of(rig.model, token_ids(1, 3))
        with pytest.raises(ZeroDivisionError), recorder.recording():
            _ = 1 / 0


def test_a_trace_has_the_rows_of_its_sample_and_an_invalid_last_one():
    ids = torch.arange(3)[None, :, None] + torch.tensor([0, 4])  # one layer, three rows, top 2
    trace = trace_of(ids, flat_map([5]), num_tokens=4)
    assert trace.experts.dtype == np.uint8
    assert trace.experts[:3, 0].tolist() == [[0, 4], [1, 5], [2, 6]]
    assert trace.valid.tolist() == [True, True, True, False]
    assert trace_of(ids, flat_map([5]), num_tokens=3).valid.all()
    with pytest.raises(CheckError, match=r"\[1, 3, 2\]; expected \[1, 4 or 5, 2\]"):
        trace_of(ids, flat_map([5]), num_tokens=5)


def test_ids_above_a_byte_keep_their_value():
    trace = trace_of(torch.tensor([[[511, 256]]]), flat_map([0], num_experts=512), num_tokens=1)
    assert trace.experts.dtype == np.uint16
    assert trace.experts[0, 0].tolist() == [511, 256]
