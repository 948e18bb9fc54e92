// Scores S = q·k of a block's rows for all heads.
#pragma once
#include "spans.h"

struct ScoreInputs : RowSpans {
  const void* q;           // [H, …, d], scaled, from the chunk's first row on
  const void* k;           // [H, …, d], from column 0 on
  int q_stride, k_stride;  // bytes from one head to the next
  int q_row;               // bytes from one row of q to the next
  int heads;
};

// How a row is read: more than once by the multiprocessor, once, or once and before the next barrier.
enum Reading { REPEATED, ONCE, ONCE_EARLY };

// A row of a head, divided among four lanes. Step `step` of a product reads words 2·step and 2·step + 1 of queries and
// keys. Their order among the dimensions does not matter.
template <class G>
struct HeadRow {
  static constexpr int STEPS = G::HEAD_DIM / 16, WHOLE = STEPS / 2;
  u32 word[2 * STEPS];

  // Loads the lane's words of a row that begins `offset` bytes after `base` + `in_base`.
  template <Reading READING>
  KERNEL_CODE void load(const void* base, long long in_base, i32 offset, int constant = 0) {
    i32 t = lane_id() % 4;
    UNROLL_FOR (int z = 0; z < WHOLE; z++) {
      Words<4> v = read<READING, 4>(advance(address(base, offset + t * 16), in_base), constant + 64 * z);
      UNROLL_FOR (int x = 0; x < 4; x++) word[4 * z + x] = v.x[x];
    }
    if (STEPS % 2 == 1) {
      Words<2> v = read<READING, 2>(advance(address(base, offset + t * 8), in_base), constant + 64 * WHOLE);
      UNROLL_FOR (int x = 0; x < 2; x++) word[4 * WHOLE + x] = v.x[x];
    }
  }

 private:
  template <Reading READING, int N>
  static KERNEL_CODE Words<N> read(Address at, int constant) {
    if constexpr (READING == REPEATED) return load_global<N>(at, constant);
    else if constexpr (READING == ONCE) return load_global_once<N>(at, constant);
    else return request_global_once<N>(at, constant);
  }
};

// A warp computes a head's scores as two blocks of 16 rows and 16 columns (two n-tiles): two row tiles, or, if IS_WIDE,
// one row tile and two groups of columns, which reads queries half as often. Lane g of n-tile n has the column
// (g/2)·LANE_COLUMNS + 2n + g%2 of a group, so a lane's sums belong to four adjacent columns from t·LANE_COLUMNS on.
// Groups are GROUP_COLUMNS apart.
template <class G, int LANE_COLUMNS, bool IS_WIDE>
struct Scores {
  typedef HeadRow<G> Row;
  typedef typename G::Element Element;
  static constexpr int GROUPS = IS_WIDE ? 2 : 1, TILES = 2 / GROUPS, GROUP_COLUMNS = LANE_COLUMNS == 4 ? 16 : 4;
  struct Keys {
    Row row[GROUPS][2];
  };
  struct Sums {
    f32 tile[2][2][4];
  };

  // First row and column of a block of sums.
  static constexpr KERNEL_CODE int block_row(int block) { return IS_WIDE ? 0 : 16 * block; }
  static constexpr KERNEL_CODE int block_column(int block) { return IS_WIDE ? GROUP_COLUMNS * block : 0; }

  // Copies an equal share of the queries to shared memory, as A fragments [head][row tile][k-step][lane][4 words].
  static KERNEL_CODE void load_queries(const ScoreInputs& in, SharedMemory queries, int warp, int first_row) {
    constexpr int SHARE = G::HEADS / G::WARPS;
    i32 lane = lane_id();
    UNROLL_FOR (int h = 0; h < SHARE; h++)
      UNROLL_FOR (int tile = 0; tile < G::ROW_TILES; tile++) {
        const int head = SHARE * warp + h;
        LoadedQueries rows;
        load_rows(rows, in, head, first_row + 16 * tile);
        UNROLL_FOR (int step = 0; step < Row::STEPS; step++)
          store_shared<4>(queries, lane * 16 + query_offset(head, tile, step), rows.load(tile, step));
      }
  }

  // Loads row `first` + g of the queries, or of a tensor with their strides, but no row after the chunk's last.
  static KERNEL_CODE void load_row(Row& row, const ScoreInputs& in, const void* q, long long head, int first) {
    i32 g = minimum(lane_id() / 4, i32(in.rows - 1 - first));  // the offset within a block's rows fits in 32 bits
    row.template load<REPEATED>(q, head + (long long)first * in.q_row, g * in.q_row);
  }

  // Loads a head's keys for the lanes' columns from `first` on.
  static KERNEL_CODE void load_keys(Keys& keys, const ScoreInputs& in, int head, int first) {
    i32 g = lane_id() / 4, lane_column = (g / 2) * LANE_COLUMNS + g % 2;
    const long long in_keys = head_offset(in, head, in.k_stride) + (long long)first * G::ROW_BYTES;
    UNROLL_FOR (int group = 0; group < GROUPS; group++)
      UNROLL_FOR (int n = 0; n < 2; n++)
        keys.row[group][n].template load<ONCE>(in.k, in_keys, lane_column * G::ROW_BYTES,
                                               (GROUP_COLUMNS * group + 2 * n) * G::ROW_BYTES);
  }
  // Loads the same keys, but the nearest key inside for columns outside of 0 … `last`.
  template <Reading READING>
  static KERNEL_CODE void load_keys_inside(Keys& keys, const ScoreInputs& in, int head, int first, int last) {
    i32 g = lane_id() / 4, lane_column = (g / 2) * LANE_COLUMNS + g % 2;
    UNROLL_FOR (int group = 0; group < GROUPS; group++)
      UNROLL_FOR (int n = 0; n < 2; n++) {
        i32 column = lane_column + (first + GROUP_COLUMNS * group + 2 * n);
        column = minimum(maximum(column, i32(0)), i32(last));
        keys.row[group][n].template load<READING>(in.k, head_offset(in, head, in.k_stride), column * G::ROW_BYTES);
      }
  }

  static KERNEL_CODE Words<4> load_query(SharedMemory queries, int head, int tile, int step) {
    return load_shared<4>(queries, lane_id() * 16 + query_offset(head, tile, step));
  }
  // Queries in shared memory by head, row tile and step of a product.
  struct SharedQueries {
    SharedMemory memory;
    int head, first_tile;
    KERNEL_CODE Words<4> load(int tile, int step) const { return load_query(memory, head, first_tile + tile, step); }
  };
  // Queries of a row tile, loaded from global memory.
  struct LoadedQueries {
    Row rows[2];
    KERNEL_CODE Words<4> load(int, int step) const {
      Words<4> v;
      UNROLL_FOR (int x = 0; x < 4; x++) v.x[x] = rows[x % 2].word[2 * step + x / 2];
      return v;
    }
  };
  static KERNEL_CODE void load_rows(LoadedQueries& queries, const ScoreInputs& in, int head, int row) {
    UNROLL_FOR (int r = 0; r < 2; r++)
      load_row(queries.rows[r], in, in.q, head_offset(in, head, in.q_stride), row + 8 * r);
  }

  // Computes the scores of a head in the row tiles from `first_tile` on.
  static KERNEL_CODE void multiply(Sums& sums, const Keys& keys, SharedMemory queries, int head, int first_tile = 0) {
    multiply(sums, keys, SharedQueries{queries, head, first_tile});
  }
  template <class Queries>
  static KERNEL_CODE void multiply(Sums& sums, const Keys& keys, const Queries& queries) {
    UNROLL_FOR (int tile = 0; tile < TILES; tile++)
      UNROLL_FOR (int step = 0; step < Row::STEPS; step++) {
        Words<4> q = queries.load(tile, step);
        UNROLL_FOR (int group = 0; group < GROUPS; group++)
          UNROLL_FOR (int n = 0; n < 2; n++) {
            const Row& row = keys.row[group][n];
            f32(&sum)[4] = sums.tile[tile + group][n];
            if (step == 0) Element::multiply_from_zero(sum, q.x, row.word[2 * step], row.word[2 * step + 1]);
            else Element::multiply(sum, q.x, row.word[2 * step], row.word[2 * step + 1]);
          }
      }
  }

  // Packs the words of a pair of heads: words[block][x][r] belongs to column `first` + x of the lane's columns in the
  // block, and row g + 8r. MASKED: scores of columns that a row does not see are zero.
  template <bool MASKED>
  static KERNEL_CODE void pack(u32 (&words)[2][4][2], const Sums (&sums)[2], const ScoreInputs& in, int first_row,
                               int first) {
    i32 lane = lane_id(), g = lane / 4, t = lane % 4, begin[2][2];
    UNROLL_FOR (int block = 0; block < 2; block++)
      UNROLL_FOR (int r = 0; r < 2; r++) {
        begin[block][r] = i32(0);
        if constexpr (MASKED && G::LOCAL)
          begin[block][r] = in.find_lanes_first(g + (first_row + block_row(block) + 8 * r));
      }
    UNROLL_FOR (int block = 0; block < 2; block++)
      UNROLL_FOR (int x = 0; x < 4; x++)
        UNROLL_FOR (int r = 0; r < 2; r++) {
          const int y = x / 2, z = 2 * r + x % 2;
          u32& word = words[block][x][r];
          word = pack_exchange(sums[0].tile[block][y][z], sums[1].tile[block][y][z]);
          if (MASKED) {
            i32 column = t * LANE_COLUMNS + (first + block_column(block) + x);
            const int position = in.position + first_row + block_row(block) + 8 * r;
            word = select(column <= g + position && column >= begin[block][r], word, u32(0u));
          }
        }
  }

 private:
  static KERNEL_CODE long long head_offset(const ScoreInputs& in, int head, int stride) {
    return (long long)(head < in.heads ? head : in.heads - 1) * stride;  // heads after the last have zero weights
  }
  static KERNEL_CODE int query_offset(int head, int tile, int step) {
    return ((head * G::ROW_TILES + tile) * Row::STEPS + step) * 512;
  }
};
