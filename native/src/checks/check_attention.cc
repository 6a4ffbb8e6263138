#include <algorithm>
#include <cmath>
#include <cstring>

#include "checks/kernel_check.h"
#include "checks/random.h"
#include "checks/scalar_attention.h"
#include "checks/scalar_rows.h"
#include "checks/worst.h"
#include "kv/kv_store.h"
#include "runtime/aligned.h"

namespace octavo {
namespace {

constexpr int kBlockSize = 16;

struct TypeName {
  KVType type;
  const char* name;
};
constexpr TypeName kTypes[] = {{KVType::kF16, "f16"}, {KVType::kBF16, "bf16"}, {KVType::kF32, "f32"}, {KVType::kI8, "int8"}};

// One sequence of `tokens` positions: random q, k, v, the KV stored by the kernel under test in blocks out of order.
struct Sequence {
  AttentionParams p;
  int tokens, width, kv_width;
  std::vector<float> q, k, v, out;
  KVStore store;
  std::vector<int32_t> table;

  Sequence(const Kernels& kernels, const AttentionParams& params, KVType type, int tokens, Rng& rng)
      : p(params), tokens(tokens), width(p.heads * p.head_dim), kv_width(p.kv_heads * p.head_dim),
        store((tokens + kBlockSize - 1) / kBlockSize, kBlockSize, type, {{p.kv_heads, p.head_dim}}) {
    q = rng.uniform_values(static_cast<size_t>(tokens) * width, 4.0f);
    k = rng.uniform_values(static_cast<size_t>(tokens) * kv_width, 2.0f);
    v = rng.uniform_values(static_cast<size_t>(tokens) * kv_width, 2.0f);
    out.assign(q.size(), 0.0f);
    for (int b = store.num_blocks() - 1; b >= 0; --b) table.push_back(b);
    for (int t = 0; t < tokens; ++t)
      kernels.store_kv(view(), table[t / kBlockSize], t % kBlockSize, &k[static_cast<size_t>(t) * kv_width], &v[static_cast<size_t>(t) * kv_width]);
  }
  const KVLayerView& view() const { return store.layer(0); }
  AttentionSequence rows(int start, int count) {
    const size_t at = static_cast<size_t>(start) * width;
    return {&q[at], &out[at], width, width, start, count, table.data()};
  }
};

// The last `rows` positions of the sequence in one pass, then each split by itself and merged; both must agree to the bit.
void run_rows(const Kernels& kernels, Sequence& s, int rows, Worst& worst) {
  AlignedArray<uint8_t> scratch(kernels.attention_scratch_bytes(s.p));
  const AttentionSequence at = s.rows(s.tokens - rows, rows);
  const int splits = attention_num_splits(at);
  const size_t count = static_cast<size_t>(rows) * s.width, first = s.q.size() - count;
  AlignedArray<float> partial(static_cast<size_t>(rows) * s.p.kv_heads * splits * kernels.attention_partial_floats(s.p));
  for (int h = 0; h < s.p.kv_heads; ++h) {
    for (int split = 0; split < splits; ++split)
      kernels.attention(s.view(), s.p, at, h, 0, rows, split, split + 1, partial.data(), scratch.data());
    for (int row = 0; row < rows; ++row) kernels.attention_merge(s.p, at, h, row, splits, partial.data());
  }
  const std::vector<float> merged(s.out.begin() + static_cast<ptrdiff_t>(first), s.out.end());
  for (int h = 0; h < s.p.kv_heads; ++h) kernels.attention(s.view(), s.p, at, h, 0, rows, 0, splits, nullptr, scratch.data());
  worst.exact(std::memcmp(merged.data(), &s.out[first], sizeof(float) * count) == 0);
}

// Of many rows the ends and those beside a tile's or split's boundary: the scalar loop is slow.
std::vector<int> judged_positions(int start, int tokens) {
  std::vector<int> out;
  for (int position = start; position < tokens; ++position) {
    const int in_tile = position % 64;
    if (tokens - start <= 64 || position == start || position == tokens - 1 || (position % 256 < 65 && (in_tile <= 1 || in_tile == 63)))
      out.push_back(position);
  }
  return out;
}

void compare(const Kernels& kernels, const AttentionParams& p, KVType type, int tokens, int rows, Rng& rng, Worst& worst) {
  Sequence s(kernels, p, type, tokens, rng);
  run_rows(kernels, s, rows, worst);
  std::vector<double> want;
  for (const int position : judged_positions(tokens - rows, tokens))
    for (int head = 0; head < p.heads; ++head) {
      const size_t at = static_cast<size_t>(position) * s.width + static_cast<size_t>(head) * p.head_dim;
      const double bound = scalar_attention(s.view(), s.table.data(), p, AttentionRounding(kernels, type), &s.q[at], position, head, want);
      for (size_t d = 0; d < want.size(); ++d) worst.value(s.out[at + d], want[d], bound);
    }
}

struct Case {
  const char* shape;
  int tokens, rows;
};

void check_type(const Kernels& kernels, const TypeName& type, CheckExtent extent, std::vector<KernelCheck>& out) {
  Rng rng{77};
  if (extent == CheckExtent::kStart) {
    Worst worst;
    compare(kernels, {2, 1, 16, 0.25f, 0.0f, 0}, type.type, 19, 3, rng, worst);
    out.push_back(worst.verdict("attention", type.name, "3 rows"));
    return;
  }
  const AttentionParams params[] = {{3, 1, 64, 0.125f, 0.0f, 0}, {4, 2, 24, 0.2f, 30.0f, 0}, {2, 2, 128, 0.09f, 0.0f, 100}};
  for (const Case& c : {Case{"1 row", 300, 1}, {"2-4 rows", 131, 3}, {"5-16 rows", 270, 11}, {"17-64 rows", 97, 50}, {"512 rows", 512, 512}}) {
    Worst worst;
    for (const AttentionParams& p : params) compare(kernels, p, type.type, c.tokens, c.rows, rng, worst);
    out.push_back(worst.verdict("attention", type.name, c.shape));
  }
}

// Half a step of int8 codes for x[first .. first + n): their greatest magnitude is 127 steps. And what rounding the scale may add.
double half_step(const std::vector<float>& x, int first, int n) {
  float max = 0.0f;
  for (int i = first; i < first + n; ++i) max = std::max(max, std::fabs(x[static_cast<size_t>(i)]));
  return max * (0.5 / 127 + 2.4e-7);
}

// Every stored element against the nearest code of its type, through the documented layout.
void check_store(const Kernels& kernels, const TypeName& type, CheckExtent extent, std::vector<KernelCheck>& out) {
  Rng rng{5};
  Worst worst;
  const std::vector<int> head_dims = extent == CheckExtent::kStart ? std::vector<int>{24} : std::vector<int>{2, 16, 24, 64, 80, 256};
  for (const int head_dim : head_dims) {
    const AttentionParams p{2, 2, head_dim, 1.0f, 0.0f, 0};
    Sequence s(kernels, p, type.type, 21, rng);
    for (int t = 0; t < s.tokens; ++t)
      for (int i = 0; i < s.kv_width; ++i)
        for (const bool value : {false, true}) {
          const float x = (value ? s.v : s.k)[static_cast<size_t>(t) * s.kv_width + i];
          const float stored = stored_kv(s.view(), s.table.data(), t, i / head_dim, i % head_dim, value);
          if (type.type == KVType::kI8) worst.value(stored, x, half_step(value ? s.v : s.k, t * s.kv_width + i / head_dim * head_dim, head_dim));
          else worst.value(stored, type.type == KVType::kF32 ? x : value_of_code(nearest_code(x, type.type), type.type), 0.0);
        }
  }
  out.push_back(worst.verdict("store_kv", type.name, extent == CheckExtent::kStart ? "head_dim 24" : "head_dim 2-256"));
}

// Whole blocks packed and unpacked again: every element within half a step of what was stored (and the rounding of its type), and packing
// what came back gives the same bytes.
void check_packing(const Kernels& kernels, const TypeName& type, CheckExtent extent, std::vector<KernelCheck>& out) {
  Rng rng{9};
  Worst worst;
  const std::vector<int> head_dims = extent == CheckExtent::kStart ? std::vector<int>{24} : std::vector<int>{2, 16, 24, 64, 80, 256};
  for (const int head_dim : head_dims) {
    const AttentionParams p{2, 2, head_dim, 1.0f, 0.0f, 0};
    Sequence s(kernels, p, type.type, kBlockSize, rng);
    const size_t tile = kv_tile_layout(type.type, head_dim).bytes, packed_tile = kv_tile_layout(KVType::kI8, head_dim).bytes;
    std::vector<float> before;
    for (const bool value : {false, true})
      for (int t = 0; t < kBlockSize; ++t)
        for (int i = 0; i < s.kv_width; ++i) before.push_back(stored_kv(s.view(), s.table.data(), t, i / head_dim, i % head_dim, value));
    AlignedArray<uint8_t> packed(packed_tile), again(packed_tile);
    for (int h = 0; h < p.kv_heads; ++h) {
      uint8_t* at = s.view().base + static_cast<size_t>(h) * tile;
      kernels.pack_kv(type.type, head_dim, at, packed.data());
      std::memset(at, 0x55, tile);
      kernels.unpack_kv(type.type, head_dim, packed.data(), at);
      kernels.pack_kv(type.type, head_dim, at, again.data());
      worst.exact(std::memcmp(packed.data(), again.data(), packed_tile) == 0);
    }
    for (size_t i = 0; i < before.size(); ++i) {
      const int value = i >= before.size() / 2, t = static_cast<int>(i % (before.size() / 2)) / s.kv_width, at = static_cast<int>(i % s.kv_width);
      const size_t head = i - i % static_cast<size_t>(head_dim);
      const double half = type.type == KVType::kI8 ? 0.0 : half_step(before, static_cast<int>(head), head_dim) * (1.0 + 1.0 / 1024);
      const double own = type.type == KVType::kBF16 ? 1.0 / 256 : type.type == KVType::kF16 ? 1.0 / 2048 : 0.0;  // unit roundoff
      const double bound = half + own * (std::fabs(before[i]) + half);
      worst.value(stored_kv(s.view(), s.table.data(), t, at / head_dim, at % head_dim, value != 0), before[i], bound);
    }
  }
  out.push_back(worst.verdict("pack_kv", type.name, extent == CheckExtent::kStart ? "head_dim 24" : "head_dim 2-256"));
}

}  // namespace

std::vector<KernelCheck> check_attention(const Kernels& table, CheckExtent extent) {
  std::vector<KernelCheck> out;
  for (const TypeName& type : kTypes) {
    check_store(table, type, extent, out);
    check_packing(table, type, extent, out);
    check_type(table, type, extent, out);
  }
  return out;
}

}  // namespace octavo
