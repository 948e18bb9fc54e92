// CDAPE's logits for a block's query rows, computed from queries and keys. A kernel's last phase reads them as words in
// shared memory.
//
//   hidden[j] = U[i - j] + Σ_t W1[t]·S[j + t - p]        (E[i, j] instead of U for j < p)
//   L[j] = S[j] + bias[i - j] + Σ_t W2[t]·LeakyReLU(hidden[j + t - p])
//
// (DAPE V2, equation 5; b1 is part of U and E, b2 of the bias, which the last phase adds.) Scores are never stored in
// global memory. Few warps fit on a multiprocessor, and all of them would wait for loads together. If registers allow
// it, keys are therefore loaded a tile, and U half a tile, before their use.
#pragma once
#include "runs.h"
#include "scores.h"
#include "tables.h"
#include "windows.h"

struct LogitInputs {
  ScoreInputs scores;
  const void* table;  // U, exchange numbers [groups of 8 distances, D/16, 32 lanes, 2, 2, 2], see Tables::Distances
  const void* edge;   // E, float32 [R, p, D]
  const void* w1;     // B fragments of W1, exchange numbers [parts][k][head groups, n-tiles: 4][32 lanes][2]
  const void* w2;     // B fragments of W2, exchange numbers [parts][k][k-steps, n-tiles: 4][32 lanes][2]
  const void* bias;   // float32 [H, bias_stride]: entry bias_front + n is added to the logits at distance n
  int table_group;    // group of the distance of row 0 and column p + 7
  int bias_front, bias_stride;  // bias_front + position is a multiple of 4
  // GATED: terms that replace the tables by distance. `edge` is [R, 4p, 32], and entry j of `bias` is added at column
  // j.
  GateInputs gates;

  KERNEL_CODE void select_sequence(int index) {
    scores.select_sequence(index);
    gates.select_sequence(index);
    edge = (const char*)edge + index * gates.edge_batch;
    bias = (const char*)bias + index * gates.bias_batch;
  }
};

// BY_ROWS: the last phase reads words by rows and columns instead of columns and pairs. RELOADS: weights are loaded
// again for each tile, as slices require, so that other phases can use their registers. PREFETCHES: keys and U are
// loaded at least a phase before their use, into registers that the last phase does not need.
template <class G_, bool BY_ROWS, bool RELOADS = (G_::SLICES > 1), bool PREFETCHES = true>
struct Logits {
  typedef G_ G;
  typedef Scores<G, 4, G::ROW_TILES == 1> S;
  typedef FragmentWindow<G> W;
  typedef Tables<G> T;
  typedef GateTerms<G> Gates;
  typedef Runs<G, Exchange, BY_ROWS> R;
  static constexpr int PADDING = G::PADDING, TAPS = G::TAPS, COLUMNS = G::COLUMNS, NUM_THREADS = 32 * G::WARPS;
  // With more than three taps, several slices or gates leave fewer registers for keys.
  static constexpr bool IS_TIGHT = TAPS > 3 && (G::SLICES > 1 || G::GATED);
  // Number of heads whose next keys are prefetched while a tile is mixed: as many as fit in SPARE registers. Without
  // prefetching, registers hold the keys of all four heads of the warp.
  static constexpr int KEY_WORDS = G::HEAD_DIM / 4 * G::GROUPS, SPARE = IS_TIGHT ? 32 : 64;
  static constexpr int HELD = !PREFETCHES || 4 * KEY_WORDS <= SPARE ? 4 : 2 * KEY_WORDS <= SPARE ? 2 : 1;
  static_assert(PREFETCHES || G::HEAD_GROUPS == 1, "without prefetching, all of a tile's keys are loaded together");
  static constexpr int MEMORY_BYTES = G::QUERY_BYTES + W::MEMORY_BYTES + R::MEMORY_BYTES;

  struct State {
    u32 w1[TAPS][G::HEAD_GROUPS * G::N_TILES][2], w2[TAPS][G::HEAD_GROUPS * G::N_TILES][2];  // weights of a slice
    typename R::Column carry[R::CARRY];
    typename S::Keys keys[HELD];                         // keys of the next tile
    typename T::template Distances<T::STEPS> distances;  // U of this tile
    // GATED: row vectors of the warp's row tile.
    typename Gates::template Rows<2> rows;
  };
  struct Context {
    LogitInputs in;
    SharedMemory queries, scores, sums;
    int warp, first_row;
    Tiles tiles;
    KERNEL_CODE int position() const { return in.scores.position + first_row; }
    // Last column that any of the block's rows sees.
    KERNEL_CODE int last_column() const {
      const int end = first_row + G::ROWS < in.scores.rows ? first_row + G::ROWS : in.scores.rows;
      return in.scores.position + end - 1;
    }
  };

  // Computes the tiles of the block's rows, and calls take<MASKED>(context, first column) of the last phase after each.
  template <class Last>
  static KERNEL_CODE void go_over_tiles(const LogitInputs& in, SharedMemory memory, int warp, int block, Last& last) {
    Context c{in, memory, memory, memory, warp, block * G::ROWS, {}};
    c.scores = advance(memory, G::QUERY_BYTES);
    c.sums = advance(c.scores, W::MEMORY_BYTES);
    if (G::LOCAL) c.tiles = in.scores.find_tiles<G>(c.first_row);
    last.begin(c);
    State st;
    begin(st, c);
    barrier(memory);
    if constexpr (G::HAS_PROLOGUE) {
      compute_scores<true>(st, c, -1);
      barrier(memory);
      mix<true, false>(st, c, -COLUMNS, 0);
      barrier(memory);
    } else {
      R::clear(st.carry);
      if (owns_last_columns(c))
        UNROLL_FOR (int group = 0; group < G::HEAD_GROUPS; group++)
          W::clear_last_columns(find_window(c, group), warp % 4);
    }
    if (!G::LOCAL) c.tiles = in.scores.find_tiles<G>(c.first_row);  // not earlier, because registers are scarce there
    Step<Last> step{st, c, memory, last};
    RowSpans::go_over<G>(c.tiles, step);
  }

  // Loads the logits, without bias, of a pair of heads in four columns of a tile. `at` is the offset of the row and
  // pair.
  static KERNEL_CODE void load(f32 (&logits)[2][4], SharedMemory sums, i32 at, i32 chunk) {
    Words<4> own, passed;
    R::load(own, passed, sums, at, chunk);
    UNROLL_FOR (int y = 0; y < 4; y++) {
      logits[0][y] = low_exchange(own.x[y]);
      logits[1][y] = high_exchange(own.x[y]);
      if (y < R::REACH) {
        logits[0][y] += low_exchange(passed.x[y]);
        logits[1][y] += high_exchange(passed.x[y]);
      }
    }
  }

  // A warp computes the scores of head pairs w and w + 4, with w = warp % 4: heads 2w, 2w + 1, 2w + 8 and 2w + 9, and
  // with two groups of heads each of these plus 16.
  static KERNEL_CODE int find_head(int warp, int h) { return 2 * (warp % 4) + 8 * (h / 2) + h % 2; }

 private:
  template <class Last>
  struct Step {
    State& st;
    Context& c;
    SharedMemory memory;
    Last& last;
    template <bool MASKED>
    KERNEL_CODE void take(int tile) {
      take_tile<MASKED>(st, c, memory, tile, last);
    }
  };
  template <bool MASKED, class Last>
  static KERNEL_CODE void take_tile(State& st, Context& c, SharedMemory memory, int tile, Last& last) {
    const int first = tile * COLUMNS, row_tile = c.warp / G::RUNS, run = c.warp % G::RUNS;
    const int table_group = c.in.table_group + (c.first_row - first) / 8 + 2 * row_tile - run;
    if constexpr (!G::GATED && PREFETCHES) T::load_distances(st.distances, c.in.table, table_group, 0);
    if (owns_last_columns(c))
      UNROLL_FOR (int group = 0; group < G::HEAD_GROUPS; group++)
        W::keep_last_columns(find_window(c, group), c.warp % 4);
    compute_scores<MASKED>(st, c, tile);
    barrier(memory);
    mix<false, G::HAS_EDGES && MASKED>(st, c, first, table_group);
    barrier(memory);
    last.template take<MASKED>(c, first);
  }

  static KERNEL_CODE void begin(State& st, Context& c) {
    if (!RELOADS) load_weights(st, c, 0);
    S::load_queries(c.in.scores, c.queries, c.warp, c.first_row);
    if (PREFETCHES)
      UNROLL_FOR (int h = 0; h < HELD; h++) load_keys(st, c, h, G::HAS_PROLOGUE ? -1 : c.tiles.first);
    if constexpr (G::GATED)
      Gates::load_rows(st.rows, c.in.gates, c.in.scores.rows, c.first_row + 16 * (c.warp / G::RUNS), 0);
  }

  static KERNEL_CODE void load_weights(State& st, const Context& c, int slice) {
    G::load_weights(st.w1, c.in.w1, slice);
    G::load_weights(st.w2, c.in.w2, slice);
  }
  // Window of a group of 16 heads.
  static KERNEL_CODE SharedMemory find_window(const Context& c, int group) {
    return advance(c.scores, group * W::GROUP_BYTES);
  }

  static KERNEL_CODE bool owns_last_columns(const Context& c) { return c.warp / 4 == G::WARPS / 4 - 1; }

  static KERNEL_CODE int find_column(Context& c, int tile) {
    return tile * COLUMNS + 2 * PADDING + 16 * G::GROUPS * (c.warp / 4);
  }

  // Computes the scores of a tile (-1: the tile before the first) from prefetched keys, and loads the keys of the next
  // HELD heads, in this tile or the next.
  template <bool MASKED>
  static KERNEL_CODE void compute_scores(State& st, Context& c, int tile) {
    constexpr int WARP_HEADS = 4 * G::HEAD_GROUPS;
    if (!PREFETCHES)
      UNROLL_FOR (int h = 0; h < WARP_HEADS; h++) load_keys(st, c, h, tile);
    UNROLL_FOR (int group = 0; group < G::HEAD_GROUPS; group++) {
      u32 words[2][2][4][2];
      UNROLL_FOR (int upper = 0; upper < 2; upper++) {
        typename S::Sums sums[2];
        UNROLL_FOR (int h = 0; h < 2; h++) {
          const int now = 4 * group + 2 * upper + h, next = now + HELD;
          S::multiply(sums[h], st.keys[now % HELD], c.queries, find_head(c.warp, now));
          if (PREFETCHES) load_keys(st, c, next % WARP_HEADS, next < WARP_HEADS ? tile : tile + 1);
        }
        S::template pack<MASKED>(words[upper], sums, c.in.scores, c.first_row, find_column(c, tile));
      }
      W::store(find_window(c, group), words, c.warp % 4, 16 * G::GROUPS * (c.warp / 4));
    }
  }
  static KERNEL_CODE void load_keys(State& st, Context& c, int h, int tile) {
    const int head = find_head(c.warp, h), first = find_column(c, tile);
    S::template load_keys_inside<ONCE_EARLY>(st.keys[h % HELD], c.in.scores, head, first, c.last_column());
  }

  // Mixes the warp's 16 rows and run of 8 columns, one slice of the width after another. EDGE: only the hidden values
  // of columns left of p. BEGINS: documents may begin in this tile. `table_group` is the group of the run's distances.
  template <bool EDGE, bool BEGINS>
  static KERNEL_CODE void mix(State& st, Context& c, int first, int table_group) {
    const int row_tile = c.warp / G::RUNS, run = c.warp % G::RUNS;
    if (EDGE) R::clear(st.carry);
    if (EDGE && run != G::RUNS - 1) return;
    Pixels<EDGE> pixels;
    pixels.hidden_column = first + PADDING + 8 * run;
    if constexpr (BEGINS) {
      const int first_row = c.first_row + 16 * row_tile;
      pixels.has_begin = T::has_edge(c.in.scores, first_row, pixels.hidden_column);
      if (pixels.has_begin) T::find_places(pixels.places, c.in.scores, first_row);
    }
    UNROLL_FOR (int slice = 0; slice < G::SLICES; slice++) {
      if (RELOADS) load_weights(st, c, slice);
      if (!EDGE && !G::GATED && (slice > 0 || !PREFETCHES))
        T::load_distances(st.distances, c.in.table, table_group, slice * T::STEPS);
      mix_slice<EDGE, BEGINS>(st, c, pixels, slice);
    }
  }
  template <bool EDGE>
  struct Pixels {
    static constexpr int BEGIN = EDGE ? 8 - PADDING : 0, KEPT = 2 * PADDING;
    typename R::Column passed[R::CARRY];  // contributions of earlier slices to the next run's columns
    int hidden_column;
    bool has_begin = false;
    typename T::Places places;
  };
  static KERNEL_CODE void load_scores(u32 (&scores)[G::HEAD_GROUPS][4], const Context& c, int row_tile, int run,
                                      int x) {
    UNROLL_FOR (int group = 0; group < G::HEAD_GROUPS; group++)
      W::load(scores[group], find_window(c, group), row_tile, run, x);
  }
  // Adds a column's words of all heads by a product with the identity, which is exact.
  static KERNEL_CODE void add_words(f32 (&sum)[R::TILES][4], const u32 (&words)[4], int group, u32 unit) {
    mma_exchange(sum[2 * group], words, unit, u32(0u));
    mma_exchange(sum[2 * group + 1], words, u32(0u), unit);
  }
  static KERNEL_CODE void add_column(f32 (&sum)[R::TILES][4], const typename R::Column& column, u32 unit) {
    UNROLL_FOR (int group = 0; group < G::HEAD_GROUPS; group++) {
      u32 words[4];
      UNROLL_FOR (int q = 0; q < 4; q++) words[q] = column.part[4 * group + q];
      add_words(sum, words, group, unit);
    }
  }

  template <bool EDGE, bool BEGINS>
  static KERNEL_CODE void mix_slice(State& st, Context& c, Pixels<EDGE>& pixels, int slice) {
    constexpr int KEPT = Pixels<EDGE>::KEPT, BEGIN = Pixels<EDGE>::BEGIN;
    i32 lane = lane_id(), g = lane / 4, t = lane % 4;
    const int row_tile = c.warp / G::RUNS, run = c.warp % G::RUNS;
    u32 scores[8 + KEPT][G::HEAD_GROUPS][4];  // loaded when they are reached
    f32 sums[TAPS][R::TILES][4];
    UNROLL_FOR (int y = 0; y < TAPS; y++)
      UNROLL_FOR (int n = 0; n < R::TILES; n++)
        UNROLL_FOR (int x = 0; x < 4; x++) sums[y][n][x] = f32(0.0f);
    i32 to = R::locate(row_tile);
    typename R::Column done[4], before[4];
    u32 unit = select(t == g / 2, select(g % 2 == 0, u32(0x3c00u), u32(0x3c000000u)), u32(0u));
    u32 slope = u32(0x211f211fu);  // 0.01 twice
    Address columns = Gates::locate_columns(c.in.gates, pixels.hidden_column);
    UNROLL_FOR (int x = BEGIN; x < BEGIN + KEPT; x++) load_scores(scores[x], c, row_tile, run, x);
    UNROLL_FOR (int jj = BEGIN; jj < 8; jj++) {
      const int column = pixels.hidden_column + jj;
      load_scores(scores[jj + KEPT], c, row_tile, run, jj + KEPT);
      if (!EDGE && slice > 0 && jj % 4 == 0) R::load_stored(before, c.sums, to, 8 * run + jj);
      f32 hidden[G::N_TILES][4];
      if constexpr (EDGE) {
        UNROLL_FOR (int step = 0; step < T::STEPS; step++) {
          f32 part[2][4];
          T::load_edge(part, c.in.edge, c.in.scores.rows, c.first_row + 16 * row_tile, G::FIRST_EDGE + jj - BEGIN,
                       slice * T::STEPS + step);
          UNROLL_FOR (int n = 0; n < 2; n++)
            UNROLL_FOR (int x = 0; x < 4; x++) hidden[2 * step + n][x] = part[n][x];
        }
      } else if constexpr (G::GATED) {
        UNROLL_FOR (int step = 0; step < T::STEPS; step++) {
          f32 half[2][4];
          Gates::begin_hidden(half, st.rows, columns, jj, slice * T::STEPS + step);
          UNROLL_FOR (int n = 0; n < 2; n++)
            UNROLL_FOR (int x = 0; x < 4; x++) hidden[2 * step + n][x] = half[n][x];
        }
      } else {
        T::begin_hidden(hidden, st.distances, jj);
      }
      if constexpr (BEGINS && PADDING > 0)
        if (pixels.has_begin) T::select_edges(hidden, c.in.edge, pixels.places, column, slice);
      UNROLL_FOR (int tap = 0; tap < TAPS; tap++)
        UNROLL_FOR (int group = 0; group < G::HEAD_GROUPS; group++)
          UNROLL_FOR (int n = 0; n < G::N_TILES; n++) {
            const u32(&w)[2] = st.w1[tap][group * G::N_TILES + n];
            mma_exchange(hidden[n], scores[jj + tap][group], w[0], w[1]);
          }
      u32 active[G::N_TILES][2];
      UNROLL_FOR (int n = 0; n < G::N_TILES; n++)
        UNROLL_FOR (int r = 0; r < 2; r++) {
          u32 word = pack_exchange(hidden[n][2 * r], hidden[n][2 * r + 1]);
          active[n][r] = G::LINEAR ? word : maximum_exchange(word, multiply_exchange(word, slope));
          if (BEGINS && pixels.has_begin)
            active[n][r] = select(T::is_inside(pixels.places, r, column), active[n][r], u32(0u));
        }
      UNROLL_FOR (int step = 0; step < T::STEPS; step++) {
        const u32 a[4] = {active[2 * step][0], active[2 * step][1], active[2 * step + 1][0], active[2 * step + 1][1]};
        UNROLL_FOR (int tap = 0; tap < TAPS; tap++)
          UNROLL_FOR (int n = 0; n < R::TILES; n++) {
            const u32(&w)[2] = st.w2[tap][R::TILES * step + n];
            f32(&sum)[4] = sums[(jj + KEPT - tap) % TAPS][n];
            if (step == 0 && tap == 0) mma_exchange_from_zero(sum, a, w[0], w[1]);
            else mma_exchange(sum, a, w[0], w[1]);
          }
      }
      f32(&sum)[R::TILES][4] = sums[jj % TAPS];
      if (slice > 0) {
        if (!EDGE) add_column(sum, before[jj % 4], unit);
      } else {
        UNROLL_FOR (int group = 0; group < G::HEAD_GROUPS; group++) add_words(sum, scores[jj][group], group, unit);
      }
      done[jj % 4] = R::pack(sum);
      if (!EDGE && jj % 4 == 3) R::store(c.sums, to, done, 8 * run + jj - 3);
    }
    UNROLL_FOR (int y = 0; y < R::REACH; y++) {
      f32(&sum)[R::TILES][4] = sums[(8 + y) % TAPS];
      if (slice > 0) add_column(sum, pixels.passed[y], unit);
      if (slice + 1 < G::SLICES) pixels.passed[y] = R::pack(sum);
    }
    if (slice + 1 == G::SLICES) R::pass_on(c.sums, to, st.carry, sums, run, EDGE);
  }
};
