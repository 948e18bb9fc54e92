/* NVML, with which PyTorch counts devices before it uses one. The library is also installed under NVML's file name
   (environment.py). */
#include "null_device.h"

#include <stdio.h>
#include <string.h>

#define NOT_SUPPORTED 3
#define NOT_FOUND 6

int nvmlInit(void) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int error) { return error == 0 ? "Success" : "Not Supported"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = (unsigned)null_device_card()->devices;
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if ((long)index >= null_device_card()->devices) return NOT_FOUND;
    *device = (void *)(0x100l + index);
    return 0;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) {
    unsigned index = 0;
    return sscanf(id, "%*x:%x", &index) == 1 ? nvmlDeviceGetHandleByIndex_v2(index, device) : NOT_FOUND;
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned size) {
    snprintf(uuid, size, "GPU-null-%ld", (long)device - 0x100l);
    return 0;
}

int nvmlDeviceGetName(void *device, char *name, unsigned size) {
    (void)device;
    snprintf(name, size, "%s", null_device_card()->name);
    return 0;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return 0;
}

int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes) {
    (void)device;
    (void)processes;
    *count = 0;
    return 0;
}

/* No fabric: the version is followed by a 16-byte cluster id, a status, a clique and a state, all 0. */
int nvmlDeviceGetGpuFabricInfoV(void *device, char *info) {
    (void)device;
    memset(info + 4, 0, 25);
    return 0;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NOT_SUPPORTED; }
