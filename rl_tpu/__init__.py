"""Reinforcement-learning post-training for language models on Cloud TPUs, in PyTorch."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("rl_tpu")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0.0.0"
