"""Learning."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rl_tpu.config.schema.base import Count, Decay, NonNegative, Positive, Seconds, Section, Share


class OptimizerConfig(Section):
    """The optimizer and its schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """AdamW for everything; or Muon for the matrices of the blocks (which keeps one moment of them, not two), AdamW for
    embedding, head, norms and biases. Muon's updates are as large as AdamW's: one learning rate for both."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate."""
    beta1: Decay = 0.9
    """AdamW: decay of the first moment."""
    beta2: Decay = 0.95
    """AdamW: decay of the second moment."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW: added to the root of the second moment."""
    momentum: Decay = 0.95
    """Muon: decay of the moment."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay, of matrices alone: not of norms and biases."""
    warmup_steps: Count = 0
    """Optimizer steps of linear warm-up."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up; linear and cosine end at `final_learning_rate_share` with the last step."""
    final_learning_rate_share: Share = 0.0
    """Share of the peak learning rate at which linear and cosine end."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Global gradient norm is clipped to this."""


class CheckpointConfig(Section):
    """Saving the run."""

    every_steps: Count = 0
    """Steps between checkpoints; 0 saves only at the end and when the run is interrupted."""
    keep: Annotated[int, Field(ge=1)] = 2
    """Newest checkpoints kept."""
    mode: Literal["sync", "async"] = "async"
    """async: training goes on as soon as a copy of the weights and the optimizer lies in host memory (12 bytes a
    parameter, divided by the ranks that share it), and a checkpoint gets its name when the copy is on disk. sync:
    training waits, without the copy."""
    export_every_steps: Count = 0
    """Steps between Hugging Face directories of the policy, in `exports/`; 0 writes none."""
    export_final: bool = True
    """Write the final policy as a Hugging Face directory."""


class ParallelConfig(Section):
    """How the trainer's ranks share the policy: ranks = replicas x sharded ranks x tensor."""

    tensor: Positive = 1
    """Ranks that share every layer's matrices (tensor parallelism); they see the same rows."""
    replicas: Positive = 1
    """Copies of the sharded policy (HSDP): gradients are summed over them, parameters are gathered within one."""
    sharding: Literal["fsdp2", "simple_fsdp"] = "fsdp2"
    """How parameters are sharded over the remaining ranks: torch's FSDP2, or SimpleFSDP, whose collectives a compiler
    sees."""


class ExecutionConfig(Section):
    """How the trainer's programs reach the device."""

    mode: Literal["eager", "compile", "graph"] = "eager"
    """One operation after the other (`eager`); every transformer block compiled (`compile`); or whole programs captured
    once per shape (`graph`): forward and backward of a micro-batch, and the update, with one loop over all layers, so that
    compiling takes no longer for more layers. `graph` computes every block again in the backward."""
    eager: Literal["default", "fused", "strict", "debug"] = "default"
    """TPU, outside of compiled programs: operations are gathered and fused by torch_tpu (`fused`, DEFER_AND_FUSE), sent one
    by one (`strict`, DEFER_NEVER), or one by one and each waited for (`debug`, DEFER_NEVER_AND_LAUNCH_BLOCKING); `default`
    leaves it to torch_tpu, whose version 0.2.0 sends them one by one."""
    max_compilations: Positive | None = None
    """Programs (one for every shape) that a rank may capture or compile; one more ends the run. null: any number."""
    cache: str | None = None
    """Directory that keeps compiled programs from run to run, on every host; `auto`: programs/ in RL_TPU_CACHE (default
    ~/.cache/rl_tpu). A run looks among those of its own versions and topology. CPU and CUDA compile in mode `compile` alone.
    null: none is kept."""


class KernelConfig(Section):
    """Parts of the model that are computed by kernels written for the TPU (Pallas), or by plain PyTorch.

    Elsewhere than on a TPU a kernel's operation is computed by plain PyTorch as well.
    """

    attention: Literal["plain", "splash"] = "plain"
    """Softmax over all pairs of a row under a mask, or block by block without ever holding the pairs."""
    head: Literal["plain", "fused"] = "plain"
    """Output layer, softmax and entropy by chunks of tokens, or in one kernel whose logits never leave the chip's cores."""
    experts: Literal["plain", "grouped"] = "plain"
    """The experts' products by torch's grouped matrix product, or by a kernel."""
    attention_block_q: Positive = 1024
    """splash: queries per tile, at most: the greatest multiple of 128 that divides the row's tokens and is no more."""
    attention_block_kv: Positive = 512
    """splash: keys per tile, likewise."""
    head_block_tokens: Positive = 512
    """fused: tokens per tile."""
    head_block_vocabulary: Positive = 512
    """fused: vocabulary entries per tile."""
    experts_block_rows: Positive = 512
    """grouped: rows per tile."""
    experts_block_inner: Positive = 1024
    """grouped: the summed dimension per tile."""
    experts_block_columns: Positive = 1024
    """grouped: columns per tile."""


class TrainerConfig(Section):
    """Learning: TorchTitan ranks."""

    steps: Positive
    """Rollout steps of the run."""
    row_tokens: list[Positive] = Field(default=[2048], min_length=1)
    """Allowed lengths of packed rows, ascending; each is one compiled program on an XLA device."""
    microbatch_tokens: Positive | None = None
    """Tokens of one forward and backward per rank: as many packed rows as fit, at least one; null: one row. Rows that
    are longer are used only for samples that fit no other."""
    param_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the forward and backward; master weights, gradients' reductions and optimizer stay float32."""
    parallel: ParallelConfig = ParallelConfig()
    """How the ranks share the policy."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What the backward computes again instead of keeping it: nothing, what is cheap to compute, every block."""
    execution: ExecutionConfig = ExecutionConfig()
    """How programs reach the device."""
    kernels: KernelConfig = KernelConfig()
    """Which parts are computed by kernels of their own."""
    offload_reference: bool = False
    """Keep the reference policy in host memory and bring its layers to the device as they are needed."""
    share_prompts: bool = False
    """Lay a prompt once beside all its answers in a row, so that it is computed once for them all."""
    max_skipped_updates: Positive = 10
    """So many updates in a row without a finite gradient end the run."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and schedule."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving."""
    threads_per_rank: Positive = 1
    """CPU threads of one rank."""
    start_timeout_s: Seconds = 600.0
    """Deadline for all ranks to build the model."""
    step_timeout_s: Seconds = 3600.0
    """Deadline of one call to the ranks (a step, a save)."""
