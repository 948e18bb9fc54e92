/* Arguments of both passes, and the computation of a row's logits.

   Letters as in README.md: B batch, H heads, R query rows, C key columns, d head dimension, N = offset + R distances,
   D width of the processor, k kernel size, p = k / 2. Row r is at position i = offset + r. All numbers are float32.

   Functions of the distance n = i − j are stored in reverse, at N − 1 − n. The columns of a row are then in order, and
   begin at N − 1 − i. Every line has `margin` zeros on both sides, and every line of distances has `block_rows` more.
   Whole vectors, and columns around a tile, can therefore be read and written anywhere. */
#ifndef FARFIELD_PROBLEM_H
#define FARFIELD_PROBLEM_H

#include <math.h>
#include <stdlib.h>

#include "vectors.h"

#define TILE 96 /* columns of scores per tile: hidden values and bias contributions fit in the L1 cache */
/* Floats from one line of a tile to the next; up to 2p + LANES beyond the tile are read. Like `row_stride`, it is an
   odd number of cache lines: few lines at distances of a power of two would fit in the L1 cache. */
#define LINE (TILE + 48)

typedef struct {
    long batch, heads, rows, columns, dim, width, kernel_size, offset, window, num_threads;
    long padded_dim;                    /* d, rounded up to whole vectors */
    long padded_width;                  /* D, rounded up to whole vectors */
    long block_rows;                    /* query rows of a unit of work, which reads keys and values once */
    long margin;                        /* at least min_margin */
    long *next_block;                   /* index of the next unit of work */
    const float *q;                     /* [B, H, R, padded_dim], scaled */
    const float *k, *v;                 /* [B, H, C, padded_dim] */
    const float *kt, *vt;               /* [B, H, d, margin + C + margin] */
    const float *bias_contributions;    /* U in reverse, [D, block_rows + margin + N + p + margin + block_rows] */
    const float *edge;                  /* E, [R, D, p]; with document_starts, of all rows from position 0 on */
    const float *bias;                  /* in reverse, [H, block_rows + margin + N + margin + block_rows], or NULL */
    const float *w1, *w2;               /* [H, k, D] and [D, k, H] */
    const float *w1t, *w2t;             /* for the backward pass: [D, k, H] and [H, k, D], taps mirrored */
    const int *document_starts;         /* first column of each row's document, [B, R], or NULL if all are 0 */
    float *out;                         /* [B, H, R, padded_dim] */
    float *row_max, *row_sum;           /* maximum and sum of each row's softmax, [B, H, R] */
    /* backward pass only */
    long splits;                        /* number of parts of a sequence's rows */
    const float *dout;                  /* [B, H, R, padded_dim] */
    const float *delta;                 /* Σ dout · out, [B, H, R] */
    float *dq;                          /* [B, H, R, padded_dim] */
    float *dk, *dv;                     /* [splits, B, H, C, padded_dim] */
    float *dbias_contributions, *dedge; /* [threads, …] as bias_contributions and edge */
    float *dbias;                       /* [threads, …] as bias, or NULL */
    float *dw1, *dw2;                   /* [threads, H, k, padded_width]; taps of dw1 are mirrored */
} Problem;

/* Tiles begin 4p columns before the first column that they keep, end 5p after the last key, and consist of vectors. */
INLINE long min_margin(long kernel_size) { return 3 * kernel_size + LANES; }
INLINE long reversed_origin(const Problem *x) { return x->block_rows + x->margin + x->offset + x->rows - 1; }
INLINE long bias_contributions_stride(const Problem *x) {
    return x->offset + x->rows + x->kernel_size / 2 + 2 * (x->margin + x->block_rows);
}
INLINE long bias_stride(const Problem *x) { return x->offset + x->rows + 2 * (x->margin + x->block_rows); }
INLINE long columns_stride(const Problem *x) { return x->columns + 2 * x->margin; }
/* Return the bytes of a number of floats, rounded up to whole cache lines, as aligned_alloc requires. */
INLINE long align_to_cache_line(long floats) { return (floats * (long)sizeof(float) + 63) / 64 * 64; }
/* Return the number of floats from one row's H lines to the next row's. */
INLINE long row_stride(const Problem *x) { return (x->heads * (LINE / 16) | 1) * 16; }
INLINE long min_long(long a, long b) { return a < b ? a : b; }
INLINE long max_long(long a, long b) { return a > b ? a : b; }

/* Return the left edge of a row's sequence: the first column of its document. */
INLINE long left_edge(const Problem *x, long b, long row) {
    return x->document_starts ? x->document_starts[b * x->rows + row] : 0;
}
/* Return the first column that a row sees. */
INLINE long first_seen(const Problem *x, long b, long row) {
    return max_long(x->offset + row - x->window + 1, left_edge(x, b, row));
}
/* Return the first column of a block's tiles if its first row needs the columns from `left` on. */
INLINE long first_tile(const Problem *x, long left, long kept_columns) {
    return x->document_starts ? left : left / kept_columns * kept_columns;
}
/* Return the number of rows of E. */
INLINE long num_edge_rows(const Problem *x) { return x->document_starts ? x->offset + x->rows : x->rows; }
/* Return the offset of a row's first line in E. The row is as far from its left edge as E's row is from column 0. */
INLINE long edge_origin(const Problem *x, long b, long row) {
    long place = x->document_starts ? x->offset + row - left_edge(x, b, row) : row;
    return place * x->width * (x->kernel_size / 2);
}

/* Zero the columns below `from` and from `to` on, in lines whose first column is `first`, up to whole vectors. */
INLINE void clear_outside(float *lines, long count, long first, long from, long to, long columns) {
    long left = min_long(max_long(from - first, 0), columns), right = min_long(max_long(to - first, 0), columns);
    for (long line = 0; line < count; line++) {
        float *at = lines + line * LINE;
        if (left > 0) memset(at, 0, (size_t)left * sizeof(float));
        if (columns > right) memset(at + right, 0, (size_t)(columns - right) * sizeof(float));
    }
}

/* Compute the scores of some rows [block_rows, row_stride]: `count` vectors of columns from `first` on, else zeros. */
static inline void compute_scores(
    const Problem *x, long b, long row, long rows, long first, int count, const float *left, const float *right,
    float *scores
) {
    for (long h = 0; h < x->heads; h++) {
        Matrix a = {left + ((b * x->heads + h) * x->rows + row) * x->padded_dim, x->padded_dim, 1};
        const float *columns = right + (b * x->heads + h) * x->dim * columns_stride(x) + x->margin + first;
        LineView y = {columns, columns_stride(x), (int)x->dim, 1};
        matmul((int)rows, count, a, y, NULL, 0, scores + h * LINE, row_stride(x));
    }
}

/* Compute Conv1 and LeakyReLU of one row: hidden values [D, LINE] in `count` vectors of columns from `first` on.

   `scores` [H, LINE] begin p columns earlier, and are zero in columns that the row does not see. */
static inline void compute_hidden(
    const Problem *x, long b, long row, long first, int count, const float *scores, float *hidden
) {
    long p = x->kernel_size / 2, position = x->offset + row, line = bias_contributions_stride(x);
    long left = left_edge(x, b, row);
    const float *start = x->bias_contributions + reversed_origin(x) - position + first;
    Matrix a = {x->w1, 1, x->width};
    LineView y = {scores, LINE, (int)x->heads, (int)x->kernel_size};
    if (first < left + p) { /* columns with taps beyond the left edge have separate bias contributions */
        for (long w = 0; w < x->width; w++) {
            memcpy(hidden + w * LINE, start + w * line, (size_t)count * LANES * sizeof(float));
            const float *edge = x->edge + edge_origin(x, b, row) + w * p;
            for (long c = max_long(first, left); c < min_long(left + p, first + count * LANES); c++)
                hidden[w * LINE + c - first] = edge[c - left];
        }
        start = hidden, line = LINE;
    }
    matmul_leaky_relu((int)x->width, count, a, y, start, line, hidden, LINE);
    if (first < left) clear_outside(hidden, x->width, first, left, first + count * LANES, count * LANES);
}

/* Compute the logits [H, LINE] of one row in `count` vectors of columns from `first` on. They are −∞ in columns that
   the row does not see, and from `stop` on.

   `scores` and `hidden` begin 2p and p columns earlier; `logits` may be `scores`. */
static inline void compute_logits(
    const Problem *x, long b, long row, long first, long stop, int count, const float *scores, const float *hidden,
    float *logits
) {
    long p = x->kernel_size / 2, position = x->offset + row, columns = count * LANES;
    Matrix a = {x->w2, 1, x->heads};
    LineView y = {hidden, LINE, (int)x->width, (int)x->kernel_size};
    matmul((int)x->heads, count, a, y, scores + 2 * p, LINE, logits, LINE);
    long left = min_long(max_long(first_seen(x, b, row) - first, 0), columns);
    long right = min_long(max_long(min_long(position + 1, stop) - first, 0), columns);
    for (long h = 0; h < x->heads; h++) {
        float *at = logits + h * LINE;
        if (x->bias) {
            const float *bias = x->bias + h * bias_stride(x) + reversed_origin(x) - position + first;
            for (int n = 0; n < count; n++) store(at + n * LANES, load(at + n * LANES) + load(bias + n * LANES));
        }
        for (long c = 0; c < left; c++) at[c] = -INFINITY;
        for (long c = right; c < columns; c++) at[c] = -INFINITY;
    }
}

#endif
