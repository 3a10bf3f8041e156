"""JAX twins of the torch operators in rl_tpu/trainer/kernels, by the operators' names."""

from rl_tpu.tpu.kernels.base import Kernel
from rl_tpu.tpu.kernels.fused_logprobs import FUSED_LOGPROBS, FUSED_LOGPROBS_BACKWARD
from rl_tpu.tpu.kernels.grouped_matmul import GROUPED_MATMUL, GROUPED_MATMUL_BACKWARD
from rl_tpu.tpu.kernels.splash_attention import SPLASH_ATTENTION, SPLASH_ATTENTION_BACKWARD

KERNELS: dict[str, Kernel] = {
    "rl_tpu::fused_logprobs": FUSED_LOGPROBS,
    "rl_tpu::fused_logprobs_backward": FUSED_LOGPROBS_BACKWARD,
    "rl_tpu::grouped_matmul": GROUPED_MATMUL,
    "rl_tpu::grouped_matmul_backward": GROUPED_MATMUL_BACKWARD,
    "rl_tpu::splash_attention": SPLASH_ATTENTION,
    "rl_tpu::splash_attention_backward": SPLASH_ATTENTION_BACKWARD,
}
