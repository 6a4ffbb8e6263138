#include "checks/scalar_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "checks/scalar_rows.h"
#include "runtime/cpu_features.h"

namespace octavo {

float stored_kv(const KVLayerView& kv, const int32_t* block_table, int token, int kv_head, int d, bool value) {
  const size_t head_dim = static_cast<size_t>(kv.head_dim), v_dims = (head_dim + 15) / 16 * 16, lane = static_cast<size_t>(token % 16);
  const size_t at = static_cast<size_t>(d), tile = static_cast<size_t>(kv_head) * (kv.block_size / 16) + token % kv.block_size / 16;
  const bool paired = kv.type == KVType::kBF16 || kv.type == KVType::kI8;
  const size_t element = kv.type == KVType::kF32 ? 4 : kv.type == KVType::kI8 ? 1 : 2, values = 16 * (head_dim + v_dims);
  const size_t tile_bytes = values * element + (kv.type == KVType::kI8 ? 128 : 0);
  const size_t k_index = paired ? (at / 2 * 16 + lane) * 2 + at % 2 : at * 16 + lane;
  const size_t v_index = 16 * head_dim + (paired ? (lane / 2 * v_dims + at) * 2 + lane % 2 : lane * v_dims + at);
  const uint8_t* start = kv.base + static_cast<size_t>(block_table[token / kv.block_size]) * kv.block_bytes + tile * tile_bytes;
  const uint8_t* p = start + (value ? v_index : k_index) * element;
  float scale;
  uint16_t code;
  switch (kv.type) {
    case KVType::kF32: std::memcpy(&scale, p, 4); return scale;
    case KVType::kI8:
      std::memcpy(&scale, start + values + (value ? 64 : 0) + 4 * lane, 4);
      return scale * static_cast<float>(static_cast<int8_t>(*p));
    default: std::memcpy(&code, p, 2); return value_of_code(code, kv.type);
  }
}

AttentionRounding::AttentionRounding(const Kernels& kernels, KVType type)
    : bf16(type == KVType::kBF16 && cpu_has_avx512_bf16() && kernels.attention == kernels_avx512_bf16()->attention), int8(type == KVType::kI8) {}

namespace {

double round_bf16(float x) { return value_of_code(nearest_code(x, KVType::kBF16), KVType::kBF16); }

}  // namespace

double scalar_attention(const KVLayerView& kv, const int32_t* block_table, const AttentionParams& p, AttentionRounding rounding, const float* query,
                        int position, int head, std::vector<double>& out) {
  const int kv_head = head / (p.heads / p.kv_heads), from = p.window ? std::max(0, position - p.window + 1) : 0;
  std::vector<double> score(static_cast<size_t>(position) + 1), q(static_cast<size_t>(p.head_dim));
  double max = -INFINITY, magnitude = 0, sum = 0, max_q = 0, max_k = 0;
  for (int d = 0; d < p.head_dim; ++d) {
    const float x = query[d] * p.scale;
    q[d] = rounding.bf16 ? round_bf16(x) + round_bf16(x - static_cast<float>(round_bf16(x))) : x;
    max_q = std::max(max_q, std::fabs(q[d]));
  }
  for (int t = from; t <= position; ++t) {
    double dot = 0, absolute = 0, sum_k = 0;
    for (int d = 0; d < p.head_dim; ++d) {
      const double k = stored_kv(kv, block_table, t, kv_head, d, false);
      dot += q[d] * k;
      absolute += std::fabs(q[d] * k);
      sum_k += std::fabs(k);
    }
    score[t] = p.softcap > 0 ? p.softcap * std::tanh(dot / p.softcap) : dot;
    max = std::max(max, score[t]);
    magnitude = std::max(magnitude, absolute);
    max_k = std::max(max_k, sum_k);
  }
  out.assign(static_cast<size_t>(p.head_dim), 0.0);
  double max_v = 0;
  for (int t = from; t <= position; ++t) {
    const double w = std::exp(score[t] - max);
    sum += w;
    for (int d = 0; d < p.head_dim; ++d) {
      const double value = stored_kv(kv, block_table, t, kv_head, d, true);
      out[d] += w * value;
      max_v = std::max(max_v, std::fabs(value));
    }
  }
  for (double& x : out) x /= sum;
  // A score's rounding errors (chain over head_dim, softcap, subtraction and exp) act twice, in numerator and denominator;
  // then come the chain of up to one split of weights and one rounding per tile and split. eps covers two roundings per
  // portable multiply-add.
  const double eps = 1.2e-7;
  double score_error = eps * ((p.head_dim + 2) * magnitude + 4 * p.softcap + std::fabs(max) + 8), weight_error = 0;
  // bfloat16 weights are within 2^-8 of themselves, in numerator and denominator alike, and their exp within 2^-18.
  if (rounding.bf16) weight_error = 2 * (std::ldexp(1.0, -8) + std::ldexp(1.0, -18));
  // int8: half a step of the query (of 32767 to its greatest value); half a step of each weight of a tile (of 32767 to the greatest
  // weight times scale), so 64 half steps of the tile's greatest weight, and the greatest weights of all tiles are at most l.
  if (rounding.int8) score_error += 0.5 / 32767 * max_q * max_k, weight_error = 64 * 0.5 / 32767;
  return max_v * (2 * score_error + weight_error + eps * (2 * std::min(position + 1, kSplitTokens) + position / 64 + 8));
}

}  // namespace octavo
