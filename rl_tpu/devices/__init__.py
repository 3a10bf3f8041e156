"""What differs between kinds of accelerator, in one place: nothing else in the package names one."""

from rl_tpu.devices.base import Device, MemoryUse
from rl_tpu.devices.cpu import CpuDevice
from rl_tpu.devices.cuda import CudaDevice
from rl_tpu.devices.torchtitan import prepare_torchtitan
from rl_tpu.devices.tpu import TpuDevice
from rl_tpu.errors import UserError

DEVICES: dict[str, Device] = {device.name: device for device in (CpuDevice(), CudaDevice(), TpuDevice())}

__all__ = ["DEVICES", "Device", "MemoryUse", "get_device", "prepare_torchtitan"]


def get_device(name: str) -> Device:
    """The device called `name`; UserError with the known names otherwise."""
    if name not in DEVICES:
        raise UserError(f"cluster.device: {name!r} is unknown; choose one of {', '.join(DEVICES)}")
    return DEVICES[name]
