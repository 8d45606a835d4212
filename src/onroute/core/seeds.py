"""Randomness is an argument, derived from names, so that a resumed run draws the same numbers."""

from __future__ import annotations

import hashlib


def seed_for(run_seed: int, *names: str | int) -> int:
    """A 56-bit seed for what `names` describe, e.g. `seed_for(7, "rollout", step, prompt_id)`.

    Stable across processes, restarts and Python hash seeds.
    """
    text = "/".join(map(str, (run_seed, *names)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
