"""An exported checkpoint is the trainer's model for every program that loads Hugging Face folders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from onroute.cli.catalogs import CATALOGS
from onroute.core.config.load import load_config
from onroute.core.config.sections import RunConfig
from onroute.core.errors import UserError
from onroute.models.world import open_world
from onroute.observability.progress import Progress
from onroute.orchestration.checkpoints import saved_steps
from onroute.orchestration.export import export_run
from onroute.orchestration.folder import RunFolder
from onroute.orchestration.run import execute
from onroute.training.trainer import Trainer
from tests.orchestration.conftest import QUICKSTART, SMALL, merged

IDS = torch.tensor([[3, 5, 8, 1, 2, 9, 7, 4]])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> RunConfig:
    """Four steps, checkpoints after 2 and 4, at a rate that moves the weights."""
    folder = tmp_path_factory.mktemp("exported") / "run"
    places = (f"--model.path={demo_model}", f"--run.folder={folder}", "--optimizer.lr=1e-2")
    config = load_config(QUICKSTART, merged(*SMALL, *places), CATALOGS)
    execute(config, progress=Progress.silent())
    return config


def trained(config: RunConfig, step: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The trainer's parameters after a step, and its log-probs of every next token."""
    checkpoints = RunFolder(Path(config.run.folder)).checkpoints
    with open_world(timeout_s=60.0) as world:
        trainer = Trainer(config, world, total_steps=4)
        trainer.load(saved_steps(checkpoints)[step])
        with torch.no_grad():
            log_probs = trainer.model(input_ids=IDS).logits.log_softmax(-1)
        tensors = {name: value for unit in trainer.weights() for name, value in unit.items()}
        return {name: value.clone() for name, value in tensors.items()}, log_probs


def export(config: RunConfig, out: Path | None, *, step: int | None = None, dtype=torch.float32):
    return export_run(config, RunFolder.open(Path(config.run.folder)), step=step, out=out, dtype=dtype)


@pytest.mark.parametrize("step", [2, 4])
def test_stock_transformers_gets_the_trainers_weights_and_log_probs(run, tmp_path, step):
    exported = export(run, tmp_path / "model", step=step)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True, experts_implementation="eager"
    )
    tensors, log_probs = trained(run, step)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.dtype == torch.float32  # without being asked: config.json says so
    assert (exported.step, exported.dtype, exported.tensors) == (step, "float32", len(tensors))
    again = export(run, tmp_path / "again", step=step)
    assert again.parameters == exported.parameters == sum(p.numel() for p in loaded.parameters())
    written = load_file(tmp_path / "model" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert [name for name in tensors if not torch.equal(written[name], tensors[name])] == []
    with torch.no_grad():
        found = loaded.eval()(input_ids=IDS).logits.log_softmax(-1)
    torch.testing.assert_close(found, log_probs, rtol=0, atol=1e-6)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.vocab_size == AutoTokenizer.from_pretrained(run.model.path).vocab_size


def test_the_newest_checkpoint_is_the_default_and_lies_in_the_run_folder(run):
    exported = export(run, None)
    assert exported.folder == Path(run.run.folder) / "export" / "step-000004"
    assert exported.step == 4
    with pytest.raises(UserError, match=r"export-folder.*exists already.*step-000004.*--out"):
        export(run, None)


def test_bfloat16_rounds_the_weights_and_says_so_in_the_config(run, tmp_path):
    export(run, tmp_path / "model", dtype=torch.bfloat16)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", experts_implementation="eager")
    assert loaded.dtype == torch.bfloat16
    tensors, _ = trained(run, 4)
    embeddings = loaded.get_input_embeddings().weight
    assert torch.equal(embeddings, tensors["model.embed_tokens.weight"].bfloat16())
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_folder_that_exists_is_left_alone(run, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("")
    with pytest.raises(UserError, match="export-folder"):
        export(run, tmp_path / "model")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["mine"]


def test_a_step_that_is_not_there_is_refused_with_those_that_are(run, tmp_path):
    with pytest.raises(UserError, match=r"no checkpoint of step 3; there are: 2, 4"):
        export(run, tmp_path / "model", step=3)
    assert not (tmp_path / "model").exists()


def onroute(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from onroute.cli.main import main; main()", "export", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_the_command_ends_with_a_json_object_or_one_line_of_what_is_wrong(run, tmp_path):
    done = onroute(run.run.folder, "--step", "2", "--out", str(tmp_path / "model"), "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["step"], result["dtype"]) == (2, "float32")
    assert (Path(result["folder"]) / "model.safetensors").is_file()
    wrong = onroute(str(tmp_path))
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("[run-folder] no run folder")
    assert wrong.stderr.count("\n") == 1
