from __future__ import annotations

import os
import subprocess
import sys

from onroute.core.seeds import seed_for


def test_seeds_differ_by_every_name_and_fit_an_int64():
    seeds = {
        seed_for(run, name, step) for run in (0, 1) for name in ("rollout", "eval") for step in range(50)
    }
    assert len(seeds) == 200
    assert all(0 <= seed < 2**56 for seed in seeds)


def test_names_are_not_run_together():
    assert seed_for(0, "a", "b") != seed_for(0, "ab")
    assert seed_for(1, 23) != seed_for(12, 3)


def test_a_seed_is_the_same_in_another_process_with_another_hash_seed():
    done = subprocess.run(
        [sys.executable, "-c", "from onroute.core.seeds import seed_for; print(seed_for(7, 'rollout', 3))"],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert int(done.stdout) == seed_for(7, "rollout", 3)
