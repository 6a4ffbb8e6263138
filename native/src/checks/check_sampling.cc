#include <algorithm>
#include <cmath>
#include <limits>

#include "checks/kernel_check.h"
#include "checks/random.h"
#include "checks/worst.h"

namespace octavo {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// A row of logits with ties, a masked token here and there, and its room.
struct Row {
  std::vector<float> logits, block_best, candidate_logits;
  std::vector<int32_t> ids;
  std::vector<uint32_t> weights;
  LogitRow row;
  Row(int size, Rng& rng)
      : logits(rng.uniform_values(static_cast<size_t>(size), 12.0f)), block_best(logits.size() / kScanBlock + 1), candidate_logits(logits.size()),
        ids(logits.size()), weights(logits.size()) {
    for (float& x : logits) x = rng.below(20) == 0 ? kMinusInfinity : std::nearbyint(x * 8.0f) / 8.0f;
    logits[static_cast<size_t>(rng.below(size))] = 3.0f;  // at least one is not masked
    row = {logits.data(), size, block_best.data(), 0.0f, -1, -1};
  }
  Candidates room() { return {candidate_logits.data(), ids.data(), weights.data()}; }
};

// In two parts, as threads do it.
void scan(const SamplingKernels& table, Row& r) {
  const int middle = r.row.size / 2 / kScanBlock * kScanBlock;
  r.row.bad_id = std::max(table.scan(r.logits.data(), middle, r.row.size, r.block_best.data()), table.scan(r.logits.data(), 0, middle, r.block_best.data()));
  table.find_best(&r.row);
}

void check_scan(const SamplingKernels& table, Row& r, Worst& worst) {
  scan(table, r);
  const auto best = std::max_element(r.logits.begin(), r.logits.end());  // the first of equals
  worst.exact(r.row.bad_id == -1 && r.row.best == *best && r.row.best_id == best - r.logits.begin());
  for (size_t i = 0; i < r.logits.size(); i += kScanBlock) {
    const auto begin = r.logits.begin() + static_cast<ptrdiff_t>(i);
    worst.exact(r.block_best[i / kScanBlock] == *std::max_element(begin, std::min(begin + kScanBlock, r.logits.end())));
  }
}

void check_masks(const SamplingKernels& table, Row& r, Rng& rng, Worst& worst) {
  std::vector<uint32_t> masks[2];
  for (auto& mask : masks)
    for (size_t i = 0; i < r.logits.size(); i += 32) mask.push_back(static_cast<uint32_t>(rng.next()));
  std::vector<float> out(r.logits.size());
  table.copy_masked(r.logits.data(), masks[0].data(), masks[1].data(), r.row.size, out.data());
  for (size_t i = 0; i < out.size(); ++i) {
    const bool allowed = masks[0][i / 32] & masks[1][i / 32] & (1u << i % 32);
    worst.exact(out[i] == (allowed ? r.logits[i] : kMinusInfinity));
  }
}

// The log-probability of every asked token in double; rank and order exactly.
void check_logprobs(const SamplingKernels& table, Row& r, Rng& rng, Worst& worst) {
  double sum = 0;
  for (const float x : r.logits) sum += std::exp(static_cast<double>(x) - r.row.best);
  const int id = static_cast<int>(std::max_element(r.logits.begin(), r.logits.end()) - r.logits.begin());
  const int k = std::min(5, r.row.size), token = rng.below(2) ? id : rng.below(r.row.size);
  TokenLogprobs got;
  table.logprobs(r.row, token, k, r.room(), &got);
  std::vector<int> order(r.logits.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return r.logits[static_cast<size_t>(a)] > r.logits[static_cast<size_t>(b)]; });
  worst.exact(got.token_id == token && got.num_top == k && order[static_cast<size_t>(got.rank) - 1] == token);
  const auto judge = [&](float logprob, int t) {
    const double x = r.logits[static_cast<size_t>(t)], want = x - r.row.best - std::log(sum);
    // A masked token's is exactly -inf; else rounded differences, and a sum of positive terms of two roundings each.
    if (std::isinf(x)) worst.exact(logprob == kMinusInfinity);
    else worst.value(logprob, want, 6e-8 * (2 * std::fabs(want) + static_cast<double>(r.logits.size()) / 16 + 32));
  };
  judge(got.logprob, token);
  for (int i = 0; i < k; ++i) {
    worst.exact(got.top_ids[i] == order[static_cast<size_t>(i)]);
    judge(got.top_logprobs[i], got.top_ids[i]);
  }
}

// A draw has one right answer on every level: that of the plain one, whose rule is octavo/sampling/reference.py.
void check_draws(const SamplingKernels& table, Row& r, Worst& worst) {
  const SamplingKernels& plain = *sampling_kernels_portable();
  for (uint64_t seed = 0; seed < 4; ++seed)
    for (const DrawParams& p : {DrawParams{1.0f, 1.0f, 0.0f, 0, seed, 7}, DrawParams{0.7f, 0.9f, 0.0f, 40, seed, 8}, DrawParams{1.3f, 1.0f, 0.05f, 0, seed, 9}}) {
      const int want = plain.draw(r.row, p, r.room());
      worst.exact(table.draw(r.row, p, r.room()) == want);
    }
}

}  // namespace

std::vector<KernelCheck> check_sampling(const SamplingKernels& table, CheckExtent extent) {
  Rng rng{31};
  const bool full = extent == CheckExtent::kFull;
  std::vector<KernelCheck> out;
  for (const char* kind : {"scan", "mask", "logprobs", "draw"}) {
    Worst worst;
    for (const int size : full ? std::vector<int>{1, 63, 64, 65, 1000, 5000, 49152} : std::vector<int>{300}) {
      Row r(size, rng);
      scan(*sampling_kernels_portable(), r);
      if (kind[0] == 's') check_scan(table, r, worst);
      else if (kind[0] == 'm') check_masks(table, r, rng, worst);
      else if (kind[0] == 'l') check_logprobs(table, r, rng, worst);
      else check_draws(table, r, worst);
    }
    out.push_back(worst.verdict("sampling", kind, full ? "1-49152 tokens" : "300 tokens"));
  }
  return out;
}

}  // namespace octavo
