// CUDA's runtime without a GPU. Memory is address space without pages behind it, copies of more than a mebibyte and
// kernels do not happen; everything else of PyTorch is its own: dispatcher, autograd, the host code of its kernels, which
// allocates their scratch memory, and the caching allocator. So sizes are those of a GPU, and values are not.
//
// STAND_IN_CAPABILITY (like 90), STAND_IN_MULTIPROCESSORS, STAND_IN_BYTES and STAND_IN_NAME say which card it is,
// STAND_IN_CONTEXT how many bytes of it a process takes before its first tensor, STAND_IN_COUNT how many cards there are.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <map>
#include <mutex>
#include <string>
#include <sys/mman.h>

#define API extern "C" __attribute__((visibility("default")))
using Error = cudaError_t;
constexpr size_t MiB = 1 << 20;

static size_t number(const char *name, size_t otherwise) {
  const char *text = getenv(name);
  return text ? strtoull(text, nullptr, 10) : otherwise;
}
static const size_t total = number("STAND_IN_BYTES", 150000000000), context = number("STAND_IN_CONTEXT", 0);
static const int capability = number("STAND_IN_CAPABILITY", 90), multiprocessors = number("STAND_IN_MULTIPROCESSORS", 132);

// --- memory -------------------------------------------------------------------------------------------------------------

static std::mutex lock;
using Guard = std::lock_guard<std::mutex>;
struct Block {
  size_t size;
  int card;
};
using Blocks = std::map<size_t, Block>; // by address or handle
static Blocks device, host, pages;
static std::map<int, size_t> used; // bytes by card
static thread_local Error last = cudaSuccess;
static thread_local int current = 0; // of the cards that CUDA_VISIBLE_DEVICES lists

static Error fail(Error error) { return last = error; }

static char *reserve(size_t size, size_t align) {
  char *start = (char *)mmap(nullptr, size + align, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED)
    return nullptr;
  char *aligned = (char *)(((size_t)start + align - 1) & ~(align - 1));
  if (aligned > start)
    munmap(start, aligned - start);
  if (size_t rest = start + align - aligned)
    munmap(aligned + size, rest);
  return aligned;
}

static const Block *find(const Blocks &blocks, const void *pointer) {
  auto next = blocks.upper_bound((size_t)pointer);
  bool is_in = next != blocks.begin() && (size_t)pointer < std::prev(next)->first + std::prev(next)->second.size;
  return is_in ? &std::prev(next)->second : nullptr;
}
static bool fits(size_t size) { return used[current] + context + size <= total; }

API Error cudaMalloc(void **pointer, size_t size) {
  size = (size + 2 * MiB - 1) / (2 * MiB) * (2 * MiB);
  Guard guard(lock);
  *pointer = fits(size) ? reserve(size, 2 * MiB) : nullptr;
  if (!*pointer)
    return fail(cudaErrorMemoryAllocation);
  used[current] += size, device[(size_t)*pointer] = {size, current};
  return cudaSuccess;
}
API Error cudaFree(void *pointer) {
  Guard guard(lock);
  auto found = device.find((size_t)pointer);
  if (!pointer || found == device.end())
    return pointer ? fail(cudaErrorInvalidValue) : cudaSuccess;
  munmap(pointer, found->second.size), used[found->second.card] -= found->second.size, device.erase(found);
  return cudaSuccess;
}
API Error cudaMallocAsync(void **pointer, size_t size, cudaStream_t) { return cudaMalloc(pointer, size); }
API Error cudaMallocFromPoolAsync(void **pointer, size_t size, cudaMemPool_t, cudaStream_t) { return cudaMalloc(pointer, size); }
API Error cudaFreeAsync(void *pointer, cudaStream_t) { return cudaFree(pointer); }
API Error cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *value) { return *(size_t *)value = 0, cudaSuccess; }
API Error cudaMallocManaged(void **pointer, size_t size, unsigned) { // on the host, as paged states are at first
  *pointer = reserve(size = (size + 4095) / 4096 * 4096, 4096);
  Guard guard(lock);
  host[(size_t)*pointer] = {size, current};
  return *pointer ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
API Error cudaHostAlloc(void **pointer, size_t size, unsigned) { return cudaMallocManaged(pointer, size, 0); }
API Error cudaFreeHost(void *pointer) {
  Guard guard(lock);
  auto found = host.find((size_t)pointer);
  if (found == host.end())
    return fail(cudaErrorInvalidValue);
  munmap(pointer, found->second.size), host.erase(found);
  return cudaSuccess;
}
API Error cudaHostRegister(void *pointer, size_t size, unsigned) { // for copies only: whoever made it gives it back
  Guard guard(lock);
  return host[(size_t)pointer] = {size, current}, cudaSuccess;
}
API Error cudaHostUnregister(void *pointer) {
  Guard guard(lock);
  return host.erase((size_t)pointer), cudaSuccess;
}
API Error cudaMemGetInfo(size_t *free, size_t *all) {
  Guard guard(lock);
  *all = total, *free = total - used[current] - context;
  return cudaSuccess;
}
API Error cudaPointerGetAttributes(cudaPointerAttributes *found, const void *pointer) {
  memset(found, 0, sizeof *found);
  Guard guard(lock);
  if (const Block *block = find(device, pointer))
    found->type = cudaMemoryTypeDevice, found->devicePointer = (void *)pointer, found->device = block->card;
  else if (find(host, pointer))
    found->type = cudaMemoryTypeHost, found->hostPointer = found->devicePointer = (void *)pointer;
  return cudaSuccess;
}

static Error copy(void *to, const void *from, size_t size) {
  bool up, down;
  {
    Guard guard(lock);
    up = find(device, to), down = find(device, from) && !up;
  }
  if (down && size == 1)
    *(char *)to = 1; // a condition on values holds: every mask is full
  else if (!up || size <= MiB)
    memmove(to, from, size);
  return cudaSuccess;
}
API Error cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind) { return copy(to, from, size); }
API Error cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind, cudaStream_t) { return copy(to, from, size); }
API Error cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t size, cudaStream_t) { return copy(to, from, size); }
API Error cudaMemset(void *to, int value, size_t size) {
  memset(to, value, size < MiB ? size : MiB);
  return cudaSuccess;
}
API Error cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t) { return cudaMemset(to, value, size); }
API Error cudaGetSymbolAddress(void **found, const void *symbol) { return *found = (void *)symbol, cudaSuccess; }

// --- the device ---------------------------------------------------------------------------------------------------------

API Error cudaGetDeviceCount(int *count) {
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  *count = visible && !*visible ? 0 : number("STAND_IN_COUNT", 1);
  if (visible && *count)
    *count = std::min<int>(*count, 1 + std::count(visible, visible + strlen(visible), ','));
  return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}
API Error cudaGetDevice(int *found) { return *found = current, cudaSuccess; }
API Error cudaSetDevice(int chosen) {
  int count;
  cudaGetDeviceCount(&count);
  return chosen < 0 || chosen >= count ? fail(cudaErrorInvalidDevice) : (current = chosen, cudaSuccess);
}
API Error cudaDriverGetVersion(int *version) { return *version = 13000, cudaSuccess; }
API Error cudaRuntimeGetVersion(int *version) { return *version = 13000, cudaSuccess; }
API Error cudaDeviceCanAccessPeer(int *can, int, int) { return *can = 0, cudaSuccess; }
API Error cudaDeviceGetPCIBusId(char *text, int size, int card) {
  return snprintf(text, size, "0000:%02x:00.0", card + 1), cudaSuccess;
}
API Error cudaDeviceGetStreamPriorityRange(int *least, int *most) { return *least = 0, *most = -5, cudaSuccess; }

// CUDA C++ Programming Guide, technical specifications per compute capability
static int shared_memory() {
  switch (capability) {
  case 90: case 100: return 227 << 10;
  case 80: return 163 << 10;
  case 70: return 96 << 10;
  case 75: return 64 << 10;
  default: return capability < 70 ? 48 << 10 : 99 << 10;
  }
}
static int threads() {
  return capability == 75 ? 1024 : capability == 86 || capability == 89 || capability == 120 ? 1536 : 2048;
}
API Error cudaDeviceGetAttribute(int *value, cudaDeviceAttr which, int) {
  switch (which) {
  case cudaDevAttrComputeCapabilityMajor: *value = capability / 10; break;
  case cudaDevAttrComputeCapabilityMinor: *value = capability % 10; break;
  case cudaDevAttrMultiProcessorCount: *value = multiprocessors; break;
  case cudaDevAttrMaxThreadsPerMultiProcessor: *value = threads(); break;
  case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
  case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = shared_memory(); break;
  case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = shared_memory() + 1024; break;
  case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = 1024; break;
  case cudaDevAttrMaxBlockDimZ: *value = 64; break;
  case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
  case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
  case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
  case cudaDevAttrWarpSize: case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; break;
  case cudaDevAttrL2CacheSize: *value = 50 * MiB; break;
  case cudaDevAttrClockRate: *value = 1000000; break; // kHz; nobody takes times, but some divide by them
  case cudaDevAttrMemoryClockRate: *value = 5000000; break;
  case cudaDevAttrGlobalMemoryBusWidth: *value = 256; break;
  case cudaDevAttrUnifiedAddressing: case cudaDevAttrManagedMemory: case cudaDevAttrConcurrentKernels:
  case cudaDevAttrConcurrentManagedAccess: *value = 1; break;
  default: *value = 0;
  }
  return cudaSuccess;
}
API Error cudaGetDeviceProperties(cudaDeviceProp *found, int card) {
  memset(found, 0, sizeof *found);
  const char *name = getenv("STAND_IN_NAME");
  snprintf(found->name, sizeof found->name, "%s", name ? name : "a stand-in");
  found->totalGlobalMem = total, found->major = capability / 10, found->minor = capability % 10;
  found->pciBusID = card + 1; // as cudaDeviceGetPCIBusId says it, and NVML
  found->multiProcessorCount = multiprocessors, found->maxThreadsPerMultiProcessor = threads();
  found->sharedMemPerBlock = 48 << 10, found->sharedMemPerBlockOptin = shared_memory();
  found->sharedMemPerMultiprocessor = shared_memory() + 1024;
  found->warpSize = found->maxBlocksPerMultiProcessor = 32, found->maxThreadsPerBlock = 1024;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536, found->l2CacheSize = 50 * MiB;
  found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024, found->maxThreadsDim[2] = 64;
  found->maxGridSize[0] = 2147483647, found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->unifiedAddressing = found->managedMemory = found->concurrentKernels = 1;
  return cudaSuccess;
}

// --- streams, events, kernels: all is done at once ------------------------------------------------------------------------

static std::atomic<size_t> handle{4096};
API Error cudaEventCreate(cudaEvent_t *event) { return *event = (cudaEvent_t)(handle += 16), cudaSuccess; }
API Error cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) { return cudaEventCreate(event); }
API Error cudaEventElapsedTime(float *time, cudaEvent_t, cudaEvent_t) { return *time = 1, cudaSuccess; }
API Error cudaStreamCreate(cudaStream_t *stream) { return *stream = (cudaStream_t)(handle += 16), cudaSuccess; }
API Error cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) { return cudaStreamCreate(stream); }
API Error cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int) { return cudaStreamCreate(stream); }
API Error cudaStreamGetPriority(cudaStream_t, int *priority) { return *priority = 0, cudaSuccess; }
static std::atomic<void *> capturing{nullptr}; // the stream whose work goes into a graph
static cudaStreamCaptureStatus status(cudaStream_t stream) {
  return capturing && capturing == stream ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}
API Error cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *is) { return *is = status(stream), cudaSuccess; }
API Error cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus *is, unsigned long long *id, cudaGraph_t *graph,
                                   const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
  *is = status(stream);
  if (id)
    *id = *is == cudaStreamCaptureStatusActive;
  if (graph)
    *graph = (cudaGraph_t)stream;
  if (nodes)
    *nodes = nullptr;
  if (edges)
    *edges = nullptr;
  if (count)
    *count = 0;
  return cudaSuccess;
}
API Error cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) { return capturing = stream, cudaSuccess; }
API Error cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  return capturing = nullptr, *graph = (cudaGraph_t)stream, cudaSuccess;
}
API Error cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t *, size_t *count) { return *count = 1, cudaSuccess; }
API Error cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long) {
  return *made = (cudaGraphExec_t)graph, cudaSuccess;
}
API Error cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void *data) { return function(data), cudaSuccess; }
API Error cudaFuncGetAttributes(cudaFuncAttributes *found, const void *) {
  memset(found, 0, sizeof *found);
  // PyTorch's wheels have no binary for 8.9, whose cards run that for 8.6; CUB asks which it is
  found->ptxVersion = found->binaryVersion = capability == 89 ? 86 : capability, found->maxThreadsPerBlock = 1024, found->numRegs = 32;
  found->maxDynamicSharedSizeBytes = 48 << 10;
  return cudaSuccess;
}
API Error cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int size, size_t, unsigned) {
  return *blocks = size && size < threads() ? threads() / size : 1, cudaSuccess;
}
API Error cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int size, size_t memory) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, kernel, size, memory, 0);
}
API Error cudaGetLastError() {
  Error error = last;
  return last = cudaSuccess, error;
}
API Error cudaPeekAtLastError() { return last; }
API const char *cudaGetErrorString(Error error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : error == cudaErrorInvalidDevice ? "invalid device ordinal"
       : error ? "an error of the stand-in" : "no error";
}
API const char *cudaGetErrorName(Error error) { return cudaGetErrorString(error); }

// what nvcc's host code calls
static thread_local struct { dim3 grid, block; size_t memory; cudaStream_t stream; } call;
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t memory, cudaStream_t stream) {
  return call = {grid, block, memory, stream}, 0;
}
API Error __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *memory, void *stream) {
  *grid = call.grid, *block = call.block, *memory = call.memory, *(cudaStream_t *)stream = call.stream;
  return cudaSuccess;
}
API void **__cudaRegisterFatBinary(void *) {
  static void *binary[8];
  return binary;
}
API char __cudaInitModule(void **) { return 1; }
API Error __cudaGetKernel(cudaKernel_t *kernel, const void *function) { return *kernel = (cudaKernel_t)function, cudaSuccess; }

// --- the driver's functions that the allocator asks for: a context is there, and expandable segments -----------------------

static CUresult done() { return CUDA_SUCCESS; }
static CUresult active(CUdevice, unsigned *flags, int *is) { return *flags = 0, *is = 1, CUDA_SUCCESS; }
static CUresult granularity(size_t *size, const CUmemAllocationProp *, CUmemAllocationGranularity_flags) {
  return *size = 2 * MiB, CUDA_SUCCESS;
}
static CUresult addresses(CUdeviceptr *start, size_t size, size_t, CUdeviceptr, unsigned long long) {
  Guard guard(lock);
  *start = (CUdeviceptr)reserve(size, 2 * MiB);
  device[*start] = {size, current};
  return *start ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
static CUresult no_addresses(CUdeviceptr start, size_t size) {
  Guard guard(lock);
  return munmap((void *)start, size), device.erase(start), CUDA_SUCCESS;
}
static CUresult create(CUmemGenericAllocationHandle *made, size_t size, const CUmemAllocationProp *, unsigned long long) {
  Guard guard(lock);
  if (!fits(size))
    return CUDA_ERROR_OUT_OF_MEMORY;
  return used[current] += size, pages[*made = (handle += 16)] = {size, current}, CUDA_SUCCESS;
}
static CUresult release(CUmemGenericAllocationHandle made) {
  Guard guard(lock);
  return used[pages[made].card] -= pages[made].size, pages.erase(made), CUDA_SUCCESS;
}
API Error cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned, unsigned long long,
                                           cudaDriverEntryPointQueryResult *result) {
  static const std::map<std::string, void *> functions = {
      {"cuDevicePrimaryCtxGetState", (void *)active}, {"cuMemGetAllocationGranularity", (void *)granularity},
      {"cuMemAddressReserve", (void *)addresses},     {"cuMemAddressFree", (void *)no_addresses},
      {"cuMemCreate", (void *)create},                {"cuMemRelease", (void *)release}};
  auto function = functions.find(name);
  *found = function == functions.end() ? (void *)done : function->second;
  if (result)
    *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// --- for the other stand-ins --------------------------------------------------------------------------------------------

API size_t stand_in_used(int card) {
  Guard guard(lock);
  return used[card] + context;
}
API size_t stand_in_total() { return total; }
