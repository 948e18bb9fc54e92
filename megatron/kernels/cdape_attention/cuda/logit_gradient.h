// Backward pass of CDAPE's softmax for a block's query rows: computes P and dL from queries, keys, values and the
// output's gradient.
//
//   P = exp2(L·log2(e) - log2 Σ)      dL = P ∘ (dP - δ)      dP = dO·Vᵀ      δ = Σ P ∘ dP = dO·O
//
// O is read as a number of the model's type plus its rounding error, a second such number. If a probability is nearly
// 1, the difference dP - δ cancels, and the rounding error of O would remain. The logits (`logits.h`) are never stored.
#pragma once
#include "logits.h"

struct LogitGradientArgs {
  LogitInputs inputs;      // with 4 copies of the bias; copy x has distance n at entry bias_front + n + 3 - x
  ScoreInputs values;      // dO and V in place of queries and keys
  const void* output;      // O, [H, …, d], with dO's strides
  const void* residue;     // rounding error of O, with the same strides
  const void* stats;       // float32 [2, B, H, …]: maximum (in base 2) and sum of exponentials
  void* sums;              // float32 [H, …], δ
  void* probabilities;     // P, [H, R, C], written in the columns that a row sees
  void* dlogits;           // dL, words [R, 8 pairs, C], written in the same columns
  int stats_stride;        // bytes from one head to the next in stats and sums
  long long total_offset;  // bytes from a maximum to its sum
  long long q_batch, k_batch, value_batch, dout_batch, stats_batch, probabilities_batch, dlogits_batch;
};

// KEEPS_DOUT: dO is kept in shared memory. Otherwise it is read together with the values of each tile.
template <class G, bool KEEPS_DOUT>
struct DifferentiateSoftmax {
  typedef Logits<G, true, (G::SLICES > 1 || (G::TAPS > 3 && !KEEPS_DOUT))> L;
  typedef typename G::Element Element;
  typedef typename L::R R;
  typedef typename L::S S;
  typedef typename L::Context Context;
  // (log2 Σ, δ) for each head and row, followed by unused words for each warp.
  static constexpr int UNREAD = G::HEADS * G::ROWS * 8, STATS_BYTES = UNREAD + 128 * G::WARPS;
  LogitGradientArgs args;
  SharedMemory douts, stats;

  KERNEL_CODE void begin(const Context& c) {
    i32 lane = lane_id(), g = lane / 4, t = lane % 4;
    const int rows = args.values.rows;
    if constexpr (KEEPS_DOUT) S::load_queries(args.values, douts, c.warp, c.first_row);
    constexpr int SHARE = G::HEADS / G::WARPS;
    UNROLL_FOR (int h = 0; h < SHARE; h++) {
      const int head = SHARE * c.warp + h, known = head < args.values.heads ? head : args.values.heads - 1;
      i32 row = lane % G::ROWS, in_stats = minimum(row + c.first_row, i32(rows - 1)) * 4;
      Address from = advance(address(args.stats, in_stats), (long long)known * args.stats_stride);
      f32 maximum = as_f32(load_global<1>(from, 0).x[0]);
      f32 total = as_f32(load_global<1>(advance(from, args.total_offset), 0).x[0]);
      Words<1> norm;
      // Heads after the last have no probabilities.
      norm.x[0] = as_u32(head < args.values.heads ? maximum + logarithm2(total) : f32(1e30f));
      store_shared<1>(stats, row * 8 + head * (G::ROWS * 8), norm);
      // dO·O of a row is an entry on the diagonal of the product of 16 rows of dO and O.
      UNROLL_FOR (int tile = 0; tile < G::ROW_TILES; tile++) {
        f32 sums[2][4];
        typename S::LoadedQueries dout;
        S::load_rows(dout, args.values, head, c.first_row + 16 * tile);
        UNROLL_FOR (int part = 0; part < 2; part++)
          UNROLL_FOR (int n = 0; n < 2; n++) {
            typename S::Row output;
            S::load_row(output, args.values, part == 0 ? args.output : args.residue,
                        (long long)known * args.values.q_stride, c.first_row + 16 * tile + 8 * n);
            UNROLL_FOR (int step = 0; step < S::Row::STEPS; step++) {
              Words<4> q = dout.load(tile, step);
              const u32 b0 = output.word[2 * step], b1 = output.word[2 * step + 1];
              if (part == 0 && step == 0) Element::multiply_from_zero(sums[n], q.x, b0, b1);
              else Element::multiply(sums[n], q.x, b0, b1);
            }
          }
        UNROLL_FOR (int n = 0; n < 2; n++) {
          Words<1> sum;
          sum.x[0] = as_u32(select(g % 2 == 0, sums[n][2 * n], sums[n][2 * n + 1]));
          const int row = 16 * tile + 8 * n;
          pred is_diagonal = t == g / 2;
          store_shared<1>(
              stats, select(is_diagonal, g * 8 + ((head * G::ROWS + row) * 8 + 4), lane * 4 + (UNREAD + 128 * c.warp)),
              sum);
          store_global<1>(
              advance(address(args.sums, g * 4), (c.first_row + row) * 4ll + (long long)known * args.stats_stride), 0,
              sum, is_diagonal && g + (c.first_row + row) < rows && i32(head) < args.values.heads);
        }
      }
    }
  }

  // A warp processes the heads and columns of its scores; a lane processes 4 columns of rows g and g + 8 of both
  // blocks.
  template <bool MASKED>
  KERNEL_CODE void take(const Context& c, int first) {
    constexpr float LOG2E = 1.4426950408889634f;
    const int warp = c.warp, rows = c.in.scores.rows, columns = c.in.scores.columns;
    const int start = first + 16 * G::GROUPS * (warp / 4);
    const long long row_bytes = (long long)columns * 2, head_bytes = rows * row_bytes, pair_bytes = 2 * row_bytes;
    i32 lane = lane_id(), g = lane / 4, t = lane % 4;
    i32 at = R::row_offset(g), chunk = t + 4 * G::GROUPS * (warp / 4);
    const int copy_bytes = G::HEADS * c.in.bias_stride * 4;
    Address bias = advance(address(c.in.bias, g % 4 * copy_bytes + (g / 4 - t) * 16),
                           (long long)(c.position() - start + c.in.bias_front) * 4);
    if constexpr (G::GATED) bias = advance(address(c.in.bias, t * 16), start * 4ll);  // bias by column
    Address to_p = advance(address(args.probabilities, (g * columns + t * 4) * 2), c.first_row * row_bytes + start * 2);
    Address to_dl = advance(address(args.dlogits, (g * (G::PAIRS * columns) + t * 4) * 4),
                            c.first_row * (G::PAIRS * pair_bytes) + start * 4);
    UNROLL_FOR (int upper = 0; upper < 2; upper++) {
      const int head = L::find_head(warp, 2 * upper), pair = head / 2;
      typename S::Sums dp[2];
      UNROLL_FOR (int h = 0; h < 2; h++) {
        typename S::Keys keys;
        S::template load_keys_inside<ONCE>(keys, args.values, head + h, start, c.last_column());
        if constexpr (KEEPS_DOUT) {
          S::multiply(dp[h], keys, douts, head + h);
        } else {
          typename S::LoadedQueries dout;
          S::load_rows(dout, args.values, head + h, c.first_row);
          S::multiply(dp[h], keys, dout);
        }
      }
      UNROLL_FOR (int quarter = 0; quarter < 4; quarter++) {
        const int block = quarter / 2, row = S::block_row(block) + 8 * (quarter % 2), behind = S::block_column(block);
        const int column = start + behind;
        f32 logits[2][4], dlogits[2][4];
        L::load(logits, c.sums, at + (R::row_offset(row) + pair * R::PAIR_STRIDE * 4), chunk + behind / 4);
        pred is_stored = lane >= 0;
        i32 begin = i32(0);
        if (MASKED) is_stored = t * 4 + column <= g + (c.position() + row) && g + (c.first_row + row) < rows;
        if (MASKED && G::LOCAL) {
          is_stored = is_stored && t * 4 + column >= 0;
          begin = c.in.scores.find_lanes_first(g + (c.first_row + row));
        }
        UNROLL_FOR (int h = 0; h < 2; h++) {
          const long long entry = (long long)(head + h) * c.in.bias_stride + (G::GATED ? behind : row - behind);
          Words<4> b = load_global<4>(advance(bias, entry * 4), 0);
          Words<2> of_row = load_shared<2>(stats, g * 8 + ((head + h) * G::ROWS + row) * 8);
          f32 p[4];
          UNROLL_FOR (int y = 0; y < 4; y++) {
            p[y] = exponential2(
                multiply_subtract(logits[h][y] + as_f32(b.x[G::GATED ? y : 3 - y]), f32(LOG2E), as_f32(of_row.x[0])));
            if (MASKED) p[y] = select(t * 4 + (column + y) <= g + (c.position() + row), p[y], f32(0.0f));
            if (MASKED && G::LOCAL) p[y] = select(t * 4 + (column + y) >= begin, p[y], f32(0.0f));
            f32 gradient = dp[h].tile[block][y / 2][2 * (quarter % 2) + y % 2];
            dlogits[h][y] = p[y] * (gradient - as_f32(of_row.x[1]));
          }
          Words<2> v;
          UNROLL_FOR (int z = 0; z < 2; z++) v.x[z] = Element::pack(p[2 * z], p[2 * z + 1]);
          store_global<2>(advance(to_p, row * row_bytes + (head + h) * head_bytes), behind * 2, v,
                          is_stored && i32(head + h) < args.values.heads);
        }
        Words<4> v;
        UNROLL_FOR (int y = 0; y < 4; y++) v.x[y] = Element::pack(dlogits[0][y], dlogits[1][y]);
        store_global<4>(advance(to_dl, (row * G::PAIRS + pair) * pair_bytes), behind * 4, v, is_stored);
      }
    }
  }
};

template <class G, bool KEEPS_DOUT>
struct LogitGradient {
  typedef DifferentiateSoftmax<G, KEEPS_DOUT> Last;
  typedef typename Last::L L;
  static constexpr int NUM_THREADS = L::NUM_THREADS, BLOCKS_PER_SM = 8 / G::WARPS;
  static constexpr int MEMORY_BYTES = L::MEMORY_BYTES + KEEPS_DOUT * G::QUERY_BYTES + Last::STATS_BYTES;

  static KERNEL_CODE void run(LogitGradientArgs args, SharedMemory memory, int warp, int block, int, int batch) {
    ScoreInputs &scores = args.inputs.scores, &values = args.values;
    scores.q = (const char*)scores.q + batch * args.q_batch;
    scores.k = (const char*)scores.k + batch * args.k_batch;
    args.inputs.select_sequence(batch);
    values.q = (const char*)values.q + batch * args.dout_batch;
    values.k = (const char*)values.k + batch * args.value_batch;
    args.output = (const char*)args.output + batch * args.dout_batch;
    args.residue = (const char*)args.residue + batch * args.dout_batch;
    args.stats = (const char*)args.stats + batch * args.stats_batch;
    args.sums = (char*)args.sums + batch * args.stats_batch;
    args.probabilities = (char*)args.probabilities + batch * args.probabilities_batch;
    args.dlogits = (char*)args.dlogits + batch * args.dlogits_batch;
    Last last;
    last.args = args;
    last.douts = advance(memory, L::MEMORY_BYTES);
    last.stats = advance(last.douts, KEEPS_DOUT * G::QUERY_BYTES);
    L::go_over_tiles(args.inputs, memory, warp, block, last);
  }
};
