from __future__ import annotations

import io

import pytest
from rich.console import Console

from onroute.observability.progress import Progress, duration

METRICS = {
    "rollout/reward_mean": 0.4123,
    "mismatch/k3": 9.13e-5,
    "routing/agreement": 0.9971,
    "perf/tokens_per_s": 5234.0,
    "eval/accuracy": 0.85,
    "train/lr": 1e-3,
}


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def plain(clock):
    out = io.StringIO()
    return Progress(Console(file=out, width=80), "plain", clock=clock), out


def test_a_line_tells_step_metrics_and_time_left():
    clock = Clock()
    progress, out = plain(clock)
    with progress, progress.phase("RL", total=80) as phase:
        clock.now = 30.0
        phase.update(20, METRICS)  # 1.5 s a step, 60 to go
    assert out.getvalue() == (
        "RL 20/80  reward 0.412  held-out 0.850  k3 9.1e-05  routes 99.7%  tok/s 5.2k  1:30 left\n"
    )


def test_short_steps_give_a_line_every_tenth_of_the_run():
    clock = Clock()
    progress, out = plain(clock)
    with progress.phase("RL", total=100) as phase:
        for step in range(1, 101):
            clock.now += 0.01
            phase.update(step, {})
    steps = [int(line.split()[1].split("/")[0]) for line in out.getvalue().splitlines()]
    assert steps == [1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 100]


def test_middling_steps_give_a_line_every_five_seconds_and_long_ones_a_line_each():
    for seconds, expected in ((1.0, [1, 6, 11, 16]), (60.0, list(range(1, 20)))):
        clock = Clock()
        progress, out = plain(clock)
        with progress.phase("RL", total=1000) as phase:
            for step in range(1, 20):
                clock.now += seconds
                phase.update(step, {})
        assert [int(line.split()[1].split("/")[0]) for line in out.getvalue().splitlines()] == expected


def test_a_resumed_run_reckons_the_time_left_from_its_own_steps():
    clock = Clock()
    progress, out = plain(clock)
    with progress.phase("RL", total=80, start=60) as phase:
        clock.now = 20.0
        phase.update(70, {})  # 2 s a step, 10 to go
    assert out.getvalue() == "RL 70/80  0:20 left\n"


def test_a_metric_that_is_missing_now_keeps_its_last_value_and_none_at_all_is_no_error():
    progress, out = plain(Clock())
    with progress.phase("RL", total=2) as phase:
        phase.update(1, {"eval/accuracy": 0.5})
        phase.update(2, {"rollout/reward_mean": float("nan")})
    assert "reward nan  held-out 0.500" in out.getvalue().splitlines()[1]


def test_a_terminal_of_80_columns_shows_two_lines_that_fit():
    console = Console(file=io.StringIO(), force_terminal=True, width=80, legacy_windows=False)
    progress = Progress.open(console)
    with progress, progress.phase("RL", total=80) as phase:
        for step in range(1, 35):
            phase.update(step, METRICS | {"rollout/reward_mean": step / 100})
        drawn = Console(file=io.StringIO(), width=80)
        drawn.print(phase)
    lines = drawn.file.getvalue().splitlines()
    assert len(lines) == 2
    assert all(len(line) <= 80 for line in lines)
    assert "34/80" in lines[0]
    assert "left" in lines[0]
    assert lines[1].split() == (
        [
            "reward",
            "0.340",
            "▁▂▃▃▄▅▆▆▇█",
            "held-out",
            "0.850",
            "k3",
            "9.1e-05",
            "routes",
            "99.7%",
            "tok/s",
            "5.2k",
        ]
    )
    assert "\x1b[" in console.file.getvalue()


def test_the_live_lines_end_with_the_phase_also_by_an_error():
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    progress = Progress.open(console)
    with pytest.raises(RuntimeError), progress.phase("RL", total=2):
        raise RuntimeError
    assert console.file.getvalue().endswith("\x1b[?25h")  # the cursor is back


def test_without_a_terminal_lines_are_plain_and_silent_shows_nothing(capsys):
    out = io.StringIO()
    with Progress.open(Console(file=out)) as progress, progress.phase("Warm-up", total=1) as phase:
        phase.update(1, {"supervised/loss": 0.5})
        progress.note("[saved] step 1")
    assert out.getvalue() == "Warm-up 1/1  loss 0.500  0:00 in all\n[saved] step 1\n"
    with Progress.silent() as progress, progress.phase("RL", total=1) as phase:
        phase.update(1, METRICS)
        progress.note("saved")
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_durations_read_like_a_clock():
    seconds = (0, 59.6, 61, 3600, 3661)
    assert [duration(s) for s in seconds] == ["0:00", "1:00", "1:01", "1:00:00", "1:01:01"]
