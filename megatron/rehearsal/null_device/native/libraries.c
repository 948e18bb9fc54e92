/* cuBLAS and cuDNN: handles, empty workspaces, and one algorithm for everything. The functions are declared by hand
   because their headers require C++ headers. */
#include "null_device.h"

#include <string.h>

static int new_handle(void **handle) {
    *handle = null_device_new_handle();
    return 0;
}

int cublasCreate_v2(void **handle) { return new_handle(handle); }
int cublasLtCreate(void **handle) { return new_handle(handle); }
int cublasLtMatmulDescCreate(void **descriptor) { return new_handle(descriptor); }
int cublasLtMatrixLayoutCreate(void **layout) { return new_handle(layout); }
int cublasLtMatmulPreferenceCreate(void **preference) { return new_handle(preference); }

int cublasGetMathMode(void *handle, int *mode) {
    (void)handle;
    *mode = 0;
    return 0;
}

int cublasGetPointerMode_v2(void *handle, int *mode) {
    (void)handle;
    *mode = 0;
    return 0;
}

size_t cublasLtGetVersion(void) { return 130100; }

/* cublasLtMatmulHeuristicResult_t: 64 bytes for the algorithm, a size_t for the workspace, a status, a wave count. */
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int requested, void *results, int *count) {
    (void)handle, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)preference, (void)requested;
    memset(results, 0, 96);
    *count = 1;
    return 0;
}

#define PRODUCT(name)                                                                                                  \
    int name(void) {                                                                                                   \
        null_device_counters.gemm++;                                                                                   \
        return 0;                                                                                                      \
    }
PRODUCT(cublasGemmEx)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasDgemv_v2)
PRODUCT(cublasLtMatmul)

/* cuDNN. PyTorch compares the major version with the one it was built with. */

int cudnnCreate(void **handle) { return new_handle(handle); }
int cudnnCreateTensorDescriptor(void **descriptor) { return new_handle(descriptor); }
int cudnnCreateFilterDescriptor(void **descriptor) { return new_handle(descriptor); }
int cudnnCreateConvolutionDescriptor(void **descriptor) { return new_handle(descriptor); }
int cudnnCreateActivationDescriptor(void **descriptor) { return new_handle(descriptor); }
int cudnnCreateDropoutDescriptor(void **descriptor) { return new_handle(descriptor); }
const char *cudnnGetErrorString(int status) { return status == 0 ? "CUDNN_STATUS_SUCCESS" : "CUDNN_STATUS_ERROR"; }

void cudnnGetLastErrorString(char *text, size_t size) {
    if (size > 0) text[0] = 0;
}

int cudnnBackendCreateDescriptor(int type, void **descriptor) {
    (void)type;
    return new_handle(descriptor);
}

#define CUDNN_ATTR_ENGINEHEUR_RESULTS 202
#define CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE 402

/* Every operation has one engine, which has no notes and needs no workspace. */
int cudnnBackendGetAttribute(void *descriptor, int attribute, int type, int64_t requested, int64_t *count,
                             void *values) {
    (void)descriptor;
    (void)type;
    int64_t found = attribute == CUDNN_ATTR_ENGINEHEUR_RESULTS || attribute == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE;
    if (count != NULL) *count = found;
    if (attribute == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE && requested > 0 && values != NULL)
        memset(values, 0, sizeof(int64_t));
    return 0;
}

int cudnnBackendExecute(void *handle, void *plan, void *pack) {
    (void)handle;
    (void)plan;
    (void)pack;
    null_device_counters.convolutions++;
    return 0;
}
