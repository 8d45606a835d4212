"""A stock Hugging Face model from a folder, whole or as a skeleton without weights.

The network is never asked: a model is a folder on this machine.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from onroute.core.errors import UserError
from onroute.routing.dense import expects_routing

Attention: TypeAlias = Literal["sdpa", "eager"]

# Without the second, transformers asks on the terminal whether to run code that lies in the folder.
_FROM_FOLDER: Final[Mapping[str, bool]] = {"local_files_only": True, "trust_remote_code": False}
_MAX_REASON: Final = 240
"""Characters of another library's words in one of ours."""


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
        config: PreTrainedConfig = AutoConfig.from_pretrained(path, **_FROM_FOLDER)
    except Exception as error:  # whatever a file written by others makes transformers raise
        raise UserError(
            "model-config",
            f"the model's configuration can't be read: {_one_line(error)}",
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
    with _loader_reports() as reports:
        try:
            model, info = _auto_class(config).from_pretrained(
                path,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that they are told by name, and refused here
                use_kernels=False,  # on by default since 5.25: fetched from the network, put in by train()
                **_kernels(config, attention, experts),
                **_FROM_FOLDER,
            )
        except Exception as error:  # whatever files written by others make transformers raise
            _refuse_weights(path, "unfit", _unconverted(reports))
            raise _cannot_load(path, error) from error
    _refuse_loading_info(path, info)
    loaded: PreTrainedModel = model.to(device).eval()
    return loaded


def load_skeleton(path: Path, *, dtype: torch.dtype, attention: str, experts: str) -> PreTrainedModel:
    """The same model on the meta device: modules and shapes, no weights, no file of weights opened."""
    config = read_config(path)
    with torch.device("meta"):
        try:
            model = _auto_class(config).from_config(
                config, dtype=dtype, trust_remote_code=False, **_kernels(config, attention, experts)
            )
        except Exception as error:  # whatever a file written by others makes transformers raise
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
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, **_FROM_FOLDER)
    except Exception as error:  # whatever files written by others make transformers raise
        raise _no_tokenizer(path, _one_line(error)) from error
    # Without any file transformers makes a tokenizer with an empty vocabulary from the model type.
    names = tuple(loaded.vocab_files_names.values())
    if names and not any((path / name).is_file() for name in names):
        raise _no_tokenizer(path, f"none of {', '.join(names)} is there")
    return loaded


def context_length(config: PreTrainedConfig) -> int:
    """Most tokens the model takes, from its text configuration."""
    return int(config.get_text_config().max_position_embeddings)


def stop_token_ids(path: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends a response: those of generation_config.json, else the tokenizer's own.

    Raises UserError when that file can't be read.
    """
    file = path / "generation_config.json"
    ids: tuple[int, ...] = ()
    if file.is_file():
        try:
            ids = _as_ids(GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id)
        except Exception as error:  # whatever a file written by others makes transformers raise
            raise UserError(
                "model-generation-config",
                f"the end tokens can't be read: {_one_line(error)}",
                str(file),
                "mend eos_token_id there: an id or a list of ids",
            ) from error
    return ids or _as_ids(tokenizer.eos_token_id)


def _as_ids(ids: int | list[int] | None) -> tuple[int, ...]:
    if ids is None:
        return ()
    return tuple(int(token) for token in ids) if isinstance(ids, list) else (int(ids),)


def _refuse_loading_info(path: Path, info: Mapping[str, Any]) -> None:
    for kind in ("missing", "unexpected"):
        _refuse_weights(path, kind, sorted(info[f"{kind}_keys"]))
    shapes = [f"{name} {[*have]} for {[*want]}" for name, have, want in sorted(info["mismatched_keys"])]
    _refuse_weights(path, "mismatched", shapes)


def _refuse_weights(path: Path, kind: str, tensors: list[str]) -> None:
    if tensors:
        raise UserError(
            "model-weights",
            f"{len(tensors)} {kind} tensor(s): {', '.join(tensors[:10])}",
            str(path),
            "the weights do not belong to config.json; export the model again",
        )


@contextmanager
def _loader_reports() -> Iterator[list[str]]:
    """Catches the table that the stock loader prints about weights that do not fit."""
    reports: list[str] = []

    def catch(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if "LOAD REPORT" in message:
            reports.append(message)
        return "LOAD REPORT" not in message

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(catch)
    try:
        yield reports
    finally:
        logger.removeFilter(catch)


def _unconverted(reports: list[str]) -> list[str]:
    """Parameters whose published tensors do not go together, which only that table names."""
    return [name for text in reports for name in re.findall(r"^(\S+) +\| *\S*CONVERSION", text, re.MULTILINE)]


def _auto_class(config: PreTrainedConfig) -> Any:
    known = AutoModelForCausalLM._model_mapping
    return AutoModelForCausalLM if type(config) in known else AutoModelForImageTextToText


def _kernels(config: PreTrainedConfig, attention: str, experts: str) -> dict[str, str]:
    kernels = {"attn_implementation": attention}
    # Dense families refuse any value of a key that means nothing to them.
    return {**kernels, "experts_implementation": experts} if expects_routing(config) else kernels


def _cannot_load(path: Path, error: Exception) -> UserError:
    return UserError(
        "model-load",
        f"the model can't be loaded: {_one_line(error)}",
        str(path),
        "check that the folder is complete, and the keys model.attention and model.experts",
    )


def _no_tokenizer(path: Path, reason: str) -> UserError:
    return UserError(
        "model-tokenizer",
        f"the tokenizer can't be loaded: {reason}",
        str(path),
        "save the tokenizer into the model folder with save_pretrained",
    )


def _one_line(error: Exception) -> str:
    words = " ".join(str(error).split())
    if not words or isinstance(error, KeyError):
        words = f"{type(error).__name__} {words}".rstrip()
    return words if len(words) <= _MAX_REASON else f"{words[:_MAX_REASON]} ..."
