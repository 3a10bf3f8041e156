"""JAX as these tests need it: several CPU devices, and libtpu as a compiler alone."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # else libtpu asks a cloud's metadata server, and waits for the answer
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
