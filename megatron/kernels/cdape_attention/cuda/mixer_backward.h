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
//
// dS is a product over the widths of dhidden, which is therefore computed by rows (`hidden.h`). The weights' gradients
// are products over rows, so that hidden values and dhidden are computed by widths, without transposes.
#pragma once
#include "diagonals.h"
#include "mixer_backward_results.h"

template <class G, bool SCORES, bool WEIGHTS>
struct MixerBackward {
  static_assert(SCORES != WEIGHTS, "a kernel returns either dS or the gradients of the weights");
  static_assert(G::HEAD_GROUPS == 1, "the gradients of weights are those of 16 heads");
  typedef typename G::Element Element;
  typedef MixerBackwardContext Context;
  typedef MixerBackwardInputs<G> Inputs;
  typedef MixerBackwardResults<G> Results;
  typedef PairWindow<G> W;
  typedef Tables<G, WEIGHTS> T;
  typedef Runs<G, Element, false> R;
  typedef Diagonals<G> D;
  typedef GateTerms<G, WEIGHTS> Gates;
  typedef HiddenLayout<WEIGHTS> Layout;
  typedef GateSums<G> Sums;
  static constexpr int PADDING = G::PADDING, TAPS = G::TAPS, NUM_THREADS = 32 * G::WARPS, BLOCKS_PER_SM = 8 / G::WARPS;
  static constexpr float SLOPE = 0.01f;
  // Registers hold the weights of a slice of the width: 32 widths; 16 with more than three taps, or for dS of more than
  // 32 widths; 8 with seven taps if they also hold gradients of the weights. The slices' contributions to dS are
  // summed. Each slice has its own gradients of weights, computed by its own blocks.
  static constexpr bool HAS_NARROW_SLICES = PADDING > 1 || (SCORES && G::WIDTH > 32);
  static constexpr int N_TILES = PADDING > 2 && WEIGHTS ? 1 : HAS_NARROW_SLICES ? 2 : 4;
  static constexpr int SLICES = G::WIDTH / (8 * N_TILES);
  // Hidden values are computed in steps of 16 widths. A slice of 8 widths uses half of a step.
  static constexpr int STEPS = (N_TILES + 1) / 2, STEP_TILES = N_TILES > 1 ? 2 : 1;
  // A block that computes the gradients of the weights reads the terms of its own widths alone.
  static constexpr int ROW_STEPS = SCORES ? G::WIDTH / 16 : STEPS;

  // With one slice, a tile's sums stay in registers until dS is stored, and then take its memory. The L1 cache, which
  // has the rest of a multiprocessor's memory, keeps spilled registers.
  static constexpr bool SHARES_MEMORY = SCORES && SLICES == 1;
  static constexpr int LARGER_BYTES = R::MEMORY_BYTES > D::MEMORY_BYTES ? R::MEMORY_BYTES : D::MEMORY_BYTES;
  static constexpr int RESULT_BYTES = SHARES_MEMORY ? LARGER_BYTES : SCORES ? R::MEMORY_BYTES + D::MEMORY_BYTES : 0;
  static constexpr int MEMORY_BYTES = G::QUERY_BYTES + 2 * W::MEMORY_BYTES + RESULT_BYTES;

  // A warp's sums of a tile, of the gradients of hidden values in a slice and of logits: along diagonals or, GATED,
  // over rows.
  struct TileSums {
    f32 du[SCORES ? 2 : 1][N_TILES][4], db[SCORES ? 2 : 1][2][4];
    typename Sums::Columns columns;
  };

  struct State {
    // Weights of a slice by n-tiles. With WEIGHTS, w1 and w2 are A fragments of two n-tiles, see `arrange`.
    u32 w1[TAPS][2 * STEPS][2], w2[TAPS][2 * STEPS][2], w1_back[TAPS][2 * STEPS][2];
    typename R::Column carry[R::CARRY];
    f32 dw1[WEIGHTS ? TAPS : 1][N_TILES][4], dw2[WEIGHTS ? TAPS : 1][N_TILES][4];
    typename D::Sums diagonals;
    // GATED: row vectors and sums of the warp's row tile.
    typename Gates::template Rows<ROW_STEPS> rows;
    typename Sums::Rows row_sums;
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
    c.diagonals = SHARES_MEMORY ? c.sums : advance(c.sums, R::MEMORY_BYTES);
    State st;
    begin(st, c);
    barrier(memory);
    if constexpr (G::HAS_PROLOGUE) {
      Inputs::template load_tile<true>(c, 2 * PADDING - G::COLUMNS);
      barrier(memory);
      TileSums unused;
      mix<true, false>(st, c, -G::COLUMNS, unused);
      barrier(memory);
    } else {
      R::clear(st.carry);
      Inputs::clear_columns(c);
    }
    Step step{st, c, memory};
    RowSpans::go_over<G>(c.tiles, step);
    if constexpr (WEIGHTS) Results::store_weights(st.dw1, st.dw2, c, memory);
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
    Inputs::keep_columns(c);
    Inputs::template load_tile<MASKED>(c, first + 2 * PADDING);
    barrier(memory);
    TileSums sums;
    mix<false, G::HAS_EDGES && MASKED>(st, c, first, sums);
    barrier(memory);
    if constexpr (SCORES) {
      Results::template store_scores<MASKED>(c, first);
      if constexpr (SHARES_MEMORY) {
        barrier(memory);
        store_sums(c, sums, 0);
        barrier(memory);
      }
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
      Gates::load_rows(st.rows, c.args.gates, c.args.scores.rows, c.first_row + 16 * (c.warp / G::RUNS),
                       c.slice * N_TILES / 2);
    if constexpr (WEIGHTS)
      UNROLL_FOR (int tap = 0; tap < TAPS; tap++)
        UNROLL_FOR (int n = 0; n < N_TILES; n++)
          UNROLL_FOR (int x = 0; x < 4; x++) {
            st.dw1[tap][n][x] = f32(0.0f);
            st.dw2[tap][n][x] = f32(0.0f);
          }
    Inputs::S::load_queries(c.args.scores, c.queries, c.warp, c.first_row);
  }

  static KERNEL_CODE void load_weights(State& st, const Context& c, int slice) {
    const int steps = slice * N_TILES / 2 / STEPS;
    G::load_weights(st.w1, c.args.w1, steps);
    G::load_weights(st.w2, c.args.w2, steps);
    if constexpr (SCORES) G::load_weights(st.w1_back, c.args.w1_back, steps);
    if constexpr (WEIGHTS)
      UNROLL_FOR (int tap = 0; tap < TAPS; tap++)
        UNROLL_FOR (int step = 0; step < STEPS; step++) {
          arrange(st.w1[tap][2 * step], st.w1[tap][2 * step + 1]);
          arrange(st.w2[tap][2 * step], st.w2[tap][2 * step + 1]);
        }
  }
  // Arranges the B fragments of two n-tiles as an A fragment.
  static KERNEL_CODE void arrange(u32 (&first)[2], u32 (&second)[2]) {
    const u32 words[4] = {first[0], second[0], first[1], second[1]};
    UNROLL_FOR (int x = 0; x < 2; x++) {
      first[x] = settle(words[x]);
      second[x] = settle(words[2 + x]);
    }
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
  static KERNEL_CODE void mix(State& st, Context& c, int first, TileSums& tile_sums) {
    if (EDGE) R::clear(st.carry);
    if (EDGE && c.warp % G::RUNS != G::RUNS - 1) return;
    typename R::Column passed[R::CARRY];  // contributions of earlier slices to the next run's columns
    UNROLL_FOR (int slice = 0; slice < (SCORES ? SLICES : 1); slice++) {
      if (SCORES && SLICES > 1) load_weights(st, c, slice);
      mix_slice<EDGE, BEGINS>(st, c, passed, first, WEIGHTS ? c.slice : slice, tile_sums);
    }
  }

  template <bool EDGE, bool BEGINS>
  static KERNEL_CODE void mix_slice(State& st, Context& c, typename R::Column (&passed)[R::CARRY], int first, int slice,
                                    TileSums& tile_sums) {
    i32 lane = lane_id(), g = lane / 4, t = lane % 4;
    const int row_tile = c.warp / G::RUNS, run = c.warp % G::RUNS;
    const int first_step = slice * N_TILES / 2;
    constexpr int BEGIN = EDGE ? 8 - PADDING : 0, KEPT = 2 * PADDING;
    typename T::template Distances<STEPS> distances;
    const int group = c.args.table_group + (c.first_row - first) / 8 + 2 * row_tile - run;
    if constexpr (!EDGE && !G::GATED) T::load_distances(distances, c.args.table, group, first_step);
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
    f32 ds[SCORES ? TAPS : 1][2][4], (&du)[SCORES ? 2 : 1][N_TILES][4] = tile_sums.du;
    f32(&db)[SCORES ? 2 : 1][2][4] = tile_sums.db;
    typename Sums::Columns& column_sums = tile_sums.columns;
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
    typename R::Column done[4], others[4];  // sums of earlier slices
    u32 unit = select(t == g / 2, select(g % 2 == 0, u32(Element::ONE), u32(Element::ONE << 16)), u32(0u));
    const int hidden_column = first + PADDING + 8 * run;
    Address columns = Gates::locate_columns(c.args.gates, hidden_column, SCORES ? 0 : first_step);
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
        if (G::GATED && slice == 0) {
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
        else if constexpr (G::GATED)
          Gates::begin_hidden(hidden, st.rows, columns, jj, SCORES ? first_step + step : step);
        else T::begin_hidden(hidden, distances, jj, step, 1);
        if constexpr (BEGINS && PADDING > 0)
          if (has_begin) T::select_edge(hidden, c.args.edge, places, hidden_column + jj, first_step + step);
        UNROLL_FOR (int tap = 0; tap < TAPS; tap++)
          UNROLL_FOR (int n = 0; n < 2; n++) {
            const u32(&x)[4] = s.column[jj + tap], (&y)[4] = l.column[jj + KEPT - tap];
            if constexpr (WEIGHTS) {
              mma_exchange(hidden[n], find_fragment(st.w1[tap], step).a, x[n], x[2 + n]);
              multiply_tap(gradient[n], tap, find_fragment(st.w2[tap], step).a, y[n], y[2 + n]);
            } else {
              const u32(&w1)[2] = st.w1[tap][2 * step + n], (&w2)[2] = st.w2[tap][2 * step + n];
              mma_exchange(hidden[n], x, w1[0], w1[1]);
              multiply_tap(gradient[n], tap, y, w2[0], w2[1]);
            }
          }
        UNROLL_FOR (int n = 0; n < 2; n++)
          UNROLL_FOR (int x = 0; x < 4; x++) {
            f32 h = hidden[n][x], d = gradient[n][x];
            if constexpr (!G::LINEAR) {
              gradient[n][x] = select(h > 0.0f, d, d * SLOPE);
              hidden[n][x] = select(h > 0.0f, h, h * SLOPE);
            }
            if (BEGINS && has_begin) {
              pred is_inside = T::is_inside(places, Layout::row_index(n, x), hidden_column + jj);
              gradient[n][x] = select(is_inside, gradient[n][x], f32(0.0f));
              hidden[n][x] = select(is_inside, hidden[n][x], f32(0.0f));
            }
          }
        // Words of 8 widths and rows, by n and r.
        u32 active[2][2], before[2][2];
        UNROLL_FOR (int n = 0; n < 2; n++)
          UNROLL_FOR (int r = 0; r < 2; r++) {
            const int i = WEIGHTS ? r : n, x = WEIGHTS ? 2 * n : 2 * r;
            before[n][r] = Element::pack(gradient[i][x], gradient[i][x + 1]);
            if constexpr (WEIGHTS) active[n][r] = Element::pack(hidden[i][x], hidden[i][x + 1]);
          }
        if constexpr (SCORES) {
          if constexpr (BEGINS && PADDING > 0)
            if (has_begin) Results::store_edge(gradient, c, places, hidden_column + jj, first_step + step);
          if constexpr (EDGE) Results::store_edge(gradient, c, row_tile, G::FIRST_EDGE + jj - BEGIN, first_step + step);
          u32 a[4] = {before[0][0], before[0][1], before[1][0], before[1][1]};
          UNROLL_FOR (int tap = 0; tap < TAPS; tap++)
            UNROLL_FOR (int n = 0; n < 2; n++) {
              const u32(&w)[2] = st.w1_back[tap][2 * step + n];
              f32(&sum)[4] = ds[(jj + tap) % TAPS][n];
              if (step == 0 && tap == KEPT) Element::multiply_from_zero(sum, a, w[0], w[1]);
              else Element::multiply(sum, a, w[0], w[1]);
            }
        }
        if (SCORES && BEGINS && has_begin)
          UNROLL_FOR (int n = 0; n < 2; n++)
            UNROLL_FOR (int r = 0; r < 2; r++)  // E is not a function of the distance
              before[n][r] = select(T::is_at_edge(places, r, hidden_column + jj), u32(0u), before[n][r]);
        if constexpr (SCORES && G::GATED && !EDGE)
          UNROLL_FOR (int n = 0; n < 2; n++)
            Sums::add_to_rows(st.row_sums, 2 * (first_step + step) + n, before[n][0], before[n][1], unit);
        if constexpr (SCORES)
          UNROLL_FOR (int n = 0; n < 2; n++)
            UNROLL_FOR (int r = 0; r < 2; r++) before[n][r] = transpose_8x8(before[n][r]);
        if constexpr (WEIGHTS) {
          if (STEP_TILES == 1)
            UNROLL_FOR (int r = 0; r < 2; r++) {
              before[0][r] = slice % 2 ? before[1][r] : before[0][r];
              active[0][r] = slice % 2 ? active[1][r] : active[0][r];
            }
          UNROLL_FOR (int tap = 0; tap < TAPS; tap++)
            UNROLL_FOR (int n = 0; n < STEP_TILES; n++) {
              const int w = STEP_TILES * step + n;
              Element::multiply(st.dw1[tap][w], s_rows[(jj + tap) % TAPS], before[n][0], before[n][1]);
              Element::multiply(st.dw2[tap][w], l_rows[(jj + KEPT - tap) % TAPS], active[n][0], active[n][1]);
            }
        }
        if constexpr (SCORES && !EDGE && G::GATED) {
          const u32 transposed[4] = {before[0][0], before[1][0], before[0][1], before[1][1]};
          Sums::add_to_columns(column_sums, first_step + step, transposed, jj);
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
      if constexpr (!EDGE && !SHARES_MEMORY) store_sums(c, tile_sums, slice);
    }
  }

  // Stores a warp's sums of a slice and, with the first slice, those of the logits.
  static KERNEL_CODE void store_sums(const Context& c, const TileSums& sums, int slice) {
    if constexpr (G::GATED) {
      UNROLL_FOR (int step = slice * N_TILES / 2; step < slice * N_TILES / 2 + STEPS; step++)
        Sums::store(c.diagonals, c.warp, sums.columns, step);
      if (slice == 0) Sums::store(c.diagonals, c.warp, sums.columns, 2);
    } else {
      D::store(c.diagonals, c.warp, sums.du, sums.db, slice);
    }
  }

  struct Fragment {
    u32 a[4];
  };
  static KERNEL_CODE Fragment find_fragment(const u32 (&weights)[2 * STEPS][2], int step) {
    Fragment f;
    UNROLL_FOR (int x = 0; x < 4; x++) f.a[x] = weights[2 * step + x / 2][x % 2];
    return f;
  }
  static KERNEL_CODE void multiply_tap(f32 (&sum)[4], int tap, const u32 (&a)[4], u32 b0, u32 b1) {
    if (tap == 0) Element::multiply_from_zero(sum, a, b0, b1);
    else Element::multiply(sum, a, b0, b1);
  }

  static KERNEL_CODE void add_words(f32 (&sum)[2][4], const u32 (&words)[4], u32 unit) {
    UNROLL_FOR (int n = 0; n < 2; n++) Element::multiply_k8(sum[n], words[2 * n], words[2 * n + 1], unit);
  }
};
