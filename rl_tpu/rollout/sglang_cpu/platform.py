"""The platform class SGLang asks about the device. Imported only by SGLang, and only when our platform is chosen."""

from __future__ import annotations

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Memory and device answers are SGLang's own for a CPU; the kernels are plain torch (no sgl_kernel, no Triton)."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def is_pin_memory_available(self, device=None) -> bool:
        return False

    def init_backend(self) -> None:
        import torch._dynamo

        torch._dynamo.config.disable = True
