/* Products of small matrices in registers, and the exponential, for the processor's vector length.

   With GCC's and Clang's vector extensions the same source compiles to AVX-512, AVX, SSE or NEON. */
#ifndef FARFIELD_VECTORS_H
#define FARFIELD_VECTORS_H

#include <string.h>

#if defined(__AVX512F__)
#define LANES 16 /* floats in a vector */
#define BLOCK_ROWS 8 /* rows of BLOCK_VECTORS accumulators: with their factors, they fill the registers */
#elif defined(__AVX__)
#define LANES 8
#define BLOCK_ROWS 4
#else
#define LANES 4
#define BLOCK_ROWS 4
#endif
#define BLOCK_VECTORS 3

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int Integers __attribute__((vector_size(4 * LANES)));
typedef float UnalignedVector __attribute__((vector_size(4 * LANES), aligned(4), may_alias)); /* at any address */

#define INLINE static inline __attribute__((always_inline))

INLINE Vector load(const float *from) { return *(const UnalignedVector *)from; }
INLINE void store(float *to, Vector x) { *(UnalignedVector *)to = x; }
INLINE Vector broadcast(float x) { return x - (Vector){0}; }
INLINE int num_vectors(long columns) { return columns <= 0 ? 0 : (int)((columns + LANES - 1) / LANES); }

/* Select `one` in lanes in which `which` is all ones, and `other` in lanes in which it is zero. */
INLINE Vector select_lanes(Integers which, Vector one, Vector other) {
    return (Vector)((which & (Integers)one) | (~which & (Integers)other));
}

INLINE float sum_lanes(Vector x) {
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += x[lane];
    return sum;
}

/* Return e^x for x ≤ 0, within 2 units in the last place; 0 below −87.3, the limit of float32, and NaN for NaN.

   x = n · ln 2 + r, and e^r by the polynomial of Cephes' expf (S. L. Moshier, 1989) on |r| ≤ ln 2 / 2. */
INLINE Vector exp_nonpositive(Vector x) {
    const Vector round = broadcast(12582912.f); /* after adding 1.5 · 2^23, the lowest bits are the nearest integer */
    Integers below = x < broadcast(-87.3f);
    Vector shifted = x * 1.44269504f + round;
    Vector n = shifted - round;
    Vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f; /* x − n · ln 2, ln 2 in two parts */
    Vector p = broadcast(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.f;
    Integers exponent = ((Integers)shifted - (Integers)round + 127) << 23;
    return select_lanes(below, broadcast(0.f), p * (Vector)exponent);
}

/* A matrix whose entry (m, j) is `at[m · row_stride + j · column_stride]`. */
typedef struct {
    const float *at;
    long row_stride, column_stride;
} Matrix;

/* Rows of contiguous columns; row (a, b) of `outer` times `inner` begins at `at[a·outer_stride + b]`. The taps of a
   convolution are rows, each of which begins one column after the previous one. */
typedef struct {
    const float *at;
    long outer_stride;
    int outer, inner;
} LineView;

/* Function that is applied to a sum before it is stored. */
typedef enum { IDENTITY, LEAKY_RELU } Activation;
#define NEGATIVE_SLOPE 0.01f

INLINE Vector leaky_relu(Vector x, Vector where) { return select_lanes(where > 0, x, x * NEGATIVE_SLOPE); }

INLINE void matmul_block(
    const int num_rows, const int num_vecs, const Activation activation, Matrix a, LineView b, const float *start,
    long by_start, float *out, long by_out
) {
    Vector sum[BLOCK_ROWS][BLOCK_VECTORS];
#pragma GCC unroll 8
    for (int m = 0; m < num_rows; m++)
#pragma GCC unroll 3
        for (int n = 0; n < num_vecs; n++) sum[m][n] = start ? load(start + m * by_start + n * LANES) : (Vector){0};
    const float *factor = a.at;
    for (int o = 0; o < b.outer; o++) {
        const float *row = b.at + o * b.outer_stride;
        for (int i = 0; i < b.inner; i++, factor += a.column_stride) {
            Vector x[BLOCK_VECTORS];
#pragma GCC unroll 3
            for (int n = 0; n < num_vecs; n++) x[n] = load(row + i + n * LANES);
#pragma GCC unroll 8
            for (int m = 0; m < num_rows; m++) {
                Vector y = broadcast(factor[m * a.row_stride]);
#pragma GCC unroll 3
                for (int n = 0; n < num_vecs; n++) sum[m][n] += y * x[n];
            }
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < num_rows; m++)
#pragma GCC unroll 3
        for (int n = 0; n < num_vecs; n++)
            store(out + m * by_out + n * LANES, activation == LEAKY_RELU ? leaky_relu(sum[m][n], sum[m][n]) : sum[m][n]);
}

#define MATMUL_OF_WIDTH(num_rows)                                                                              \
    switch (num_vecs) {                                                                                        \
    case 1: matmul_block(num_rows, 1, activation, a, b, start, by_start, out, by_out); break;                  \
    case 2: matmul_block(num_rows, 2, activation, a, b, start, by_start, out, by_out); break;                  \
    default: matmul_block(num_rows, 3, activation, a, b, start, by_start, out, by_out);                        \
    }

/* Compute out[m] = start[m] + Σ_j a[m, j] · b[j] over `num_vecs` vectors of columns.

   `start` may be NULL (zeros), `out`, or a later address in the same lines, because blocks run from left to right. */
INLINE void matmul_with_activation(
    const Activation activation, int rows, int total_vecs, Matrix a, LineView b, const float *start, long by_start,
    float *out, long by_out
) {
    const Matrix factor = a;
    const float *const columns = b.at, *const first = start;
    float *const result = out;
    for (int n = 0; n < total_vecs; n += BLOCK_VECTORS) {
        int num_vecs = total_vecs - n < BLOCK_VECTORS ? total_vecs - n : BLOCK_VECTORS;
        b.at = columns + n * LANES;
        for (int m = 0; m < rows;) {
            int left = rows - m;
            a.at = factor.at + m * factor.row_stride;
            start = first ? first + m * by_start + n * LANES : NULL;
            out = result + m * by_out + n * LANES;
            if (left >= BLOCK_ROWS) {
                MATMUL_OF_WIDTH(BLOCK_ROWS)
                m += BLOCK_ROWS;
            } else if (left >= 4) {
                MATMUL_OF_WIDTH(4)
                m += 4;
            } else if (left >= 2) {
                MATMUL_OF_WIDTH(2)
                m += 2;
            } else {
                MATMUL_OF_WIDTH(1)
                m += 1;
            }
        }
    }
}
#undef MATMUL_OF_WIDTH

static inline void matmul(
    int rows, int num_vecs, Matrix a, LineView b, const float *start, long by_start, float *out, long by_out
) {
    matmul_with_activation(IDENTITY, rows, num_vecs, a, b, start, by_start, out, by_out);
}

/* Compute LeakyReLU of the result of `matmul`. */
static inline void matmul_leaky_relu(
    int rows, int num_vecs, Matrix a, LineView b, const float *start, long by_start, float *out, long by_out
) {
    matmul_with_activation(LEAKY_RELU, rows, num_vecs, a, b, start, by_start, out, by_out);
}

/* Select lanes of two vectors by index; those of the second begin at LANES. */
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Integers){__VA_ARGS__})
#endif
#if LANES == 16
#define FOR_EACH_LANE(f, s) \
    f(0, s), f(1, s), f(2, s), f(3, s), f(4, s), f(5, s), f(6, s), f(7, s), f(8, s), f(9, s), f(10, s), f(11, s), \
        f(12, s), f(13, s), f(14, s), f(15, s)
#elif LANES == 8
#define FOR_EACH_LANE(f, s) f(0, s), f(1, s), f(2, s), f(3, s), f(4, s), f(5, s), f(6, s), f(7, s)
#else
#define FOR_EACH_LANE(f, s) f(0, s), f(1, s), f(2, s), f(3, s)
#endif
/* Step s of a transposition (s = 1, 2, 4, …): for rows i and i + s, where bit s of i is 0, exchange the lanes of row i
   with that bit and the lanes of row i + s without it. */
#define UPPER(lane, s) ((lane) & (s) ? LANES + (lane) - (s) : (lane))
#define LOWER(lane, s) ((lane) & (s) ? LANES + (lane) : ((lane) + (s)) % LANES)
#define EXCHANGE(s)                                                                                            \
    if (s < LANES)                                                                                             \
        for (int i = 0; i < LANES; i++)                                                                        \
            if (!(i & s)) {                                                                                    \
                Vector upper = x[i], lower = x[(i + s) % LANES];                                               \
                x[i] = SHUFFLE(upper, lower, FOR_EACH_LANE(UPPER, s));                                         \
                x[(i + s) % LANES] = SHUFFLE(upper, lower, FOR_EACH_LANE(LOWER, s));                           \
            }

/* Transpose: to[c, m] = from[m, c]. */
static inline void transpose(int num_rows, int num_vecs, const float *from, long by_from, float *to, long by_to) {
    for (int n = 0; n < num_vecs; n++)
        for (int m = 0; m < num_rows; m++) {
            Vector x[LANES];
            const float *block = from + m * LANES * by_from + n * LANES;
            for (int i = 0; i < LANES; i++) x[i] = load(block + i * by_from);
            EXCHANGE(1)
            EXCHANGE(2)
            EXCHANGE(4)
            EXCHANGE(8)
            for (int i = 0; i < LANES; i++) store(to + (n * LANES + i) * by_to + m * LANES, x[i]);
        }
}

#endif
