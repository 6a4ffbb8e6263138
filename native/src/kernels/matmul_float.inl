// out = x W^T for float weights (float32, float16, bfloat16 widened exactly) and float32 activations.
#pragma once

#include "kernels/matmul_simd.inl"

namespace octavo {
namespace OCTAVO_ISA_NS {

// Where the results of one tile go: rows t at out + t * stride, `columns` (1..16) outputs of one 16-row block.
struct OutTile {
  float* out;
  int stride, columns;
  const float* bias;  // of this block, or null
  bool accumulate;
};

OCTAVO_INLINE void store_tile_row(const OutTile& o, int t, F32x16 value) {
  float* p = o.out + (size_t)t * o.stride;
  if (o.columns == kRowBlock) {
    if (o.bias) value = value + f32_load(o.bias);
    if (o.accumulate) value = f32_load(p) + value;
    f32_store(p, value);
  } else {
    if (o.bias) value = value + f32_load_n(o.bias, o.columns);
    if (o.accumulate) value = f32_load_n(p, o.columns) + value;
    f32_store_n(p, value, o.columns);
  }
}

// One call's constants, shared by the loops below.
struct MatmulCall {
  const PackedMatrix& w;
  const float* x;       // float formats
  const QuantRows& qx;  // quantised formats
  const float* bias;
  bool accumulate;
  float* out;
  int out_stride;
};

OCTAVO_INLINE OutTile out_tile(const MatmulCall& c, int row, int block) {
  const int column = block * kRowBlock, left = c.w.n - column;
  const float* bias = c.bias ? c.bias + column : nullptr;
  return {c.out + (size_t)row * c.out_stride + column, c.out_stride, left < kRowBlock ? left : kRowBlock, bias, c.accumulate};
}

// Rows of the next tile: as few tiles as max_rows allows, of nearly equal size.
OCTAVO_INLINE int next_tile_rows(int rows_left, int max_rows) {
  const int tiles = (rows_left + max_rows - 1) / max_rows;
  return (rows_left + tiles - 1) / tiles;
}

// Weights of this many bytes are run through all rows before the next ones, so that they come from memory once and from the
// second-level cache afterwards.
constexpr size_t kPanelBytes = 256 * 1024;

// Row blocks of a panel; all of them when one tile holds every row.
OCTAVO_INLINE int panel_blocks(const PackedMatrix& w, bool single_tile) {
  if (single_tile) return w.num_blocks;
  const size_t blocks = kPanelBytes / w.block_bytes;
  return blocks < 1 ? 1 : blocks > 1024 ? 1024 : (int)blocks;
}

// How far ahead of their use weights are asked for. The core's window of instructions holds too few cache lines in flight to
// stream memory at its full rate; measured on Zen 4, where 2 to 8 KiB do and hints for outer caches do not.
constexpr int kPrefetchBytes = 4096;

template <PackedFormat kFormat>
OCTAVO_INLINE F32x16 load_weights(const uint8_t* block, int k) {
  if constexpr (kFormat == PackedFormat::kF32) return f32_load((const float*)block + (size_t)k * kRowBlock);
  const uint16_t* p = (const uint16_t*)block + (size_t)k * kRowBlock;
  if constexpr (kFormat == PackedFormat::kF16) return f32_load_f16(p);
  return f32_load_bf16(p);
}

// Two accumulator chains, even k and odd k, added at the end: one row alone is then not bound by the latency of the FMA.
template <PackedFormat kFormat, int kRows>
OCTAVO_NOINLINE void float_tile(const uint8_t* block, const float* x, int k, const OutTile& out) {
  F32x16 even[kRows], odd[kRows];
  for (int t = 0; t < kRows; ++t) even[t] = odd[t] = f32_zero();
  int i = 0;
  constexpr int kPairBytes = 2 * kRowBlock * (kFormat == PackedFormat::kF32 ? 4 : 2);
  for (; i + 2 <= k; i += 2) {
    for (int ahead = 0; ahead < kPairBytes; ahead += 64) __builtin_prefetch(block + (size_t)i / 2 * kPairBytes + kPrefetchBytes + ahead);
    const F32x16 w0 = load_weights<kFormat>(block, i), w1 = load_weights<kFormat>(block, i + 1);
    for (int t = 0; t < kRows; ++t) {
      const float* p = x + (size_t)t * k + i;
      even[t] = f32_fma(w0, f32_set(p[0]), even[t]);
      odd[t] = f32_fma(w1, f32_set(p[1]), odd[t]);
    }
  }
  if (i < k) {
    const F32x16 w0 = load_weights<kFormat>(block, i);
    for (int t = 0; t < kRows; ++t) even[t] = f32_fma(w0, f32_set(x[(size_t)t * k + i]), even[t]);
  }
  for (int t = 0; t < kRows; ++t) store_tile_row(out, t, even[t] + odd[t]);
}

// rows == 1..kRows, found by counting down.
template <PackedFormat kFormat, int kRows>
void float_rows(const MatmulCall& c, int row, int rows, int block_begin, int block_end) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return float_rows<kFormat, kRows - 1>(c, row, rows, block_begin, block_end);
  }
  for (int b = block_begin; b < block_end; ++b)
    float_tile<kFormat, kRows>(c.w.data + (size_t)b * c.w.block_bytes, c.x + (size_t)row * c.w.k, c.w.k, out_tile(c, row, b));
}

template <PackedFormat kFormat>
void matmul_float(const MatmulCall& c, int rows, int block_begin, int block_end) {
  constexpr int kTileRows = kFormat == PackedFormat::kF32 ? kFloatRowsPerTile : kHalfRowsPerTile;
  const int panel = panel_blocks(c.w, rows <= kTileRows);
  for (int begin = block_begin; begin < block_end; begin += panel) {
    const int end = block_end - begin < panel ? block_end : begin + panel;
    for (int row = 0; row < rows;) {
      const int count = next_tile_rows(rows - row, kTileRows);
      float_rows<kFormat, kTileRows>(c, row, count, begin, end);
      row += count;
    }
  }
}

}  // namespace OCTAVO_ISA_NS
}  // namespace octavo
