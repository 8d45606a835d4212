"""AdamW over sharded float32 master weights, its learning rate, and the norm of its gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from onroute.core.config.sections import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig, *, lr: float) -> torch.optim.AdamW:
    """AdamW with `config.weight_decay` on matrices only: norms and biases are vectors."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=config.betas, eps=config.eps)


def learning_rate(step: int, config: OptimizerConfig, *, total_steps: int) -> float:
    """The rate of optimizer step `step` (from 0): a linear climb to `config.lr` over `warmup_steps`,
    of which the first is lr / warmup_steps, then constant, or a half cosine that would reach 0 right
    after the last step.

    Cosine: lr · (1 + cos(π · progress)) / 2 (Loshchilov & Hutter, arXiv 1608.03983, without restarts).
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    return config.lr * (1 + math.cos(math.pi * min(1.0, progress))) / 2


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale all gradients down to a global 2-norm of `max_norm`; the norm before, over all ranks.

    A collective on sharded parameters. The norm is NaN or infinite when any gradient is.
    """
    norm: Tensor = nn.utils.clip_grad_norm_(parameters, max_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
