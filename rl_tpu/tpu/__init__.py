"""What only TPUs need: lowering through torch_tpu, ahead-of-time compilation by libtpu, kernels in Pallas."""

import os

# JAX lowers and, in tests, computes on the CPU. It is never to take a chip, which is torch_tpu's.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
