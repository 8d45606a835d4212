"""A tiny random model of any family that routes tokens to experts."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from onroute.core.errors import UserError
from onroute.models.families.overrides import OVERRIDES
from onroute.models.families.scan import routing_model_types
from onroute.models.families.shrink import shrunk
from onroute.models.tiny import random_model

PREFIX: Final = "tiny:"
"""`tiny:<model_type>` stands for such a model where a model folder is asked for."""

_TEXT: Final = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",)
_MULTIMODAL: Final = ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES")


def tiny_family(model_type: str) -> PreTrainedModel:
    """A random float32 model of this type in eval mode: 3 layers, 8 experts, top 2 where it allows that.

    Raises:
        UserError: the type routes no tokens, has no causal language-model head, or can't be built tiny.
    """
    if model_type not in routing_model_types():
        raise _unbuildable(model_type, "no model type of the installed transformers with routed experts")
    try:
        config_class: type[PreTrainedConfig] = CONFIG_MAPPING[model_type]
        config = config_class(**shrunk(config_class, OVERRIDES.get(model_type, {})))
        return random_model(partial(_head(config)._from_config, config, dtype=torch.float32), model_type)
    except UserError:
        raise
    except Exception as error:  # whatever another library raises over settings it does not like
        reason = " ".join(str(error).split())[:200]
        raise _unbuildable(model_type, f"{type(error).__name__}: {reason}") from error


def _head(config: PreTrainedConfig) -> Any:
    """The class with a language-model head; a wrapper around a text model has its own."""
    if "vocab_size" not in vars(config.get_text_config(decoder=True)):
        raise _unbuildable(config.model_type, "no vocabulary to predict")
    tables = (*_MULTIMODAL, *_TEXT) if "text_config" in config.sub_configs else (*_TEXT, *_MULTIMODAL)
    for table in tables:
        name = getattr(modeling_auto, table, {}).get(config.model_type)
        if isinstance(name, str):
            return getattr(transformers, name)
    raise _unbuildable(config.model_type, "no causal language-model head")


def _unbuildable(model_type: str, why: str) -> UserError:
    return UserError(
        "models-tiny-family",
        f"no tiny model of this type: {why}",
        f"model type {model_type!r}",
        "`onroute check --all-families` lists the types",
    )
