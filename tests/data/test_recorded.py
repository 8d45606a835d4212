from __future__ import annotations

import json
import struct
from dataclasses import fields, replace

import numpy as np
import pytest
from safetensors.numpy import save_file

from onroute.core.errors import CheckError, MachineError, OnrouteError, UserError
from onroute.core.routing import RoutingTrace
from onroute.data import recorded
from onroute.data.recorded import load_rollouts, prune, recorded_steps, save_rollouts, step_folder
from onroute.data.rollout_arrays import encode
from tests.data.builders import make_group, make_sample, make_trace
from tests.disk import Disk

GROUPS = [
    make_group(
        "sort/1", [3, 0, 2], seed=1, routed=[True, False, True], metadata={"answer": [1, None], "ü": 2.5}
    ),
    make_group("sort/2", [4], seed=9),
]


def same(a, b) -> bool:
    """Equal in every field, arrays bit for bit and of one type."""
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if hasattr(a, "__dataclass_fields__"):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize(
    "groups",
    [GROUPS, [make_group("p", [2, 1], routed=False)], [make_group("p", [0], routed=False), *GROUPS]],
    ids=["mixed", "unrouted", "empty response first"],
)
def test_what_was_saved_comes_back_bit_for_bit(tmp_path, groups):
    loaded = load_rollouts(save_rollouts(tmp_path, 3, groups))
    assert same(loaded, groups)


def test_the_order_of_routed_and_unrouted_samples_is_kept(tmp_path):
    for number, routed in enumerate(([True, False], [False, True])):
        group = make_group("p", [2, 3], routed=routed)
        loaded = load_rollouts(save_rollouts(tmp_path, number, [group]))
        assert [s.routing is not None for s in loaded[0].samples] == routed
        assert same(loaded, [group])


def test_more_than_256_experts_come_back_as_uint16(tmp_path):
    sample = make_sample(3, 2, id="p/0", prompt_id="p", routing=make_trace(5, num_experts=300, top_k=8))
    group = replace(make_group("p", [1]), samples=(sample,))
    loaded = load_rollouts(save_rollouts(tmp_path, 0, [group]))
    assert loaded[0].samples[0].routing.experts.dtype == np.uint16
    assert same(loaded, [group])


def test_unusual_numbers_and_texts_survive(tmp_path):
    group = make_group('p\n"ü\u2028', [2])
    sample = replace(group.samples[0], reward=-0.1 - 0.2, stop_reason="abort")
    group = replace(group, samples=(sample,))
    assert same(load_rollouts(save_rollouts(tmp_path, 0, [group])), [group])


def test_saving_again_replaces_and_leaves_one_file(tmp_path):
    save_rollouts(tmp_path, 1, GROUPS)
    folder = save_rollouts(tmp_path, 1, GROUPS[:1])
    assert same(load_rollouts(folder), GROUPS[:1])
    assert [path.name for path in folder.iterdir()] == [recorded.FILE_NAME]


def test_a_save_on_a_full_disk_names_the_file_and_leaves_the_old_one(disk: Disk):
    folder = save_rollouts(disk.path, 1, GROUPS)
    disk.leave(0)
    with pytest.raises(MachineError, match=r"machine-disk.*step-000001/rollouts\.safetensors; free some"):
        save_rollouts(disk.path, 1, GROUPS[:1])
    assert same(load_rollouts(folder), GROUPS)
    assert [path.name for path in folder.iterdir()] == [recorded.FILE_NAME]


def test_nothing_to_save_is_refused(tmp_path):
    with pytest.raises(CheckError, match="empty batch"):
        save_rollouts(tmp_path, 0, [])


def test_samples_of_two_models_are_refused(tmp_path):
    other = make_sample(3, 2, id="q/0", prompt_id="q", routing=make_trace(5, layers=(0, 1, 2)))
    group = replace(make_group("q", [1]), samples=(other,))
    with pytest.raises(CheckError, match="2 kinds of model"):
        save_rollouts(tmp_path, 0, [*GROUPS, group])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no recorded rollouts; file .*step-000004/rollouts\.safetensors"):
        load_rollouts(step_folder(tmp_path, 4))


def test_every_truncation_gives_one_line_that_names_the_file(tmp_path):
    path = save_rollouts(tmp_path, 0, GROUPS) / recorded.FILE_NAME
    whole = path.read_bytes()
    for size in {0, 1, 7, 8, 9, *range(10, len(whole), 97), len(whole) - 1}:
        path.write_bytes(whole[:size])
        with pytest.raises(CheckError) as caught:
            load_rollouts(path.parent)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_every_changed_byte_is_noticed(tmp_path):
    path = save_rollouts(tmp_path, 0, GROUPS) / recorded.FILE_NAME
    whole = path.read_bytes()
    header = struct.unpack("<Q", whole[:8])[0]
    for position in [*range(0, 8 + header, 41), *range(8 + header, len(whole), 13)]:
        changed = bytearray(whole)
        changed[position] ^= 0x15
        path.write_bytes(changed)
        with pytest.raises(OnrouteError) as caught:
            load_rollouts(path.parent)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_foreign_file_is_refused(tmp_path):
    folder = step_folder(tmp_path, 0)
    folder.mkdir()
    path = folder / recorded.FILE_NAME
    save_file({"weight": np.zeros(3)}, path)
    with pytest.raises(CheckError, match="no onroute-rollouts file"):
        load_rollouts(folder)
    path.write_text("{}")
    with pytest.raises(CheckError, match=str(path)):
        load_rollouts(folder)


def test_another_schema_is_refused_by_number(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded, "SCHEMA", "2")
    folder = save_rollouts(tmp_path, 0, GROUPS)
    monkeypatch.undo()
    with pytest.raises(UserError, match="schema 2, this version reads 1"):
        load_rollouts(folder)


def forge(tmp_path, change):
    """A file with a right digest around content that `change(arrays, records)` made wrong."""
    arrays, text = encode(GROUPS)
    records = json.loads(text)
    change(arrays, records)
    text = json.dumps(records)
    folder = step_folder(tmp_path, 0)
    folder.mkdir(exist_ok=True)
    metadata = {"format": "onroute-rollouts", "schema": "1", "records": text}
    metadata["digest"] = recorded._digest(arrays, text)
    save_file(arrays, folder / recorded.FILE_NAME, metadata=metadata)
    return folder


def put(name, value):
    def change(arrays, records):
        arrays[name] = value(arrays[name])

    return change


def put_record(change):
    return lambda arrays, records: change(records)


def edited(position, value):
    def edit(array):
        array = array.copy()
        array[position] = value
        return array

    return edit


FORGERIES = {
    "an array is missing": lambda arrays, records: arrays.pop("rewards"),
    "experts are missing": lambda arrays, records: arrays.pop("experts"),
    "tokens are floats": put("tokens", lambda a: a.astype(np.float32)),
    "tokens are short": put("tokens", lambda a: a[:-1]),
    "tokens have two dimensions": put("tokens", lambda a: a[None]),
    "a size is negative": put("sizes", lambda a: a * np.array([-1, 1, 1, 1])),
    "a negative size is made up for": put("sizes", lambda a: a + np.array([-7, 7, 0, 0])),
    "a size is huge": put("sizes", edited(0, 2**62)),
    "sizes overflow to the right sum": put("sizes", lambda a: a + np.array([2**62, 2**62, 2**62, 2**62])),
    "group sizes do not add up": put("group_sizes", lambda a: a + 1),
    "a group is missing": put("group_sizes", lambda a: a[:1]),
    "prompt sizes do not add up": put("prompt_sizes", lambda a: a - 1),
    "a prompt length leaves the sample": put("prompt_lengths", edited(0, 99)),
    "a reward is NaN": put("rewards", edited(0, np.nan)),
    "a log-prob is positive": put("log_probs", edited(4, 3.0)),
    "an expert does not exist": put("experts", edited((0, 0, 0), 8)),
    "experts are int32": put("experts", lambda a: a.astype(np.int32)),
    "a validity mask is short": put("valid", lambda a: a[:-1]),
    "a route flag is missing": put("routed", lambda a: a[:-1]),
    "all have routes": put("routed", lambda a: ~a | True),
    "layers descend": put_record(lambda r: r.update(layers=[3, 1])),
    "layers are three": put_record(lambda r: r.update(layers=[1, 3, 5])),
    "layers are texts": put_record(lambda r: r.update(layers=["1", "3"])),
    "num_experts is true": put_record(lambda r: r.update(num_experts=True)),
    "a prompt has no id": put_record(lambda r: r["prompts"][0].pop("id")),
    "a text is a number": put_record(lambda r: r["prompts"][0].update(text=3)),
    "metadata is a list": put_record(lambda r: r["prompts"][0].update(metadata=[])),
    "a stop reason is unknown": put_record(lambda r: r["samples"][0].update(stop_reason="bored")),
    "a stop reason is a list": put_record(lambda r: r["samples"][0].update(stop_reason=[])),
    "a sample is missing": put_record(lambda r: r["samples"].pop()),
    "a sample is of another prompt": put_record(lambda r: r["samples"][0].update(prompt_id="sort/2")),
    "samples are no list": put_record(lambda r: r.update(samples={})),
}


def test_a_forged_file_that_is_right_loads(tmp_path):
    assert same(load_rollouts(forge(tmp_path, lambda arrays, records: None)), GROUPS)


@pytest.mark.parametrize("name", FORGERIES)
def test_content_that_breaks_a_promise_is_refused_though_its_digest_fits(tmp_path, name):
    folder = forge(tmp_path, FORGERIES[name])
    with pytest.raises(CheckError) as caught:
        load_rollouts(folder)
    line = str(caught.value)
    assert (
        line.startswith("[data-rollouts]") and str(folder / recorded.FILE_NAME) in line and "\n" not in line
    )


def test_only_finished_steps_are_listed_in_order(tmp_path):
    assert recorded_steps(tmp_path / "absent") == []
    for step in (10, 2, 1_000_000):
        save_rollouts(tmp_path, step, GROUPS[:1])
    step_folder(tmp_path, 5).mkdir()
    (step_folder(tmp_path, 5) / f".{recorded.FILE_NAME}.unfinished").write_bytes(b"half")
    for stranger in ("step-7", "step-x", "notes"):
        (tmp_path / stranger).mkdir()
        (tmp_path / stranger / recorded.FILE_NAME).write_bytes(b"")
    assert recorded_steps(tmp_path) == [2, 10, 1_000_000]


def test_pruning_keeps_the_last_steps_and_what_is_not_a_step(tmp_path):
    for step in (1, 2, 3):
        (save_rollouts(tmp_path, step, GROUPS[:1]) / "weights.safetensors").write_bytes(b"w")
    (tmp_path / "notes").mkdir()
    prune(tmp_path, 2)
    assert recorded_steps(tmp_path) == [2, 3]
    assert not step_folder(tmp_path, 1).exists() and (tmp_path / "notes").exists()
    prune(tmp_path, 5)
    assert recorded_steps(tmp_path) == [2, 3]
    prune(tmp_path, 0)
    assert recorded_steps(tmp_path) == []


def test_loaded_traces_are_those_of_the_record(tmp_path):
    loaded = load_rollouts(save_rollouts(tmp_path, 0, GROUPS))
    trace = loaded[0].samples[0].routing
    assert isinstance(trace, RoutingTrace)
    assert trace.layers == (1, 3) and trace.num_experts == 8 and trace.top_k == 2 and trace.num_tokens == 6
