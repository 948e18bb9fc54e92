// Results of the mixer's backward pass (`mixer_backward.h`) in global memory: dS, and the gradients of E and of the
// weights.
#pragma once
#include "mixer_backward_inputs.h"
#include "runs.h"
#include "tables.h"

template <class G>
struct MixerBackwardResults {
  typedef typename G::Element Element;
  typedef Tables<G> T;
  typedef Runs<G, Element, false> R;
  typedef MixerBackwardContext Context;

  static KERNEL_CODE void store_edge(const f32 (&gradient)[2][4], Context& c, int row_tile, int column, int step) {
    i32 lane = lane_id(), g = lane / 4, t = lane % 4;
    UNROLL_FOR (int r = 0; r < 2; r++) {
      i32 row = g + (c.first_row + 16 * row_tile + 8 * r);
      Words<4> v;
      UNROLL_FOR (int x = 0; x < 4; x++) v.x[x] = as_u32(gradient[x / 2][2 * r + x % 2]);
      store_global<4>(address(c.args.dedge, row * T::EDGE_BYTES + t * 16), column * T::COLUMN_BYTES + step * 64, v,
                      row < c.args.scores.rows);
    }
  }

  static KERNEL_CODE void store_edge(const f32 (&gradient)[2][4], Context& c, const typename T::Places& places,
                                     int column, int step) {
    UNROLL_FOR (int r = 0; r < 2; r++) {
      Words<4> v;
      UNROLL_FOR (int x = 0; x < 4; x++) v.x[x] = as_u32(gradient[x / 2][2 * r + x % 2]);
      store_global<4>(address(c.args.dedge, T::locate_edge(places.row[r], places, r, column, step)), 0, v,
                      T::is_at_edge(places, r, column) && places.row[r] < c.args.scores.rows);
    }
  }

  // Stores dS of a tile's columns. A warp stores an equal share of the rows, a lane 4 columns of a pair.
  template <bool MASKED>
  static KERNEL_CODE void store_scores(Context& c, int first) {
    constexpr int CHUNKS = G::COLUMNS / 4, AT_ONCE = 32 / CHUNKS;  // pairs
    i32 lane = lane_id(), chunk = lane % CHUNKS, pair = lane / CHUNKS;
    const int rows = c.args.scores.rows, columns = c.args.scores.columns;
    const long long head_bytes = (long long)rows * columns * 2;
    Address lanes = advance_heads(address(c.args.dscores, chunk * 8), pair * 2, head_bytes);
    UNROLL_FOR (int r = 0; r < G::WARP_ROWS; r++) {
      const int row = G::WARP_ROWS * c.warp + r, in_map = c.first_row + row;
      const int begin = MASKED && G::LOCAL ? c.args.scores.find_first(in_map) : 0;
      UNROLL_FOR (int others = 0; others < G::PAIRS; others += AT_ONCE) {
        i32 at = pair * (R::PAIR_STRIDE * 4) + (R::row_offset(row) + others * R::PAIR_STRIDE * 4);
        Words<4> sum, passed;
        R::load(sum, passed, c.sums, at, chunk);
        UNROLL_FOR (int y = 0; y < 4 && y < R::REACH; y++) {
          u32 part = passed.x[y], &word = sum.x[y];
          word = Element::pack(Element::low(word) + Element::low(part), Element::high(word) + Element::high(part));
        }
        i32 j = chunk * 4 + first;
        if (MASKED)
          UNROLL_FOR (int y = 0; y < 4; y++) sum.x[y] = select(j + y <= c.position() + row, sum.x[y], u32(0u));
        if (MASKED && G::LOCAL)
          UNROLL_FOR (int y = 0; y < 4; y++) sum.x[y] = select(j + y >= begin, sum.x[y], u32(0u));
        Words<2> v[2];
        UNROLL_FOR (int z = 0; z < 2; z++) {
          v[0].x[z] = low_halves(sum.x[2 * z], sum.x[2 * z + 1]);
          v[1].x[z] = high_halves(sum.x[2 * z], sum.x[2 * z + 1]);
        }
        UNROLL_FOR (int h = 0; h < 2; h++) {
          pred is_stored = pair * 2 + (2 * others + h) < c.args.scores.heads;
          if (MASKED) is_stored = is_stored && j < columns && in_map < rows;
          if (MASKED && G::LOCAL) is_stored = is_stored && j >= 0;
          store_global<2>(advance(lanes, ((long long)in_map * columns + first) * 2 + (2 * others + h) * head_bytes), 0,
                          v[h], is_stored);
        }
      }
    }
  }

  // Adds the warps' gradients of the weights in the order of the warps, and stores them. Overwrites all of shared
  // memory.
  template <int N_TILES>
  static KERNEL_CODE void store_weights(const f32 (&dw1)[G::TAPS][N_TILES][4], const f32 (&dw2)[G::TAPS][N_TILES][4],
                                        Context& c, SharedMemory memory) {
    constexpr int TAPS = G::TAPS, COUNT = 2 * TAPS * N_TILES, WARP_BYTES = COUNT * 512;
    constexpr int MEMORY_BYTES = G::QUERY_BYTES + 2 * PairWindow<G>::MEMORY_BYTES;
    static_assert(G::WARPS * WARP_BYTES <= MEMORY_BYTES, "the warps' sums fit in the memory of a tile");
    i32 lane = lane_id();
    barrier(memory);
    UNROLL_FOR (int which = 0; which < 2; which++)
      UNROLL_FOR (int tap = 0; tap < TAPS; tap++)
        UNROLL_FOR (int n = 0; n < N_TILES; n++) {
          Words<4> v;
          UNROLL_FOR (int x = 0; x < 4; x++) v.x[x] = as_u32(which ? dw2[tap][n][x] : dw1[tap][n][x]);
          store_shared<4>(memory, lane * 16 + (c.warp * WARP_BYTES + ((which * TAPS + tap) * N_TILES + n) * 512), v);
        }
    barrier(memory);
    constexpr int SHARE = (COUNT + G::WARPS - 1) / G::WARPS;
    UNROLL_FOR (int part = 0; part < SHARE; part++) {
      const int fragment = c.warp * SHARE + part;
      if (fragment >= COUNT) continue;
      i32 at = lane * 16 + fragment * 512;
      f32 sum[4] = {f32(0.0f), f32(0.0f), f32(0.0f), f32(0.0f)};
      UNROLL_FOR (int warp = 0; warp < G::WARPS; warp++) {
        Words<4> v = load_shared<4>(memory, at + warp * WARP_BYTES);
        UNROLL_FOR (int x = 0; x < 4; x++) sum[x] += as_f32(v.x[x]);
      }
      Words<4> v;
      UNROLL_FOR (int x = 0; x < 4; x++) v.x[x] = as_u32(sum[x]);
      constexpr int ALL_TILES = G::WIDTH / 8;
      const int place = fragment / N_TILES * ALL_TILES + c.slice * N_TILES + fragment % N_TILES;
      Address to = advance(address(c.args.dweights, lane * 16), (c.program * (2 * TAPS * ALL_TILES) + place) * 512);
      store_global<4>(to, 0, v, lane >= 0);
    }
  }
};
