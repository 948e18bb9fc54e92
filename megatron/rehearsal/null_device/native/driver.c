/* The CUDA driver, as Triton and PyTorch call it. Kernels are loaded from the output of ptxas, which also states their
   registers and stack size. Launches are checked against the limits of the GPU. */
#include "null_device.h"

#include <cuda.h>
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

CUresult cuInit(unsigned flags) {
    (void)flags;
    return null_device_count() > 0 ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

CUresult cuDriverGetVersion(int *version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_SUCCESS                           ? "no error"
            : error == CUDA_ERROR_INVALID_VALUE             ? "invalid argument"
            : error == CUDA_ERROR_OUT_OF_MEMORY             ? "out of memory"
            : error == CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES   ? "too many resources requested for launch"
            : error == CUDA_ERROR_NO_BINARY_FOR_GPU         ? "no kernel image is available for execution on the device"
            : error == CUDA_ERROR_NOT_FOUND                 ? "named symbol not found"
            : error == CUDA_ERROR_NO_DEVICE                 ? "no CUDA-capable device is detected"
                                                            : "unknown error";
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **text) { return cuGetErrorString(error, text); }

CUresult cuDeviceGetCount(int *count) {
    *count = null_device_count();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int index) {
    *device = index;
    return index >= 0 && index < null_device_count() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
    (void)device;
    snprintf(name, (size_t)size, "%s", null_device_card()->name);
    return CUDA_SUCCESS;
}

extern int cudaDeviceGetAttribute(int *, int, int);

/* The driver and the runtime number attributes alike. */
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    return (CUresult)cudaDeviceGetAttribute(value, (int)attribute, device);
}

/* The handle of a context is 0x100 + its device. */

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    (void)device;
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = (CUcontext)(0x100l + device);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) { return cuDevicePrimaryCtxRetain(context, null_device_current()); }

CUresult cuCtxSetCurrent(CUcontext context) {
    if (context != NULL) null_device_set_current((int)((long)context - 0x100l));
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    *device = null_device_current();
    return CUDA_SUCCESS;
}

/* Modules and kernels */

struct module {
    unsigned char *image;
};

struct kernel {
    char name[256];
    int registers;      /* per thread */
    int stack;          /* bytes of local memory per thread, for spilled registers */
    int shared;         /* bytes of static shared memory */
    int dynamic_shared; /* maximum dynamic shared memory of a launch */
    int used_shared;    /* maximum requested by any launch */
    int launches;
    struct kernel *next;
};

static struct kernel *first_kernel, *last_kernel;

/* Name and resource usage of the n-th loaded kernel; returns 1 if there are fewer kernels. */
int null_device_kernel(int index, char *name, int *values) {
    struct kernel *kernel = first_kernel;
    while (kernel != NULL && index-- > 0) kernel = kernel->next;
    if (kernel == NULL) return 1;
    memcpy(name, kernel->name, sizeof kernel->name);
    values[0] = kernel->registers;
    values[1] = kernel->stack;
    values[2] = kernel->used_shared;
    values[3] = kernel->launches;
    return 0;
}

static const Elf64_Shdr *find_section(const unsigned char *image, const char *name) {
    const Elf64_Ehdr *header = (const Elf64_Ehdr *)image;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(image + header->e_shoff);
    const char *names = (const char *)image + sections[header->e_shstrndx].sh_offset;
    for (int i = 0; i < header->e_shnum; i++)
        if (strcmp(names + sections[i].sh_name, name) == 0) return &sections[i];
    return NULL;
}

static const Elf64_Shdr *find_kernel_section(const unsigned char *image, const char *prefix, const char *kernel) {
    char name[512];
    snprintf(name, sizeof name, "%s%s", prefix, kernel);
    return find_section(image, name);
}

/* Reads a kernel's .nv.info section. It consists of records (format, attribute, size, values); those read here contain
   pairs of a symbol index and a value. */
enum { REGISTER_COUNT = 0x2f, FRAME_SIZE = 0x11 };

static int read_info(const unsigned char *image, const char *kernel, unsigned wanted) {
    const Elf64_Shdr *info = find_section(image, ".nv.info"), *symbols = find_section(image, ".symtab");
    const Elf64_Shdr *names = find_section(image, ".strtab");
    if (info == NULL || symbols == NULL || names == NULL) return 0;
    const unsigned char *record = image + info->sh_offset, *end = record + info->sh_size;
    while (record + 4 <= end) {
        unsigned format = record[0], attribute = record[1], size = record[2] | record[3] << 8;
        record += 4;
        if (format != 4) continue; /* the value is in the record's header */
        if (attribute == wanted && size >= 8) {
            uint32_t values[2];
            memcpy(values, record, sizeof values);
            if (values[0] < symbols->sh_size / sizeof(Elf64_Sym)) {
                const Elf64_Sym *symbol = (const Elf64_Sym *)(image + symbols->sh_offset) + values[0];
                if (strcmp((const char *)image + names->sh_offset + symbol->st_name, kernel) == 0)
                    return (int)values[1];
            }
        }
        record += size;
    }
    return 0;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    const Elf64_Ehdr *header = image;
    if (memcmp(header->e_ident, ELFMAG, SELFMAG) != 0) return CUDA_ERROR_NO_BINARY_FOR_GPU;
    size_t size = header->e_shoff + (size_t)header->e_shnum * header->e_shentsize;
    if (header->e_phoff + (size_t)header->e_phnum * header->e_phentsize > size)
        size = header->e_phoff + (size_t)header->e_phnum * header->e_phentsize;
    struct module *loaded = malloc(sizeof *loaded);
    if (loaded == NULL || (loaded->image = malloc(size)) == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
    memcpy(loaded->image, image, size);
    *module = (CUmodule)loaded;
    return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) {
    free(((struct module *)module)->image);
    free(module);
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    const unsigned char *image = ((struct module *)module)->image;
    const Elf64_Shdr *text = find_kernel_section(image, ".text.", name);
    if (text == NULL) return CUDA_ERROR_NOT_FOUND;
    struct kernel *kernel = calloc(1, sizeof *kernel);
    if (kernel == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
    const Elf64_Shdr *shared = find_kernel_section(image, ".nv.shared.", name);
    snprintf(kernel->name, sizeof kernel->name, "%s", name);
    kernel->registers = read_info(image, name, REGISTER_COUNT);
    if (kernel->registers == 0) kernel->registers = (int)(text->sh_info >> 24);
    kernel->stack = read_info(image, name, FRAME_SIZE);
    kernel->shared = shared == NULL ? 0 : (int)shared->sh_size;
    /* Since Hopper the section starts with 1 KiB per block reserved by the system, which counts toward no limit. */
    if (null_device_card()->major >= 9 && kernel->shared >= 1024) kernel->shared -= 1024;
    kernel->dynamic_shared = 49152 - kernel->shared;
    if (last_kernel == NULL) first_kernel = kernel; /* Triton holds the interpreter's lock here */
    else last_kernel->next = kernel;
    last_kernel = kernel;
    *function = (CUfunction)kernel;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    const struct kernel *kernel = (const struct kernel *)function;
    switch ((int)attribute) {
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = kernel->registers; break;
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: *value = kernel->stack; break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = kernel->shared; break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = kernel->dynamic_shared; break;
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: {
        int threads = kernel->registers > 0 ? 65536 / kernel->registers / 32 * 32 : 1024;
        *value = threads < 1024 ? threads : 1024;
        break;
    }
    default: *value = 0;
    }
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    struct kernel *kernel = (struct kernel *)function;
    /* Triton 3.9 tries an attribute of later GPUs, and raises the limit of shared memory only if that is an error. */
    if (attribute > CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE) return CUDA_ERROR_INVALID_VALUE;
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_SUCCESS;
    if (value + kernel->shared > null_device_card()->block_shared) return CUDA_ERROR_INVALID_VALUE;
    kernel->dynamic_shared = value;
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **arguments,
                        void **extra) {
    struct kernel *kernel = (struct kernel *)function;
    (void)stream;
    (void)arguments;
    (void)extra;
    null_device_counters.triton++;
    kernel->launches++;
    if ((int)shared + kernel->shared > kernel->used_shared) kernel->used_shared = (int)shared + kernel->shared;
    if ((int)shared > kernel->dynamic_shared) return CUDA_ERROR_INVALID_VALUE;
    if (null_device_check_launch(grid_x, grid_y, grid_z, block_x, block_y, block_z, shared + (size_t)kernel->shared, 0))
        return CUDA_ERROR_INVALID_VALUE;
    if (null_device_check_launch(1, 1, 1, block_x, block_y, block_z, 0, kernel->registers))
        return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction function, void **arguments, void **extra) {
    return cuLaunchKernel(function, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
                          c->sharedMemBytes, c->hStream, arguments, extra);
}

CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *configuration) {
    (void)function;
    (void)configuration;
    *clusters = (int)null_device_card()->processors / 2;
    return CUDA_SUCCESS;
}

/* Memory */

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    int kind = null_device_memory_kind((const void *)pointer);
    if (kind == 0) return CUDA_ERROR_INVALID_VALUE;
    switch ((int)attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)value = pointer; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)value = kind == 1 ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
        break;
    case CU_POINTER_ATTRIBUTE_CONTEXT: return cuCtxGetCurrent((CUcontext *)value);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = null_device_current(); break;
    default: *(int *)value = 0;
    }
    return CUDA_SUCCESS;
}

CUresult cuMemGetInfo(size_t *free, size_t *total) {
    *total = (size_t)null_device_card()->memory;
    *free = (size_t)null_device_free_memory(null_device_current());
    return CUDA_SUCCESS;
}

/* PyTorch's expandable segments: an address range is reserved once, and memory is mapped into it in chunks. Here the
   chunks only count against the budget; the range itself is the memory. */

struct piece {
    size_t size;
    int device;
};

CUresult cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags option) {
    (void)properties;
    (void)option;
    *size = 2ul << 20;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t size, size_t alignment, CUdeviceptr address,
                             unsigned long long flags) {
    (void)alignment;
    (void)address;
    (void)flags;
    return null_device_reserve((void **)pointer, size) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) {
    (void)size;
    return null_device_release((void *)pointer) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
    (void)flags;
    int device = properties->location.id;
    if (null_device_charge(device, (long)size)) return CUDA_ERROR_OUT_OF_MEMORY;
    struct piece *piece = malloc(sizeof *piece);
    if (piece == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
    *piece = (struct piece){size, device};
    *handle = (CUmemGenericAllocationHandle)piece;
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    struct piece *piece = (struct piece *)handle;
    null_device_charge(piece->device, -(long)piece->size);
    free(piece);
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) {
    madvise((void *)pointer, size, MADV_DONTNEED);
    return CUDA_SUCCESS;
}

/* NVRTC compiles some of PyTorch's operators (torch.special) on their first call. It requests undocumented function
   tables, and works without them. */
CUresult cuGetExportTable(const void **table, const CUuuid *id) {
    (void)id;
    *table = NULL;
    return CUDA_ERROR_NOT_FOUND;
}

/* Functions that PyTorch looks up by name */

extern int cudaGetDriverEntryPointByVersion(const char *, void **, unsigned, unsigned long long, int *);

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *result) {
    cudaGetDriverEntryPointByVersion(name, function, (unsigned)version, flags, (int *)result);
    return *function != NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
