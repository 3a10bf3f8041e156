"""How operations are sent to a TPU, by torch_tpu's own names; elsewhere there is nothing to choose."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rl_tpu.config.compose import load_config
from rl_tpu.config.schema import ExecutionConfig
from rl_tpu.devices import get_device
from rl_tpu.errors import UserError
from rl_tpu.orchestrator.inputs import check_names

SET_THEM = """
import torch
from torch_tpu._internal import execution_mode
from rl_tpu.devices import get_device

torch.tpu = execution_mode  # as torch_tpu makes it on a host with TPUs, which has these two names among others
for mode in ("default", "fused", "strict", "debug", "default"):
    get_device("tpu").prepare_execution(mode)
    print(mode, torch.tpu.eager_mode.name)
"""


def test_the_modes_are_torch_tpu_s():
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "TPU_SKIP_MDS_QUERY": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SET_THEM], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert dict(line.split() for line in done.stdout.splitlines()[1:4]) == {
        "fused": "DEFER_AND_FUSE",
        "strict": "DEFER_NEVER",
        "debug": "DEFER_NEVER_AND_LAUNCH_BLOCKING",
    }
    assert done.stdout.splitlines()[0] == "default DEFER_NEVER", "torch_tpu's own choice"
    assert done.stdout.splitlines()[4] == "default DEFER_NEVER_AND_LAUNCH_BLOCKING", "left as it is"


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_other_devices_know_one_way(name):
    get_device(name).prepare_execution("default")
    with pytest.raises(
        UserError, match=f"trainer.execution.eager fused is torch_tpu's: with cluster.device {name} use"
    ):
        get_device(name).check_eager("fused")


@pytest.mark.parametrize("mode", sorted(set(ExecutionConfig.model_fields["eager"].annotation.__args__) - {"default"}))
def test_a_run_elsewhere_is_refused(mode):
    with pytest.raises(UserError, match=f"trainer.execution.eager {mode} is torch_tpu's"):
        check_names(load_config(["+experiment=quickstart", f"trainer.execution.eager={mode}"]))
    check_names(load_config(["+experiment=qwen3_4b_dapo", f"trainer.execution.eager={mode}"]))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("trainer.parallel.replicas=2", "trainer.parallel.replicas 2"),
        ("trainer.parallel.tensor=2", "trainer.parallel.tensor 2"),
        ("trainer.parallel.sharding=simple_fsdp", "trainer.parallel.sharding simple_fsdp"),
        ("trainer.activation_checkpointing=full", "trainer.activation_checkpointing full"),
        ("trainer.offload_reference=true", "trainer.offload_reference true"),
    ],
)
def test_what_programs_cannot_do_is_refused(setting, words):
    chips = ["cluster.chips_per_host=3", "cluster.trainer_chips=2", "cluster.cpus_per_chip=0.5"]
    load_config(["+experiment=quickstart", *chips, "trainer.execution.mode=graph"])
    load_config(["+experiment=quickstart", *chips, setting])
    with pytest.raises(UserError, match=f"trainer.execution.mode graph and {words} exclude each other"):
        load_config(["+experiment=quickstart", *chips, "trainer.execution.mode=graph", setting])
