// CDAPE's logits for a block's query rows, from queries and keys, as words that a kernel's last phase takes from shared
// memory.
//
//   hidden[j] = U[i - j] + Σ_t W1[t]·S[j + t - p]        (E[i, j] instead of U for j < p)
//   L[j] = S[j] + bias[i - j] + Σ_t W2[t]·LeakyReLU(hidden[j + t - p])
//
// (DAPE V2, equation 5; b1 is part of U and E, b2 of the bias, which the last phase adds.) Scores are never in memory.
// Everything that a tile reads from global memory is requested a tile ahead of its use, or half of one: few warps fit
// on a multiprocessor, and they would wait for it together.
#pragma once
#include "runs.h"
#include "scores.h"
#include "tables.h"
#include "windows.h"

struct LogitInputs {
  ScoreInputs scores;
  const void* table;  // U, exchange numbers [groups of 8 distances, 2, 32 lanes, 2, 2, 2], see Tables::Distances
  const void* edge;   // E, float32 [R, p, 32]
  const void* w1;     // B fragments of W1, exchange numbers [k][4 n-tiles][32 lanes][2]
  const void* w2;     // B fragments of W2, exchange numbers [k][2 k-steps][2 n-tiles][32 lanes][2]
  const void* bias;   // float32 [16, bias_stride]: entry bias_front + n is added to the logits at distance n
  int table_group;    // of the distance of row 0 and column p + 7
  int bias_front, bias_stride;  // bias_front + position is a multiple of 4
};

// BY_ROWS: the last phase reads its words by rows and columns, not by columns and pairs.
template <class G_, bool BY_ROWS>
struct Logits {
  typedef G_ G;
  typedef Scores<G, 4> S;
  typedef FragmentWindow<G> W;
  typedef Tables<G> T;
  typedef Runs<G, Exchange, BY_ROWS> R;
  static constexpr int PADDING = G::PADDING, TAPS = G::TAPS, COLUMNS = G::COLUMNS, NUM_THREADS = 32 * G::WARPS;
  // Of the warp's four heads, those whose next keys wait in registers while a tile is mixed.
  static constexpr int KEY_WORDS = G::HEAD_DIM / 4 * G::GROUPS, HELD = KEY_WORDS <= 16 ? 4 : KEY_WORDS <= 32 ? 2 : 1;
  static constexpr int MEMORY_BYTES = G::QUERY_BYTES + W::MEMORY_BYTES + R::MEMORY_BYTES;

  struct State {
    u32 w1[TAPS][4][2], w2[TAPS][4][2];
    typename R::Words4 carry[R::CARRY];
    typename S::Keys keys[HELD];      // of the next tile
    typename T::Distances distances;  // of this one
  };
  struct Context {
    LogitInputs in;
    SharedMemory queries, scores, sums;
    int warp, first_row;
    Tiles tiles;
    KERNEL_CODE int position() const { return in.scores.position + first_row; }
    // The last column that one of the block's rows sees.
    KERNEL_CODE int last_column() const {
      const int end = first_row + G::ROWS < in.scores.rows ? first_row + G::ROWS : in.scores.rows;
      return in.scores.position + end - 1;
    }
  };

  // Goes over the tiles of the block's rows; after each, take<MASKED>(context, first column) of the last phase.
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
      mix<true, false>(st, c, -COLUMNS);
      barrier(memory);
    } else {
      R::clear(st.carry);
      if (owns_last_columns(c)) W::clear_last_columns(c.scores, warp % 4);
    }
    if (!G::LOCAL) c.tiles = in.scores.find_tiles<G>(c.first_row);  // not before, when registers are scarce
    Step<Last> step{st, c, memory, last};
    RowSpans::go_over<G>(c.tiles, step);
  }

  // The words of pair `pair` in four columns of a tile, `at` being their row's offset: both heads' logits without bias.
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

  // A warp computes the scores of pairs w and w + 4, w = warp % 4, in the columns of its scores' blocks: its heads are
  // 2w, 2w + 1 and 8 more.
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
    T::load_distances(st.distances, c.in.table, c.in.table_group + (c.first_row - first) / 8 + 2 * row_tile - run);
    if (owns_last_columns(c)) W::keep_last_columns(c.scores, c.warp % 4);
    compute_scores<MASKED>(st, c, tile);
    barrier(memory);
    mix<false, G::LOCAL && MASKED>(st, c, first);
    barrier(memory);
    last.template take<MASKED>(c, first);
  }

  static KERNEL_CODE void begin(State& st, Context& c) {
    G::load_weights(st.w1, c.in.w1);
    G::load_weights(st.w2, c.in.w2);
    S::load_queries(c.in.scores, c.queries, c.warp, c.first_row);
    UNROLL_FOR (int h = 0; h < HELD; h++) load_keys(st, c, h, G::HAS_PROLOGUE ? -1 : c.tiles.first);
  }

  static KERNEL_CODE bool owns_last_columns(const Context& c) { return c.warp / 4 == G::WARPS / 4 - 1; }

  static KERNEL_CODE int find_column(Context& c, int tile) {
    return tile * COLUMNS + 2 * PADDING + 16 * G::GROUPS * (c.warp / 4);
  }

  // Scores of a tile, -1 being the one before the first, from keys that were loaded before; loads those of the next
  // HELD heads, of this tile or the next.
  template <bool MASKED>
  static KERNEL_CODE void compute_scores(State& st, Context& c, int tile) {
    u32 words[2][2][4][2];
    UNROLL_FOR (int upper = 0; upper < 2; upper++) {
      typename S::Sums sums[2];
      UNROLL_FOR (int h = 0; h < 2; h++) {
        const int now = 2 * upper + h, next = now + HELD;
        S::multiply(sums[h], st.keys[now % HELD], c.queries, find_head(c.warp, now));
        load_keys(st, c, next % 4, next < 4 ? tile : tile + 1);
      }
      S::template pack<MASKED>(words[upper], sums, c.in.scores, c.first_row, find_column(c, tile));
    }
    W::store(c.scores, words, c.warp % 4, 16 * G::GROUPS * (c.warp / 4));
  }
  static KERNEL_CODE void load_keys(State& st, Context& c, int h, int tile) {
    const int head = find_head(c.warp, h), first = find_column(c, tile);
    S::template load_keys_inside<true>(st.keys[h % HELD], c.in.scores, head, first, c.last_column());
  }

  // Mixes the warp's 16 rows and run of 8 columns. EDGE: only the hidden values of the columns left of p. BEGINS: rows'
  // documents may begin here.
  template <bool EDGE, bool BEGINS>
  static KERNEL_CODE void mix(State& st, Context& c, int first) {
    i32 lane = lane_id(), g = lane / 4, t = lane % 4;
    const int row_tile = c.warp / G::RUNS, run = c.warp % G::RUNS;
    if (EDGE) R::clear(st.carry);
    if (EDGE && run != G::RUNS - 1) return;
    constexpr int BEGIN = EDGE ? 8 - PADDING : 0, KEPT = 2 * PADDING;
    u32 scores[8 + KEPT][4];
    UNROLL_FOR (int x = BEGIN; x < 8 + KEPT; x++) W::load(scores[x], c.scores, row_tile, run, x);
    f32 sums[TAPS][2][4];
    UNROLL_FOR (int y = 0; y < TAPS; y++)
      UNROLL_FOR (int n = 0; n < 2; n++)
        UNROLL_FOR (int x = 0; x < 4; x++) sums[y][n][x] = f32(0.0f);
    i32 to = R::locate(row_tile);
    typename R::Words4 done[4];
    u32 unit = select(t == g / 2, select(g % 2 == 0, u32(0x3c00u), u32(0x3c000000u)), u32(0u));
    u32 slope = u32(0x211f211fu);  // 0.01 twice
    const int hidden_column = first + PADDING + 8 * run;
    typename T::Places places;
    bool has_begin = false;
    if constexpr (BEGINS) {
      has_begin = hidden_column < c.in.scores.find_document(c.first_row + 16 * row_tile + 15) + PADDING;
      if (has_begin) T::find_places(places, c.in.scores, c.first_row + 16 * row_tile);
    }
    UNROLL_FOR (int jj = BEGIN; jj < 8; jj++) {
      f32 hidden[4][4];
      if constexpr (EDGE) {
        UNROLL_FOR (int step = 0; step < 2; step++) {
          f32 half[2][4];
          T::load_edge(half, c.in.edge, c.in.scores.rows, c.first_row + 16 * row_tile, jj - BEGIN, step);
          UNROLL_FOR (int n = 0; n < 2; n++)
            UNROLL_FOR (int x = 0; x < 4; x++) hidden[2 * step + n][x] = half[n][x];
        }
      } else {
        T::begin_hidden(hidden, st.distances, jj);
      }
      if constexpr (BEGINS && PADDING > 0)
        if (has_begin) T::select_edges(hidden, c.in.edge, places, hidden_column + jj);
      UNROLL_FOR (int tap = 0; tap < TAPS; tap++)
        UNROLL_FOR (int n = 0; n < 4; n++)
          mma_exchange(hidden[n], scores[jj + tap], st.w1[tap][n][0], st.w1[tap][n][1]);
      u32 active[4][2];
      UNROLL_FOR (int n = 0; n < 4; n++)
        UNROLL_FOR (int r = 0; r < 2; r++) {
          u32 word = pack_exchange(hidden[n][2 * r], hidden[n][2 * r + 1]);
          active[n][r] = maximum_exchange(word, multiply_exchange(word, slope));
          if (BEGINS && has_begin)
            active[n][r] = select(T::is_inside(places, r, hidden_column + jj), active[n][r], u32(0u));
        }
      UNROLL_FOR (int step = 0; step < 2; step++) {
        const u32 a[4] = {active[2 * step][0], active[2 * step][1], active[2 * step + 1][0], active[2 * step + 1][1]};
        UNROLL_FOR (int tap = 0; tap < TAPS; tap++)
          UNROLL_FOR (int n = 0; n < 2; n++) {
            const u32(&w)[2] = st.w2[tap][2 * step + n];
            f32(&sum)[4] = sums[(jj + KEPT - tap) % TAPS][n];
            if (step == 0 && tap == 0) mma_exchange_from_zero(sum, a, w[0], w[1]);
            else mma_exchange(sum, a, w[0], w[1]);
          }
      }
      f32(&sum)[2][4] = sums[jj % TAPS];
      // The scores themselves, exactly, by a product with the identity.
      mma_exchange(sum[0], scores[jj], unit, u32(0u));
      mma_exchange(sum[1], scores[jj], u32(0u), unit);
      done[jj % 4] = R::pack(sum);
      if (!EDGE && jj % 4 == 3) R::store(c.sums, to, done, 8 * run + jj - 3);
    }
    R::pass_on(c.sums, to, st.carry, sums, run, EDGE);
  }
};
