"""Triton kernels of products with block-scaled fp8 weights, for CUDA GPUs with fp8 tensor cores."""
