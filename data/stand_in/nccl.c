// NCCL between ranks that all hold the same: what a rank gathers are copies of its own part, and nothing is sent.
#define __CUDA_FP16_H__ // nccl.h includes these two, which need more wheels, and uses nothing of them
#define __CUDA_BF16_H__
#include <nccl.h>
#include <stdlib.h>
#include <string.h>
#define API __attribute__((visibility("default")))
struct ncclComm {
  int ranks, rank;
};

static size_t size(ncclDataType_t type) {
  switch (type) {
  case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
  case ncclFloat16: case ncclBfloat16: return 2;
  case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
  default: return 4;
  }
}
static ncclResult_t make(ncclComm_t *made, int ranks, int rank) {
  *made = malloc(sizeof **made), (*made)->ranks = ranks, (*made)->rank = rank;
  return ncclSuccess;
}
static ncclResult_t copies(const void *from, void *to, size_t bytes, int times, cudaStream_t stream) {
  for (int i = 0; i < times; i++)
    if ((char *)to + i * bytes != from)
      cudaMemcpyAsync((char *)to + i * bytes, from, bytes, 4, stream);
  return ncclSuccess;
}
API ncclResult_t ncclGetVersion(int *version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }
API ncclResult_t ncclGetUniqueId(ncclUniqueId *id) { return memset(id, 1, sizeof *id), ncclSuccess; }
API const char *ncclGetErrorString(ncclResult_t result) { return result ? "an error of the stand-in" : "no error"; }
API const char *ncclGetLastError(ncclComm_t comm) { return ""; }
API ncclResult_t ncclCommInitRank(ncclComm_t *made, int ranks, ncclUniqueId id, int rank) { return make(made, ranks, rank); }
API ncclResult_t ncclCommInitRankConfig(ncclComm_t *made, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
  return make(made, ranks, rank);
}
API ncclResult_t ncclCommInitRankScalable(ncclComm_t *made, int ranks, int rank, int ids, ncclUniqueId *id, ncclConfig_t *config) {
  return make(made, ranks, rank);
}
API ncclResult_t ncclCommInitAll(ncclComm_t *made, int ranks, const int *devices) {
  for (int rank = 0; rank < ranks; rank++)
    make(made + rank, ranks, rank);
  return ncclSuccess;
}
API ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *made, ncclConfig_t *config) {
  return color == NCCL_SPLIT_NOCOLOR ? (*made = NULL, ncclSuccess) : make(made, comm->ranks, key);
}
API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) { return *error = ncclSuccess; }
API ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) { return *count = comm->ranks, ncclSuccess; }
API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) { return *rank = comm->rank, ncclSuccess; }
API ncclResult_t ncclMemAlloc(void **pointer, size_t bytes) { return cudaMalloc(pointer, bytes) ? ncclUnhandledCudaError : ncclSuccess; }
API ncclResult_t ncclMemFree(void *pointer) { return cudaFree(pointer), ncclSuccess; }
API ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
  return copies(from, to, count * size(type), comm->ranks, stream);
}
API ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t how, ncclComm_t comm,
                                   cudaStream_t stream) {
  return copies((const char *)from + comm->rank * count * size(type), to, count * size(type), 1, stream);
}
API ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t how, ncclComm_t comm,
                               cudaStream_t stream) {
  return copies(from, to, count * size(type), 1, stream);
}
API ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t how, int root, ncclComm_t comm,
                            cudaStream_t stream) {
  return copies(from, to, comm->rank == root ? count * size(type) : 0, 1, stream);
}
API ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                               cudaStream_t stream) {
  return copies(from, to, count * size(type), 1, stream);
}
