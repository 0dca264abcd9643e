"""GPUs and their sensors, the caching allocator's rules, and what CUDA's kernels allocate besides their results."""
