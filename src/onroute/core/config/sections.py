"""The sections of a run file: plain frozen dataclasses, one a room, each key with its meaning.

The string under a field is what `onroute config` prints. A section holds at most 15 keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from onroute.core.samples import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    path: str
    """Hugging Face folder of the model to train: config, safetensors weights, tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type the trainer computes in; master weights and optimizer state are always float32."""
    attention: Literal["sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3"] = "sdpa"
    """Attention implementation of the trainer."""
    experts: Literal["eager", "grouped_mm", "batched_mm"] = "grouped_mm"
    """How the experts of a layer are computed, in trainer and embedded engine. grouped_mm: all of them in
    one grouped matrix product; fastest on GPUs and with many experts. eager: one after the other; as fast
    on a CPU with a tiny model. batched_mm: a copy of the weights for every token; slow in training."""
    activation_checkpointing: Literal["none", "full"] = "none"
    """Recompute each decoder layer in the backward pass: less memory for about a third more time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig:
    replay: Literal["rollout", "record", "off"] = "rollout"
    """rollout: train on the route that the engine took. record: on the route that the trainer took when it
    scored the batch before its first optimizer step; asks nothing of the engine, and leaves its differences
    from the trainer as they are. off: the trainer's own router decides in every pass."""
    start_check: bool = True
    """Prove at start that replay works on this model; costs a few forward passes of some tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    name: str = "huggingface"
    """Which rollout engine samples."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the engine's weights; pushed weights are cast to it."""
    temperature: float = 1.0
    """Divides the logits, in the engine and in training alike; must be above 0."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this much probability; below 1 biases training."""
    top_k: int | None = None
    """Sample from this many most likely tokens, which biases training; leave the key out to sample
    from all."""
    max_new_tokens: int = 1024
    """Longest response, in tokens."""
    max_batch_size: int = 1024
    """Most requests decoded together."""
    push_bucket_mib: int = 256
    """Bytes of weights in flight at once during a push, in MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfig:
    name: str
    """Where prompts and rewards come from."""
    options: Mapping[str, Json] = field(default_factory=dict)
    """Keys of that environment; see below."""
    workers: int = 2
    """Processes of environments of a run on Ray; a local run has none of its own."""
    timeout_s: float = 600.0
    """Longest wait on Ray for the rollouts of one batch, sampling included, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    prompts_per_step: int = 64
    """Prompts rolled out for one batch."""
    samples_per_prompt: int = 8
    """Samples of each prompt; they form a group."""
    optimizer_steps: int = 1
    """Optimizer steps that a batch is cut into, by whole prompts."""
    layout: Literal["rows", "packed"] = "rows"
    """rows: one sample a row, right-padded. packed: whole samples side by side in one row."""
    microbatch_tokens: int = 16384
    """Most tokens of one forward pass, padding included; a longer sample is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    advantage: str = "grpo"
    """How rewards become advantages."""
    advantage_options: Mapping[str, Json] = field(default_factory=dict)
    """Keys of that advantage; see below."""
    loss: str = "clipped"
    """What training minimises. clipped is for RL. supervised imitates every token whatever its reward: for
    `python -m onroute.training` on rollouts that hold right answers. run.supervised_steps needs no setting
    here."""
    loss_options: Mapping[str, Json] = field(default_factory=dict)
    """Keys of that loss; see below."""
    aggregation: Literal["token_mean", "sample_mean"] = "token_mean"
    """token_mean: every token counts the same. sample_mean: every sample counts the same."""
    max_log_prob_gap: float = 0.5
    """Stop when trainer and engine differ by more on average (nats per token): the engine then
    samples from other weights than those that train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    lr: float = 1e-6
    """Peak learning rate of AdamW. 1e-6 suits models of billions of parameters; tiny ones want 1e-4 to
    1e-3."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay of the first and second moment."""
    eps: float = 1e-8
    """AdamW's term against division by zero."""
    weight_decay: float = 0.0
    """Decoupled weight decay; norms and biases are left out."""
    clip_norm: float = 1.0
    """Largest global gradient norm; larger ones are scaled down to it."""
    schedule: Literal["constant", "cosine"] = "constant"
    """What the learning rate does after its warm-up; cosine falls to 0 at the last step."""
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate climbs; the first step is never at 0."""
    max_nonfinite_steps: int = 3
    """Stop after this many steps in a row were skipped for a loss or gradient that is not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    ranks: int = 2
    """Trainer ranks of a run on Ray; a local run has one."""
    engines: int = 1
    """Rollout engines of a run on Ray; more than one is not supported yet."""
    placement_timeout_s: float = 60.0
    """Longest wait on Ray for room in the cluster, in seconds."""
    reshard_after_forward: bool = True
    """Free the gathered parameters of a layer after its forward pass; false trades memory for speed."""
    timeout_s: float = 600.0
    """Longest wait in one collective, in seconds, before the run ends; on Ray also for one answer of a
    rank or an engine, e.g. one batch of training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    every: int = 0
    """Save after this many steps; 0 saves only at the end."""
    keep: int = 2
    """Checkpoints kept; older ones are removed."""
    best: str = ""
    """Keep one more: the first at or after the step where this metric was highest, e.g. eval/accuracy."""
    recorded_steps: int = 2
    """How many recorded steps are kept, the newest: rollouts and the weights that sampled them, which
    `onroute compare` reads. 0 records none."""
    record_every: int = 10
    """Every step whose number is a multiple of this is recorded, and so are the last recorded_steps of the
    run; a record is as big as the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingConfig:
    trackers: tuple[str, ...] = ("tensorboard",)
    """Where metrics go besides metrics.jsonl, which is always written."""
    plots: bool = True
    """Draw the curves as PNG files at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    folder: str
    """The run folder; it must not exist yet unless the run is resumed."""
    on: Literal["local", "ray"] = "local"
    """local: one process. ray: trainer ranks, engine and environments are processes of a Ray cluster."""
    ray_address: str = ""
    """Cluster to attach to, as host:port or auto; empty starts one on this machine and ends it again."""
    restarts: int = 0
    """How often a run on Ray goes on by itself from its newest checkpoint after the machine failed."""
    steps: int = 100
    """Batches to train on."""
    seed: int = 0
    """Everything random in the run derives from it."""
    resume: Literal["never", "auto"] | int = "never"
    """auto: go on from the newest checkpoint in the run folder, or start when there is none. A number: go
    on from the checkpoint of that step; later ones go with the next save."""
    eval_every: int = 0
    """Held-out evaluation after this many steps; 0 evaluates only before and after."""
    eval_prompts: int = 256
    """Held-out problems, which are never trained on; 0 switches evaluation off."""
    eval_samples: int = 4
    """Samples of each held-out problem."""
    supervised_steps: int = 0
    """Steps of supervised learning on right answers before RL, where the environment knows them: a model
    that solves nothing can't learn by RL."""
    supervised_samples: int = 128
    """Right answers in each of those steps."""
    supervised_lr: float = 1e-3
    """Learning rate of those steps; they have an optimizer of their own."""
    threads: int = 1
    """CPU threads per process; more than 1 is far slower when anything else runs on the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A whole run file, validated."""

    model: ModelConfig
    environment: EnvironmentConfig
    run: RunSection
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
