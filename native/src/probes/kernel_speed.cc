#include "probes/kernel_speed.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

#include "kernels/packing.h"
#include "kv/kv_store.h"
#include "probes/timing.h"
#include "runtime/aligned.h"

namespace octavo {
namespace {

constexpr int kBlockSize = 16;  // tokens

// KV of one thread's sequence in `layers` layers, blocks in descending order. Zeros: times do not depend on the values.
struct SequenceKV {
  KVStore store;
  std::vector<int32_t> table;
  std::vector<float> q, out;
  AlignedArray<uint8_t> scratch;
  SequenceKV(const Kernels& kernels, const AttentionCase& c, int layers)
      : store((c.context + kBlockSize - 1) / kBlockSize, kBlockSize, c.type,
              std::vector<KVLayerShape>(static_cast<size_t>(layers), {c.params.kv_heads, c.params.head_dim})),
        q(static_cast<size_t>(c.rows) * c.params.heads * c.params.head_dim, 0.25f), out(q.size()),
        scratch(kernels.attention_scratch_bytes(c.params)) {
    for (int b = store.num_blocks() - 1; b >= 0; --b) table.push_back(b);
    std::memset(store.layer(0).base, 0, store.layer(0).block_bytes * static_cast<size_t>(store.num_blocks()));  // every page is there
  }
};

void attend(const Kernels& kernels, const AttentionCase& c, SequenceKV& kv, int layer) {
  const int width = c.params.heads * c.params.head_dim;
  const AttentionSequence s{kv.q.data(), kv.out.data(), width, width, c.context - c.rows, c.rows, kv.table.data()};
  for (int h = 0; h < c.params.kv_heads; ++h)
    kernels.attention(kv.store.layer(layer), c.params, s, h, 0, c.rows, 0, attention_num_splits(s), nullptr, kv.scratch.data());
}

}  // namespace

KernelSpeed time_matmul(const Kernels& table, ThreadPool& pool, const std::string& dtype, int n, int k, int rows, double budget_s) {
  if (rows < 1) throw std::invalid_argument("rows: " + std::to_string(rows) + " is not allowed; at least 1");
  const auto w = pack_begin(dtype.c_str(), n, k, false);
  const int64_t threads = pool.size();
  const auto bound = [&](int64_t part) { return static_cast<int>(w->num_blocks * part / threads); };
  pool.each([&](int thread) {  // zeros: times do not depend on the values
    std::memset(w->data + static_cast<size_t>(bound(thread)) * w->block_bytes, 0, static_cast<size_t>(bound(thread + 1) - bound(thread)) * w->block_bytes);
  });
  const size_t count = static_cast<size_t>(rows) * static_cast<size_t>(k);
  const std::vector<float> x(count, 0.5f);
  std::vector<float> scale(count / 32 + 1, 0.01f), out(static_cast<size_t>(rows) * static_cast<size_t>(n));
  std::vector<int8_t> q(count, 3);
  std::vector<int16_t> sum16(count / 16 + 1, 48);
  const QuantRows quant{q.data(), scale.data(), sum16.data()};
  const Timing t = time_on_threads(pool, budget_s, [&](int thread) {
    table.matmul(*w, x.data(), quant, rows, bound(thread), bound(thread + 1), nullptr, false, out.data(), n);
  });
  return {t.median_s, static_cast<double>(w->bytes), 2.0 * rows * n * k};
}

KernelSpeed time_attention(const Kernels& table, ThreadPool& pool, const AttentionCase& c, double budget_s) {
  if (c.rows < 1 || c.rows > c.context) throw std::invalid_argument("rows: " + std::to_string(c.rows) + " is not in 1 .. the context");
  const AttentionParams& p = c.params;
  const size_t blocks = static_cast<size_t>((c.context + kBlockSize - 1) / kBlockSize);
  const size_t layer_bytes = blocks * KVStore::bytes_per_block(kBlockSize, c.type, {{p.kv_heads, p.head_dim}});
  const int layers = static_cast<int>(std::clamp<size_t>((c.kv_bytes + layer_bytes - 1) / layer_bytes, 1, 4096));
  std::vector<std::unique_ptr<SequenceKV>> sequences;
  for (int t = 0; t < pool.size(); ++t) sequences.push_back(std::make_unique<SequenceKV>(table, c, layers));
  const Timing t = time_on_threads(pool, budget_s, [&](int thread) {
    for (int layer = 0; layer < layers; ++layer) attend(table, c, *sequences[static_cast<size_t>(thread)], layer);
  });
  // Row i of the rows sees context - rows + i + 1 positions; two products of head_dim multiply-adds each.
  const double seen = static_cast<double>(c.rows) * (2.0 * c.context - c.rows + 1) / 2;
  const double times = static_cast<double>(layers) * pool.size();
  return {t.median_s, times * static_cast<double>(layer_bytes), times * 4.0 * seen * p.heads * p.head_dim};
}

}  // namespace octavo
