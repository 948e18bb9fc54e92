// Backward pass of CDAPE's processor for a block's query rows: computes, from the gradient of the logits, the gradients
// of the scores, the table U, the edge E, the bias table (as part of the logits), and both convolutions' weights.
//
//   hidden[j] = U[i - j] + Σ_t W1[t]·S[j + t - p]        (E[i, j] instead of U for j < p)
//   L[j] = S[j] + bias[i - j] + Σ_t W2[t]·LeakyReLU(hidden[j + t - p])
//   dhidden[j] = LeakyReLU'(hidden[j]) · Σ_t W2[t]ᵀ·dL[j - t + p]
//   dS[j] = dL[j] + Σ_t W1[t]ᵀ·dhidden[j - t + p]
//
// (DAPE V2, equation 5; b1 is part of U and E.) Scores and hidden values are recomputed. The gradients of the weights
// need all registers of a kernel, so a separate launch computes them. With SCORES, a kernel returns dS and the
// gradients of the tables; with WEIGHTS, the gradients of the weights.
#pragma once
#include "diagonals.h"
#include "gates.h"
#include "runs.h"
#include "scores.h"
#include "tables.h"
#include "windows.h"

struct MixerBackwardArgs {
  ScoreInputs scores;
  const void* dlogits;  // words [R, 8 pairs, C]; columns that a row does not see are not read
  const void* table;    // U, float32 [N + front, 4 n-tiles, 4, 4], see Tables; entry 0 is distance -front
  const void* edge;     // E, float32 [R, p, 32]
  const void* w1;       // B fragments of W1, exchange numbers [k][4 n-tiles][32 lanes][2]
  const void* w2;       // B fragments of W2ᵀ, numbers of the model's type, same layout
  const void* w1_back;  // B fragments of W1ᵀ, same type [k][2 k-steps][2 n-tiles][32 lanes][2]
  void* dscores;        // [H, R, C], written in the columns that a row sees
  void* dtables;        // float32 [programs, N', 48], initially 0: row i has dU[i - p] (32 widths), dbias[i] (16 heads)
  void* dedge;          // float32 [R, p, 32]
  void* dweights;       // float32 [programs, 2, k, 4 n-tiles, 32 lanes, 4]: gradients of W1 and W2
  int table_front, dtable_rows;
  // Bytes from one sequence to the next; `map_batch` applies to dlogits.
  long long q_batch, k_batch, map_batch, edge_batch, dscores_batch;
  // GATED: terms that replace the table. E and its gradient are [R, 4p, 32]. Row j of `dtables` [programs, C, 48]
  // belongs to the hidden values of column j + p and the logits of column j, with the channels of `drows` (see
  // GateSums).
  GateInputs gates;
  void* drows;  // float32 [R, 48]
  long long drows_batch;
};

template <class G, bool SCORES, bool WEIGHTS>
struct MixerBackward {
  static_assert(SCORES != WEIGHTS, "a kernel returns one of both");
  static_assert(G::HEAD_GROUPS == 1 && G::SLICES == 1, "weights are of 16 heads and 32 widths");
  typedef typename G::Element Element;
  typedef Scores<G, 8> S;
  typedef PairWindow<G> W;
  typedef Tables<G> T;
  typedef Runs<G, Element, false> R;
  typedef Diagonals<G> D;
  typedef GateTerms<G> Gates;
  typedef GateSums<G> Sums;
  static constexpr int PADDING = G::PADDING, TAPS = G::TAPS, NUM_THREADS = 32 * G::WARPS, BLOCKS_PER_SM = 8 / G::WARPS;
  static constexpr float SLOPE = 0.01f;
  // Registers hold the weights of a slice of the width: the whole width, or half of it with more than three taps. The
  // slices' contributions to dS are summed. Each slice has its own gradients of weights, computed by its own blocks.
  static constexpr int N_TILES = PADDING > 1 ? 2 : 4, STEPS = N_TILES / 2, SLICES = 4 / N_TILES;
  static_assert(!G::GATED || SLICES == 1, "gates have sums of all widths");

  static constexpr int MEMORY_BYTES =
      G::QUERY_BYTES + 2 * W::MEMORY_BYTES + (SCORES ? R::MEMORY_BYTES + D::MEMORY_BYTES : 0);

  struct State {
    u32 w1[TAPS][N_TILES][2], w2[TAPS][N_TILES][2], w1_back[TAPS][N_TILES][2];
    typename R::Column carry[R::CARRY];
    f32 dw1[WEIGHTS ? TAPS : 1][N_TILES][4], dw2[WEIGHTS ? TAPS : 1][N_TILES][4];
    typename D::Sums diagonals;
    // GATED: row vectors and sums of the warp's row tile.
    typename Gates::Rows rows;
    typename Sums::Rows row_sums;
  };
  struct Context {
    MixerBackwardArgs args;
    SharedMemory queries, scores, dlogits, sums, diagonals;
    int warp, first_row, slice;
    long long program;
    Tiles tiles;
    KERNEL_CODE int position() const { return args.scores.position + first_row; }
  };

  static KERNEL_CODE void run(MixerBackwardArgs args, SharedMemory memory, int warp, int block, int num_blocks,
                              int batch) {
    const int slice = WEIGHTS ? batch % SLICES : 0;
    if (WEIGHTS) batch /= SLICES;  // slices are adjacent in the grid, like sequences
    const long long program = (long long)batch * num_blocks + block;
    args.scores.q = (const char*)args.scores.q + batch * args.q_batch;
    args.scores.k = (const char*)args.scores.k + batch * args.k_batch;
    args.scores.select_sequence(batch);
    if constexpr (G::GATED) {
      args.gates.select_sequence(batch);
      args.edge = (const char*)args.edge + batch * args.gates.edge_batch;
      args.drows = (char*)args.drows + batch * args.drows_batch;
    }
    args.dlogits = (const char*)args.dlogits + batch * args.map_batch;
    args.dscores = (char*)args.dscores + batch * args.dscores_batch;
    args.dedge = (char*)args.dedge + batch * args.edge_batch;
    Context c{args,
              memory,
              memory,
              memory,
              memory,
              memory,
              warp,
              block * G::ROWS,
              slice,
              program,
              args.scores.find_tiles<G>(block * G::ROWS)};
    c.scores = advance(memory, G::QUERY_BYTES);
    c.dlogits = advance(c.scores, W::MEMORY_BYTES);
    c.sums = advance(c.dlogits, W::MEMORY_BYTES);
    c.diagonals = advance(c.sums, R::MEMORY_BYTES);
    State st;
    begin(st, c);
    barrier(memory);
    if constexpr (G::HAS_PROLOGUE) {
      load_tile<true>(c, 2 * PADDING - G::COLUMNS);
      barrier(memory);
      mix<true, false>(st, c, -G::COLUMNS);
      barrier(memory);
    } else {
      R::clear(st.carry);
      clear_columns(c);
    }
    Step step{st, c, memory};
    RowSpans::go_over<G>(c.tiles, step);
    if constexpr (WEIGHTS) store_weights(st, c, memory);
    if constexpr (SCORES && G::GATED) {
      static_assert(Sums::ROW_MEMORY_BYTES <= MEMORY_BYTES && Sums::MEMORY_BYTES <= D::MEMORY_BYTES, "sums fit");
      Sums::store(memory, warp, st.row_sums, args.drows, c.first_row, args.scores.rows);
    }
  }

 private:
  struct Step {
    State& st;
    Context& c;
    SharedMemory memory;
    template <bool MASKED>
    KERNEL_CODE void take(int tile) {
      take_tile<MASKED>(st, c, memory, tile, MASKED && tile + 1 == c.tiles.end);
    }
  };
  template <bool MASKED>
  static KERNEL_CODE void take_tile(State& st, Context& c, SharedMemory memory, int tile, bool is_last) {
    const int first = tile * G::COLUMNS;
    keep_columns(c);
    load_tile<MASKED>(c, first + 2 * PADDING);
    barrier(memory);
    mix<false, G::HAS_EDGES && MASKED>(st, c, first);
    barrier(memory);
    if constexpr (SCORES) {
      store_scores<MASKED>(c, first);
      if constexpr (G::GATED) {
        Sums::add(c.diagonals, c.warp, first, c.args.dtables, c.program, c.args.dtable_rows);
        return;
      }
      const int row = c.position() - first - (G::COLUMNS - 1);  // row of the sums' first distance
      D::add(st.diagonals, c.diagonals, c.warp, tile, is_last, c.args.dtables, c.program, c.args.dtable_rows, row);
    }
  }

  static KERNEL_CODE void begin(State& st, Context& c) {
    if (WEIGHTS || SLICES == 1) load_weights(st, c, c.slice);
    if constexpr (SCORES) {
      D::clear(st.diagonals);
      Sums::clear(st.row_sums);
    }
    if constexpr (G::GATED)
      Gates::load_rows(st.rows, c.args.gates, c.args.scores.rows, c.first_row + 16 * (c.warp / G::RUNS));
    if constexpr (WEIGHTS)
      UNROLL_FOR (int tap = 0; tap < TAPS; tap++)
        UNROLL_FOR (int n = 0; n < N_TILES; n++)
          UNROLL_FOR (int x = 0; x < 4; x++) {
            st.dw1[tap][n][x] = f32(0.0f);
            st.dw2[tap][n][x] = f32(0.0f);
          }
    S::load_queries(c.args.scores, c.queries, c.warp, c.first_row);
  }

  static KERNEL_CODE void load_weights(State& st, const Context& c, int slice) {
    G::load_weights(st.w1, c.args.w1, slice * N_TILES);
    G::load_weights(st.w2, c.args.w2, slice * N_TILES);
    if constexpr (SCORES) G::load_weights(st.w1_back, c.args.w1_back, slice * N_TILES);
  }

  // Loads scores and dL of a tile's columns. A warp loads dL of an equal share of the rows, for all heads.
  template <bool MASKED>
  static KERNEL_CODE void load_tile(Context& c, int first) {
    compute_scores<MASKED>(c, first);
    const long long columns = c.args.scores.columns;
    constexpr int LANES = G::COLUMNS / 2;  // lanes per row of a pair
    i32 lane = lane_id(), pair = lane / LANES, column = lane % LANES * 2;
    UNROLL_FOR (int r = 0; r < G::WARP_ROWS; r++) {
      const int row = G::WARP_ROWS * c.warp + r, in_map = c.first_row + row;
      const int bounded = in_map < c.args.scores.rows ? in_map : c.args.scores.rows - 1;
      const int last = in_map < c.args.scores.rows ? c.position() + row : -1;
      const int begin = MASKED && G::LOCAL ? c.args.scores.find_first(in_map) : 0;
      UNROLL_FOR (int part = 0; part < G::PAIRS; part += 32 / LANES) {
        Words<2> v;
        if (MASKED) {
          i32 j = column + first, inside = minimum(maximum(j, i32(0)), i32((int)columns - 2));
          Address from = advance_heads(address(c.args.dlogits, inside * 4), pair, columns * 4);
          v = load_global<2>(advance(from, ((long long)bounded * G::PAIRS + part) * columns * 4), 0);
          UNROLL_FOR (int x = 0; x < 2; x++) v.x[x] = select(j >= 0 && j + x <= last, v.x[x], u32(0u));
          if (G::LOCAL)
            UNROLL_FOR (int x = 0; x < 2; x++) v.x[x] = select(j + x >= begin, v.x[x], u32(0u));
        } else {
          Address from = advance_heads(address(c.args.dlogits, column * 4), pair, columns * 4);
          v = load_global<2>(advance(from, (((long long)in_map * G::PAIRS + part) * columns + first) * 4), 0);
        }
        store_shared<2>(
            c.dlogits,
            column * 4 + pair * (W::PAIR_STRIDE * 4) + (W::row_offset(row) + W::pair_offset(part) + W::FIRST * 4), v);
      }
    }
  }

  // Computes the scores of 32 columns and the one or two pairs of heads whose words the warp owns.
  static constexpr int PAIR_WARPS = G::WARPS / (G::COLUMNS / 32), OWNED_PAIRS = G::PAIRS / PAIR_WARPS;
  template <bool MASKED>
  static KERNEL_CODE void compute_scores(Context& c, int tile_first) {
    const ScoreInputs& in = c.args.scores;
    const int behind = c.warp / PAIR_WARPS * 32, first = tile_first + behind;
    UNROLL_FOR (int owned = 0; owned < OWNED_PAIRS; owned++) {
      const int pair = c.warp % PAIR_WARPS + owned * PAIR_WARPS;
      i32 lane = lane_id();
      i32 to = W::row_offset(lane / 4) + lane % 4 * 32 + (W::pair_offset(pair) + (W::FIRST + behind) * 4);
      UNROLL_FOR (int column = 0; column < 8; column += 4 * G::GROUPS) {
        typename S::Sums sums[2];
        UNROLL_FOR (int h = 0; h < 2; h++) {
          typename S::Keys keys;
          const int head = 2 * pair + h;
          if (MASKED) S::template load_keys_inside<false>(keys, in, head, first + column, in.columns - 1);
          else S::load_keys(keys, in, head, first + column);
          S::multiply(sums[h], keys, c.queries, head);
        }
        u32 words[2][4][2];
        S::template pack<MASKED>(words, sums, in, c.first_row, first + column);
        UNROLL_FOR (int block = 0; block < 2; block++)
          UNROLL_FOR (int r = 0; r < 2; r++) {
            Words<4> v;
            UNROLL_FOR (int x = 0; x < 4; x++) v.x[x] = words[block][x][r];
            const int in_tile = column + S::block_column(block);
            store_shared<4>(c.scores, to + (W::row_offset(S::block_row(block) + 8 * r) + in_tile * 4), v);
          }
      }
    }
  }

  // Copies the tile's last columns before the next tile: scores by pairs and dL by rows, as the warps own them.
  static KERNEL_CODE void keep_columns(Context& c) {
    if (owns_last_scores(c)) W::keep_last_columns(c.scores, c.warp % PAIR_WARPS);
    i32 at = locate_dlogits(c);
    UNROLL_FOR (int x = 0; x < 2 * PADDING; x += 2) {
      Words<2> v = load_shared<2>(c.dlogits, at + (G::COLUMNS + W::FIRST - 2 * PADDING + x) * 4);
      store_shared<2>(c.dlogits, at + (W::FIRST - 2 * PADDING + x) * 4, v);
    }
  }

  // Zeros the columns that `keep_columns` copies for the first tile.
  static KERNEL_CODE void clear_columns(Context& c) {
    if (owns_last_scores(c)) W::clear_last_columns(c.scores, c.warp % PAIR_WARPS);
    UNROLL_FOR (int x = G::COLUMNS - 2 * PADDING; x < G::COLUMNS; x += 2)
      store_shared<2>(c.dlogits, locate_dlogits(c) + (W::FIRST + x) * 4, Words<2>{u32(0u), u32(0u)});
  }
  static KERNEL_CODE bool owns_last_scores(const Context& c) { return c.warp / PAIR_WARPS == G::COLUMNS / 32 - 1; }
  // Offset of dL in the warp's rows. A lane has a row and a pair.
  static KERNEL_CODE i32 locate_dlogits(const Context& c) {
    i32 lane = lane_id();
    return W::row_offset(lane / 8 % G::WARP_ROWS + G::WARP_ROWS * c.warp) + W::pair_offset(lane % 8);
  }

  // Transposes an A fragment: rows are heads and columns are the pixels' rows afterwards.
  static KERNEL_CODE void transpose(u32 (&a)[4], const u32 (&x)[4]) {
    a[0] = transpose_8x8(x[0]);
    a[1] = transpose_8x8(x[2]);
    a[2] = transpose_8x8(x[1]);
    a[3] = transpose_8x8(x[3]);
  }
  static KERNEL_CODE void transpose_scores(u32 (&a)[4], const u32 (&x)[4]) {
    u32 y[4];
    UNROLL_FOR (int q = 0; q < 4; q++) y[q] = Element::from_exchange(x[q]);
    transpose(a, y);
  }

  // Mixes the warp's 16 rows and run of 8 columns. EDGE: only the hidden values of columns left of p. BEGINS: documents
  // may begin in this tile.
  template <bool EDGE, bool BEGINS>
  static KERNEL_CODE void mix(State& st, Context& c, int first) {
    if (EDGE) R::clear(st.carry);
    if (EDGE && c.warp % G::RUNS != G::RUNS - 1) return;
    typename R::Column passed[R::CARRY];  // contributions of earlier slices to the next run's columns
    UNROLL_FOR (int slice = 0; slice < (SCORES ? SLICES : 1); slice++) {
      if (SCORES && SLICES > 1) load_weights(st, c, slice);
      mix_slice<EDGE, BEGINS>(st, c, passed, first, WEIGHTS ? c.slice : slice);
    }
  }

  template <bool EDGE, bool BEGINS>
  static KERNEL_CODE void mix_slice(State& st, Context& c, typename R::Column (&passed)[R::CARRY], int first,
                                    int slice) {
    i32 lane = lane_id(), g = lane / 4, t = lane % 4;
    const int row_tile = c.warp / G::RUNS, run = c.warp % G::RUNS;
    const int first_step = slice * STEPS;
    constexpr int BEGIN = EDGE ? 8 - PADDING : 0, KEPT = 2 * PADDING;
    W s, l;
    i32 at = W::locate(row_tile, run);
    s.template load<0, KEPT>(c.scores, at);
    l.template load<0, KEPT>(c.dlogits, at);
    u32 s_rows[TAPS][4], l_rows[TAPS][4];  // transposed words of the columns that a hidden value reads
    if constexpr (EDGE) {
      s.template load<KEPT, 8 + KEPT>(c.scores, at);
      l.template load<KEPT, 8 + KEPT>(c.dlogits, at);
    }
    if constexpr (WEIGHTS)
      UNROLL_FOR (int x = 0; x < KEPT; x++) {
        transpose_scores(s_rows[(BEGIN + x) % TAPS], s.column[BEGIN + x]);
        transpose(l_rows[(BEGIN + x) % TAPS], l.column[BEGIN + x]);
      }
    f32 ds[SCORES ? TAPS : 1][2][4], du[SCORES ? 2 : 1][N_TILES][4], db[SCORES ? 2 : 1][2][4];
    typename Sums::Columns column_sums;  // GATED: replaces du and db
    Sums::clear(column_sums);
    if constexpr (SCORES) {
      UNROLL_FOR (int y = 0; y < TAPS; y++)
        UNROLL_FOR (int n = 0; n < 2; n++)
          UNROLL_FOR (int x = 0; x < 4; x++) ds[y][n][x] = f32(0.0f);
      UNROLL_FOR (int m = 0; m < 2; m++)
        UNROLL_FOR (int x = 0; x < 4; x++) {
          UNROLL_FOR (int n = 0; n < N_TILES; n++) du[m][n][x] = f32(0.0f);
          UNROLL_FOR (int n = 0; n < 2; n++) db[m][n][x] = f32(0.0f);
        }
    }
    i32 sums = R::locate(row_tile);
    i32 entry = g + (c.position() + 16 * row_tile - (first + PADDING + 8 * run) + c.args.table_front);
    Address entries[2];
    UNROLL_FOR (int n = 0; n < 2; n++)
      entries[n] = address(c.args.table, entry * 256 + first_step * 128 + ((entry & 1) ^ n) * 64 + t * 16);
    typename R::Column done[4], others[4];  // sums of earlier slices
    u32 unit = select(t == g / 2, select(g % 2 == 0, u32(Element::ONE), u32(Element::ONE << 16)), u32(0u));
    const int hidden_column = first + PADDING + 8 * run;
    Address columns = Gates::locate_columns(c.args.gates, hidden_column);
    typename T::Places places;
    bool has_begin = false;
    if constexpr (BEGINS) {
      has_begin = T::has_edge(c.args.scores, c.first_row + 16 * row_tile, hidden_column);
      if (has_begin) T::find_places(places, c.args.scores, c.first_row + 16 * row_tile);
    }
    UNROLL_FOR (int jj = BEGIN; jj < 8; jj++) {
      if (!EDGE && jj == 0) {
        s.template load<KEPT, 4 + KEPT>(c.scores, at);
        l.template load<KEPT, 4 + KEPT>(c.dlogits, at);
      }
      if (!EDGE && jj == 4) {
        s.template load<4 + KEPT, 8 + KEPT>(c.scores, at);
        l.template load<4 + KEPT, 8 + KEPT>(c.dlogits, at);
      }
      if constexpr (WEIGHTS) {
        transpose_scores(s_rows[(jj + KEPT) % TAPS], s.column[jj + KEPT]);
        transpose(l_rows[(jj + KEPT) % TAPS], l.column[jj + KEPT]);
      }
      typename D::Shift shift;
      if constexpr (SCORES && !EDGE) {
        D::build_shift(shift, jj);
        u32 dl[4];
        if constexpr (G::GATED) {
          transpose(dl, l.column[jj]);
          Sums::add_to_columns(column_sums, 2, dl, jj);
          UNROLL_FOR (int n = 0; n < 2; n++)
            Sums::add_to_rows(st.row_sums, 4 + n, l.column[jj][2 * n], l.column[jj][2 * n + 1], unit);
        } else if (slice == 0) {
          UNROLL_FOR (int q = 0; q < 4; q++) dl[q] = transpose_8x8(l.column[jj][q]);
          UNROLL_FOR (int n = 0; n < 2; n++) D::add_shifted(db[0][n], db[1][n], shift, dl[2 * n], dl[2 * n + 1], jj);
        }
      }
      if (SCORES && !EDGE && slice > 0 && jj % 4 == 0) R::load_stored(others, c.sums, sums, 8 * run + jj);
      UNROLL_FOR (int step = 0; step < STEPS; step++) {  // 16 widths at a time
        f32 hidden[2][4], gradient[2][4];
        if constexpr (EDGE)
          T::load_edge(hidden, c.args.edge, c.args.scores.rows, c.first_row + 16 * row_tile, G::FIRST_EDGE + jj - BEGIN,
                       first_step + step);
        else if constexpr (G::GATED) Gates::begin_hidden(hidden, st.rows, columns, jj, step);
        else T::load_entries(hidden, entries, jj, step);
        if constexpr (BEGINS && PADDING > 0)
          if (has_begin) T::select_edge(hidden, c.args.edge, places, hidden_column + jj, first_step + step);
        UNROLL_FOR (int tap = 0; tap < TAPS; tap++)
          UNROLL_FOR (int n = 0; n < 2; n++) {
            const int w = 2 * step + n;
            mma_exchange(hidden[n], s.column[jj + tap], st.w1[tap][w][0], st.w1[tap][w][1]);
            if (tap == 0) Element::multiply_from_zero(gradient[n], l.column[jj + KEPT], st.w2[0][w][0], st.w2[0][w][1]);
            else Element::multiply(gradient[n], l.column[jj + KEPT - tap], st.w2[tap][w][0], st.w2[tap][w][1]);
          }
        u32 active[2][2], before[2][2];
        UNROLL_FOR (int n = 0; n < 2; n++)
          UNROLL_FOR (int r = 0; r < 2; r++) {
            UNROLL_FOR (int x = 2 * r; x < 2 * r + 2; x++) {
              f32 h = hidden[n][x], d = gradient[n][x];
              gradient[n][x] = select(h > 0.0f, d, d * SLOPE);
              hidden[n][x] = maximum(h, h * SLOPE);
              if (BEGINS && has_begin) {
                pred is_inside = T::is_inside(places, r, hidden_column + jj);
                gradient[n][x] = select(is_inside, gradient[n][x], f32(0.0f));
                hidden[n][x] = select(is_inside, hidden[n][x], f32(0.0f));
              }
            }
            before[n][r] = Element::pack(gradient[n][2 * r], gradient[n][2 * r + 1]);
            if constexpr (WEIGHTS) active[n][r] = Element::pack(hidden[n][2 * r], hidden[n][2 * r + 1]);
          }
        if constexpr (SCORES) {
          if constexpr (BEGINS && PADDING > 0)
            if (has_begin) store_edge(gradient, c, places, hidden_column + jj, first_step + step);
          if constexpr (EDGE) store_edge(gradient, c, row_tile, G::FIRST_EDGE + jj - BEGIN, first_step + step);
          u32 a[4] = {before[0][0], before[0][1], before[1][0], before[1][1]};
          UNROLL_FOR (int tap = 0; tap < TAPS; tap++)
            UNROLL_FOR (int n = 0; n < 2; n++) {
              const u32(&w)[2] = st.w1_back[tap][2 * step + n];
              f32(&sum)[4] = ds[(jj + tap) % TAPS][n];
              if (step == 0 && tap == KEPT) Element::multiply_from_zero(sum, a, w[0], w[1]);
              else Element::multiply(sum, a, w[0], w[1]);
            }
        }
        UNROLL_FOR (int n = 0; n < 2; n++)
          UNROLL_FOR (int r = 0; r < 2; r++) {
            // E is not a function of the distance.
            if (SCORES && BEGINS && has_begin)
              before[n][r] = select(T::is_at_edge(places, r, hidden_column + jj), u32(0u), before[n][r]);
          }
        if constexpr (SCORES && G::GATED && !EDGE)
          UNROLL_FOR (int n = 0; n < 2; n++)
            Sums::add_to_rows(st.row_sums, 2 * step + n, before[n][0], before[n][1], unit);
        UNROLL_FOR (int n = 0; n < 2; n++)
          UNROLL_FOR (int r = 0; r < 2; r++) before[n][r] = transpose_8x8(before[n][r]);
        if constexpr (WEIGHTS) {
          UNROLL_FOR (int n = 0; n < 2; n++)
            UNROLL_FOR (int r = 0; r < 2; r++) active[n][r] = transpose_8x8(active[n][r]);
          UNROLL_FOR (int tap = 0; tap < TAPS; tap++)
            UNROLL_FOR (int n = 0; n < 2; n++) {
              Element::multiply(st.dw1[tap][2 * step + n], s_rows[(jj + tap) % TAPS], before[n][0], before[n][1]);
              Element::multiply(st.dw2[tap][2 * step + n], l_rows[(jj + KEPT - tap) % TAPS], active[n][0],
                                active[n][1]);
            }
        }
        if constexpr (SCORES && !EDGE && G::GATED) {
          const u32 transposed[4] = {before[0][0], before[1][0], before[0][1], before[1][1]};
          Sums::add_to_columns(column_sums, step, transposed, jj);
        } else if constexpr (SCORES && !EDGE)
          UNROLL_FOR (int n = 0; n < 2; n++) {
            D::add_shifted(du[0][2 * step + n], du[1][2 * step + n], shift, before[n][0], before[n][1], jj);
          }
      }
      if constexpr (SCORES) {
        f32(&sum)[2][4] = ds[jj % TAPS];
        // Adds dL by a product with the identity, which is exact; or the sum of earlier slices, which includes it.
        if (slice == 0) add_words(sum, l.column[jj], unit);
        else if (!EDGE) add_words(sum, others[jj % 4].part, unit);
        done[jj % 4] = R::pack(sum);
        if (!EDGE && jj % 4 == 3) R::store(c.sums, sums, done, 8 * run + jj - 3);
      }
    }
    if constexpr (SCORES) {
      UNROLL_FOR (int y = 0; y < R::REACH; y++) {
        f32(&sum)[2][4] = ds[(8 + y) % TAPS];
        if (slice > 0) add_words(sum, passed[y].part, unit);
        if (slice + 1 < SLICES) passed[y] = R::pack(sum);
      }
      if (slice + 1 == SLICES) R::pass_on(c.sums, sums, st.carry, ds, run, EDGE);
      if constexpr (!EDGE && G::GATED) Sums::store(c.diagonals, c.warp, column_sums);
      else if constexpr (!EDGE) D::store(c.diagonals, c.warp, du, db, slice);
    }
  }

  static KERNEL_CODE void add_words(f32 (&sum)[2][4], const u32 (&words)[4], u32 unit) {
    Element::multiply(sum[0], words, unit, u32(0u));
    Element::multiply(sum[1], words, u32(0u), unit);
  }

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
  static KERNEL_CODE void store_weights(State& st, Context& c, SharedMemory memory) {
    constexpr int COUNT = 2 * TAPS * N_TILES, WARP_BYTES = COUNT * 512;
    static_assert(G::WARPS * WARP_BYTES <= MEMORY_BYTES, "the warps' sums take the place of a tile");
    i32 lane = lane_id();
    barrier(memory);
    UNROLL_FOR (int which = 0; which < 2; which++)
      UNROLL_FOR (int tap = 0; tap < TAPS; tap++)
        UNROLL_FOR (int n = 0; n < N_TILES; n++) {
          Words<4> v;
          UNROLL_FOR (int x = 0; x < 4; x++) v.x[x] = as_u32(which ? st.dw2[tap][n][x] : st.dw1[tap][n][x]);
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
      const int place = fragment / N_TILES * 4 + c.slice * N_TILES + fragment % N_TILES;
      Address to = advance(address(c.args.dweights, lane * 16), (c.program * (2 * TAPS * 4) + place) * 512);
      store_global<4>(to, 0, v, lane >= 0);
    }
  }
};
