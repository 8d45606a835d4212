"""A stock Hugging Face model from a folder, whole or as a skeleton without weights.

The network is never asked: a model is a folder on this machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from onroute.core.errors import UserError

Attention: TypeAlias = Literal["sdpa", "eager"]


def read_config(path: Path) -> PreTrainedConfig:
    """The configuration of the model in `path`, checked before any weight is read.

    Raises UserError when `path` is no model folder, its type is unknown or its weights are quantised.
    """
    if not (path / "config.json").is_file():
        what = "no model folder" if path.is_dir() else "model folder does not exist"
        raise UserError(
            "model-missing", what, f"{path} has no config.json", "set model.path to a Hugging Face folder"
        )
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path, local_files_only=True)
    except (ValueError, OSError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            "model-config",
            f"the model's configuration can't be read: {reason}",
            str(path / "config.json"),
            "check the file, or install a transformers release that knows this model type",
        ) from error
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(
            "model-quantised",
            "quantised weights can't be trained",
            str(path),
            "convert the checkpoint to bfloat16 or float32 and point model.path at the result",
        )
    return config


def load_plain(
    path: Path, *, dtype: torch.dtype, attention: str, experts: str, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """The whole model with its weights in `dtype`, in eval mode, on `device`.

    Raises UserError when a weight is missing, left over or of the wrong shape: the stock loader
    would initialise it at random and only warn.
    """
    config = read_config(path)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model, info = _auto_class(config).from_pretrained(
            path, dtype=dtype, local_files_only=True, output_loading_info=True, **_kernels(attention, experts)
        )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise _cannot_load(path, error) from error
    problems = {
        kind: sorted(str(key) for key in info.get(f"{kind}_keys") or ())
        for kind in ("missing", "unexpected", "mismatched")
    }
    for kind, keys in problems.items():
        if keys:
            raise UserError(
                "model-weights",
                f"{len(keys)} {kind} tensor(s): {', '.join(keys[:10])}",
                str(path),
                "the weights do not belong to config.json; export the model again",
            )
    loaded: PreTrainedModel = model.to(device).eval()
    return loaded


def load_skeleton(path: Path, *, dtype: torch.dtype, attention: str, experts: str) -> PreTrainedModel:
    """The same model on the meta device: modules and shapes, no weights, no file of weights opened."""
    config = read_config(path)
    with torch.device("meta"):
        try:
            model = _auto_class(config).from_config(config, dtype=dtype, **_kernels(attention, experts))
        except (ValueError, ImportError) as error:
            raise _cannot_load(path, error) from error
    skeleton: PreTrainedModel = model.eval()
    return skeleton


def best_attention(path: Path) -> Attention:
    """ "sdpa", or "eager" for the families that transformers offers nothing else for."""
    try:
        load_skeleton(path, dtype=torch.float32, attention="sdpa", experts="eager")
    except UserError:  # any other cause comes back when the weights are loaded
        return "eager"
    return "sdpa"


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in the model's folder. Raises UserError when there is none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            "model-tokenizer",
            f"the tokenizer can't be loaded: {reason}",
            str(path),
            "save the tokenizer into the model folder with save_pretrained",
        ) from error
    loaded: PreTrainedTokenizerBase = tokenizer
    return loaded


def context_length(config: PreTrainedConfig) -> int:
    """Most tokens the model takes, from its text configuration."""
    return int(config.get_text_config().max_position_embeddings)


def stop_token_ids(path: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends a response: those of generation_config.json, else the tokenizer's own."""
    from transformers import GenerationConfig

    ids: Any = None
    if (path / "generation_config.json").is_file():
        ids = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
    if ids is None:
        ids = tokenizer.eos_token_id
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)


def _auto_class(config: PreTrainedConfig) -> Any:
    known = AutoModelForCausalLM._model_mapping
    return AutoModelForCausalLM if type(config) in known else AutoModelForImageTextToText


def _kernels(attention: str, experts: str) -> dict[str, str]:
    return {"attn_implementation": attention, "experts_implementation": experts}


def _cannot_load(path: Path, error: Exception) -> UserError:
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return UserError(
        "model-load",
        f"the model can't be loaded: {reason}",
        str(path),
        "check that the folder is complete, and the keys model.attention and model.experts",
    )
