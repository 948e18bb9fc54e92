/* Threads for units of work, created for each call: a process that is forked between calls loses no thread. */
#ifndef FARFIELD_THREADS_H
#define FARFIELD_THREADS_H

#include <pthread.h>

#define MAX_THREADS 256

typedef struct {
    void (*work)(const void *problem, long thread, long num_threads);
    const void *problem;
    long thread, num_threads;
} ThreadTask;

static void *start_task(void *argument) {
    ThreadTask *task = argument;
    task->work(task->problem, task->thread, task->num_threads);
    return NULL;
}

/* Call work(problem, t, threads) for every t, each in a separate thread if one can be created. */
static void run_in_threads(long num_threads, void (*work)(const void *, long, long), const void *problem) {
    pthread_t running[MAX_THREADS];
    ThreadTask tasks[MAX_THREADS];
    int started[MAX_THREADS] = {0};
    for (long t = 0; t < num_threads; t++) {
        tasks[t] = (ThreadTask){work, problem, t, num_threads};
        started[t] = t > 0 && pthread_create(&running[t], NULL, start_task, &tasks[t]) == 0;
    }
    for (long t = 0; t < num_threads; t++)
        if (!started[t]) start_task(&tasks[t]);
    for (long t = 0; t < num_threads; t++)
        if (started[t]) pthread_join(running[t], NULL);
}

#endif
