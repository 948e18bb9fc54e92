/* The emulated GPU, its memory and its copies.

   Device memory is untouched address space of the host. Kernels do not run, so only data that the host copies into it
   uses memory. Allocations count against the GPU's memory and fail when they would fail on a real GPU. */
#define _GNU_SOURCE
#include "null_device.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define MAX_DEVICES 64
#define ALLOCATION_UNIT (2l << 20) /* granularity of cudaMalloc */

struct counters null_device_counters;

static struct card card;
static pthread_once_t card_once = PTHREAD_ONCE_INIT;

/* FARFIELD_NULL_DEVICE is "name;key=value;…", written by environment.py from its table of GPUs. */
static void read_card(void) {
    const char *text = getenv("FARFIELD_NULL_DEVICE");
    if (text == NULL) return;
    char copy[512];
    snprintf(copy, sizeof copy, "%s", text);
    char *state = NULL, *part = strtok_r(copy, ";", &state);
    if (part != NULL) snprintf(card.name, sizeof card.name, "%s", part);
    const struct { const char *key; long *value; } fields[] = {
        {"memory", &card.memory}, {"major", &card.major}, {"minor", &card.minor}, {"processors", &card.processors},
        {"block_shared", &card.block_shared}, {"shared", &card.shared}, {"l2", &card.l2}, {"devices", &card.devices},
    };
    while ((part = strtok_r(NULL, ";", &state)) != NULL) {
        char *equals = strchr(part, '=');
        if (equals == NULL) continue;
        *equals = 0;
        for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
            if (strcmp(part, fields[i].key) == 0) *fields[i].value = strtol(equals + 1, NULL, 10);
    }
    if (card.devices > MAX_DEVICES) card.devices = MAX_DEVICES;
}

const struct card *null_device_card(void) {
    pthread_once(&card_once, read_card);
    return &card;
}

/* As in CUDA, entries of CUDA_VISIBLE_DEVICES count up to the first invalid one. */
int null_device_count(void) {
    long installed = null_device_card()->devices;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (visible == NULL) return (int)installed;
    int count = 0;
    while (*visible != 0) {
        char *end;
        long index = strtol(visible, &end, 10);
        if (end == visible || index < 0 || index >= installed) break;
        count++;
        visible = *end == ',' ? end + 1 : end;
        if (*end != ',') break;
    }
    return count;
}

static __thread int current_device;

int null_device_current(void) { return current_device; }

int null_device_set_current(int device) {
    if (device < 0 || device >= null_device_count()) return 1;
    current_device = device;
    return 0;
}

/* A sorted array suffices: PyTorch caches memory, so there are only hundreds of allocations. */
struct allocation {
    char *start;
    size_t size;
    int device;     /* -1: pinned host memory */
    size_t charged; /* bytes charged to the device's memory */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct allocation *allocations;
static size_t allocation_count, allocation_room;
static long used[MAX_DEVICES];

/* Index of the first allocation that starts after `pointer`; the array is sorted by address. */
static size_t find_next(const void *pointer) {
    size_t low = 0, high = allocation_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (allocations[middle].start <= (const char *)pointer) low = middle + 1;
        else high = middle;
    }
    return low;
}

static struct allocation *find_allocation(const void *pointer) {
    size_t next = find_next(pointer);
    if (next == 0) return NULL;
    struct allocation *allocation = &allocations[next - 1];
    return (const char *)pointer < allocation->start + allocation->size ? allocation : NULL;
}

static int allocate(void **pointer, size_t size, int device, int is_charged) {
    *pointer = NULL;
    size_t rounded = (size + ALLOCATION_UNIT - 1) / ALLOCATION_UNIT * ALLOCATION_UNIT;
    if (rounded == 0) return 0;
    size_t charged = is_charged ? rounded : 0;
    int failed = 1;
    pthread_mutex_lock(&lock);
    if (!is_charged || used[device] + (long)rounded <= null_device_card()->memory) {
        char *start = mmap(NULL, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (start != MAP_FAILED) {
            if (allocation_count == allocation_room) {
                allocation_room = allocation_room ? 2 * allocation_room : 256;
                allocations = realloc(allocations, allocation_room * sizeof *allocations);
                if (allocations == NULL) abort();
            }
            size_t next = find_next(start);
            memmove(allocations + next + 1, allocations + next, (allocation_count - next) * sizeof *allocations);
            allocations[next] = (struct allocation){start, rounded, device, charged};
            allocation_count++;
            if (is_charged) used[device] += (long)charged;
            *pointer = start;
            failed = 0;
        }
    }
    pthread_mutex_unlock(&lock);
    return failed;
}

int null_device_allocate(void **pointer, size_t size, int is_host) {
    return allocate(pointer, size, is_host ? -1 : current_device, !is_host);
}

int null_device_reserve(void **pointer, size_t size) { return allocate(pointer, size, current_device, 0); }

/* Buffers written by the host. Kernels write nothing, so all other device memory would contain stale bytes; it reads as
   zeros. A read returns stored bytes only if the host wrote a buffer with exactly this address and size, because freed
   memory may have been reused. */
struct written {
    char *start;
    size_t size;
};

static struct written *writes;
static size_t write_count, write_room;

static void forget_writes(const char *start, size_t size) {
    size_t kept = 0;
    for (size_t i = 0; i < write_count; i++)
        if (writes[i].start >= start + size || writes[i].start + writes[i].size <= start) writes[kept++] = writes[i];
    write_count = kept;
}

static void remember_write(char *start, size_t size) {
    forget_writes(start, size);
    if (write_count == write_room) {
        write_room = write_room ? 2 * write_room : 1024;
        writes = realloc(writes, write_room * sizeof *writes);
        if (writes == NULL) abort();
    }
    writes[write_count++] = (struct written){start, size};
}

static int was_written(const char *start, size_t size) {
    for (size_t i = write_count; i-- > 0;)
        if (writes[i].start == start) return writes[i].size == size;
    return 0;
}

int null_device_release(void *pointer) {
    if (pointer == NULL) return 0;
    pthread_mutex_lock(&lock);
    struct allocation *allocation = find_allocation(pointer);
    int failed = allocation == NULL || allocation->start != pointer;
    if (!failed) {
        forget_writes(allocation->start, allocation->size);
        munmap(allocation->start, allocation->size);
        if (allocation->charged > 0) used[allocation->device] -= (long)allocation->charged;
        size_t index = (size_t)(allocation - allocations);
        memmove(allocation, allocation + 1, (allocation_count - index - 1) * sizeof *allocations);
        allocation_count--;
    }
    pthread_mutex_unlock(&lock);
    return failed;
}

int null_device_charge(int device, long size) {
    if (device < 0 || device >= MAX_DEVICES) return 1;
    pthread_mutex_lock(&lock);
    int failed = used[device] + size > null_device_card()->memory;
    if (!failed) used[device] += size;
    pthread_mutex_unlock(&lock);
    return failed;
}

long null_device_free_memory(int device) { return null_device_card()->memory - used[device]; }

int null_device_memory_kind(const void *pointer) {
    pthread_mutex_lock(&lock);
    struct allocation *allocation = find_allocation(pointer);
    int kind = allocation == NULL ? 0 : allocation->device >= 0 ? 1 : 2;
    pthread_mutex_unlock(&lock);
    return kind;
}

/* Copies between host and device transfer their bytes. Copies within the device do so only if they are small, because
   large ones would copy kernel results that do not exist. */
static int is_device(const void *pointer) {
    struct allocation *allocation = find_allocation(pointer);
    return allocation != NULL && allocation->device >= 0;
}

void null_device_copy(void *target, const void *source, size_t size) {
    if (size == 0) return;
    pthread_mutex_lock(&lock);
    int to_device = is_device(target), from_device = is_device(source);
    int is_known = !from_device || was_written(source, size);
    if (to_device && from_device && size > SMALL_COPY) is_known = 0;
    if (to_device && is_known) remember_write(target, size);
    else if (to_device) forget_writes(target, size);
    pthread_mutex_unlock(&lock);
    if (is_known) memcpy(target, source, size);
    else if (!to_device) memset(target, 0, size);
}

void null_device_fill(void *target, int value, size_t size) {
    pthread_mutex_lock(&lock);
    int is_known = !is_device(target) || size <= SMALL_COPY;
    if (is_known) remember_write(target, size);
    else forget_writes(target, size);
    pthread_mutex_unlock(&lock);
    if (is_known) memset(target, value, size);
}

void *null_device_new_handle(void) {
    static uintptr_t last = 0x1000;
    return (void *)__sync_add_and_fetch(&last, 16);
}

double null_device_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}

/* Limits of compute capability 8.0 and 9.0 (CUDA C++ Programming Guide, "Technical Specifications per Compute
   Capability"). */
int null_device_check_launch(unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                             unsigned block_z, size_t shared, int registers) {
    unsigned long threads = (unsigned long)block_x * block_y * block_z;
    if (grid_x == 0 || grid_y == 0 || grid_z == 0 || threads == 0) return 1;
    if (grid_x > 2147483647u || grid_y > 65535 || grid_z > 65535) return 1;
    if (block_x > 1024 || block_y > 1024 || block_z > 64 || threads > 1024) return 1;
    if (shared > (size_t)null_device_card()->block_shared) return 1;
    /* Registers are allocated to warps in units of 256. */
    unsigned long warps = (threads + 31) / 32, per_warp = ((unsigned long)registers * 32 + 255) / 256 * 256;
    return warps * per_warp > 65536;
}
