// Bias that is the sum of a row term and a column term, such as running sums of gates. It differs between sequences,
// and is not a function of the distance.
//
// From this bias, Conv1 computes a vector of the row plus a vector of the column, the initial value of a hidden value.
// If some taps are outside of the columns that the row sees, E has the value instead. It covers the 2p columns around
// the row's first column f (f - p ... f + p - 1), then the 2p columns around its last (i - p + 1 ... i + p).
//
// The gradients of these vectors are sums over the columns and over the rows of a block's gradients. Both sums add the
// same rounded numbers. The terms are differences of large sums, so different roundings would not cancel.
#pragma once
#include "hidden.h"

struct GateInputs {
  const void* rows;     // float32 [R, 32]
  const void* columns;  // float32 [C + p, 32] from column 0 on; later values are not used
  // Bytes from one sequence to the next, including those of E and of the bias that is added to a column's logits.
  long long rows_batch, columns_batch, edge_batch, bias_batch;

  KERNEL_CODE void select_sequence(int index) {
    rows = (const char*)rows + index * rows_batch;
    columns = (const char*)columns + index * columns_batch;
  }
};

template <class G, bool BY_WIDTHS = false>
struct GateTerms {
  typedef HiddenLayout<BY_WIDTHS> Layout;
  // Row vectors of a row tile, as accumulators, in STEPS steps of 16 widths.
  template <int STEPS>
  struct Rows {
    f32 of[2 * STEPS][4];
  };
  template <int STEPS>
  static KERNEL_CODE void load_rows(Rows<STEPS>& rows, const GateInputs& in, int num_rows, int first_row,
                                    int first_step) {
    UNROLL_FOR (int y = 0; y < Layout::ROWS; y++) {
      i32 row = minimum(Layout::find_row(y) + first_row, i32(num_rows - 1));
      Address at = advance(address(in.rows, row * 128 + Layout::locate_widths()), first_step * 64);
      UNROLL_FOR (int step = 0; step < STEPS; step++) {
        typename Layout::Widths widths = Layout::load(at, step * 64);
        UNROLL_FOR (int n = 0; n < 2; n++)
          UNROLL_FOR (int x = 0; x < 4; x++)
            if (Layout::row_index(n, x) == y) rows.of[2 * step + n][x] = widths.of[Layout::width_index(n, x)];
      }
    }
  }

  // Address of the lane's part of the column vectors, from a column and a step on.
  static KERNEL_CODE Address locate_columns(const GateInputs& in, int first, int first_step = 0) {
    return advance(address(in.columns, Layout::locate_widths()), first * 128ll + first_step * 64);
  }
  // Initializes 16 widths of the hidden values in the x-th of these columns. Both vectors begin at the same step.
  template <int STEPS>
  static KERNEL_CODE void begin_hidden(f32 (&hidden)[2][4], const Rows<STEPS>& rows, const Address& columns, int x,
                                       int step) {
    typename Layout::Widths widths = Layout::load(columns, x * 128 + step * 64);
    UNROLL_FOR (int n = 0; n < 2; n++)
      UNROLL_FOR (int y = 0; y < 4; y++) hidden[n][y] = rows.of[2 * step + n][y] + widths.of[Layout::width_index(n, y)];
  }
};

// Sums over a block's columns and over its rows of the gradients of hidden values (32 channels) and of logits (16
// channels). In both, channel 8n + x is column x of n-tile n.
template <class G>
struct GateSums {
  typedef typename G::Element Element;
  static constexpr int TILES = 6, CHANNELS = 8 * TILES, VECTORS = CHANNELS / 4;
  // Strides in shared memory, in words. They cause few bank conflicts.
  static constexpr int COLUMN_WORDS = 52, ROW_WORDS = 56;
  static constexpr int MEMORY_BYTES = G::WARPS * 8 * COLUMN_WORDS * 4, ROW_MEMORY_BYTES = G::WARPS * 16 * ROW_WORDS * 4;

  // Sums for the rows of a warp's row tile, over the columns of its run in all tiles.
  struct Rows {
    f32 of[TILES][4];
  };
  static KERNEL_CODE void clear(Rows& rows) {
    UNROLL_FOR (int n = 0; n < TILES; n++)
      UNROLL_FOR (int x = 0; x < 4; x++) rows.of[n][x] = f32(0.0f);
  }
  // Adds a column of an n-tile, given as the words of rows g and g + 8, by a product with the identity.
  static KERNEL_CODE void add_to_rows(Rows& rows, int n, u32 low, u32 high, u32 identity) {
    Element::multiply_k8(rows.of[n], low, high, identity);
  }

  // Sums for the columns of a warp's run in a tile: n-tiles 2m and 2m + 1 by columns.
  struct Columns {
    f32 of[TILES / 2][4];
  };
  static KERNEL_CODE void clear(Columns& columns) {
    UNROLL_FOR (int m = 0; m < TILES / 2; m++)
      UNROLL_FOR (int x = 0; x < 4; x++) columns.of[m][x] = f32(0.0f);
  }
  // Adds the jj-th column, given as an A fragment: two n-tiles by rows.
  static KERNEL_CODE void add_to_columns(Columns& columns, int m, const u32 (&a)[4], int jj) {
    u32 ones = select(lane_id() / 4 == jj, u32(Element::ONE | Element::ONE << 16), u32(0u));
    Element::multiply(columns.of[m], a, ones, ones);
  }
  static KERNEL_CODE void store(SharedMemory memory, int warp, const Columns& columns, int m) {
    i32 lane = lane_id(), g = lane / 4, t = lane % 4;
    UNROLL_FOR (int x = 0; x < 4; x++) {
      Words<1> v;
      v.x[0] = as_u32(columns.of[m][x]);
      const int channel = 16 * m + 8 * (x / 2), column = warp * 8 + x % 2;
      store_shared<1>(memory, t * (2 * COLUMN_WORDS * 4) + g * 4 + (column * COLUMN_WORDS + channel) * 4, v);
    }
  }
  // Adds the sums of a tile's row tiles, and stores them in `table` [programs, columns, 48]. Warps share the columns.
  static KERNEL_CODE void add(SharedMemory memory, int warp, int first_column, void* table, long long program,
                              int columns) {
    constexpr int SHARE = 8 / G::ROW_TILES, COUNT = SHARE * VECTORS;
    const int first = warp * SHARE;
    Address to = address(table, lane_id() * 16);
    UNROLL_FOR (int turn = 0; turn < (COUNT + 31) / 32; turn++) {
      i32 vector = lane_id() + 32 * turn, known = minimum(vector, i32(COUNT - 1)), column = known / VECTORS;
      f32 sum[4] = {f32(0.0f), f32(0.0f), f32(0.0f), f32(0.0f)};
      UNROLL_FOR (int tile = 0; tile < G::ROW_TILES; tile++) {
        i32 at = column * (COLUMN_WORDS * 4) + known % VECTORS * 16;
        Words<4> v = load_shared<4>(memory, at + (tile * G::COLUMNS + first) * (COLUMN_WORDS * 4));
        UNROLL_FOR (int x = 0; x < 4; x++) sum[x] += as_f32(v.x[x]);
      }
      Words<4> v;
      UNROLL_FOR (int x = 0; x < 4; x++) v.x[x] = as_u32(sum[x]);
      i32 place = column + (first_column + first);
      const long long from = (program * columns + first_column + first) * (CHANNELS * 4);
      store_global<4>(advance(to, from), turn * 512, v, vector < COUNT && place >= 0 && place < columns);
    }
  }

  // Adds the runs' sums of a block's rows, and stores them in `rows` [R, 48]. Overwrites all of shared memory.
  static KERNEL_CODE void store(SharedMemory memory, int warp, const Rows& rows, void* to, int first_row,
                                int num_rows) {
    i32 lane = lane_id(), g = lane / 4, t = lane % 4;
    barrier(memory);
    UNROLL_FOR (int n = 0; n < TILES; n++)
      UNROLL_FOR (int r = 0; r < 2; r++) {
        Words<2> v;
        UNROLL_FOR (int x = 0; x < 2; x++) v.x[x] = as_u32(rows.of[n][2 * r + x]);
        store_shared<2>(memory, g * (ROW_WORDS * 4) + t * 8 + ((warp * 16 + 8 * r) * ROW_WORDS + 8 * n) * 4, v);
      }
    barrier(memory);
    constexpr int COUNT = G::ROWS * VECTORS, THREADS = 32 * G::WARPS;
    UNROLL_FOR (int turn = 0; turn < (COUNT + THREADS - 1) / THREADS; turn++) {
      i32 vector = lane + (32 * warp + THREADS * turn), known = minimum(vector, i32(COUNT - 1)), row = known / VECTORS;
      f32 sum[4] = {f32(0.0f), f32(0.0f), f32(0.0f), f32(0.0f)};
      UNROLL_FOR (int run = 0; run < G::RUNS; run++) {
        i32 in_run = row / 16 * (16 * G::RUNS) + row % 16 + 16 * run;
        Words<4> v = load_shared<4>(memory, in_run * (ROW_WORDS * 4) + known % VECTORS * 16);
        UNROLL_FOR (int x = 0; x < 4; x++) sum[x] += as_f32(v.x[x]);
      }
      Words<4> v;
      UNROLL_FOR (int x = 0; x < 4; x++) v.x[x] = as_u32(sum[x]);
      Address at = advance(address(to, known * 16), (long long)first_row * (CHANNELS * 4));
      store_global<4>(at, 0, v, vector < COUNT && row + first_row < num_rows);
    }
  }
};
