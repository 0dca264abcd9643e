// The driver, as far as PyTorch, Triton and Inductor ask it. Modules load and kernels launch without being run; what a
// card is like the runtime says (its attributes have the driver's numbers).
#include <stddef.h>
#include <stdint.h>
#define API __attribute__((visibility("default")))
static int something;
int cudaGetDeviceCount(int *), cudaDeviceGetAttribute(int *, int, int), cudaMemGetInfo(size_t *, size_t *);
int cudaMalloc(void **, size_t), cudaFree(void *);

API int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
API int cuDeviceGetCount(int *count) { return cudaGetDeviceCount(count); }
API int cuDeviceGet(int *device, int index) { return *device = index, 0; }
API int cuDeviceGetAttribute(int *value, int which, int device) { return cudaDeviceGetAttribute(value, which, device); }
API int cuCtxGetCurrent(void **context) { return *context = &something, 0; }
API int cuCtxGetDevice(int *device) { return *device = 0, 0; }
API int cuCtxGetLimit(size_t *size, int which) { return *size = 1 << 20, 0; }
API int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = &something, 0; }
API int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *flags = 0, *active = 1, 0; }
API int cuMemGetInfo_v2(size_t *free, size_t *total) { return cudaMemGetInfo(free, total); }
API int cuMemAlloc_v2(void **pointer, size_t size) { return cudaMalloc(pointer, size) ? 2 : 0; }
API int cuMemFree_v2(void *pointer) { return cudaFree(pointer); }
API int cuPointerGetAttribute(void *value, int which, uint64_t pointer) { return *(uint64_t *)value = pointer, 0; }

API int cuModuleLoad(void **module, const char *file) { return *module = &something, 0; }
API int cuModuleLoadData(void **module, const void *image) { return *module = &something, 0; }
API int cuModuleLoadDataEx(void **module, const void *image, int n, void *o, void *v) { return *module = &something, 0; }
API int cuModuleGetFunction(void **function, void *module, const char *name) { return *function = &something, 0; }
API int cuFuncGetAttribute(int *value, int which, void *function) {
  // CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, SHARED_SIZE_BYTES, CONST_SIZE_BYTES, LOCAL_SIZE_BYTES (spills), NUM_REGS
  return *value = which == 0 ? 1024 : which == 4 ? 32 : 0, 0;
}
API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int size, size_t memory) { return *blocks = 1, 0; }
API int cuOccupancyMaxActiveClusters(int *clusters, void *function, void *config) { return *clusters = 1, 0; }
API int cuGetErrorString(int error, const char **text) { return *text = error ? "an error of the stand-in" : "no error", 0; }
API int cuGetErrorName(int error, const char **text) { return cuGetErrorString(error, text); }
API int cuLaunchKernelEx(void *config, void *function, void **arguments, void **extra) { return 0; }
API int cuTensorMapEncodeTiled() { return 0; }
API int cuTensorMapEncodeIm2col() { return 0; }
API int cuCtxSetLimit() { return 0; }
API int cuCtxSetCurrent() { return 0; }
API int cuFuncSetCacheConfig() { return 0; }
