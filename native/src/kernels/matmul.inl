// out = x W^T: the matmul entry of the kernel table, and its quantised form.
//
// A tile is 16 outputs x up to kQuantRowsPerTile rows held in registers; each group of 32 weights is unpacked once per tile.
// Per output element, whatever the tile: for each group in order (16 or 32 values, as the format has them)
//   sum = exact integer dot product of (code - zero point) with the quantised activations
//   acc = fma(sum, weight scale * activation scale, acc)
//   acc = fma(weight minimum, activation scale * (exact sum of the activations), acc)    formats with a minimum
// then bias, then the old value of out.
#pragma once

#include <utility>

#include "kernels/matmul_float.inl"
#include "kernels/matmul_simd.inl"

namespace octavo {
namespace OCTAVO_ISA_NS {

// A packed format as compile-time facts; offsets as packing.h defines them.
template <PackedFormat kFormat_, ScaleKind kScales_, int kGroup_, bool kMin_>
struct QuantLayout {
  static constexpr PackedFormat kFormat = kFormat_;
  static constexpr ScaleKind kScales = kScales_;
  static constexpr bool kMin = kMin_;
  static constexpr bool kSuper = kScales != ScaleKind::kHalf;
  static constexpr int kParts = kGroup / kGroup_;  // scales per 32 values
  static constexpr int kBits = kFormat == PackedFormat::kQ4 ? 4 : kFormat == PackedFormat::kQ5 ? 5 : kFormat == PackedFormat::kQ6 ? 6 : 8;
  static constexpr int kCodeBytes = kBits * kGroup * kRowBlock / 8;
  static constexpr int kGroupsPerHead = kSuper ? kSuperBlock / kGroup : 1;
  static constexpr int kHeadBytes = (kMin ? 2 : 1) * kRowBlock * 2;  // float16 d and m
  static constexpr int kGroupBytes = kCodeBytes + (kSuper ? (kMin ? 2 : 1) * kParts * kRowBlock : 0);  // codes and integer scales
  static constexpr bool kZeroPoint = !kMin && !(kSignedBytes && kFormat == PackedFormat::kQ8);
};

// The activation side of the tiles of a pass, one tile after another, each laid out as the tile reads it.
template <class L>
struct PassActivations {
  static constexpr int kCapacity = kMaxQuantisedK / kGroup;  // rows * groups
  alignas(64) float scale[kCapacity];             // [group][row]
  // [group][part][row]: activation scale * sum for formats with a minimum, else -zero_point * sum (as an exact integer)
  alignas(64) int32_t start[L::kMin ? 1 : kCapacity * L::kParts];
  alignas(64) float weighted_sum[L::kMin ? kCapacity * L::kParts : 1];
};

// One tile's part of them.
template <class L>
struct TileActivations {
  float* scale;
  int32_t* start;
  float* weighted_sum;
  TileActivations(PassActivations<L>& pass, int first)  // first: rows * groups of the tiles before
      : scale(pass.scale + first), start(pass.start + (L::kMin ? 0 : first * L::kParts)), weighted_sum(pass.weighted_sum + (L::kMin ? first * L::kParts : 0)) {}
};

template <class L>
OCTAVO_NOINLINE void prepare_activations(const QuantRows& q, int row, int rows, int groups, int zero_point, const TileActivations<L>& out) {
  for (int t = 0; t < rows; ++t) {
    const float* scale = q.scale + (size_t)(row + t) * groups;
    const int16_t* sum16 = q.sum16 + (size_t)(row + t) * groups * 2;
    for (int g = 0; g < groups; ++g) {
      out.scale[g * rows + t] = scale[g];
      for (int part = 0; part < L::kParts; ++part) {
        const int sum = L::kParts == 2 ? sum16[2 * g + part] : sum16[2 * g] + sum16[2 * g + 1];
        const int at = (g * L::kParts + part) * rows + t;
        if constexpr (L::kMin) out.weighted_sum[at] = scale[g] * (float)sum;
        else out.start[at] = -zero_point * sum;
      }
    }
  }
}

// Weight scale (and minimum, to be added) of one group and part.
template <class L>
OCTAVO_INLINE F32x16 group_scale(F32x16 d, const uint8_t* integers, int part) {
  if constexpr (!L::kSuper) return d;
  if constexpr (L::kScales == ScaleKind::kSuperS8) return d * f32_load_s8(integers + part * kRowBlock);
  return d * f32_load_u8(integers + part * kRowBlock);
}
template <class L>
OCTAVO_INLINE F32x16 group_min(F32x16 m, const uint8_t* integers, int part) {
  if constexpr (!L::kSuper) return m;
  return m * f32_load_u8(integers + (L::kParts + part) * kRowBlock);
}

// One group of 32 k for all rows of the tile. a: q of the tile's first row at this group, rows k apart.
template <class L, int kRows>
OCTAVO_INLINE void group_step(const uint8_t* codes, const uint8_t* integers, F32x16 d, F32x16 m, const TileActivations<L>& act, int g,
                              const int8_t* a, int k, F32x16 (&acc)[kRows]) {
  I32x16 dot[kRows];
  U8x64 w[4];
  const float* scale = act.scale + g * kRows;
  for (int part = 0; part < L::kParts; ++part) {
    const int at = (g * L::kParts + part) * kRows;
    if (part == 0) load_codes<L::kFormat, 0>(codes, w);
    else load_codes<L::kFormat, 1>(codes, w);
    for (int t = 0; t < kRows; ++t) {
      const I32x16 start = L::kZeroPoint ? i32_set(act.start[at + t]) : i32_zero();
      dot[t] = dot16<L::kFormat>(start, w, a + (size_t)t * k + 16 * part);
    }
    if constexpr (L::kParts == 1) {
      load_codes<L::kFormat, 1>(codes, w);
      for (int t = 0; t < kRows; ++t) dot[t] = dot16<L::kFormat>(dot[t], w, a + (size_t)t * k + 16);
    }
    const F32x16 dw = group_scale<L>(d, integers, part);
    for (int t = 0; t < kRows; ++t) acc[t] = f32_fma(f32_from_i32(dot[t]), dw * f32_set(scale[t]), acc[t]);
    if constexpr (L::kMin) {
      const F32x16 mw = group_min<L>(m, integers, part);
      for (int t = 0; t < kRows; ++t) acc[t] = f32_fma(mw, f32_set(act.weighted_sum[at + t]), acc[t]);
    }
  }
}

// What a tile asks memory for while it computes: `lines` cache lines per group, from `p` on. Into the second-level cache
// (`far`) when several rows are computed on each line from memory: near enough then, and the first stays free for activations
// (Zen 4, 16 rows of q8_0 from memory: 0.286 TOP/s into the first, 0.334 into the second; 4 rows of q4_1: 0.296 and 0.276).
struct Ahead {
  const uint8_t* p;
  int lines;
  bool far;

  OCTAVO_INLINE void ask() {
    if (far)
      for (int line = 0; line < lines; ++line, p += 64) __builtin_prefetch(p, 0, 2);
    else
      for (int line = 0; line < lines; ++line, p += 64) __builtin_prefetch(p, 0, 3);
  }
};

// q: the tile's first row. Reads one 16-row block from start to end.
template <class L, int kRows>
OCTAVO_NOINLINE void quant_tile(const uint8_t* block, int k, const TileActivations<L>& act, const int8_t* q, const OutTile& out, Ahead ahead) {
  const int groups = k / kGroup;
  const uint8_t* p = block;
  F32x16 acc[kRows];
  for (int t = 0; t < kRows; ++t) acc[t] = f32_zero();
  for (int first = 0; first < groups; first += L::kGroupsPerHead) {
    const F32x16 d = f32_load_f16((const uint16_t*)p);
    F32x16 m = d;
    if constexpr (L::kMin) m = f32_load_f16((const uint16_t*)p + kRowBlock);
    if constexpr (L::kMin && L::kSuper) m = f32_zero() - m;  // those minima are subtracted
    p += L::kHeadBytes;
#pragma GCC unroll 1
    for (int i = 0; i < L::kGroupsPerHead; ++i) {  // eight copies of the body would only fill the instruction cache
      ahead.ask();
      group_step<L, kRows>(p, p + L::kCodeBytes, d, m, act, first + i, q + (size_t)(first + i) * kGroup, k, acc);
      p += L::kGroupBytes;
    }
  }
  for (int t = 0; t < kRows; ++t) store_tile_row(out, t, acc[t]);
}

template <class L>
using QuantTile = void (*)(const uint8_t* block, int k, const TileActivations<L>& act, const int8_t* q, const OutTile& out, Ahead ahead);

// quant_tile for 1 .. kQuantRowsPerTile rows.
template <class L, int... kRowsLessOne>
OCTAVO_INLINE QuantTile<L> quant_tile_of(int rows, std::integer_sequence<int, kRowsLessOne...>) {
  static constexpr QuantTile<L> tiles[] = {quant_tile<L, kRowsLessOne + 1>...};
  return tiles[rows - 1];
}

// Tiles of a pass: rows that share each block of weights while it is in the first-level cache, which has room for no more
// activations than two tiles'. With more rows than that, weights come from the second level to one tile after another.
constexpr int kTilesPerPass = 2;
constexpr int kFarRows = 6;

// Rows [row, row + rows) x blocks [block_begin, block_end): block by block through all tiles. Meanwhile each tile asks for its
// part of the next block, so that memory is asked for an even stream whatever the number of tiles.
template <class L>
void quant_pass(const MatmulCall& c, int row, int rows, int max_rows, int block_begin, int block_end, bool from_memory, PassActivations<L>& act) {
  const int k = c.w.k, groups = k / kGroup;
  int tile_row[kTilesPerPass + 1] = {row}, tiles = 0;
  for (int left = rows; left > 0; ++tiles) {
    const int count = next_tile_rows(left, max_rows);
    prepare_activations<L>(c.qx, tile_row[tiles], count, groups, c.w.zero_point, TileActivations<L>(act, (tile_row[tiles] - row) * groups));
    tile_row[tiles + 1] = tile_row[tiles] + count;
    left -= count;
  }
  const int group_lines = (int)((c.w.block_bytes / 64 + groups - 1) / groups), lines = (group_lines + tiles - 1) / tiles;
  for (int b = block_begin; b < block_end; ++b) {
    const uint8_t* block = c.w.data + (size_t)b * c.w.block_bytes;
    const uint8_t* ahead = tiles == 1 ? block + kPrefetchBytes : block + c.w.block_bytes;
    for (int i = 0; i < tiles; ++i, ahead += (size_t)lines * groups * 64) {
      const int first = tile_row[i];
      quant_tile_of<L>(tile_row[i + 1] - first, std::make_integer_sequence<int, kQuantRowsPerTile>{})(
          block, k, TileActivations<L>(act, (first - row) * groups), c.qx.q + (size_t)first * k, out_tile(c, first, b), {ahead, lines, from_memory && rows >= kFarRows});
    }
  }
}

template <PackedFormat kFormat, ScaleKind kScales, int kGroupSize, bool kMin>
void matmul_quantised(const MatmulCall& c, int rows, int block_begin, int block_end) {
  using L = QuantLayout<kFormat, kScales, kGroupSize, kMin>;
  PassActivations<L> act;
  const int fitting = PassActivations<L>::kCapacity / (c.w.k / kGroup);
  const int max_rows = fitting < kQuantRowsPerTile ? fitting : kQuantRowsPerTile;
  const int shared_rows = fitting / max_rows < kTilesPerPass ? fitting / max_rows * max_rows : kTilesPerPass * max_rows;
  const bool one_pass = rows <= shared_rows;
  const int pass_rows = one_pass ? shared_rows : max_rows;
  const int panel = panel_blocks(c.w, one_pass);
  for (int begin = block_begin; begin < block_end; begin += panel) {
    const int end = block_end - begin < panel ? block_end : begin + panel;
    for (int row = 0; row < rows;) {
      const int count = next_tile_rows(rows - row, pass_rows);
      quant_pass<L>(c, row, count, max_rows, begin, end, one_pass, act);
      row += count;
    }
  }
}

inline void matmul_q4(const MatmulCall& c, int rows, int begin, int end) {
  constexpr PackedFormat q4 = PackedFormat::kQ4;
  if (c.w.scales == ScaleKind::kSuperS8) return matmul_quantised<q4, ScaleKind::kSuperS8, 16, false>(c, rows, begin, end);
  if (c.w.scales == ScaleKind::kSuperU8) {
    if (c.w.group == 16) return matmul_quantised<q4, ScaleKind::kSuperU8, 16, true>(c, rows, begin, end);
    return matmul_quantised<q4, ScaleKind::kSuperU8, 32, true>(c, rows, begin, end);
  }
  if (c.w.has_min) return matmul_quantised<q4, ScaleKind::kHalf, 32, true>(c, rows, begin, end);
  return matmul_quantised<q4, ScaleKind::kHalf, 32, false>(c, rows, begin, end);
}

inline void matmul_q5(const MatmulCall& c, int rows, int begin, int end) {
  constexpr PackedFormat q5 = PackedFormat::kQ5;
  if (c.w.scales == ScaleKind::kSuperU8) return matmul_quantised<q5, ScaleKind::kSuperU8, 32, true>(c, rows, begin, end);
  if (c.w.has_min) return matmul_quantised<q5, ScaleKind::kHalf, 32, true>(c, rows, begin, end);
  return matmul_quantised<q5, ScaleKind::kHalf, 32, false>(c, rows, begin, end);
}

// The entry in the kernel table; see kernels.h.
inline void matmul(const PackedMatrix& w, const float* x, const QuantRows& qx, int rows, int block_begin, int block_end,
                   const float* bias, bool accumulate, float* out, int out_stride) {
  const MatmulCall c{w, x, qx, bias, accumulate, out, out_stride};
  switch (w.format) {
    case PackedFormat::kF32: return matmul_float<PackedFormat::kF32>(c, rows, block_begin, block_end);
    case PackedFormat::kF16: return matmul_float<PackedFormat::kF16>(c, rows, block_begin, block_end);
    case PackedFormat::kBF16: return matmul_float<PackedFormat::kBF16>(c, rows, block_begin, block_end);
    case PackedFormat::kQ4: return matmul_q4(c, rows, block_begin, block_end);
    case PackedFormat::kQ5: return matmul_q5(c, rows, block_begin, block_end);
    case PackedFormat::kQ6:
      return matmul_quantised<PackedFormat::kQ6, ScaleKind::kSuperS8, 16, false>(c, rows, block_begin, block_end);
    case PackedFormat::kQ8:
      return matmul_quantised<PackedFormat::kQ8, ScaleKind::kHalf, 32, false>(c, rows, block_begin, block_end);
  }
}

}  // namespace OCTAVO_ISA_NS
}  // namespace octavo
