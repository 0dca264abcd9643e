"""Where CUDA differs from CPU, in one place."""
from torch.overrides import TorchFunctionMode
ALLOCATION_UNIT = 512
class CudaKernels(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))
def kernel_scratch(name, args): return 0
