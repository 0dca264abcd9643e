// cuBLASLt, which always finds one algorithm, without a workspace of its own.
#include <string.h>
#define API __attribute__((visibility("default")))
static int make(void **made) {
  static int something;
  *made = &something;
  return 0;
}
API unsigned long cublasLtGetVersion() { return 130100; }
API int cublasLtCreate(void **made) { return make(made); }
API int cublasLtMatmulDescCreate(void **made, int compute, int scale) { return make(made); }
API int cublasLtMatrixLayoutCreate(void **made, int type, unsigned long rows, unsigned long columns, long ld) { return make(made); }
API int cublasLtMatmulPreferenceCreate(void **made) { return make(made); }
API int cublasLtMatmulAlgoGetHeuristic(void *a, void *b, void *c, void *d, void *e, void *f, void *g, int most, void *results, int *found) {
  memset(results, 0, most > 0 ? 96 : 0); // one cublasLtMatmulHeuristicResult_t
  *found = most > 0;
  return 0;
}
