// NVML, which knows a card's memory, name and capability. There is no power, temperature or clock: what is not here is
// "Function Not Found" to pynvml.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#define API __attribute__((visibility("default")))
typedef unsigned long long bytes;
enum { OK = 0, INVALID = 2, NO_SUPPORT = 3, NOT_FOUND = 6, TOO_SMALL = 7 };
size_t stand_in_used(int), stand_in_total();
static const char *said(const char *name, const char *otherwise) { return getenv(name) ? getenv(name) : otherwise; }
static int cards() { return atoi(said("STAND_IN_COUNT", "1")); }
static int card(void *handle) { return (int)(size_t)handle - 1; }

API int nvmlInit_v2() { return OK; }
API int nvmlInitWithFlags(unsigned flags) { return OK; }
API int nvmlShutdown() { return OK; }
API const char *nvmlErrorString(int error) { return error == NO_SUPPORT ? "Not Supported" : "an error of the stand-in"; }
API int nvmlSystemGetDriverVersion(char *text, unsigned size) { return snprintf(text, size, "580.0-stand-in"), OK; }
API int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = 13000, OK; }
API int nvmlDeviceGetCount_v2(unsigned *count) { return *count = cards(), OK; }
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  return *handle = (void *)(size_t)(index + 1), index < cards() ? OK : INVALID;
}
API int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **handle) {
  unsigned domain, number;
  if (sscanf(bus, "%x:%x", &domain, &number) != 2)
    return NOT_FOUND;
  return nvmlDeviceGetHandleByIndex_v2(number - 1, handle);
}
API int nvmlDeviceGetHandleByUUID(const char *text, void **handle) {
  unsigned index;
  return sscanf(text, "GPU-%8x", &index) == 1 ? nvmlDeviceGetHandleByIndex_v2(index, handle) : NOT_FOUND;
}
API int nvmlDeviceGetIndex(void *handle, unsigned *index) { return *index = card(handle), OK; }
API int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
  return snprintf(text, size, "GPU-%08x-0000-0000-0000-000000000000", card(handle)), OK;
}
API int nvmlDeviceGetName(void *handle, char *text, unsigned size) {
  return snprintf(text, size, "%s", said("STAND_IN_NAME", "a stand-in")), OK;
}
API int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
  int both = atoi(said("STAND_IN_CAPABILITY", "90"));
  return *major = both / 10, *minor = both % 10, OK;
}
API int nvmlDeviceGetMemoryInfo(void *handle, bytes *found) { // total, free, used
  found[0] = stand_in_total(), found[2] = stand_in_used(card(handle)), found[1] = found[0] - found[2];
  return OK;
}
API int nvmlDeviceGetMemoryInfo_v2(void *handle, bytes *found) { // version, total, reserved by the driver, free, used
  found[1] = stand_in_total(), found[2] = 0, found[4] = stand_in_used(card(handle)), found[3] = found[1] - found[4];
  return OK;
}
API int nvmlDeviceGetUtilizationRates(void *handle, unsigned *found) { return found[0] = found[1] = 0, OK; }
API int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) { return NO_SUPPORT; }
API int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *degrees) { return NO_SUPPORT; }
API int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, bytes *found) { // pid, bytes
  unsigned room = *count;
  *count = 1;
  if (!room || !found)
    return TOO_SMALL;
  memset(found, 0, 3 * sizeof *found);
  return *(unsigned *)found = getpid(), found[1] = stand_in_used(card(handle)), OK;
}
API int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, bytes *found) { // another layout after bytes
  return nvmlDeviceGetComputeRunningProcesses_v3(handle, count, found);
}
API int nvmlDeviceGetNvLinkRemoteDeviceType(void *handle, unsigned link, int *type) { return NO_SUPPORT; }
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, unsigned link, void *found) { return NO_SUPPORT; }
API int nvmlDeviceGetGpuFabricInfoV(void *handle, void *found) { return OK; } // zeros: no fabric (expandable segments ask)
