// Weight matrices in the form the matmul kernels read, and GGML's block formats they come from.
//
// Owns: the packed layout, its memory, and the exact conversion of file blocks into it. Never computes with activations and
// never rounds: 2- and 3-bit codes are widened to 4 bits, scales keep the bits they have in the file.
//
// Layout. Rows (output features) are interleaved by 16 and padded to a multiple of 16 with zero weights; block b holds rows
// 16b .. 16b+15 and is one contiguous range of block_bytes bytes, so that a thread working on a range of blocks streams memory.
//
// Float formats: block = [k][16 rows] of float32, float16 or bfloat16.
//
// Quantised formats: block = for each unit of consecutive k (32 with kHalf scales, 256 with the others), head and groups:
//   head: 16 float16 d; then (has_min) 16 float16 m.
//   for each group of 32 k of the unit: the codes of 16 rows; then, in units of 256, 32 / group times 16 one-byte integer
//     scales and (has_min) as many times 16 one-byte minima.
//   The scale of a group is d, or d * its integer; its minimum m is added, or m * its integer subtracted. Both products are
//   exact in float32. weight = scale * (code - zero_point) +- minimum, with unsigned codes.
//   A "quad" is 4 consecutive k of each of 16 rows: byte 4 * row + i of its 64 belongs to k = 4 * quad + i.
//     kQ4: 4 x 64 bytes, the low nibbles of line j are quad j, the high ones quad j + 4
//     kQ5: as kQ4, then 64 bytes whose bit b is bit 4 of quad b
//     kQ6: as kQ4, then 2 x 64 bytes: bits 2j, 2j + 1 of line h are bits 4 and 5 of quad 4h + j
//     kQ8: 8 x 64 bytes, quad by quad
// Each block ends with zeros up to a multiple of 64 bytes. Everything a group needs lies together, because one sequential
// stream is what the memory delivers fastest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/kernels.h"

namespace octavo {

constexpr int kRowBlock = 16;       // rows interleaved
constexpr int kGroup = 32;          // k values that share an activation scale
constexpr int kSuperBlock = 256;    // k values that share a float16 scale of scales
constexpr int kMaxQuantisedK = 6144 * kGroup;  // bounds the kernels' stack scratch

enum class ScaleKind : int32_t {
  kNone = 0,     // float formats
  kHalf = 1,     // float16 per group
  kSuperU8 = 2,  // float16 per 256 values times an unsigned byte per group
  kSuperS8 = 3,  // float16 per 256 values times a signed byte per group
};

struct PackedMatrix {
  PackedFormat format;
  int n, k;        // out_features, in_features as in the file
  int num_blocks;  // ceil(n / 16)
  int group;       // values per scale, 16 or 32; 0 for float formats
  ScaleKind scales;
  bool has_min;
  int zero_point;
  size_t block_bytes;  // multiple of 64
  uint8_t* data;       // [num_blocks][block_bytes], 64-byte aligned, in storage; null until it is allocated
  size_t bytes;
  std::shared_ptr<uint8_t> storage;  // matrices may share one range of memory

  PackedMatrix() = default;
  PackedMatrix(const PackedMatrix&) = delete;
  PackedMatrix& operator=(const PackedMatrix&) = delete;
  bool quantised() const { return scales != ScaleKind::kNone; }  // needs QuantRows rather than float activations
};

// Bytes of one row of k values in a file. Throws std::invalid_argument for an unknown dtype, k < 1, or k that is not a whole
// number of the dtype's blocks.
size_t row_bytes(const char* dtype, int k);

// The packed form of an n x k matrix, without memory for its data yet.
// dtype is GGML's name in lower case: f32 f16 bf16 q4_0 q4_1 q5_0 q5_1 q8_0 q2_k q3_k q4_k q5_k q6_k. widen_to_f32 dequantises
// into kF32 whatever the dtype. Throws std::invalid_argument naming what cannot be packed.
std::unique_ptr<PackedMatrix> pack_plan(const char* dtype, int n, int k, bool widen_to_f32);

// Memory for planned matrices, in their order in one range; undefined until pack_blocks has covered [0, num_blocks) of each.
// Throws std::bad_alloc.
void pack_allocate(const std::vector<PackedMatrix*>& matrices);

// Both for one matrix.
std::unique_ptr<PackedMatrix> pack_begin(const char* dtype, int n, int k, bool widen_to_f32);

// Fill 16-row blocks [block_begin, block_end) from the whole matrix' file bytes (n rows of row_bytes(dtype, k), any alignment).
// dtype must be the one given to pack_plan. Threads may fill disjoint ranges at once.
void pack_blocks(PackedMatrix& matrix, const char* dtype, const uint8_t* raw, int block_begin, int block_end);

// out[0..k) = the row in float32, bit for bit what GGML's reference dequantisation gives (d * sc first, then * code, then the
// minimum; no fused multiply-add). Throws as row_bytes does.
void dequantize_row(const char* dtype, const uint8_t* row, int k, float* out);

// out[0..k) = row `row` of a packed matrix in float32: the bits that dequantize_row gives for the row it was packed from.
void unpack_row(const PackedMatrix& matrix, int row, float* out);

}  // namespace octavo
