/* The forward pass: rows of all heads, a tile of columns at a time, their softmax as it comes (README.md). */
#include "problem.h"
#include "threads.h"

typedef struct {
    float *logits;          /* [unit, row_stride], first scores */
    float *hidden;          /* [D, LINE] */
    float *out;             /* [unit, H, wide_dim] */
    float *largest, *total; /* [unit, H] */
} Space;

/* Puts the softmax's weights in place of a row's logits in one tile: exponentials below the largest logit so far, to be
   divided by their sum at the end. What earlier tiles left in `total` and `out` is scaled to a new largest one. */
static void soften(float *logits, int count, float *largest, float *total, float *out, long dim) {
    Vector top = load(logits);
    for (int n = 1; n < count; n++) {
        Vector x = load(logits + n * LANES);
        top = chosen(x > top, x, top);
    }
    float high = *largest;
    for (int lane = 0; lane < LANES; lane++) high = top[lane] > high ? top[lane] : high;
    if (high == -INFINITY) { /* nothing seen so far: all weights are zero, unless a logit is NaN */
        Vector sum = {0};
        for (int n = 0; n < count; n++) {
            Vector x = load(logits + n * LANES), weight = chosen(x != x, x, filled(0.f));
            store(logits + n * LANES, weight);
            sum += weight;
        }
        *total += sum_of(sum);
        return;
    }
    if (high > *largest) {
        float scale = expf(*largest - high);
        *largest = high;
        *total *= scale;
        for (long c = 0; c < dim; c++) out[c] *= scale;
    }
    Vector sum = {0};
    for (int n = 0; n < count; n++) {
        Vector weight = exponential(load(logits + n * LANES) - high);
        store(logits + n * LANES, weight);
        sum += weight;
    }
    *total += sum_of(sum);
}

static void unit(const Problem *x, long b, long row, Space space) {
    long rows = least(x->unit, x->rows - row), p = x->taps / 2, kept = TILE - 4 * p;
    long heads = x->heads, stride = row_stride(x);
    long last = x->offset + row + rows - 1, left = most(x->offset + row - x->window + 1, 0);
    for (long each = 0; each < rows * heads; each++) space.largest[each] = -INFINITY, space.total[each] = 0;
    memset(space.out, 0, (size_t)(rows * heads * x->wide_dim) * sizeof(float));
    for (long first = left / kept * kept; first <= last; first += kept) {
        long stop = least(first + kept, last + 1); /* of the logits' columns */
        int count = vectors(stop - first);
        scores_of(x, b, row, rows, first - 2 * p, vectors(stop - first + 4 * p), x->q, x->kt, space.logits);
        for (long r = 0; r < rows; r++) {
            long position = x->offset + row + r, edge = position - x->window + 1;
            float *logits = space.logits + r * stride;
            if (first > position || stop <= edge) {
                clear_outside(logits, heads, 0, 0, 0, count * LANES);
                continue;
            }
            int own = vectors(least(stop, position + 1) - first);
            if (position + 1 < stop + 2 * p || edge > first - 2 * p)
                clear_outside(logits, heads, first - 2 * p, edge, position + 1, LINE);
            hidden_of(x, row + r, first - p, vectors(least(stop, position + 1) - first + 2 * p), logits, space.hidden);
            logits_of(x, row + r, first, stop, own, logits, space.hidden, logits);
            for (long h = 0; h < heads; h++)
                soften(logits + h * LINE, own, space.largest + r * heads + h, space.total + r * heads + h,
                       space.out + (r * heads + h) * x->wide_dim, x->wide_dim);
            clear_outside(logits, heads, 0, 0, own * LANES, count * LANES);
        }
        for (long h = 0; h < heads; h++) {
            Factor a = {space.logits + h * LINE, stride, 1};
            Rows y = {x->v + ((b * heads + h) * x->columns + first) * x->wide_dim, x->wide_dim, (int)(stop - first), 1};
            float *out = space.out + h * x->wide_dim;
            product((int)rows, (int)(x->wide_dim / LANES), a, y, out, heads * x->wide_dim, out, heads * x->wide_dim);
        }
    }
    for (long r = 0; r < rows; r++)
        for (long h = 0; h < heads; h++) {
            long to = (b * heads + h) * x->rows + row + r, from = r * heads + h;
            x->largest[to] = space.largest[from];
            x->total[to] = space.total[from];
            for (long c = 0; c < x->wide_dim; c++)
                x->out[to * x->wide_dim + c] = space.out[from * x->wide_dim + c] / space.total[from];
        }
}

static void work(const void *given, long thread, long threads) {
    (void)thread, (void)threads;
    const Problem *x = given;
    long blocks = (x->rows + x->unit - 1) / x->unit, maps = x->unit * row_stride(x);
    long floats = maps + x->width * LINE + x->unit * x->heads * (x->wide_dim + 2);
    float *memory = aligned_alloc(64, (size_t)room(floats));
    if (!memory) abort();
    float *out = memory + maps + x->width * LINE, *largest = out + x->unit * x->heads * x->wide_dim;
    Space space = {memory, memory + maps, out, largest, largest + x->unit * x->heads};
    memset(memory, 0, (size_t)(maps + x->width * LINE) * sizeof(float));
    /* The last rows have the most columns and come first, so that no thread is left with a long one. */
    for (long i; (i = __atomic_fetch_add(x->next, 1, __ATOMIC_RELAXED)) < blocks * x->batch;)
        unit(x, i % x->batch, (blocks - 1 - i / x->batch) * x->unit, space);
    free(memory);
}

void cdape_forward(const Problem *x) { in_threads(x->threads, work, x); }

/* What the caller has to know of how this was compiled. */
long cdape_lanes(void) { return LANES; }
long cdape_margin(long taps) { return least_margin(taps); }
