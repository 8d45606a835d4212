from __future__ import annotations

import json
import threading

import pytest

from onroute.observability.spans import Spans


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_time_adds_up_by_name_until_it_is_taken(clock):
    spans = Spans(clock)
    for seconds in (2.0, 3.0):
        with spans.span("generate"):
            clock.now += seconds
    with spans.span("train"):
        clock.now += 4.0
    assert spans.take() == {"time/generate_s": 5.0, "time/train_s": 4.0}
    assert spans.take() == {}


def test_a_span_counts_for_itself_and_for_the_span_around_it(clock):
    spans = Spans(clock)
    with spans.span("step"):
        clock.now += 1.0
        with spans.span("train"):
            clock.now += 2.0
    assert spans.take() == {"time/step_s": 3.0, "time/train_s": 2.0}


def test_spans_of_one_name_that_overlap_count_the_clock_once(clock):
    spans = Spans(clock)
    first, second = spans.span("rollout"), spans.span("rollout")
    first.__enter__()
    clock.now += 1.0
    second.__enter__()
    clock.now += 1.0
    first.__exit__(None, None, None)
    clock.now += 1.0
    second.__exit__(None, None, None)
    assert spans.take() == {"time/rollout_s": 3.0}


def test_a_span_still_open_is_counted_up_to_now_and_the_rest_later(clock):
    spans = Spans(clock)
    with spans.span("wait"):
        clock.now += 1.5
        assert spans.take() == {"time/wait_s": 1.5}
        clock.now += 0.5
    assert spans.take() == {"time/wait_s": 0.5}


def test_a_span_that_raises_is_counted(clock):
    spans = Spans(clock)
    with pytest.raises(KeyError), spans.span("train"):
        clock.now += 1.0
        raise KeyError
    assert spans.take() == {"time/train_s": 1.0}


def test_the_trace_is_chrome_json_in_microseconds(clock, tmp_path):
    spans = Spans(clock)
    clock.now += 1.0
    with spans.span("step"):
        clock.now += 0.5
        with spans.span("train"):
            clock.now += 0.25
    spans.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [(e["name"], e["ph"], e["ts"], e["dur"]) for e in events] == [
        ("train", "X", 1_500_000.0, 250_000.0),
        ("step", "X", 1_000_000.0, 750_000.0),
    ]
    assert {e["tid"] for e in events} == {0}


def test_spans_of_many_threads_are_all_kept():
    spans = Spans()

    def work():
        for _ in range(200):
            with spans.span("x"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(spans.events) == 800
    assert spans.take()["time/x_s"] >= 0.0
