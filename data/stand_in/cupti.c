// CUPTI, which lets the profiler subscribe and never has an activity of the GPU to tell of.
#include <stdint.h>
#define API __attribute__((visibility("default")))
static int something;
API int cuptiGetVersion(uint32_t *version) { return *version = 130000, 0; }
API int cuptiSubscribe(void **subscriber, void *callback, void *data) { return *subscriber = &something, 0; }
API int cuptiGetResultString(int result, const char **text) { return *text = "the stand-in", 0; }
API int cuptiGetCallbackName(int domain, uint32_t id, const char **text) { return *text = "", 0; }
API int cuptiGetTimestamp(uint64_t *time) { return *time = 0, 0; }
API int cuptiActivityGetNextRecord(uint8_t *buffer, uint64_t size, void **record) { return 12; } // CUPTI_ERROR_MAX_LIMIT_REACHED
API int cuptiActivityGetNumDroppedRecords(void *context, uint32_t stream, uint64_t *count) { return *count = 0, 0; }
