"""Rules between settings. Each finding is a sentence with the numbers, so that the reader sees which one to change."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rl_tpu.config.schema import PromptSourceConfig, RunConfig
from rl_tpu.errors import UserError

GREEDY_BELOW = 1e-6
"""SGLang takes a smaller temperature for 0."""
TILE_MULTIPLE = 128
"""Width of a TPU's vector registers."""


def broken_rules(config: RunConfig) -> list[str]:
    """Everything in `config` that cannot work together; empty if all is well."""
    return [
        *_parallel(config),
        *_batches(config),
        *_pacing(config),
        *_algorithm(config),
        *_lengths(config),
        *_sampling(config),
        *_generation(config),
        *_chips(config),
        *_evaluation(config),
        *_sources(config),
        *_sync(config),
        *_kernels(config),
        *_execution(config),
    ]


def _parallel(config: RunConfig) -> Iterator[str]:
    ranks, cluster, parallel = config.trainer_ranks, config.cluster, config.trainer.parallel
    if ranks % (parallel.replicas * parallel.tensor):
        yield (
            f"cluster.trainer_chips {cluster.trainer_chips} x devices_per_chip {cluster.devices_per_chip} = {ranks} trainer"
            f" ranks are not divisible by trainer.parallel.replicas {parallel.replicas} x tensor {parallel.tensor} ="
            f" {parallel.replicas * parallel.tensor}"
        )


def _batches(config: RunConfig) -> Iterator[str]:
    rollout, samples, ranks = config.rollout, config.samples_per_step, max(1, config.data_ranks)
    minibatches = config.algorithm.minibatches
    shape = f"rollout.prompts_per_step {rollout.prompts_per_step} x samples_per_prompt {rollout.samples_per_prompt}"
    if samples % (minibatches * ranks):
        yield (
            f"{shape} = {samples} samples are not divisible by algorithm.minibatches {minibatches} x data ranks {ranks}"
            f" = {minibatches * ranks}"
        )


def _pacing(config: RunConfig) -> Iterator[str]:
    rollout, correction = config.rollout, config.algorithm.correction
    if rollout.oversampling > 1 and rollout.max_staleness < 1:
        yield (
            f"rollout.oversampling {rollout.oversampling:g} keeps groups in flight for later policies, which"
            f" rollout.max_staleness {rollout.max_staleness} does not let train: use max_staleness 1 or more, or"
            " oversampling 1"
        )
    elif rollout.oversampling > 1 and rollout.stale_groups == "wait":
        most = (rollout.max_staleness + 1) * rollout.prompts_per_step
        yield (
            f"rollout.oversampling {rollout.oversampling:g} would begin more than the (max_staleness"
            f" {rollout.max_staleness} + 1) x prompts_per_step {rollout.prompts_per_step} = {most} groups that can train"
            " within the bound, and rollout.stale_groups wait waits for all of them: use stale_groups drop or correct, or"
            " oversampling 1"
        )
    if rollout.stale_groups == "correct" and correction.mode == "none":
        yield (
            f"rollout.stale_groups correct lets groups train that are older than max_staleness {rollout.max_staleness}"
            " steps: it needs algorithm.correction.mode truncate or mask (now none), or use stale_groups wait or drop"
        )


def _algorithm(config: RunConfig) -> Iterator[str]:
    algorithm, samples = config.algorithm, config.rollout.samples_per_prompt
    compares = algorithm.baseline in ("group_mean", "leave_one_out") or algorithm.scale.startswith("group_std")
    if samples == 1 and (compares or algorithm.drop_uniform_groups):
        yield (
            "rollout.samples_per_prompt 1 leaves nothing to compare within a group: it needs algorithm.baseline batch_mean"
            f" or none (now {algorithm.baseline}), algorithm.scale none or batch_std (now {algorithm.scale}) and"
            f" algorithm.drop_uniform_groups false (now {str(algorithm.drop_uniform_groups).lower()})"
        )
    if algorithm.baseline in ("batch_mean", "none") and algorithm.scale.startswith("group_std"):
        yield (
            f"algorithm.scale {algorithm.scale} divides by a group's deviation what algorithm.baseline"
            f" {algorithm.baseline} does not compare within the group: use scale none or batch_std"
        )
    if algorithm.dual_clip is not None and algorithm.objective == "cispo":
        yield f"algorithm.dual_clip {algorithm.dual_clip} has no meaning with algorithm.objective cispo: use null"
    correction = algorithm.correction
    if correction.mode != "none" and algorithm.old_logprobs != "recompute":
        yield (
            f"algorithm.correction.mode {correction.mode} weighs the trainer's log-probabilities against the engine's:"
            f" it needs algorithm.old_logprobs=recompute, it is {algorithm.old_logprobs}"
        )
    if correction.low > correction.high:
        yield f"algorithm.correction.low {correction.low} is more than algorithm.correction.high {correction.high}"
    if algorithm.kl.refresh_steps and not algorithm.kl.coefficient:
        yield (
            f"algorithm.kl.refresh_steps {algorithm.kl.refresh_steps} refreshes a reference policy that"
            " algorithm.kl.coefficient 0 does without"
        )


def _lengths(config: RunConfig) -> Iterator[str]:
    rollout, rows = config.rollout, config.trainer.row_tokens
    lengths = f"data.max_prompt_tokens {config.data.max_prompt_tokens} + rollout.max_response_tokens"
    if rows != sorted(set(rows)):
        yield f"trainer.row_tokens {rows} must ascend without repetition"
    if config.trainer.microbatch_tokens is not None and config.trainer.microbatch_tokens < min(rows):
        yield (
            f"trainer.microbatch_tokens {config.trainer.microbatch_tokens} do not hold one row of the shortest length in"
            f" trainer.row_tokens, {min(rows)}"
        )
    if config.max_sample_tokens > max(rows):
        yield (
            f"{lengths} {rollout.max_response_tokens} = {config.max_sample_tokens} tokens do not fit the longest row"
            f" of trainer.row_tokens, {max(rows)}"
        )
    responses = {"rollout.max_response_tokens": rollout.max_response_tokens}
    for name, evaluation in config.evaluation.sets.items():
        if evaluation.max_response_tokens is not None:
            responses[f"evaluation.sets.{name}.max_response_tokens"] = evaluation.max_response_tokens
    for name, tokens in responses.items():
        total = config.data.max_prompt_tokens + tokens
        if total > rollout.context_tokens:
            yield (
                f"data.max_prompt_tokens {config.data.max_prompt_tokens} + {name} {tokens} = {total} tokens exceed"
                f" rollout.context_tokens {rollout.context_tokens}"
            )
    if rollout.kv_cache_tokens is not None and rollout.kv_cache_tokens < rollout.context_tokens:
        yield (
            f"rollout.kv_cache_tokens {rollout.kv_cache_tokens} hold less than one sample of rollout.context_tokens"
            f" {rollout.context_tokens}"
        )
    if config.algorithm.overlong_buffer_tokens >= rollout.max_response_tokens:
        yield (
            f"algorithm.overlong_buffer_tokens {config.algorithm.overlong_buffer_tokens} must be less than"
            f" rollout.max_response_tokens {rollout.max_response_tokens}"
        )


def _sampling(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    chosen = {"rollout": rollout} | {f"evaluation.sets.{name}": each for name, each in config.evaluation.sets.items()}
    for name, each in chosen.items():
        if each.top_k == 0:
            yield f"{name}.top_k 0 leaves no token to sample: -1 is for all, k for the k likeliest"
    if rollout.temperature < GREEDY_BELOW:
        yield (
            f"rollout.temperature {rollout.temperature} is greedy to the engine (it is less than {GREEDY_BELOW}):"
            " no answer would differ from another"
        )
    seeded = rollout.server_options.get("enable_deterministic_inference", config.cluster.device == "cpu")
    for name, each in chosen.items():
        if seeded and each.min_p > 0:
            yield (
                f"{name}.min_p {each.min_p}: SGLang has no min_p in seeded sampling; use min_p 0, or set"
                " rollout.server_options.enable_deterministic_inference to false (runs then cannot be repeated)"
            )


def _generation(config: RunConfig) -> Iterator[str]:
    cluster = config.cluster
    if not cluster.generation:
        return
    from rl_tpu.devices.generations import get_generation  # costs a second, of those alone who name a generation

    try:
        known = get_generation(cluster.generation)
    except UserError as error:
        yield str(error)
        return
    # Larger machines than this one are not wired to others.
    hosts = [chips for chips in known.chips_per_vm if cluster.hosts == 1 or chips == 4]
    if cluster.chips_per_host not in hosts or cluster.devices_per_chip != known.devices_per_chip:
        yield (
            f"cluster.generation {cluster.generation}, chips_per_host {cluster.chips_per_host} and devices_per_chip"
            f" {cluster.devices_per_chip} do not agree: {known.name} has {' or '.join(map(str, hosts))} chips in"
            f" {'a host' if cluster.hosts == 1 else 'each of several hosts'} and {known.devices_per_chip} device(s) in a"
            " chip"
        )


def _chips(config: RunConfig) -> Iterator[str]:
    cluster, rollout = config.cluster, config.rollout
    chips = cluster.hosts * cluster.chips_per_host
    wanted = cluster.trainer_chips + cluster.rollout_chips
    if wanted > chips:
        yield (
            f"cluster.trainer_chips {cluster.trainer_chips} + rollout_chips {cluster.rollout_chips} = {wanted} chips,"
            f" but {cluster.hosts} host(s) x chips_per_host {cluster.chips_per_host} = {chips}"
        )
    devices = cluster.rollout_chips * cluster.devices_per_chip
    used = rollout.engines * rollout.tensor_parallel
    if used != devices:
        yield (
            f"rollout.engines {rollout.engines} x tensor_parallel {rollout.tensor_parallel} = {used} devices, but"
            f" cluster.rollout_chips {cluster.rollout_chips} x devices_per_chip {cluster.devices_per_chip} = {devices}"
        )
    if rollout.tensor_parallel % cluster.devices_per_chip:
        yield (
            f"an engine takes whole chips: rollout.tensor_parallel {rollout.tensor_parallel} must be a multiple of"
            f" cluster.devices_per_chip {cluster.devices_per_chip}"
        )


def _evaluation(config: RunConfig) -> Iterator[str]:
    if config.evaluation.beside_training and config.rollout.engines < 2:
        yield (
            "evaluation.beside_training true takes an engine of its own: it needs rollout.engines 2 or more, it is"
            f" {config.rollout.engines}"
        )


def _sync(config: RunConfig) -> Iterator[str]:
    sync = config.weight_sync
    if sync.delivery == "broadcast" and sync.transport != "ici":
        yield f"weight_sync.delivery=broadcast needs weight_sync.transport ici, it is {sync.transport}"
    if sync.transport == "shared_memory" and config.cluster.hosts > 1:
        yield (
            "weight_sync.transport=shared_memory reaches engines on the trainer's own host only, cluster.hosts is"
            f" {config.cluster.hosts}"
        )


def _kernels(config: RunConfig) -> Iterator[str]:
    kernels = config.trainer.kernels
    sizes = {name: getattr(kernels, name) for name in type(kernels).model_fields if "_block_" in name}
    used = {
        "attention": kernels.attention == "splash",
        "head": kernels.head == "fused",
        "experts": kernels.experts == "grouped",
    }
    for name, size in sizes.items():
        if used.get(name.split("_")[0]) and size % TILE_MULTIPLE:
            yield f"trainer.kernels.{name} {size} is not a multiple of {TILE_MULTIPLE}, as a kernel's tiles must be"
    if used["head"]:
        yield from _fused_head(config)
    if not used["attention"]:
        return
    if config.trainer.share_prompts:
        yield (
            "trainer.share_prompts true and trainer.kernels.attention splash exclude each other: the kernel knows no shared"
            " prompts; use attention plain, or share_prompts false"
        )
    odd = [length for length in config.trainer.row_tokens if length % TILE_MULTIPLE]
    if odd:
        yield (
            f"trainer.row_tokens {odd} are not multiples of {TILE_MULTIPLE}: rows are cut into tiles of so many tokens or a"
            " multiple (trainer.kernels.attention_block_q, attention_block_kv) with trainer.kernels.attention splash"
        )


def _fused_head(config: RunConfig) -> Iterator[str]:
    rollout, tensor = config.rollout, config.trainer.parallel.tensor
    if rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0:
        yield (
            "trainer.kernels.head fused computes the whole softmax, but answers are sampled with rollout.top_p"
            f" {rollout.top_p}, top_k {rollout.top_k} and min_p {rollout.min_p}: use head plain, or top_p 1, top_k -1 and"
            " min_p 0"
        )
    if tensor > 1:
        yield (
            "trainer.kernels.head fused needs the whole vocabulary on every rank, and trainer.parallel.tensor"
            f" {tensor} divides it: use head plain, or tensor 1"
        )


def _execution(config: RunConfig) -> Iterator[str]:
    trainer = config.trainer
    if trainer.execution.mode != "graph":
        return
    alone = {
        "parallel.tensor": (trainer.parallel.tensor, 1, "its ranks share layers, not matrices"),
        "parallel.replicas": (trainer.parallel.replicas, 1, "all its ranks share one copy"),
        "parallel.sharding": (trainer.parallel.sharding, "fsdp2", "its programs gather parameters themselves"),
        "activation_checkpointing": (trainer.activation_checkpointing, "none", "it computes blocks again as it is"),
        "offload_reference": (trainer.offload_reference, False, "its programs take whole policies from the device"),
    }
    for name, (value, only, reason) in alone.items():
        if value != only:
            yield (
                f"trainer.execution.mode graph and trainer.{name} {str(value).lower()} exclude each other: {reason}; use"
                f" {str(only).lower()}, or mode eager or compile"
            )


def _sources(config: RunConfig) -> Iterator[str]:
    for where, source in config.prompt_sources.items():
        yield from source_rules(source, f"{where}.")


def source_rules(source: PromptSourceConfig, prefix: str = "") -> Iterator[str]:
    """What is wrong with one prompt source even before its file is there or a problem is generated."""
    if source.kind == "mixture":
        yield f"{prefix}sources are required for kind=mixture: name: {{weight, and what a source has}}"
        return
    if source.kind == "file":
        yield from _file_rules(source, prefix)
    elif not (source.task and source.size):
        yield f"{prefix}task (for example chain_sum) and {prefix}size are required for kind=reasoning_gym"
    if "{prompt}" not in source.template:
        yield f"{prefix}template {source.template!r} must contain {{prompt}}"
    if source.held_out_share == {"held_out": 0.0, "train": 1.0}.get(source.part):
        yield f"with {prefix}held_out_share {source.held_out_share} nothing is on the side {prefix}part={source.part}"


def _file_rules(source: PromptSourceConfig, prefix: str) -> Iterator[str]:
    if not source.path:
        yield f"{prefix}path is required for kind=file"
    if (source.choices_field is not None) != ("{choices}" in source.template):
        yield f"{prefix}choices_field and {{choices}} in {prefix}template go together, one of them is missing"
    if source.pass_rate_field is None and (source.min_pass_rate, source.max_pass_rate) != (0.0, 1.0):
        yield f"{prefix}min_pass_rate and max_pass_rate need {prefix}pass_rate_field, the field with the pass rate"
    if source.min_pass_rate > source.max_pass_rate:
        yield f"{prefix}min_pass_rate {source.min_pass_rate} exceeds max_pass_rate {source.max_pass_rate}"
    if source.answer_pattern is not None:
        try:
            re.compile(source.answer_pattern)
        except re.error as error:
            yield f"{prefix}answer_pattern {source.answer_pattern!r} is no regular expression: {error}"
