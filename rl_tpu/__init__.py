"""Reinforcement-learning post-training for language models on Cloud TPUs, in PyTorch."""

import os
from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("rl_tpu")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0.0.0"

# torch would start every accelerator package that is installed when it is imported (torch_tpu: 3 s). Whoever computes on
# such a device loads it by name (rl_tpu/devices).
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
