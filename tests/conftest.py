"""Settings of every test: one thread, so that results and times do not depend on the machine."""

from __future__ import annotations

import hypothesis
import torch

torch.set_num_threads(1)

hypothesis.settings.register_profile("onroute", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("onroute")
