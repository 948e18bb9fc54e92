/* Shared declarations of the null device: the emulated GPU, its memory and its counters. */
#ifndef FARFIELD_NULL_DEVICE_H
#define FARFIELD_NULL_DEVICE_H

#include <stddef.h>
#include <stdint.h>

/* Largest copy within the device that transfers its bytes, so that small messages reach the host intact. */
#define SMALL_COPY 4096

struct card {
    char name[64];
    long memory;      /* allocatable bytes per process */
    long major, minor; /* compute capability */
    long processors;   /* streaming multiprocessors */
    long block_shared; /* maximum bytes of shared memory per block */
    long shared;       /* bytes of shared memory per multiprocessor */
    long l2;           /* bytes of the L2 cache */
    long devices;      /* devices per node */
};

/* Same order as `Counters` in recorder.py. */
struct counters {
    long launches; /* launches through the CUDA runtime: PyTorch's own kernels */
    long triton;   /* launches through the driver: Triton's and NVRTC's kernels */
    long gemm;     /* cuBLAS matrix products */
    long convolutions; /* cuDNN convolutions */
    long copies;       /* cudaMemcpy and cudaMemcpyAsync, in any direction */
    long fills;        /* cudaMemset and cudaMemsetAsync */
    long synchronizations; /* waits of the host for a stream, an event, the device or a copy to host memory */
    long collectives;
};

extern struct counters null_device_counters;

const struct card *null_device_card(void);
int null_device_count(void);
int null_device_current(void);
int null_device_set_current(int device);

/* Returns 0, or 1 if the budget is exhausted. */
int null_device_allocate(void **pointer, size_t size, int is_host);
/* Reserves a device address range for later mappings; uses none of the budget. */
int null_device_reserve(void **pointer, size_t size);
/* Returns 0, or 1 if the address was not allocated. */
int null_device_release(void *pointer);
/* Charges mapped memory to a device's budget or releases it (driver.c). */
int null_device_charge(int device, long size);
long null_device_free_memory(int device);
/* Returns 0 for unknown, 1 for device memory, 2 for pinned host memory. */
int null_device_memory_kind(const void *pointer);
void null_device_copy(void *target, const void *source, size_t size);
void null_device_fill(void *target, int value, size_t size);

void *null_device_new_handle(void);
double null_device_now(void);

/* Returns 0 if the GPU can run the launch; `registers` per thread is 0 if unknown. */
int null_device_check_launch(unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                             unsigned block_z, size_t shared, int registers);

#endif
