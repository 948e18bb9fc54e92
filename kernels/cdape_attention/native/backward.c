/* The backward pass (README.md): logits are computed again, a tile at a time, and the tile adds to every gradient. */
#include "problem.h"
#include "threads.h"

typedef struct {
    float *scores, *weights;                    /* [unit, row_stride]: S that become dS, and dP that become P */
    float *hidden, *dhidden, *dlogits;          /* [wide_width, LINE] twice, [H, LINE] */
    float *transposed;                          /* [LINE, wide_width], columns of `hidden` or of `dhidden` */
    float *sums;                                /* [H, k, wide_width] */
    float *dshares, *dedge, *dbias, *dw1, *dw2; /* of this thread */
    float *dk, *dv;                             /* of this part of a sequence */
} Space;

/* Adds lines of a tile to lines of a table, over so many columns and zeros after them. */
INLINE void add_lines(float *to, long by_to, const float *from, long lines, long columns) {
    for (long line = 0; line < lines; line++)
        for (long c = 0; c < columns; c += LANES)
            store(to + line * by_to + c, load(to + line * by_to + c) + load(from + line * LINE + c));
}

/* sums[h, t, w] += Σ_c lines[h, c] · transposed[c + t, w]: over so many columns, a line times what is around each.

   A tile's sum is begun anew, so that rounding grows with the number of tiles and not with that of columns. */
static void add_products(const Problem *x, long columns, const float *lines, Space space, float *sums) {
    long features = x->taps * x->wide_width; /* that lie next to each other */
    Factor a = {lines, LINE, 1};
    Rows y = {space.transposed, x->wide_width, (int)columns, 1};
    product((int)x->heads, vectors(features), a, y, NULL, 0, space.sums, features);
    for (long i = 0; i < x->heads * features; i += LANES) store(sums + i, load(sums + i) + load(space.sums + i));
}

/* Columns first … stop − 1 of one row: what they add to the gradients of tables and weights.

   `scores` (first − 4p on) become dS and `weights`, which hold dP (first − 2p on), become P, both from `first` on. */
static void row_of(
    const Problem *x, long b, long row, long first, long stop, float *scores, float *weights, Space space
) {
    long p = x->taps / 2, heads = x->heads, width = x->width, position = x->offset + row, columns = stop - first;
    int all = vectors(columns + 4 * p), own = vectors(columns);
    hidden_of(x, row, first - 3 * p, vectors(columns + 6 * p), scores, space.hidden);
    logits_of(x, row, first - 2 * p, stop + 2 * p, all, scores, space.hidden, space.dlogits);
    for (long h = 0; h < heads; h++) {
        long at = (b * heads + h) * x->rows + row;
        float largest = x->largest[at], share = 1 / x->total[at], inner = x->inner[at];
        float *line = space.dlogits + h * LINE, *weight = weights + h * LINE;
        for (int n = 0; n < all * LANES; n += LANES) {
            Vector part = exponential(load(line + n) - largest) * share;
            store(line + n, part * (load(weight + n) - inner));
            store(weight + n, part);
        }
        memmove(weight, weight + 2 * p, (size_t)columns * sizeof(float));
    }
    clear_outside(space.dlogits, heads, first - 2 * p, first - 2 * p, stop + 2 * p, LINE);

    Factor a = {x->w2t, 1, width};
    Rows y = {space.dlogits, LINE, (int)heads, (int)x->taps};
    product((int)width, vectors(columns + 2 * p), a, y, NULL, 0, space.dhidden, LINE);
    for (long w = 0; w < width; w++) {
        const float *hidden = space.hidden + w * LINE + 2 * p;
        float *at = space.dhidden + w * LINE;
        for (long c = 0; c < columns + 2 * p; c += LANES) store(at + c, leaky(load(at + c), load(hidden + c)));
    }
    clear_outside(space.dhidden, width, first - p, 0, stop + p, LINE);

    long wide = x->wide_width;
    transpose(vectors(width), vectors(columns + 2 * p), space.hidden + 2 * p, LINE, space.transposed, wide);
    add_products(x, columns, space.dlogits + 2 * p, space, space.dw2);
    transpose(vectors(width), vectors(columns + 2 * p), space.dhidden, LINE, space.transposed, wide);
    add_products(x, columns, scores + 4 * p, space, space.dw1);

    a = (Factor){x->w1t, 1, heads};
    y = (Rows){space.dhidden, LINE, (int)width, (int)x->taps};
    product((int)heads, own, a, y, space.dlogits + 2 * p, LINE, scores, LINE);
    clear_outside(scores, heads, first, position - x->window + 1, least(position + 1, stop), LINE);

    /* Whole vectors are added to the tables, to those of the shares from `left` on: zeros after the last column. */
    clear_outside(space.dlogits + 2 * p, heads, first, first, stop, own * LANES);
    clear_outside(space.dhidden + p, width, first, first, stop, (own + 1) * LANES);
    long start = reversed(x) - position + first, left = least(most(p - first, 0), columns);
    for (long w = 0; w < width; w++)
        for (long c = 0; c < left; c++)
            space.dedge[(row * width + w) * p + first + c] += space.dhidden[w * LINE + p + c];
    add_lines(space.dshares + start + left, line_of_shares(x), space.dhidden + p + left, width, columns - left);
    if (x->dbias) add_lines(space.dbias + start, line_of_bias(x), space.dlogits + 2 * p, heads, columns);
}

static void unit(const Problem *x, long b, long row, Space space) {
    long rows = least(x->unit, x->rows - row), p = x->taps / 2, kept = TILE - 8 * p;
    long heads = x->heads, stride = row_stride(x);
    long last = x->offset + row + rows - 1, left = most(x->offset + row - x->window + 1 - p, 0);
    for (long h = 0; h < heads; h++)
        for (long r = 0; r < rows; r++)
            memset(x->dq + ((b * heads + h) * x->rows + row + r) * x->wide_dim, 0, (size_t)x->wide_dim * sizeof(float));
    for (long first = left / kept * kept; first <= last + p; first += kept) {
        long stop = least(first + kept, last + p + 1), columns = stop - first, there = least(stop, last + 1) - first;
        scores_of(x, b, row, rows, first - 4 * p, vectors(columns + 8 * p), x->q, x->kt, space.scores);
        scores_of(x, b, row, rows, first - 2 * p, vectors(columns + 4 * p), x->dout, x->vt, space.weights);
        for (long r = 0; r < rows; r++) {
            long position = x->offset + row + r, edge = position - x->window + 1, at = r * stride;
            if (first > position + p || stop <= edge - p) {
                clear_outside(space.weights + at, heads, 0, 0, 0, columns);
                clear_outside(space.scores + at, heads, 0, 0, 0, columns);
                continue;
            }
            clear_outside(space.scores + at, heads, first - 4 * p, edge, position + 1, LINE);
            /* Hidden values are alive up to p columns right of a row's last. */
            long own = least(stop, position + p + 1);
            row_of(x, b, row + r, first, own, space.scores + at, space.weights + at, space);
            clear_outside(space.weights + at, heads, first, first, own, columns);
            clear_outside(space.scores + at, heads, first, first, own, columns);
        }
        if (there <= 0) continue;
        for (long h = 0; h < heads; h++) {
            long query = ((b * heads + h) * x->rows + row) * x->wide_dim;
            long key = ((b * heads + h) * x->columns + first) * x->wide_dim;
            int wide = (int)(x->wide_dim / LANES);
            Factor by_key = {space.scores + h * LINE, 1, stride};
            Rows queries = {x->q + query, x->wide_dim, (int)rows, 1};
            product((int)there, wide, by_key, queries, space.dk + key, x->wide_dim, space.dk + key, x->wide_dim);
            by_key.at = space.weights + h * LINE;
            queries.at = x->dout + query;
            product((int)there, wide, by_key, queries, space.dv + key, x->wide_dim, space.dv + key, x->wide_dim);
            Factor by_query = {space.scores + h * LINE, stride, 1};
            Rows keys = {x->k + key, x->wide_dim, (int)there, 1};
            product((int)rows, wide, by_query, keys, x->dq + query, x->wide_dim, x->dq + query, x->wide_dim);
        }
    }
}

static void work(const void *given, long thread, long threads) {
    const Problem *x = given;
    long p = x->taps / 2, heads = x->heads, width = x->width, maps = x->unit * row_stride(x);
    long wide = x->wide_width, features = x->taps * wide, blocks = (x->rows + x->unit - 1) / x->unit;
    long floats = 2 * maps + (3 * wide + heads) * LINE + heads * features;
    float *memory = aligned_alloc(64, (size_t)room(floats));
    if (!memory) abort();
    memset(memory, 0, (size_t)floats * sizeof(float));
    float *hidden = memory + 2 * maps;
    Space space = {
        .scores = memory,
        .weights = memory + maps,
        .hidden = hidden,
        .dhidden = hidden + wide * LINE,
        .transposed = hidden + 2 * wide * LINE,
        .dlogits = hidden + 3 * wide * LINE,
        .sums = hidden + (3 * wide + heads) * LINE,
        .dshares = x->dshares + thread * width * line_of_shares(x),
        .dedge = x->dedge + thread * x->rows * width * p,
        .dbias = x->dbias ? x->dbias + thread * heads * line_of_bias(x) : NULL,
        .dw1 = x->dw1 + thread * heads * features,
        .dw2 = x->dw2 + thread * heads * features,
    };
    /* Who computes what is fixed, so that sums are of the same terms in the same order each time. */
    for (long part = thread; part < x->batch * x->splits; part += threads) {
        long b = part / x->splits, split = part % x->splits;
        long keys = (split * x->batch) * heads * x->columns * x->wide_dim;
        space.dk = x->dk + keys, space.dv = x->dv + keys;
        for (long block = 0; block < blocks; block++) {
            long turn = block % (2 * x->splits); /* there and back, since later rows have more columns */
            if ((turn < x->splits ? turn : 2 * x->splits - 1 - turn) == split) unit(x, b, block * x->unit, space);
        }
    }
    free(memory);
}

void cdape_backward(const Problem *x) { in_threads(x->threads, work, x); }
