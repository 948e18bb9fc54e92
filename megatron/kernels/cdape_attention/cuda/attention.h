// Forward pass of CDAPE's attention for a block's query rows: computes the logits (`logits.h`), their online softmax,
// and the average of the values (Dao 2023, FlashAttention-2, algorithm 1). No map is stored in global memory.
//
//   O = Σ_j exp2(L[j]·log2(e) - m)·V[j] / Σ      Σ = Σ_j exp2(L[j]·log2(e) - m)      m = max_j L[j]·log2(e)
//
// A thread keeps 2·d sums of the output with 32 rows, or d with 16 rows, in up to half of its registers. The other
// phases therefore load keys, tables and weights when they need them. Loaded earlier, these would be spilled to stacks
// that do not fit in the L1 cache.
#pragma once
#include "logits.h"
#include "values.h"

struct AttentionArgs {
  LogitInputs inputs;           // with 4 copies of the bias; copy x has distance n at entry bias_front + n + 3 - x
  const void* values;           // V, [H, …, d], from column 0 on
  const void* sinks;            // float32 [H], logits of keys without a value, or null
  const void* offsets;          // float32 [H, …], subtracted from the sinks: row terms that the logits omit; or null
  void* output;                 // O, [H, …, d], from the chunk's first row on
  void* residue;                // rounding error of O, with the same strides, or null
  void* stats;                  // float32 [2, B, H, …], m and Σ
  int v_stride, output_stride;  // bytes from one head to the next
  int output_row;               // bytes from one row of O to the next
  int stats_stride;             // bytes from one head to the next in stats and offsets
  long long total_offset;       // bytes from m to Σ
  long long q_batch, k_batch, v_batch, output_batch, stats_batch;
};

// A warp processes all rows and columns of a tile for one pair of heads. As in `Scores`, a lane has four adjacent
// columns of rows g and g + 8. In this order columns are the k-dimension of the product with the values.
template <class G>
struct AverageValues {
  typedef Logits<G, true, true, false> L;
  typedef typename G::Element Element;
  typedef typename L::R R;
  typedef typename L::Context Context;
  // Number of groups of 16 columns that are weighed together. Registers hold no more.
  static constexpr int GROUPS = 2, N_TILES = G::HEAD_DIM / 8;
  // Masked logits and the first maximum are LOWEST. They are finite, because the difference of two infinities is NaN.
  static constexpr float LOG2E = 1.4426950408889634f, LOWEST = -1e30f;
  static_assert(G::PAIRS == G::WARPS, "a warp has the registers for one pair of heads");

  AttentionArgs args;
  f32 highest[2][G::ROW_TILES][2], totals[2][G::ROW_TILES][2];  // m, and the lane's share of Σ
  f32 sums[2][G::ROW_TILES][N_TILES][4];

  KERNEL_CODE void begin(const Context& c) {
    i32 lane = lane_id(), g = lane / 4, t = lane % 4;
    UNROLL_FOR (int h = 0; h < 2; h++)
      UNROLL_FOR (int tile = 0; tile < G::ROW_TILES; tile++) {
        const int head = 2 * c.warp + h, known = head < c.in.scores.heads ? head : c.in.scores.heads - 1;
        UNROLL_FOR (int r = 0; r < 2; r++) {
          f32 first = f32(LOWEST), total = f32(0.0f);
          if (args.sinks != nullptr) {
            f32 sink = as_f32(load_global<1>(address(args.sinks, i32(known * 4)), 0).x[0]);
            if (args.offsets != nullptr) {
              i32 row = minimum(g + (c.first_row + 16 * tile + 8 * r), i32(c.in.scores.rows - 1));
              Address at = advance(address(args.offsets, row * 4), (long long)known * args.stats_stride);
              sink = sink - as_f32(load_global<1>(at, 0).x[0]);
            }
            // A lower maximum would be raised by masked columns. The rounding error of their LOWEST * LOG2E would then
            // be their exponent, and overflow.
            first = select(sink * LOG2E < LOWEST, f32(LOWEST), sink * LOG2E);
            total = select(t == 0, f32(1.0f), f32(0.0f));
          }
          highest[h][tile][r] = first;
          totals[h][tile][r] = total;
        }
        UNROLL_FOR (int n = 0; n < N_TILES; n++)
          UNROLL_FOR (int x = 0; x < 4; x++) sums[h][tile][n][x] = f32(0.0f);
      }
  }

  template <bool MASKED>
  KERNEL_CODE void take(const Context& c, int first) {
    if (2 * c.warp >= c.in.scores.heads) return;
    UNROLL_FOR (int at = 0; at < G::COLUMNS / 16; at += GROUPS) {
      u32 weights[2][G::ROW_TILES][GROUPS][4];  // unnormalized P, as A fragments
      UNROLL_FOR (int tile = 0; tile < G::ROW_TILES; tile++) {
        f32 logits[2][2][GROUPS][4];  // by head, row g or g + 8, group and column
        UNROLL_FOR (int r = 0; r < 2; r++)
          UNROLL_FOR (int group = 0; group < GROUPS; group++) {
            f32 part[2][4];
            load_logits<MASKED>(part, c, 16 * tile + 8 * r, first, at + group);
            UNROLL_FOR (int h = 0; h < 2; h++)
              UNROLL_FOR (int y = 0; y < 4; y++) logits[h][r][group][y] = part[h][y];
          }
        UNROLL_FOR (int h = 0; h < 2; h++) weigh(weights[h][tile], logits[h], h, tile);
      }
      UNROLL_FOR (int h = 0; h < 2; h++)
        UNROLL_FOR (int group = 0; group < GROUPS; group++)
          add_values<MASKED>(weights, c, first + 16 * (at + group), h, group);
    }
  }

  // Stores the results of the block's rows.
  KERNEL_CODE void finish(const ScoreInputs& scores, int warp, int first_row) const {
    i32 lane = lane_id(), g = lane / 4, t = lane % 4;
    UNROLL_FOR (int h = 0; h < 2; h++)
      UNROLL_FOR (int tile = 0; tile < G::ROW_TILES; tile++)
        UNROLL_FOR (int r = 0; r < 2; r++) {
          const int head = 2 * warp + h, row = first_row + 16 * tile + 8 * r;
          f32 total = totals[h][tile][r];
          total += exchange_lanes(total, 1);
          total += exchange_lanes(total, 2);
          pred is_stored = g + row < scores.rows && i32(head) < scores.heads;
          Address to_stats = advance(address(args.stats, g * 4), (long long)head * args.stats_stride + row * 4ll);
          store_global<1>(to_stats, 0, Words<1>{as_u32(highest[h][tile][r])}, is_stored && t == 0);
          store_global<1>(advance(to_stats, args.total_offset), 0, Words<1>{as_u32(total)}, is_stored && t == 0);
          const long long in_output = (long long)head * args.output_stride + (long long)row * args.output_row;
          OutputRow<G> output, residue;
          UNROLL_FOR (int n = 0; n < N_TILES; n += 2)
            UNROLL_FOR (int side = 0; side < 2; side++) {
              f32 low = sums[h][tile][n][2 * r + side] / total, high = sums[h][tile][n + 1][2 * r + side] / total;
              u32& word = output.word[side][n / 2];
              word = Element::pack(low, high);
              residue.word[side][n / 2] = Element::pack(low - Element::low(word), high - Element::high(word));
            }
          output.store(args.output, in_output, g * args.output_row, is_stored);
          if (args.residue != nullptr) residue.store(args.residue, in_output, g * args.output_row, is_stored);
        }
  }

 private:
  // Loads the logits of a pair of heads in row `row` + g and the lane's four columns of a group. MASKED: logits of
  // columns that the row does not see are LOWEST.
  template <bool MASKED>
  static KERNEL_CODE void load_logits(f32 (&logits)[2][4], const Context& c, int row, int first, int group) {
    i32 lane = lane_id(), g = lane / 4, t = lane % 4;
    const int behind = 16 * group, pair = c.warp;
    L::load(logits, c.sums, R::row_offset(g) + (R::row_offset(row) + pair * R::PAIR_STRIDE * 4), t + 4 * group);
    Address bias = advance(address(c.in.bias, g % 4 * (G::HEADS * c.in.bias_stride * 4) + (g / 4 - t) * 16),
                           (long long)(c.position() - first + c.in.bias_front) * 4);
    if constexpr (G::GATED) bias = advance(address(c.in.bias, t * 16), first * 4ll);  // bias by column
    i32 begin = i32(0);
    if constexpr (MASKED && G::LOCAL) begin = c.in.scores.find_lanes_first(g + (c.first_row + row));
    UNROLL_FOR (int h = 0; h < 2; h++) {
      const long long entry = (long long)(2 * pair + h) * c.in.bias_stride + (G::GATED ? behind : row - behind);
      Words<4> b = load_global<4>(advance(bias, entry * 4), 0);
      UNROLL_FOR (int y = 0; y < 4; y++) {
        f32& logit = logits[h][y];
        logit += as_f32(b.x[G::GATED ? y : 3 - y]);
        i32 column = t * 4 + (first + behind + y);
        if (MASKED) logit = select(column <= g + (c.position() + row), logit, f32(LOWEST));
        if (MASKED && G::LOCAL) logit = select(column >= begin, logit, f32(LOWEST));
      }
    }
  }

  // Replaces a head's logits by their exponentials, packed as factors of a product, and scales its sums down if the
  // maximum of a row rises.
  KERNEL_CODE void weigh(u32 (&weights)[GROUPS][4], f32 (&logits)[2][GROUPS][4], int h, int tile) {
    f32 shrink[2];
    UNROLL_FOR (int r = 0; r < 2; r++) {
      f32 top = logits[r][0][0];
      UNROLL_FOR (int y = 1; y < 4 * GROUPS; y++) top = maximum(top, logits[r][y / 4][y % 4]);
      top = maximum(top, exchange_lanes(top, 1));
      top = maximum(top, exchange_lanes(top, 2));
      f32 higher = maximum(highest[h][tile][r], top * LOG2E), sum = f32(0.0f);
      shrink[r] = exponential2(highest[h][tile][r] - higher);
      highest[h][tile][r] = higher;
      UNROLL_FOR (int y = 0; y < 4 * GROUPS; y++) {
        f32& logit = logits[r][y / 4][y % 4];
        logit = exponential2(multiply_subtract(logit, f32(LOG2E), higher));
        sum += logit;
      }
      totals[h][tile][r] = totals[h][tile][r] * shrink[r] + sum;
    }
    if (any_lane(shrink[0] < 1.0f || shrink[1] < 1.0f))
      UNROLL_FOR (int n = 0; n < N_TILES; n++)
        UNROLL_FOR (int x = 0; x < 4; x++) sums[h][tile][n][x] = sums[h][tile][n][x] * shrink[x / 2];
    UNROLL_FOR (int group = 0; group < GROUPS; group++)
      UNROLL_FOR (int q = 0; q < 4; q++) {
        const f32(&of_row)[4] = logits[q % 2][group];
        weights[group][q] = Element::pack(of_row[2 * (q / 2)], of_row[2 * (q / 2) + 1]);
      }
  }

  // Adds the values of a group of 16 columns from `first` on to a head's sums.
  template <bool MASKED>
  KERNEL_CODE void add_values(const u32 (&weights)[2][G::ROW_TILES][GROUPS][4], const Context& c, int first, int h,
                              int group) {
    const int head = 2 * c.warp + h, known = head < c.in.scores.heads ? head : c.in.scores.heads - 1;
    ValueRows<G> rows;
    rows.template load<MASKED>(args.values, (long long)known * args.v_stride, first, c.last_column());
    UNROLL_FOR (int n = 0; n < N_TILES; n++)
      UNROLL_FOR (int tile = 0; tile < G::ROW_TILES; tile++)
        Element::multiply(sums[h][tile][n], weights[h][tile][group], rows.find(n, 0), rows.find(n, 1));
  }
};

template <class G>
struct Attention {
  typedef AverageValues<G> Last;
  typedef typename Last::L L;
  static constexpr int NUM_THREADS = L::NUM_THREADS, MEMORY_BYTES = L::MEMORY_BYTES, BLOCKS_PER_SM = 1;

  static KERNEL_CODE void run(AttentionArgs args, SharedMemory memory, int warp, int block, int, int batch) {
    ScoreInputs& scores = args.inputs.scores;
    scores.q = (const char*)scores.q + batch * args.q_batch;
    scores.k = (const char*)scores.k + batch * args.k_batch;
    args.inputs.select_sequence(batch);
    args.values = (const char*)args.values + batch * args.v_batch;
    args.output = (char*)args.output + batch * args.output_batch;
    args.stats = (char*)args.stats + batch * args.stats_batch;
    if (args.residue != nullptr) args.residue = (char*)args.residue + batch * args.output_batch;
    if (args.offsets != nullptr) args.offsets = (const char*)args.offsets + batch * args.stats_batch;
    Last last;
    last.args = args;
    L::go_over_tiles(args.inputs, memory, warp, block, last);
    last.finish(scores, warp, block * G::ROWS);
  }
};
