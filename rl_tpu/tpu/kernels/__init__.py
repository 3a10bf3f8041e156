"""JAX twins of the torch operators in rl_tpu/trainer/kernels, by the operators' names."""

from rl_tpu.tpu.kernels.base import Kernel

KERNELS: dict[str, Kernel] = {}
