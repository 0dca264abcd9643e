// cuDNN, whose heuristics always find one plan, which needs no workspace and computes nothing.
#include <cudnn.h>
#define API __attribute__((visibility("default")))
static int something;
API size_t cudnnGetVersion() { return CUDNN_VERSION; }
API cudnnStatus_t cudnnGetProperty(libraryPropertyType type, int *value) {
  *value = type == MAJOR_VERSION ? CUDNN_MAJOR : type == MINOR_VERSION ? CUDNN_MINOR : CUDNN_PATCHLEVEL;
  return CUDNN_STATUS_SUCCESS;
}
API size_t cudnnGetCudartVersion() { return 13000; }
API const char *cudnnGetErrorString(cudnnStatus_t status) { return status ? "an error of the stand-in" : "CUDNN_STATUS_SUCCESS"; }
API cudnnStatus_t cudnnCreate(cudnnHandle_t *handle) { return *handle = (void *)&something, CUDNN_STATUS_SUCCESS; }
API cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *made) {
  return *made = &something, CUDNN_STATUS_SUCCESS;
}
API cudnnStatus_t cudnnBackendGetAttribute(const cudnnBackendDescriptor_t from, cudnnBackendAttributeName_t name,
                                           cudnnBackendAttributeType_t type, int64_t wanted, int64_t *count, void *found) {
  if (count) // notes on behaviour and precision: none; plans and whatever is one number: one
    *count = name == CUDNN_ATTR_ENGINEHEUR_RESULTS || type == CUDNN_TYPE_INT64;
  if (found && wanted && type == CUDNN_TYPE_INT64)
    *(int64_t *)found = 0;
  if (found && wanted && type == CUDNN_TYPE_INT32)
    *(int32_t *)found = 0;
  return CUDNN_STATUS_SUCCESS;
}
API cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    cudnnHandle_t h, cudnnBatchNormMode_t m, cudnnBatchNormOps_t o, const cudnnTensorDescriptor_t x, const cudnnTensorDescriptor_t z,
    const cudnnTensorDescriptor_t y, const cudnnTensorDescriptor_t s, const cudnnActivationDescriptor_t a, size_t *size) {
  return *size = 0, CUDNN_STATUS_SUCCESS;
}
API cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    cudnnHandle_t h, cudnnBatchNormMode_t m, cudnnBatchNormOps_t o, const cudnnTensorDescriptor_t x, const cudnnTensorDescriptor_t y,
    const cudnnTensorDescriptor_t dy, const cudnnTensorDescriptor_t dz, const cudnnTensorDescriptor_t dx,
    const cudnnTensorDescriptor_t s, const cudnnActivationDescriptor_t a, size_t *size) {
  return *size = 0, CUDNN_STATUS_SUCCESS;
}
API cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(cudnnHandle_t h, cudnnBatchNormMode_t m,
    cudnnBatchNormOps_t o, const cudnnActivationDescriptor_t a, const cudnnTensorDescriptor_t x, size_t *size) {
  return *size = 0, CUDNN_STATUS_SUCCESS;
}
