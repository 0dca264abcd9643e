"""GPUs and their sensors, the caching allocator, scratch memory of CUDA's kernels, the host."""
