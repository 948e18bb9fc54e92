/* The CUDA runtime: devices, memory, streams, events and launches. What PyTorch calls and is not here returns success
   (the stubs that build.py generates). */
#include "null_device.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static __thread cudaError_t last_error;

static cudaError_t fail(cudaError_t error) {
    last_error = error;
    return error;
}

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    default: return "cudaErrorUnknown";
    }
}

const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    default: return "unknown error";
    }
}

/* Devices */

cudaError_t cudaGetDeviceCount(int *count) {
    *count = null_device_count();
    return *count > 0 ? cudaSuccess : fail(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *device) {
    *device = null_device_current();
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    return null_device_set_current(device) ? fail(cudaErrorInvalidDevice) : cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    const struct card *card = null_device_card();
    (void)device;
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)card->block_shared; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)card->shared; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = 1024; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMultiProcessorCount: *value = (int)card->processors; break;
    case cudaDevAttrComputeCapabilityMajor: *value = (int)card->major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = (int)card->minor; break;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; break;
    case cudaDevAttrL2CacheSize: *value = (int)card->l2; break;
    case cudaDevAttrClockRate: *value = 1410000; break; /* kHz; nothing here takes time */
    case cudaDevAttrMemoryClockRate: *value = 1215000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = 5120; break;
    case cudaDevAttrUnifiedAddressing: case cudaDevAttrConcurrentKernels: *value = 1; break;
    case cudaDevAttrAsyncEngineCount: *value = 3; break;
    default: *value = 0;
    }
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    const struct card *card = null_device_card();
    if (device < 0 || device >= null_device_count()) return fail(cudaErrorInvalidDevice);
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "%s", card->name);
    snprintf(properties->uuid.bytes, sizeof properties->uuid.bytes, "null%d", device);
    properties->totalGlobalMem = (size_t)card->memory;
    properties->sharedMemPerBlock = 49152;
    properties->sharedMemPerBlockOptin = (size_t)card->block_shared;
    properties->sharedMemPerMultiprocessor = (size_t)card->shared;
    properties->reservedSharedMemPerBlock = 1024;
    properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
    properties->maxThreadsDim[2] = 64;
    properties->maxGridSize[0] = 2147483647;
    properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
    properties->major = (int)card->major;
    properties->minor = (int)card->minor;
    properties->multiProcessorCount = (int)card->processors;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->maxBlocksPerMultiProcessor = 32;
    properties->l2CacheSize = (int)card->l2;
    properties->memoryBusWidth = 5120;
    properties->unifiedAddressing = properties->concurrentKernels = 1;
    properties->asyncEngineCount = 3;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int device) {
    snprintf(id, (size_t)length, "0000:%02x:00.0", device);
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = device != peer;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

/* Memory */

cudaError_t cudaMalloc(void **pointer, size_t size) {
    return null_device_allocate(pointer, size, 0) ? fail(cudaErrorMemoryAllocation) : cudaSuccess;
}

cudaError_t cudaMallocAsync(void **pointer, size_t size, cudaStream_t stream) {
    (void)stream;
    return cudaMalloc(pointer, size);
}

cudaError_t cudaFree(void *pointer) {
    return null_device_release(pointer) ? fail(cudaErrorInvalidValue) : cudaSuccess;
}

cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) {
    (void)stream;
    return cudaFree(pointer);
}

cudaError_t cudaMallocHost(void **pointer, size_t size) {
    return null_device_allocate(pointer, size, 1) ? fail(cudaErrorMemoryAllocation) : cudaSuccess;
}

cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
    (void)flags;
    return cudaMallocHost(pointer, size);
}

cudaError_t cudaFreeHost(void *pointer) { return cudaFree(pointer); }

cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    *total = (size_t)null_device_card()->memory;
    *free = (size_t)null_device_free_memory(null_device_current());
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    int kind = null_device_memory_kind(pointer);
    memset(attributes, 0, sizeof *attributes);
    attributes->type = kind == 1 ? cudaMemoryTypeDevice : kind == 2 ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    attributes->device = null_device_current();
    attributes->devicePointer = (void *)pointer;
    attributes->hostPointer = kind == 2 ? (void *)pointer : NULL;
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t size, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
    (void)kind;
    (void)stream;
    null_device_counters.copies++;
    null_device_copy(target, source, size);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *target, const void *source, size_t size, enum cudaMemcpyKind kind) {
    null_device_counters.synchronizations++;
    return cudaMemcpyAsync(target, source, size, kind, NULL);
}

cudaError_t cudaMemcpy2DAsync(void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    (void)kind;
    (void)stream;
    null_device_counters.copies++;
    for (size_t row = 0; row < height; row++)
        null_device_copy((char *)target + row * target_pitch, (const char *)source + row * source_pitch, width);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *target, int value, size_t size, cudaStream_t stream) {
    (void)stream;
    null_device_counters.fills++;
    null_device_fill(target, value, size);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *target, int value, size_t size) { return cudaMemsetAsync(target, value, size, NULL); }

static cudaStream_t captured_stream;
static unsigned long long capture;

static int is_captured(cudaStream_t stream) { return stream != NULL && stream == captured_stream; }

/* Streams and events. Nothing takes time on the device, so an event happens when the host records it. */

static cudaError_t new_stream(cudaStream_t *stream) {
    *stream = null_device_new_handle();
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return new_stream(stream); }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    (void)flags;
    return new_stream(stream);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    (void)flags;
    (void)priority;
    return new_stream(stream);
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    (void)stream;
    *priority = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (is_captured(stream)) return fail(cudaErrorStreamCaptureUnsupported);
    null_device_counters.synchronizations++;
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
    null_device_counters.synchronizations++;
    return cudaSuccess;
}

struct event {
    double time;
};

static cudaError_t new_event(cudaEvent_t *event) {
    *event = (cudaEvent_t)calloc(1, sizeof(struct event));
    return *event == NULL ? fail(cudaErrorMemoryAllocation) : cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return new_event(event); }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    (void)flags;
    return new_event(event);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    (void)stream;
    (void)flags;
    ((struct event *)event)->time = null_device_now();
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    (void)event;
    null_device_counters.synchronizations++;
    return cudaSuccess;
}

/* The host's time between the two, and at least a microsecond: whoever measures kernels divides by it. */
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    double elapsed = 1e3 * (((struct event *)end)->time - ((struct event *)start)->time);
    *milliseconds = elapsed > 1e-3 ? (float)elapsed : 1e-3f;
    return cudaSuccess;
}

/* Graphs: what is captured is nothing, and so is what is replayed. Threads launch into a stream that another one
   captures, as autograd's do, so the stream decides; one is captured at a time. */

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    static unsigned long long last;
    (void)mode;
    if (stream == NULL) return fail(cudaErrorStreamCaptureUnsupported);
    capture = __sync_add_and_fetch(&last, 1);
    captured_stream = stream;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    if (!is_captured(stream)) return fail(cudaErrorIllegalState);
    captured_stream = NULL;
    *graph = null_device_new_handle();
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = is_captured(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                     const cudaGraphEdgeData **edges, size_t *count) {
    cudaStreamIsCapturing(stream, status);
    if (id != NULL) *id = is_captured(stream) ? capture : 0;
    if (graph != NULL) *graph = NULL;
    if (nodes != NULL) *nodes = NULL;
    if (edges != NULL) *edges = NULL;
    if (count != NULL) *count = 0;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
    (void)graph;
    (void)flags;
    *executable = null_device_new_handle();
    return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    (void)graph;
    (void)nodes;
    *count = 1;
    return cudaSuccess;
}

/* Launches */

struct configuration {
    dim3 grid, block;
    size_t shared;
    void *stream;
};

static __thread struct configuration configurations[16];
static __thread int configuration_count;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    if (configuration_count == 16) return 1;
    configurations[configuration_count++] = (struct configuration){grid, block, shared, stream};
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    if (configuration_count == 0) return fail(cudaErrorInvalidConfiguration);
    struct configuration *top = &configurations[--configuration_count];
    *grid = top->grid;
    *block = top->block;
    *shared = top->shared;
    *(void **)stream = top->stream;
    return cudaSuccess;
}

static cudaError_t launch(dim3 grid, dim3 block, size_t shared) {
    null_device_counters.launches++;
    if (null_device_check_launch(grid.x, grid.y, grid.z, block.x, block.y, block.z, shared, 0))
        return fail(cudaErrorInvalidConfiguration);
    return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
    (void)function;
    (void)arguments;
    (void)stream;
    return launch(grid, block, shared);
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
    (void)kernel;
    (void)arguments;
    (void)stream;
    return launch(grid, block, shared);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *configuration, const void *function, void **arguments) {
    (void)function;
    (void)arguments;
    return launch(configuration->gridDim, configuration->blockDim, configuration->dynamicSmemBytes);
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

void **__cudaRegisterFatBinary(void *binary) {
    static void *registered;
    (void)binary;
    return &registered;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    (void)function;
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 64;
    attributes->binaryVersion = attributes->ptxVersion =
        10 * (int)null_device_card()->major + (int)null_device_card()->minor;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads,
                                                          size_t shared) {
    (void)function;
    int by_threads = threads > 0 ? 2048 / threads : 1;
    int by_shared = shared > 0 ? (int)((size_t)null_device_card()->shared / shared) : 32;
    *blocks = by_threads < by_shared ? by_threads : by_shared;
    if (*blocks > 32) *blocks = 32;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads,
                                                                   size_t shared, unsigned flags) {
    (void)flags;
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}

/* The driver's functions, which are in this library too. */

#include <dlfcn.h>

static void *find_driver_function(const char *name) {
    void *function = dlsym(RTLD_DEFAULT, name);
    if (function == NULL) {
        char versioned[256];
        snprintf(versioned, sizeof versioned, "%s_v2", name);
        function = dlsym(RTLD_DEFAULT, versioned);
    }
    return function;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
    (void)version;
    (void)flags;
    *function = find_driver_function(name);
    if (result != NULL)
        *result = *function != NULL ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
