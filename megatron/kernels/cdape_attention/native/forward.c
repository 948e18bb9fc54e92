/* Forward pass: rows of all heads in tiles of columns, with an online softmax (README.md). */
#include "problem.h"
#include "threads.h"

typedef struct {
    float *logits;            /* [block_rows, row_stride], initially scores */
    float *hidden;            /* [D, LINE] */
    float *out;               /* [block_rows, H, padded_dim] */
    float *row_max, *row_sum; /* [block_rows, H] */
} Workspace;

/* Replace a row's logits in one tile by unnormalized weights: exponentials relative to the largest logit so far, which
   are divided by their sum at the end. A new largest logit rescales `row_sum` and `out` of earlier tiles. */
static void softmax_tile(float *logits, int count, float *row_max, float *row_sum, float *out, long dim) {
    Vector top = load(logits);
    for (int n = 1; n < count; n++) {
        Vector x = load(logits + n * LANES);
        top = select_lanes(x > top, x, top);
    }
    float high = *row_max;
    for (int lane = 0; lane < LANES; lane++) high = top[lane] > high ? top[lane] : high;
    if (high == -INFINITY) { /* no visible column so far: all weights are zero, unless a logit is NaN */
        Vector sum = {0};
        for (int n = 0; n < count; n++) {
            Vector x = load(logits + n * LANES), weight = select_lanes(x != x, x, broadcast(0.f));
            store(logits + n * LANES, weight);
            sum += weight;
        }
        *row_sum += sum_lanes(sum);
        return;
    }
    if (high > *row_max) {
        float scale = expf(*row_max - high);
        *row_max = high;
        *row_sum *= scale;
        for (long c = 0; c < dim; c++) out[c] *= scale;
    }
    Vector sum = {0};
    for (int n = 0; n < count; n++) {
        Vector weight = exp_nonpositive(load(logits + n * LANES) - high);
        store(logits + n * LANES, weight);
        sum += weight;
    }
    *row_sum += sum_lanes(sum);
}

static void forward_block(const Problem *x, long b, long row, Workspace space) {
    long rows = min_long(x->block_rows, x->rows - row), p = x->kernel_size / 2, kept_columns = TILE - 4 * p;
    long heads = x->heads, stride = row_stride(x);
    long last = x->offset + row + rows - 1, left = first_seen(x, b, row);
    for (long i = 0; i < rows * heads; i++) space.row_max[i] = -INFINITY, space.row_sum[i] = 0;
    memset(space.out, 0, (size_t)(rows * heads * x->padded_dim) * sizeof(float));
    for (long first = first_tile(x, left, kept_columns); first <= last; first += kept_columns) {
        long stop = min_long(first + kept_columns, last + 1); /* end of the logits' columns */
        int count = num_vectors(stop - first);
        compute_scores(x, b, row, rows, first - 2 * p, num_vectors(stop - first + 4 * p), x->q, x->kt, space.logits);
        for (long r = 0; r < rows; r++) {
            long position = x->offset + row + r, edge = first_seen(x, b, row + r);
            float *logits = space.logits + r * stride;
            if (first > position || stop <= edge) {
                clear_outside(logits, heads, 0, 0, 0, count * LANES);
                continue;
            }
            int own = num_vectors(min_long(stop, position + 1) - first);
            if (position + 1 < stop + 2 * p || edge > max_long(first - 2 * p, 0))
                clear_outside(logits, heads, first - 2 * p, edge, position + 1, LINE);
            int around = num_vectors(min_long(stop, position + 1) - first + 2 * p);
            compute_hidden(x, b, row + r, first - p, around, logits, space.hidden);
            compute_logits(x, b, row + r, first, stop, own, logits, space.hidden, logits);
            for (long h = 0; h < heads; h++)
                softmax_tile(logits + h * LINE, own, space.row_max + r * heads + h, space.row_sum + r * heads + h,
                             space.out + (r * heads + h) * x->padded_dim, x->padded_dim);
            clear_outside(logits, heads, 0, 0, own * LANES, count * LANES);
        }
        for (long h = 0; h < heads; h++) {
            Matrix a = {space.logits + h * LINE, stride, 1};
            const float *values = x->v + ((b * heads + h) * x->columns + first) * x->padded_dim;
            LineView y = {values, x->padded_dim, (int)(stop - first), 1};
            float *out = space.out + h * x->padded_dim;
            long stride_out = heads * x->padded_dim;
            matmul((int)rows, (int)(x->padded_dim / LANES), a, y, out, stride_out, out, stride_out);
        }
    }
    for (long r = 0; r < rows; r++)
        for (long h = 0; h < heads; h++) {
            long to = (b * heads + h) * x->rows + row + r, from = r * heads + h;
            x->row_max[to] = space.row_max[from];
            x->row_sum[to] = space.row_sum[from];
            for (long c = 0; c < x->padded_dim; c++)
                x->out[to * x->padded_dim + c] = space.out[from * x->padded_dim + c] / space.row_sum[from];
        }
}

static void run_forward_worker(const void *problem, long thread, long num_threads) {
    (void)thread, (void)num_threads;
    const Problem *x = problem;
    long blocks = (x->rows + x->block_rows - 1) / x->block_rows, maps = x->block_rows * row_stride(x);
    long floats = maps + x->width * LINE + x->block_rows * x->heads * (x->padded_dim + 2);
    float *memory = aligned_alloc(64, (size_t)align_to_cache_line(floats));
    if (!memory) abort();
    float *out = memory + maps + x->width * LINE, *row_max = out + x->block_rows * x->heads * x->padded_dim;
    Workspace space = {memory, memory + maps, out, row_max, row_max + x->block_rows * x->heads};
    memset(memory, 0, (size_t)(maps + x->width * LINE) * sizeof(float));
    /* The last rows have the most columns and come first, so that no thread is left with a long one. */
    for (long i; (i = __atomic_fetch_add(x->next_block, 1, __ATOMIC_RELAXED)) < blocks * x->batch;)
        forward_block(x, i % x->batch, (blocks - 1 - i / x->batch) * x->block_rows, space);
    free(memory);
}

void cdape_forward(const Problem *x) { run_in_threads(x->num_threads, run_forward_worker, x); }

/* Constants of this build that the caller needs. */
long cdape_lanes(void) { return LANES; }
long cdape_margin(long kernel_size) { return min_margin(kernel_size); }
