"""torchtitan finds its device when it is imported, and knows only those that torch itself ships."""

from __future__ import annotations

import sys
import types

from rl_tpu.devices.base import Device
from rl_tpu.errors import RunError


def prepare_torchtitan(device: Device) -> None:
    """Make torchtitan compute on `device`. Must run before anything else of torchtitan is imported in the process.

    Its modules copy `device_type` from `torchtitan.tools.utils` at import, and that module guesses: without an
    accelerator it settles for a GPU. Raises RunError where another device was copied already.
    """
    from torchtitan.tools import utils

    if utils.device_type != device.name and "torchtitan.distributed" in sys.modules:
        raise RunError(f"torchtitan was imported for {utils.device_type} before it could be told to use {device.name}")
    utils.device_type, utils.device_module = device.name, device.torchtitan_module()
    _leave_out_triton()


def _leave_out_triton() -> None:
    """One expert-parallel dispatcher needs triton, which torchtitan does not declare. No model here uses it, so an empty
    package stands in for it everywhere, with or without triton."""
    name = "torchtitan.distributed.minimal_async_ep"
    if name in sys.modules:
        return
    for module_name in (name, f"{name}.api"):
        module = types.ModuleType(module_name)
        for attribute in ("combine_op", "dispatch_op", "init_buffer", "MinimalAsyncEPDispatchMetadata"):
            setattr(module, attribute, None)
        module.maybe_update_minimal_async_ep_config = lambda model_config, config: None
        sys.modules[module_name] = module
