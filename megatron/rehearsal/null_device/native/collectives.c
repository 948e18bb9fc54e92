/* NCCL: each call is reported to a listener, and nothing leaves the process. This rank's own values replace those of
   the other ranks. */
#include "null_device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* From nccl.h, which includes CUDA headers that PyTorch does not install. */
typedef struct {
    char internal[128];
} ncclUniqueId;

struct communicator {
    char name[128]; /* equal on all members */
    int size, rank, device;
    int splits; /* number of communicators split from this one */
};

/* Listener of NCCL calls. Arguments: name, communicator, number of elements, their type, peer or root (or -1),
   reduction (or -1), and the buffers that the call reads and writes. */
typedef void (*listener_t)(const char *operation, const char *communicator, int size, int rank, size_t count, int type,
                           int peer, int reduction, void *sent, void *received);
static listener_t listener;

void null_device_listen(listener_t function) { listener = function; }

static const int TYPE_SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

int ncclGetVersion(int *version) {
    *version = 22907;
    return 0;
}

const char *ncclGetErrorString(int error) { return error == 0 ? "no error" : "null device error"; }

const char *ncclGetLastError(void *communicator) {
    (void)communicator;
    return "";
}

int ncclGetUniqueId(ncclUniqueId *id) {
    memset(id, 0, sizeof *id);
    unsigned char bytes[8];
    FILE *file = fopen("/dev/urandom", "r");
    if (file == NULL || fread(bytes, 1, sizeof bytes, file) != sizeof bytes) abort();
    fclose(file);
    for (size_t i = 0; i < sizeof bytes; i++) sprintf(id->internal + 2 * i, "%02x", bytes[i]);
    return 0;
}

static int notify(const char *operation, struct communicator *own, size_t count, int type, int peer, int reduction,
                const void *sent, void *received) {
    if (listener != NULL)
        listener(operation, own->name, own->size, own->rank, count, type, peer, reduction, (void *)sent, received);
    return 0;
}

static int initialize(void **communicator, int size, const ncclUniqueId *id, int rank) {
    struct communicator *own = calloc(1, sizeof *own);
    if (own == NULL) return 2;
    memcpy(own->name, id->internal, sizeof id->internal - 1);
    own->size = size;
    own->rank = rank;
    own->device = null_device_current();
    *communicator = own;
    return notify("init", own, 0, -1, -1, -1, NULL, NULL);
}

int ncclCommInitRank(void **communicator, int size, ncclUniqueId id, int rank) {
    return initialize(communicator, size, &id, rank);
}

int ncclCommInitRankConfig(void **communicator, int size, ncclUniqueId id, int rank, void *configuration) {
    (void)configuration;
    return initialize(communicator, size, &id, rank);
}

int ncclCommInitRankScalable(void **communicator, int size, int rank, int ids, ncclUniqueId *id, void *configuration) {
    (void)ids;
    (void)configuration;
    return initialize(communicator, size, id, rank);
}

/* Number of ranks of the process group that PyTorch is creating, or 0. */
int null_device_group_size;

/* Members of one new communicator have the same color, and `key` orders them. NCCL counts them by asking the other
   ranks; here PyTorch's group has as many. A split outside of a new group is an invalid argument. */
int ncclCommSplit(void *communicator, int color, int key, void **part, void *configuration) {
    struct communicator *parent = communicator, *own;
    (void)configuration;
    parent->splits++;
    *part = NULL;
    if (color < 0) return 0; /* NCCL_SPLIT_NOCOLOR: joins no new communicator */
    if (null_device_group_size == 0) return 4;
    if ((own = calloc(1, sizeof *own)) == NULL) return 2;
    snprintf(own->name, sizeof own->name, "%.90s/%d.%d", parent->name, parent->splits, color);
    own->size = null_device_group_size;
    own->rank = key;
    own->device = parent->device;
    *part = own;
    return notify("split", own, 0, -1, -1, -1, NULL, NULL);
}

int ncclCommDestroy(void *communicator) {
    free(communicator);
    return 0;
}

int ncclCommAbort(void *communicator) { return ncclCommDestroy(communicator); }

int ncclCommGetAsyncError(void *communicator, int *error) {
    (void)communicator;
    *error = 0;
    return 0;
}

int ncclCommCount(void *communicator, int *count) {
    *count = ((struct communicator *)communicator)->size;
    return 0;
}

int ncclCommUserRank(void *communicator, int *rank) {
    *rank = ((struct communicator *)communicator)->rank;
    return 0;
}

int ncclCommCuDevice(void *communicator, int *device) {
    *device = ((struct communicator *)communicator)->device;
    return 0;
}

static int exchange(const char *operation, struct communicator *own, size_t count, int type, int peer, int reduction,
                    const void *sent, void *received) {
    null_device_counters.collectives++;
    return notify(operation, own, count, type, peer, reduction, sent, received);
}

static void copy(void *target, const void *source, size_t count, int type) {
    if (type < 0 || type >= (int)(sizeof TYPE_SIZES / sizeof *TYPE_SIZES)) return;
    if (target != source) null_device_copy(target, source, count * (size_t)TYPE_SIZES[type]);
}

int ncclAllReduce(const void *sent, void *received, size_t count, int type, int reduction, void *own, void *stream) {
    (void)stream;
    copy(received, sent, count, type);
    return exchange("all_reduce", own, count, type, -1, reduction, sent, received);
}

int ncclReduce(const void *sent, void *received, size_t count, int type, int reduction, int root, void *own,
               void *stream) {
    (void)stream;
    if (((struct communicator *)own)->rank == root) copy(received, sent, count, type);
    return exchange("reduce", own, count, type, root, reduction, sent, received);
}

int ncclBroadcast(const void *sent, void *received, size_t count, int type, int root, void *own, void *stream) {
    (void)stream;
    if (((struct communicator *)own)->rank == root) copy(received, sent, count, type);
    return exchange("broadcast", own, count, type, root, -1, sent, received);
}

int ncclBcast(void *buffer, size_t count, int type, int root, void *own, void *stream) {
    return ncclBroadcast(buffer, buffer, count, type, root, own, stream);
}

int ncclAllGather(const void *sent, void *received, size_t count, int type, void *own, void *stream) {
    struct communicator *communicator = own;
    (void)stream;
    if (type >= 0 && type < (int)(sizeof TYPE_SIZES / sizeof *TYPE_SIZES))
        for (int rank = 0; rank < communicator->size && count * (size_t)TYPE_SIZES[type] <= SMALL_COPY; rank++)
            copy((char *)received + (size_t)rank * count * (size_t)TYPE_SIZES[type], sent, count, type);
    return exchange("all_gather", own, count, type, -1, -1, sent, received);
}

int ncclReduceScatter(const void *sent, void *received, size_t count, int type, int reduction, void *own,
                      void *stream) {
    struct communicator *communicator = own;
    (void)stream;
    if (type >= 0 && type < (int)(sizeof TYPE_SIZES / sizeof *TYPE_SIZES))
        copy(received, (const char *)sent + (size_t)communicator->rank * count * (size_t)TYPE_SIZES[type], count, type);
    return exchange("reduce_scatter", own, count, type, -1, reduction, sent, received);
}

int ncclAlltoAll(const void *sent, void *received, size_t count, int type, void *own, void *stream) {
    (void)stream;
    return exchange("all_to_all", own, count, type, -1, -1, sent, received);
}

int ncclSend(const void *sent, size_t count, int type, int peer, void *own, void *stream) {
    (void)stream;
    return exchange("send", own, count, type, peer, -1, sent, NULL);
}

int ncclRecv(void *received, size_t count, int type, int peer, void *own, void *stream) {
    (void)stream;
    return exchange("recv", own, count, type, peer, -1, NULL, received);
}

int ncclGroupStart(void) {
    if (listener != NULL) listener("group_start", "", 0, 0, 0, -1, -1, -1, NULL, NULL);
    return 0;
}

int ncclGroupEnd(void) {
    if (listener != NULL) listener("group_end", "", 0, 0, 0, -1, -1, -1, NULL, NULL);
    return 0;
}
