/* Backward pass (README.md): each tile recomputes its logits and adds to all gradients. */
#include "problem.h"
#include "threads.h"

typedef struct {
    float *scores, *weights;                    /* [block_rows, row_stride]: S, later dS; and dP, later P */
    float *hidden, *dhidden, *dlogits;          /* [padded_width, LINE] twice, [H, LINE] */
    float *transposed;                          /* [LINE, padded_width], columns of `hidden` or of `dhidden` */
    float *sums;                                /* [H, k, padded_width] */
    float *dbias_contributions, *dedge, *dbias; /* sums of this thread, like the next two */
    float *dw1, *dw2;
    float *dk, *dv;                             /* sums of this part of a sequence */
} Workspace;

/* Add lines of a tile to lines of a table, over whole vectors; columns after `columns` are zero. */
INLINE void add_lines(float *to, long by_to, const float *from, long lines, long columns) {
    for (long line = 0; line < lines; line++)
        for (long c = 0; c < columns; c += LANES)
            store(to + line * by_to + c, load(to + line * by_to + c) + load(from + line * LINE + c));
}

/* Compute sums[h, t, w] += Σ_c lines[h, c] · transposed[c + t, w] over `columns` columns c.

   Each tile has a separate sum, so that rounding errors grow with the number of tiles instead of columns. */
static void add_products(const Problem *x, long columns, const float *lines, Workspace space, float *sums) {
    long features = x->kernel_size * x->padded_width; /* contiguous numbers */
    Matrix a = {lines, LINE, 1};
    LineView y = {space.transposed, x->padded_width, (int)columns, 1};
    matmul((int)x->heads, num_vectors(features), a, y, NULL, 0, space.sums, features);
    for (long i = 0; i < x->heads * features; i += LANES) store(sums + i, load(sums + i) + load(space.sums + i));
}

/* Add columns first … stop − 1 of one row to the gradients of tables and weights.

   `scores` (from first − 4p on) become dS, and `weights`, which contain dP (from first − 2p on), become P. Both results
   begin at `first`. */
static void backward_row(
    const Problem *x, long b, long row, long first, long stop, float *scores, float *weights, Workspace space
) {
    long p = x->kernel_size / 2, heads = x->heads, width = x->width;
    long position = x->offset + row, columns = stop - first, edge = left_edge(x, b, row);
    int all = num_vectors(columns + 4 * p), own = num_vectors(columns);
    compute_hidden(x, b, row, first - 3 * p, num_vectors(columns + 6 * p), scores, space.hidden);
    compute_logits(x, b, row, first - 2 * p, stop + 2 * p, all, scores, space.hidden, space.dlogits);
    for (long h = 0; h < heads; h++) {
        long at = (b * heads + h) * x->rows + row;
        float row_max = x->row_max[at], inverse_sum = 1 / x->row_sum[at], delta = x->delta[at];
        float *line = space.dlogits + h * LINE, *weight = weights + h * LINE;
        for (int n = 0; n < all * LANES; n += LANES) {
            Vector part = exp_nonpositive(load(line + n) - row_max) * inverse_sum;
            store(line + n, part * (load(weight + n) - delta));
            store(weight + n, part);
        }
        memmove(weight, weight + 2 * p, (size_t)columns * sizeof(float));
    }
    clear_outside(space.dlogits, heads, first - 2 * p, first - 2 * p, stop + 2 * p, LINE);

    Matrix a = {x->w2t, 1, width};
    LineView y = {space.dlogits, LINE, (int)heads, (int)x->kernel_size};
    matmul((int)width, num_vectors(columns + 2 * p), a, y, NULL, 0, space.dhidden, LINE);
    for (long w = 0; w < width; w++) {
        const float *hidden = space.hidden + w * LINE + 2 * p;
        float *at = space.dhidden + w * LINE;
        for (long c = 0; c < columns + 2 * p; c += LANES) store(at + c, leaky_relu(load(at + c), load(hidden + c)));
    }
    clear_outside(space.dhidden, width, first - p, edge, stop + p, LINE);

    long wide = x->padded_width;
    transpose(num_vectors(width), num_vectors(columns + 2 * p), space.hidden + 2 * p, LINE, space.transposed, wide);
    add_products(x, columns, space.dlogits + 2 * p, space, space.dw2);
    transpose(num_vectors(width), num_vectors(columns + 2 * p), space.dhidden, LINE, space.transposed, wide);
    add_products(x, columns, scores + 4 * p, space, space.dw1);

    a = (Matrix){x->w1t, 1, heads};
    y = (LineView){space.dhidden, LINE, (int)width, (int)x->kernel_size};
    matmul((int)heads, own, a, y, space.dlogits + 2 * p, LINE, scores, LINE);
    clear_outside(scores, heads, first, first_seen(x, b, row), min_long(position + 1, stop), LINE);

    /* Tables are updated by whole vectors, bias contributions from `left` on, so columns after the last are 0. */
    clear_outside(space.dlogits + 2 * p, heads, first, first, stop, own * LANES);
    clear_outside(space.dhidden + p, width, first, first, stop, (own + 1) * LANES);
    long start = reversed_origin(x) - position + first;
    long outside = max_long(edge - first, 0), left = min_long(max_long(edge + p - first, 0), columns);
    for (long w = 0; w < width; w++) {
        float *dedge = space.dedge + edge_origin(x, b, row) + w * p + first - edge;
        for (long c = outside; c < left; c++) dedge[c] += space.dhidden[w * LINE + p + c];
    }
    float *table = space.dbias_contributions + start + left;
    add_lines(table, bias_contributions_stride(x), space.dhidden + p + left, width, columns - left);
    if (x->dbias) add_lines(space.dbias + start, bias_stride(x), space.dlogits + 2 * p, heads, columns);
}

static void backward_block(const Problem *x, long b, long row, Workspace space) {
    long rows = min_long(x->block_rows, x->rows - row), p = x->kernel_size / 2, kept_columns = TILE - 8 * p;
    long heads = x->heads, stride = row_stride(x);
    long last = x->offset + row + rows - 1;
    long left = max_long(x->offset + row - x->window + 1 - p, left_edge(x, b, row));
    for (long h = 0; h < heads; h++)
        for (long r = 0; r < rows; r++)
            memset(
                x->dq + ((b * heads + h) * x->rows + row + r) * x->padded_dim, 0, (size_t)x->padded_dim * sizeof(float)
            );
    for (long first = first_tile(x, left, kept_columns); first <= last + p; first += kept_columns) {
        long stop = min_long(first + kept_columns, last + p + 1), columns = stop - first;
        long num_keys = min_long(stop, last + 1) - first;
        compute_scores(x, b, row, rows, first - 4 * p, num_vectors(columns + 8 * p), x->q, x->kt, space.scores);
        compute_scores(x, b, row, rows, first - 2 * p, num_vectors(columns + 4 * p), x->dout, x->vt, space.weights);
        for (long r = 0; r < rows; r++) {
            long position = x->offset + row + r, edge = first_seen(x, b, row + r), at = r * stride;
            if (first > position + p || stop <= max_long(edge - p, left_edge(x, b, row + r))) {
                clear_outside(space.weights + at, heads, 0, 0, 0, columns);
                clear_outside(space.scores + at, heads, 0, 0, 0, columns);
                continue;
            }
            clear_outside(space.scores + at, heads, first - 4 * p, edge, position + 1, LINE);
            /* Hidden values exist up to p columns right of a row's last column. */
            long own = min_long(stop, position + p + 1);
            backward_row(x, b, row + r, first, own, space.scores + at, space.weights + at, space);
            clear_outside(space.weights + at, heads, first, first, own, columns);
            clear_outside(space.scores + at, heads, first, first, own, columns);
        }
        if (num_keys <= 0) continue;
        for (long h = 0; h < heads; h++) {
            long query = ((b * heads + h) * x->rows + row) * x->padded_dim;
            long key = ((b * heads + h) * x->columns + first) * x->padded_dim;
            int wide = (int)(x->padded_dim / LANES);
            Matrix by_key = {space.scores + h * LINE, 1, stride};
            LineView queries = {x->q + query, x->padded_dim, (int)rows, 1};
            matmul((int)num_keys, wide, by_key, queries, space.dk + key, x->padded_dim, space.dk + key, x->padded_dim);
            by_key.at = space.weights + h * LINE;
            queries.at = x->dout + query;
            matmul((int)num_keys, wide, by_key, queries, space.dv + key, x->padded_dim, space.dv + key, x->padded_dim);
            Matrix by_query = {space.scores + h * LINE, stride, 1};
            LineView keys = {x->k + key, x->padded_dim, (int)num_keys, 1};
            matmul((int)rows, wide, by_query, keys, x->dq + query, x->padded_dim, x->dq + query, x->padded_dim);
        }
    }
}

static void run_backward_worker(const void *problem, long thread, long num_threads) {
    const Problem *x = problem;
    long p = x->kernel_size / 2, heads = x->heads, width = x->width, maps = x->block_rows * row_stride(x);
    long wide = x->padded_width, features = x->kernel_size * wide;
    long blocks = (x->rows + x->block_rows - 1) / x->block_rows;
    long floats = 2 * maps + (3 * wide + heads) * LINE + heads * features;
    float *memory = aligned_alloc(64, (size_t)align_to_cache_line(floats));
    if (!memory) abort();
    memset(memory, 0, (size_t)floats * sizeof(float));
    float *hidden = memory + 2 * maps;
    Workspace space = {
        .scores = memory,
        .weights = memory + maps,
        .hidden = hidden,
        .dhidden = hidden + wide * LINE,
        .transposed = hidden + 2 * wide * LINE,
        .dlogits = hidden + 3 * wide * LINE,
        .sums = hidden + (3 * wide + heads) * LINE,
        .dbias_contributions = x->dbias_contributions + thread * width * bias_contributions_stride(x),
        .dedge = x->dedge + thread * num_edge_rows(x) * width * p,
        .dbias = x->dbias ? x->dbias + thread * heads * bias_stride(x) : NULL,
        .dw1 = x->dw1 + thread * heads * features,
        .dw2 = x->dw2 + thread * heads * features,
    };
    /* The assignment of work to threads is fixed, so that each sum has the same terms in the same order every time. */
    for (long part = thread; part < x->batch * x->splits; part += num_threads) {
        long b = part / x->splits, split = part % x->splits;
        long keys = (split * x->batch) * heads * x->columns * x->padded_dim;
        space.dk = x->dk + keys, space.dv = x->dv + keys;
        for (long block = 0; block < blocks; block++) {
            long turn = block % (2 * x->splits); /* alternating directions, because later rows have more columns */
            if ((turn < x->splits ? turn : 2 * x->splits - 1 - turn) == split)
                backward_block(x, b, block * x->block_rows, space);
        }
    }
    free(memory);
}

void cdape_backward(const Problem *x) { run_in_threads(x->num_threads, run_backward_worker, x); }
