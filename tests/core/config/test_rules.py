from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from onroute.core.config.load import load_config
from onroute.core.config.sections import RunConfig
from onroute.core.config.violations import ConfigError
from tests.core.config.catalogs import CATALOGS, SMALLEST


def load(folder: Path, *overrides: str) -> RunConfig:
    file = folder / "run.toml"
    file.write_text(SMALLEST, encoding="utf-8")
    return load_config(file, overrides, CATALOGS)


BAD_VALUES = [
    ("engine.temperature", "0"),
    ("engine.temperature", "-1"),
    ("engine.temperature", "nan"),
    ("engine.top_p", "0"),
    ("engine.top_p", "1.1"),
    ("engine.top_k", "0"),
    ("engine.max_new_tokens", "0"),
    ("engine.max_batch_size", "0"),
    ("engine.push_bucket_mib", "0"),
    ("data.prompts_per_step", "0"),
    ("data.samples_per_prompt", "0"),
    ("data.optimizer_steps", "0"),
    ("data.optimizer_steps", "65"),
    ("data.optimizer_steps", "3"),
    ("data.microbatch_tokens", "0"),
    ("data.microbatch_tokens", "1024"),
    ("algorithm.max_log_prob_gap", "0"),
    ("algorithm.max_log_prob_gap", "nan"),
    ("optimizer.lr", "0"),
    ("optimizer.lr", "inf"),
    ("optimizer.lr", "nan"),
    ("optimizer.betas", "[0.9, 1.0]"),
    ("optimizer.betas", "[-0.1, 0.9]"),
    ("optimizer.betas", "[nan, 0.9]"),
    ("optimizer.eps", "-1e-8"),
    ("optimizer.weight_decay", "-0.1"),
    ("optimizer.clip_norm", "0"),
    ("optimizer.clip_norm", "-inf"),
    ("optimizer.warmup_steps", "-1"),
    ("optimizer.warmup_steps", "101"),
    ("optimizer.max_nonfinite_steps", "0"),
    ("parallel.timeout_s", "0"),
    ("parallel.timeout_s", "inf"),
    ("parallel.ranks", "0"),
    ("parallel.engines", "0"),
    ("parallel.engines", "2"),
    ("parallel.placement_timeout_s", "0"),
    ("environment.workers", "0"),
    ("environment.timeout_s", "0"),
    ("run.restarts", "-1"),
    ("run.ray_address", '"10.0.0.4:6379"'),
    ("checkpoint.every", "-1"),
    ("checkpoint.keep", "0"),
    ("run.resume", "0"),
    ("run.resume", "-3"),
    ("checkpoint.recorded_steps", "-1"),
    ("checkpoint.record_every", "0"),
    ("run.folder", '""'),
    ("model.path", '""'),
    ("run.steps", "0"),
    ("run.seed", "-1"),
    ("run.eval_every", "-1"),
    ("run.eval_prompts", "-1"),
    ("run.eval_samples", "0"),
    ("run.supervised_steps", "-1"),
    ("run.supervised_samples", "0"),
    ("run.supervised_lr", "0"),
    ("run.threads", "0"),
    ("algorithm.loss_options.clip_high", "nan"),
]


@pytest.mark.parametrize(("key", "value"), BAD_VALUES)
def test_a_bad_value_is_refused_and_named(tmp_path, key, value):
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, f"--{key}={value}")
    assert all(violation.code == "config-rule" for violation in raised.value.violations)
    assert all(key in violation.what for violation in raised.value.violations)
    assert all(f"--{key} on the command line" in violation.where for violation in raised.value.violations)


def test_the_edges_of_the_allowed_ranges_are_allowed(tmp_path):
    load(
        tmp_path,
        "--engine.temperature=0.01",
        "--engine.top_p=1.0",
        "--engine.top_k=1",
        "--data.prompts_per_step=4",
        "--data.optimizer_steps=4",
        "--data.samples_per_prompt=2",
        "--data.microbatch_tokens=1025",
        "--optimizer.betas=[0.0, 0.0]",
        "--optimizer.eps=0",
        "--optimizer.clip_norm=inf",
        "--algorithm.max_log_prob_gap=inf",
        "--run.steps=1",
        "--optimizer.warmup_steps=4",
        "--run.eval_prompts=0",
    )


def test_an_advantage_over_groups_needs_two_samples_and_another_does_not(tmp_path):
    with pytest.raises(ConfigError, match=r"samples_per_prompt = 1 and algorithm.advantage = 'grpo'"):
        load(tmp_path, "--data.samples_per_prompt=1")
    assert (
        load(tmp_path, "--data.samples_per_prompt=1", "--algorithm.advantage=plain").data.samples_per_prompt
        == 1
    )


def test_a_value_that_is_not_finite_is_told_once(tmp_path):
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, "--optimizer.lr=nan")
    assert [violation.what for violation in raised.value.violations] == ["optimizer.lr = nan must be finite"]


def test_a_run_file_is_refused_before_torch_is_imported(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(SMALLEST + "[engine]\ntemperature = 0.0\n", encoding="utf-8")
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from onroute.cli.catalogs import CATALOGS\n"
        "from onroute.core.config.load import load_config\n"
        "from onroute.core.errors import UserError\n"
        "try:\n"
        "    load_config(Path(sys.argv[1]), (), CATALOGS)\n"
        "except UserError as error:\n"
        "    print(error)\n"
        "print(sorted({'torch', 'transformers', 'reasoning_gym'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(file)], capture_output=True, text=True, check=True, timeout=60
    )
    *lines, imported = done.stdout.splitlines()
    assert any("engine.temperature = 0.0 must be above 0" in line for line in lines)
    assert imported == "[]"
