// NCCL between ranks that all hold the same: what a rank gathers are copies of its own part. Only what is broadcast is sent.
#define __CUDA_FP16_H__ // nccl.h includes these two, which need more wheels, and uses nothing of them
#define __CUDA_BF16_H__
#include <fcntl.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#define API __attribute__((visibility("default")))
struct ncclComm {
  int ranks, rank, broadcasts;
  char name[64]; // the same in all of its ranks; "" where they were split off another, and nothing is sent
};

static size_t size(ncclDataType_t type) {
  switch (type) {
  case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
  case ncclFloat16: case ncclBfloat16: return 2;
  case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
  default: return 4;
  }
}
static ncclResult_t make(ncclComm_t *made, int ranks, int rank, const char *name) {
  *made = calloc(1, sizeof **made), (*made)->ranks = ranks, (*made)->rank = rank;
  strncpy((*made)->name, name, sizeof (*made)->name - 1);
  return ncclSuccess;
}
static ncclResult_t copies(const void *from, void *to, size_t bytes, int times, cudaStream_t stream) {
  for (int i = 0; i < times; i++)
    if ((char *)to + i * bytes != from)
      cudaMemcpyAsync((char *)to + i * bytes, from, bytes, 4, stream);
  return ncclSuccess;
}
// By a file of shared memory for each receiver, who deletes it. More than a MiB the runtime does not copy either.
static ncclResult_t broadcast(const void *from, void *to, size_t bytes, int root, ncclComm_t comm, cudaStream_t stream) {
  char part[128], path[128];
  int number = comm->broadcasts++, file = -1, sends = comm->rank == root;
  if (!*comm->name || bytes > 1 << 20)
    return copies(from, to, bytes, 1, stream);
  for (int rank = 0; sends && rank < comm->ranks; rank++) {
    snprintf(path, sizeof path, "/dev/shm/%s.%d.%d", comm->name, number, rank);
    snprintf(part, sizeof part, "%s.part", path);
    if (rank == root || (file = open(part, O_WRONLY | O_CREAT | O_TRUNC, 0600)) < 0)
      continue;
    int whole = write(file, from, bytes) == (ssize_t)bytes;
    close(file), whole ? rename(part, path) : unlink(part);
  }
  if (sends)
    return copies(from, to, bytes, 1, stream);
  snprintf(path, sizeof path, "/dev/shm/%s.%d.%d", comm->name, number, comm->rank);
  for (int tries = 0; tries < 60000 && (file = open(path, O_RDONLY)) < 0; tries++)
    usleep(1000);
  if (file < 0 || read(file, to, bytes) != (ssize_t)bytes)
    return ncclRemoteError;
  return close(file), unlink(path), ncclSuccess;
}
API ncclResult_t ncclGetVersion(int *version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }
API ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  static int made;
  memset(id, 0, sizeof *id), snprintf(id->internal, sizeof id->internal, "stand_in.%d.%d", getpid(), made++);
  return ncclSuccess;
}
API const char *ncclGetErrorString(ncclResult_t result) { return result ? "an error of the stand-in" : "no error"; }
API const char *ncclGetLastError(ncclComm_t comm) { return ""; }
API ncclResult_t ncclCommInitRank(ncclComm_t *made, int ranks, ncclUniqueId id, int rank) {
  return make(made, ranks, rank, id.internal);
}
API ncclResult_t ncclCommInitRankConfig(ncclComm_t *made, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
  return make(made, ranks, rank, id.internal);
}
API ncclResult_t ncclCommInitRankScalable(ncclComm_t *made, int ranks, int rank, int ids, ncclUniqueId *id, ncclConfig_t *config) {
  return make(made, ranks, rank, id->internal);
}
API ncclResult_t ncclCommInitAll(ncclComm_t *made, int ranks, const int *devices) {
  for (int rank = 0; rank < ranks; rank++)
    make(made + rank, ranks, rank, "");
  return ncclSuccess;
}
API ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *made, ncclConfig_t *config) {
  return color == NCCL_SPLIT_NOCOLOR ? (*made = NULL, ncclSuccess) : make(made, comm->ranks, key, "");
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
  return broadcast(from, to, count * size(type), root, comm, stream);
}
API ncclResult_t ncclBcast(void *held, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return broadcast(held, held, count * size(type), root, comm, stream);
}
