"""Cloud TPUs through torch_tpu: one process per device, two devices per chip on v7x.

Names and values of the launch environment are those torch_tpu 0.2.0 reads; its own launcher sets them for a whole host,
while here some chips of a host train and others generate.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from rl_tpu.devices.base import Device, MemoryUse
from rl_tpu.errors import UserError

# Chips of one host -> bounds of the torus they form, as torch_tpu tabulates them.
_HOST_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}


class TpuDevice(Device):
    name = "tpu"
    distributed_backend = "tpu:tpu_dist,cpu:gloo"
    optimizer_implementation = "foreach"
    compile_backend = "tpu"
    pins_memory = False
    chip_resource = "TPU"

    def torch_device(self, local_rank: int) -> torch.device:
        return torch.device("tpu")

    def memory(self) -> MemoryUse:
        return MemoryUse(None, None, None)  # torch_tpu 0.2.0 has no memory statistics

    def synchronize(self) -> None:
        torch.accelerator.synchronize()

    def torchtitan_module(self) -> Any:
        # The functions of `torch.tpu` that torchtitan looks for raise in torch_tpu 0.2.0; torch.accelerator's work.
        return SimpleNamespace(
            device_count=torch.accelerator.device_count,
            is_available=torch.accelerator.is_available,
            set_device=torch.accelerator.set_device_index,
            current_device=torch.accelerator.current_device_index,
            synchronize=torch.accelerator.synchronize,
        )

    def rank_environment(
        self,
        *,
        local_world_size: int,
        chips: Sequence[int] = (),
        devices_per_chip: int = 1,
        peers: Sequence[str] = (),
        **ranks: Any,
    ) -> dict[str, str]:
        environment = super().rank_environment(
            local_world_size=local_world_size,
            chips=chips,
            devices_per_chip=devices_per_chip,
            peers=peers,
            **ranks,
        )
        environment["TORCH_TPU_DEVICES_PER_HOST"] = str(local_world_size)
        environment["TORCH_TPU_SLICEBUILDER_ADDRESSES"] = ",".join(peers)
        if local_world_size == ranks["world_size"]:
            environment["TORCH_TPU_TOPOLOGY"] = _topology(local_world_size, devices_per_chip)
        # Ranks on several hosts span a slice whose shape only the cluster knows: it sets TORCH_TPU_TOPOLOGY itself.
        return environment | _visible(chips)

    def engine_environment(self, threads: int, chips: Sequence[int] = ()) -> dict[str, str]:
        return {**super().engine_environment(threads, chips), "SGLANG_PLATFORM": "tpu_oot", **_visible(chips)}


def _visible(chips: Sequence[int]) -> dict[str, str]:
    return {"TPU_VISIBLE_CHIPS": ",".join(map(str, chips))} if chips else {}


def _topology(devices: int, devices_per_chip: int) -> str:
    """`x,y,z` of the chips that hold so many devices, and a fourth number where a chip has several devices."""
    chips, rest = divmod(devices, devices_per_chip)
    if rest or chips not in _HOST_BOUNDS:
        raise UserError(
            f"cluster: {devices} trainer devices with {devices_per_chip} per chip are not 1, 2, 4 or 8 whole chips of "
            "a host; choose another cluster.trainer_chips"
        )
    return _HOST_BOUNDS[chips] + (f",{devices_per_chip}" if devices_per_chip > 1 else "")
