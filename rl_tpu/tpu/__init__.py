"""What only TPUs need: lowering through torch_tpu, ahead-of-time compilation by libtpu, kernels in Pallas."""
