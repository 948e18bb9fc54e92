/* What the parts of the null device share: the card that it plays, its memory, and what it counts. */
#ifndef FARFIELD_NULL_DEVICE_H
#define FARFIELD_NULL_DEVICE_H

#include <stddef.h>
#include <stdint.h>

/* Copies within the device are real up to this size, so that small messages which the host reads keep their bytes. */
#define SMALL_COPY 4096

struct card {
    char name[64];
    long memory;      /* bytes that a process may allocate */
    long major, minor; /* compute capability */
    long processors;   /* streaming multiprocessors */
    long block_shared; /* bytes of shared memory that a block may ask for */
    long shared;       /* bytes of shared memory of a multiprocessor */
    long l2;           /* bytes of the L2 cache */
    long devices;      /* cards of a node */
};

/* The order is that of `COUNTERS` in counters.py. */
struct counters {
    long launches; /* kernels of the CUDA runtime: PyTorch's own */
    long triton;   /* kernels of the driver: Triton's, and what NVRTC compiled */
    long gemm;     /* matrix products of cuBLAS */
    long convolutions; /* of cuDNN */
    long copies;       /* cudaMemcpy and cudaMemcpyAsync, in any direction */
    long fills;        /* cudaMemset and cudaMemsetAsync */
    long synchronizations; /* the host waited for a stream, an event or the device, or copied to memory of its own */
    long collectives;
};

extern struct counters null_device_counters;

const struct card *null_device_card(void);
int null_device_count(void);
int null_device_current(void);
int null_device_set_current(int device);

/* 0, or 1 where the budget is used up. */
int null_device_allocate(void **pointer, size_t size, int is_host);
/* An address range of the device into which memory is mapped later: it takes none of the budget. */
int null_device_reserve(void **pointer, size_t size);
/* 0, or 1 if nothing was allocated there. */
int null_device_release(void *pointer);
/* Takes memory from the budget of a device, or gives it back: for what is mapped elsewhere (driver.c). */
int null_device_charge(int device, long size);
long null_device_free_memory(int device);
/* 0: not ours; 1: device memory; 2: pinned host memory. */
int null_device_memory_kind(const void *pointer);
void null_device_copy(void *target, const void *source, size_t size);
void null_device_fill(void *target, int value, size_t size);

void *null_device_new_handle(void);
double null_device_now(void);

/* 0 if a card can run such a launch; `registers` of a thread are 0 where they are not known. */
int null_device_check_launch(unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                             unsigned block_z, size_t shared, int registers);

#endif
