"""SGLang on a plain CPU: an out-of-tree platform in pure torch, chosen by ``SGLANG_PLATFORM=rl_tpu_cpu``.

SGLang has a platform interface for devices it does not know (TPU support arrives the same way) and loads ours through two
entry points of this package. Both are called in every process that starts SGLang, whoever starts it, so importing this
module costs nothing and nothing happens unless our platform is the chosen one.

What SGLang 0.5.23 is changed in, all of it in the server's own processes:

* ``platform.py``: the platform class itself, plus Dynamo switched off (a few helpers would compile C++ at first use).
* ``imports.py``: stand-ins so that ``import triton`` and ``import torchvision`` succeed where they are not installed.
* ``prepare_process`` below: worker processes are forked from the server instead of spawned. Forking is ruled out by
  accelerator runtimes, not by a CPU, and importing SGLang three times is most of what a start takes (25 s of CPU time
  spawned, 10 s forked).
* ``attention.py``: decoding attention for many requests at once.
* ``register_hooks`` below: seeded sampling. ``--enable-deterministic-inference`` accepts the torch_native attention
  backend, its batch-invariant Triton kernels are left out (torch_native computes one sequence at a time), and the hash
  behind seeded sampling, a compiled kernel elsewhere, is computed in torch (``murmur.py``).
"""

from __future__ import annotations

import os

PLATFORM = "rl_tpu_cpu"
"""Our name among SGLang's platforms, as pyproject.toml registers it."""


SERVER_OPTIONS = {
    # Seeded sampling, so that a run can be repeated. It costs nothing here, the batches being computed as before; every
    # request must then bring a seed, for SGLang gives all that do not the same one.
    "enable_deterministic_inference": True,
    # Overlapping the scheduler with the device makes every request pay for one decoding step too many, and no CPU is idle.
    "disable_overlap_schedule": True,
    # An idle scheduler asks for work in a busy loop: a core that the trainer needs meanwhile.
    "sleep_on_idle": True,
}
"""Arguments that suit the platform."""


def chosen() -> bool:
    """Whether this process was asked to run SGLang on our platform."""
    return os.environ.get("SGLANG_PLATFORM") == PLATFORM


def activate() -> str | None:
    """Entry point ``sglang.srt.platforms``: the platform class by name, or None to stand aside."""
    return "rl_tpu.rollout.sglang_cpu.platform.CpuPlatform" if chosen() else None


def prepare_process() -> None:
    """Called by `rl_tpu.rollout.server` before it imports SGLang."""
    import multiprocessing

    from rl_tpu.rollout.sglang_cpu import imports

    imports.install()
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *_, **__: None  # SGLang sets "spawn"


def register_hooks() -> None:
    """Entry point ``sglang.srt.plugins``: run by SGLang in each of its processes before it reads its arguments."""
    if not chosen():
        return
    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from rl_tpu.rollout.sglang_cpu import attention
    from rl_tpu.rollout.sglang_cpu.murmur import murmur_hash32

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    # The sampler binds the name when it is imported, so the function is replaced where it lives and where it is used.
    for module in ("sglang.kernels.ops.sampling.murmur_hash", "sglang.srt.layers.sampler"):
        HookRegistry.register(f"{module}.murmur_hash32", murmur_hash32, HookType.REPLACE)
    native = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    HookRegistry.register(f"{native}._run_sdpa_forward_decode", attention.decode, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode", lambda *_, **__: None, HookType.REPLACE
    )
