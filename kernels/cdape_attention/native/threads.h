/* Units of work over threads that live as long as one call: nothing is left that a fork could lose. */
#ifndef FARFIELD_THREADS_H
#define FARFIELD_THREADS_H

#include <pthread.h>

#define MOST_THREADS 256

typedef struct {
    void (*work)(const void *problem, long thread, long threads);
    const void *problem;
    long thread, threads;
} Thread;

static void *begin(void *given) {
    Thread *thread = given;
    thread->work(thread->problem, thread->thread, thread->threads);
    return NULL;
}

/* Calls work(problem, t, threads) for every t, each in a thread of its own where one can be had. */
static void in_threads(long threads, void (*work)(const void *, long, long), const void *problem) {
    pthread_t running[MOST_THREADS];
    Thread given[MOST_THREADS];
    int started[MOST_THREADS] = {0};
    for (long t = 0; t < threads; t++) {
        given[t] = (Thread){work, problem, t, threads};
        started[t] = t > 0 && pthread_create(&running[t], NULL, begin, &given[t]) == 0;
    }
    for (long t = 0; t < threads; t++)
        if (!started[t]) begin(&given[t]);
    for (long t = 0; t < threads; t++)
        if (started[t]) pthread_join(running[t], NULL);
}

#endif
