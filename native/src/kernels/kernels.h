// What the program runner may call. One Kernels table per ISA level; kernels know shapes and formats, never the model.
//
// Exactness: every output element has one fixed order of operations that depends on its own inputs alone, not on how many
// rows are computed together, which thread computes them, or where a range starts.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

// ---- activations -------------------------------------------------------------------------------------------------
// Rows quantised per token and group of 32 values: x[t][k] ~ scale[t][k / 32] * q[t][k], q in -127..127.
// sum16 holds the exact integer sums of q over each half group, for weights with a zero point or a minimum.
struct QuantRows {
  int8_t* q;        // [rows][k]
  float* scale;     // [rows][k / 32]
  int16_t* sum16;   // [rows][k / 16]
};

// ---- weights -----------------------------------------------------------------------------------------------------
enum class PackedFormat : int32_t {
  kF32 = 0,   // float32 activations and weights
  kBF16 = 1,  // weights bfloat16, activations float32
  kF16 = 2,   // weights float16, activations float32
  kQ4 = 3, kQ5 = 4, kQ6 = 5, kQ8 = 6,  // packed codes, activations QuantRows; details in packing.h
};

struct PackedMatrix;  // packing.h: n (out_features) x k (in_features), rows interleaved by 16

// ---- KV storage ----------------------------------------------------------------------------------------------------
enum class KVType : int32_t { kF16 = 0, kBF16 = 1, kF32 = 2, kI8 = 3 };

// Inside a block: [kv_head][tile of 16 tokens], a tile being K, then V, then scales. R = head_dim rounded up to a multiple of 16;
// what V holds beyond head_dim is never looked at.
//   f32, f16    K [head_dim][16 tokens]                   V [16 tokens][R]
//   bf16, int8  K [head_dim / 2][16 tokens][2 dims]   V [8][R][2 tokens]: as dot products of pairs of 16-bit numbers read them;
//               head_dim is even
//   int8        then k_scale [16] and v_scale [16] in float32: a token's and head's values are q * scale, q in -127..127
// The layout is the type's own, the same on every ISA level.
struct KVTileLayout { size_t v_offset, scales_offset, bytes; };

// Internal linkage, here and below: units differ in ISA.
static inline size_t kv_value_bytes(KVType type) { return type == KVType::kF32 ? 4 : type == KVType::kI8 ? 1 : 2; }

static inline bool kv_is_paired(KVType type) { return type == KVType::kBF16 || type == KVType::kI8; }

static inline KVTileLayout kv_tile_layout(KVType type, int head_dim) {
  const size_t v_dims = ((size_t)head_dim + 15) / 16 * 16;
  const size_t v = 16 * (size_t)head_dim * kv_value_bytes(type), scales = v + 16 * v_dims * kv_value_bytes(type);
  return {v, scales, scales + (type == KVType::kI8 ? 2 * 16 * sizeof(float) : 0)};
}

// One layer's pages.
struct KVLayerView {
  uint8_t* base;            // block b starts at base + b * block_bytes
  size_t block_bytes;
  int kv_heads, head_dim, block_size;
  KVType type;
};

struct AttentionParams {
  int heads, kv_heads, head_dim;
  float scale, softcap;  // softcap 0: off
  int window;            // 0: off; position p sees p - window + 1 .. p
};

// The states of a sequence's first positions, computed before: partial states (see Kernels::attention) of rows with the same keys and
// values there, whole tiles. Of a split that they end within, the state is one to go on from.
struct AttentionHead {
  const float* partial;
  int tokens;       // 0: none
  int row, splits;  // where in partial: the sequence's first row is its row `row`; splits a row
};

// One sequence of the step: rows are its new positions start .. start + rows - 1, KV of all of them already stored.
// Rows of several sequences whose first tokens lie in the same blocks can be computed on those tokens as one sequence: `together`, and
// then each of them sees what `start` sees.
struct AttentionSequence {
  const float* q;        // [rows][q_stride], heads * head_dim used
  float* out;            // [rows][out_stride]
  int q_stride, out_stride;
  int start, rows;
  const int32_t* block_table;
  bool together = false;
  AttentionHead head = {nullptr, 0, 0, 0};
  const int* q_rows = nullptr;   // [rows] whose queries they are: row i's at q + q_rows[i] * q_stride; null: at i
  int state_splits = 0;          // splits of a row in `partial`; 0: attention_num_splits
  uint64_t* bytes_read = nullptr;  // of keys and values, added to when not null: what each pass over them walks

  int position(int row) const { return together ? start : start + row; }
};

constexpr int kSplitTokens = 256;  // fixed split points of attention, by position
constexpr int kTileTokens = 64;    // steps of a split's running state

// Splits that hold the sequence's positions, those of this step's rows included.
static inline int attention_num_splits(const AttentionSequence& s) { return s.position(s.rows - 1) / kSplitTokens + 1; }

struct Kernels {
  const char* name;  // "portable", "avx2", "avx512_vnni", "avx512_bf16"

  // rmsnorm: out[i] = x[i] / sqrt(mean(x^2) + eps) * w[i] for one row (out may be x).
  void (*rmsnorm)(const float* x, const float* w, float eps, int dim, float* out);
  // Quantise one row of k values (k % 32 == 0) into row `row` of out.
  void (*quantize)(const float* x, int k, QuantRows out, int row);
  // out[i] = act(gate[i]) * up[i]; activation 0: silu, 1: gelu (tanh form).
  void (*gated_act)(const float* gate, const float* up, int dim, int activation, float* out);
  void (*add)(const float* a, const float* b, int dim, float* out);
  void (*softcap)(const float* x, int dim, float cap, float* out);
  // Rotate heads in place; cos_sin: [rotary_dim / 2][2] for this position.
  void (*rope)(float* x, int heads, int head_dim, int rotary_dim, bool interleaved, const float* cos_sin);
  // Store one token's k and v ([kv_heads * head_dim] each) at slot `offset` of block `block`.
  void (*store_kv)(const KVLayerView& kv, int block, int offset, const float* k, const float* v);

  // out[t][n] for rows t in 0..rows-1 and the 16-row blocks [block_begin, block_end) of the matrix.
  // x: float rows [rows][k] for float formats, qx for quantised ones. bias may be null. accumulate: out += result.
  void (*matmul)(const PackedMatrix& w, const float* x, const QuantRows& qx, int rows, int block_begin, int block_end,
                 const float* bias, bool accumulate, float* out, int out_stride);

  // Attention of kv_head's query heads for rows [row_begin, row_end) of one sequence, over positions of the fixed splits
  // [split_begin, split_end). With partial == nullptr the splits must be s.head.tokens / kSplitTokens .. attention_num_splits(s) and
  // `out` is written; otherwise the state (m, l, acc) of (row, kv_head, split) is stored at
  //   partial + ((row * kv_heads + kv_head) * attention_num_splits(s) + split) * attention_partial_floats(p).
  // States of splits that a row sees nothing of are neither written nor read. One tile arithmetic for all (attention.inl).
  // scratch: attention_scratch_bytes(p), aligned to 64 bytes, one per thread.
  void (*attention)(const KVLayerView& kv, const AttentionParams& p, const AttentionSequence& s, int kv_head, int row_begin, int row_end,
                    int split_begin, int split_end, float* partial, void* scratch);
  // Merge the states of splits 0 .. splits - 1 in order and write out (same arithmetic as the one-pass form): those of s.head's whole
  // splits, then those in `partial`. splits == attention_num_splits(s), partial as above.
  void (*attention_merge)(const AttentionParams& p, const AttentionSequence& s, int kv_head, int row, int splits, const float* partial);
  size_t (*attention_scratch_bytes)(const AttentionParams& p);
  size_t (*attention_partial_floats)(const AttentionParams& p);  // per (row, kv_head, split)

  // Round a tile of `type`, all 16 tokens of which are stored, to a byte for each value, in the tile's own order, and k_scale [16] and
  // v_scale [16] in float32 behind them: as large as a tile of int8. An int8 tile is copied as it is. And back, rounded to `type`.
  // Packing what was unpacked gives the same bytes.
  void (*pack_kv)(KVType type, int head_dim, const uint8_t* tile, uint8_t* packed);
  void (*unpack_kv)(KVType type, int head_dim, const uint8_t* packed, uint8_t* tile);
};

const Kernels* kernels_portable();
const Kernels* kernels_avx2();    // null when not compiled in
const Kernels* kernels_avx512_vnni();
const Kernels* kernels_avx512_bf16();

}  // namespace octavo
