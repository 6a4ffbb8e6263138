#include "checks/scalar_attention.h"

#include <algorithm>
#include <cmath>

#include "checks/scalar_rows.h"

namespace octavo {

float stored_kv(const KVLayerView& kv, const int32_t* block_table, int token, int kv_head, int d, bool value) {
  const size_t head_dim = static_cast<size_t>(kv.head_dim), lane = static_cast<size_t>(token % 16), at = static_cast<size_t>(d);
  const size_t tile = static_cast<size_t>(kv_head) * (kv.block_size / 16) + token % kv.block_size / 16;
  const size_t index = tile * 32 * head_dim + (value ? 16 * head_dim + lane * head_dim + at : 16 * at + lane);
  const uint8_t* block = kv.base + static_cast<size_t>(block_table[token / kv.block_size]) * kv.block_bytes;
  if (kv.type == KVType::kF32) return reinterpret_cast<const float*>(block)[index];
  return value_of_code(reinterpret_cast<const uint16_t*>(block)[index], kv.type);
}

double scalar_attention(const KVLayerView& kv, const int32_t* block_table, const AttentionParams& p, const float* q, int position, int head,
                        std::vector<double>& out) {
  const int kv_head = head / (p.heads / p.kv_heads), from = p.window ? std::max(0, position - p.window + 1) : 0;
  std::vector<double> score(static_cast<size_t>(position) + 1);
  double max = -INFINITY, magnitude = 0, sum = 0;
  for (int t = from; t <= position; ++t) {
    double dot = 0, absolute = 0;
    for (int d = 0; d < p.head_dim; ++d) {
      const double x = static_cast<double>(q[d]) * p.scale * stored_kv(kv, block_table, t, kv_head, d, false);
      dot += x;
      absolute += std::fabs(x);
    }
    score[t] = p.softcap > 0 ? p.softcap * std::tanh(dot / p.softcap) : dot;
    max = std::max(max, score[t]);
    magnitude = std::max(magnitude, absolute);
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
  const double eps = 1.2e-7, score_error = eps * ((p.head_dim + 2) * magnitude + 4 * p.softcap + std::fabs(max) + 8);
  return max_v * (2 * score_error + eps * (2 * std::min(position + 1, kSplitTokens) + position / 64 + 8));
}

}  // namespace octavo
