// The one source of every ISA level's sampling kernels: compiled with -DOCTAVO_ISA_NS=<level> and that level's machine flags.
//
// Whole-vocabulary work is straight loops over chunks that stay in the first-level cache. Filters never sort the vocabulary: a bound
// from block maxima or from masses above fixed cuts collects a few candidates, and a radix search over the bits of the logits finds where
// the kept prefix of (logit descending, id ascending) ends. Masses are integers, so that search adds them in any order.
#include "kernels/sampling.h"

#include "kernels/sampling_math.h"

namespace octavo {
namespace OCTAVO_ISA_NS {
namespace {

OCTAVO_INLINE int min_int(int a, int b) { return a < b ? a : b; }

float max_of(const float* x, int n) {
  float best = kLowest;
  int i = 0;
  if (n >= 16) {
    F32x16 lanes = f32_load(x);
    for (i = 16; i + 16 <= n; i += 16) lanes = f32_max(lanes, f32_load(x + i));
    best = f32_max_lane(lanes);
  }
  for (; i < n; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

int first_equal(const float* x, int n, float value) {
  for (int i = 0; i < n; ++i) {
    if (x[i] == value) return i;
  }
  return -1;
}

bool any_bad(const float* x, int n) {
  uint32_t bad = 0;
  for (int i = 0; i < n; ++i) bad |= x[i] < __builtin_inff() ? 0u : 1u;
  return bad != 0;
}

int first_bad(const float* x, int n) {
  for (int i = 0; i < n; ++i) {
    if (!(x[i] < __builtin_inff())) return i;
  }
  return -1;
}

int scan(const float* logits, int begin, int end, float* block_best) {
  for (int base = begin; base < end; base += kNoiseBlock) {
    const int n = min_int(kNoiseBlock, end - base);
    if (any_bad(logits + base, n)) return base + first_bad(logits + base, n);
    for (int i = 0; i < n; i += kScanBlock) block_best[(base + i) / kScanBlock] = max_of(logits + base + i, min_int(kScanBlock, n - i));
  }
  return -1;
}

void find_best(LogitRow* row) {
  const int blocks = (row->size + kScanBlock - 1) / kScanBlock;
  const float best = max_of(row->block_best, blocks);
  const int start = first_equal(row->block_best, blocks, best) * kScanBlock;
  row->best_id = start + first_equal(row->logits + start, min_int(kScanBlock, row->size - start), best);
  row->best = best + 0.0f;
}

void copy_masked(const float* logits, const uint32_t* mask, const uint32_t* other_mask, int size, float* out) {
  for (int base = 0; base < size; base += 32) {
    const int word = base / 32, n = min_int(32, size - base);
    const uint32_t allowed = (mask ? mask[word] : ~0u) & (other_mask ? other_mask[word] : ~0u);
    for (int i = 0; i < n; ++i) out[base + i] = allowed >> i & 1u ? logits[base + i] : kLowest;
  }
}

// The tokens whose logit is at least `bound`.
int collect(const LogitRow& row, float bound, Candidates room) {
  int count = 0;
  for (int base = 0; base < row.size; base += kScanBlock) {
    if (row.block_best[base / kScanBlock] < bound) continue;
    const int end = min_int(base + kScanBlock, row.size);
    for (int t = base; t < end; ++t) {  // count <= t: the write stays inside and counts only when kept
      room.logits[count] = row.logits[t];
      room.ids[count] = t;
      count += row.logits[t] >= bound ? 1 : 0;
    }
  }
  return count;
}

// Where a prefix of the order ends: tokens above `key` are kept, whose mass is `before`; of those at it, as many as the target needs.
struct Boundary {
  uint32_t key;
  uint64_t before;
};

// The shortest prefix whose mass reaches target, 1 <= target <= the mass of all; without weights each token counts 1.
// Each pass spreads the keys that may still be the boundary over the bins and goes on in the bin where the mass crosses the target.
Boundary find_boundary(const float* logits, const uint32_t* weights, int n, uint64_t target) {
  constexpr int kBinBits = 11;
  uint64_t mass[1 << kBinBits], before = 0;
  float least = logits[0];
  for (int i = 1; i < n; ++i) least = logits[i] < least ? logits[i] : least;
  uint32_t low = order_key(least), span = order_key(max_of(logits, n)) - low;  // the boundary is in low .. low + span
  while (true) {
    const int shift = span >> kBinBits ? 32 - __builtin_clz(span) - kBinBits : 0;
    uint32_t bin = span >> shift;
    __builtin_memset(mass, 0, sizeof(mass[0]) * (bin + 1));
    for (int i = 0; i < n; ++i) {
      const uint32_t offset = order_key(logits[i]) - low;  // wraps to a large number below `low`
      if (offset <= span) mass[offset >> shift] += weights ? weights[i] : 1;
    }
    while (before + mass[bin] < target) before += mass[bin--];
    low += bin << shift;
    if (shift == 0) return {low, before};
    span = (1u << shift) - 1;
  }
}

// Shorten the candidates to the prefix that find_boundary describes; returns how many are left.
int keep_prefix(Candidates c, const uint32_t* weights, int n, uint64_t target) {
  const Boundary end = find_boundary(c.logits, weights, n, target);
  uint64_t mass = end.before;
  int count = 0;
  for (int i = 0; i < n; ++i) {
    const uint32_t key = order_key(c.logits[i]);
    bool keep = key > end.key;
    if (key == end.key && mass < target) {
      mass += weights ? weights[i] : 1;
      keep = true;
    }
    c.logits[count] = c.logits[i];
    c.ids[count] = c.ids[i];
    count += keep ? 1 : 0;
  }
  return count;
}

// The k best tokens of the row, by ascending id; 1 <= k <= row.size. The k-th best block maximum bounds the k-th best logit from below.
int collect_best(const LogitRow& row, int k, Candidates room) {
  const int num_blocks = (row.size + kScanBlock - 1) / kScanBlock;
  float bound = kLowest;
  if (k <= num_blocks) bound = float_of_key(find_boundary(row.block_best, nullptr, num_blocks, static_cast<uint64_t>(k)).key);
  const int n = collect(row, bound, room);
  return n == k ? n : keep_prefix(room, nullptr, n, static_cast<uint64_t>(k));
}

// The least logit whose z = (logit - best) / temperature is at least `floor` <= 0. z does not fall as the logit rises, so comparing logits
// with it selects exactly the tokens that comparing z with floor does.
float logit_bound(float best, float temperature, float floor) {
  uint32_t low = order_key(kLowest), high = order_key(best);
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    if ((float_of_key(middle) - best) / temperature >= floor) high = middle;
    else low = middle + 1;
  }
  return float_of_key(high);
}

// Smallest integer mass that reaches the share p of `total`.
uint64_t mass_target(float p, uint64_t total) {
  const double share = static_cast<double>(p) * static_cast<double>(total);
  const uint64_t whole = static_cast<uint64_t>(share);
  return static_cast<double>(whole) < share ? whole + 1 : whole;
}

// The mass above a few cuts of z; the last cut leaves out only tokens of mass 0.
constexpr int kNumCuts = 4;
constexpr float kCuts[kNumCuts] = {-4.0f, -8.0f, -14.0f, -21.0f};

void mass_above_cuts(const LogitRow& row, float temperature, uint64_t* mass) {
  alignas(64) float z[kNoiseBlock];
  alignas(64) uint32_t weight[kNoiseBlock];
  for (int c = 0; c < kNumCuts; ++c) mass[c] = 0;
  for (int base = 0; base < row.size; base += kNoiseBlock) {
    const int n = min_int(kNoiseBlock, row.size - base);
    for (int i = 0; i < n; ++i) {
      z[i] = (row.logits[base + i] - row.best) / temperature;
      weight[i] = weight_of(z[i]);
    }
    for (int c = 0; c < kNumCuts; ++c) {
      uint64_t sum = 0;
      for (int i = 0; i < n; ++i) sum += z[i] >= kCuts[c] ? weight[i] : 0u;
      mass[c] += sum;
    }
  }
}

// top_p over `count` candidates, or over the row when count is negative; returns how many candidates are left.
int collect_nucleus(const LogitRow& row, const DrawParams& p, Candidates c, int count) {
  const float best = row.best, temperature = p.temperature;
  uint64_t total = 0;
  if (count < 0) {
    uint64_t mass[kNumCuts];
    mass_above_cuts(row, temperature, mass);
    total = mass[kNumCuts - 1];
    int cut = 0;
    while (mass[cut] < mass_target(p.top_p, total)) ++cut;
    count = collect(row, logit_bound(best, temperature, kCuts[cut]), c);
  }
  for (int i = 0; i < count; ++i) c.weights[i] = weight_of((c.logits[i] - best) / temperature);
  if (total == 0) {
    for (int i = 0; i < count; ++i) total += c.weights[i];
  }
  return keep_prefix(c, c.weights, count, mass_target(p.top_p, total));
}

// Random bits of the kNoiseBlock tokens from block * kNoiseBlock on: counter c of the block gives tokens c, c + 256, c + 512, c + 768.
void noise_of_block(const DrawParams& p, int block, uint32_t* bits) {
  constexpr int kCounters = kNoiseBlock / 4;
  const uint32_t low = static_cast<uint32_t>(p.position), high = static_cast<uint32_t>(p.position >> 32);
  const uint32_t first = static_cast<uint32_t>(block) * kCounters;
  for (int c = 0; c < kCounters; ++c) {
    const Words w = philox({first + static_cast<uint32_t>(c), low, high, 0}, p.seed);
    bits[c] = w.x0;
    bits[c + kCounters] = w.x1;
    bits[c + 2 * kCounters] = w.x2;
    bits[c + 3 * kCounters] = w.x3;
  }
}

// The greatest score so far and where it was; replaced by a greater one only, so that ties stay with the lower id.
struct Best {
  float score;
  int index;
};

// Scores of n <= kNoiseBlock tokens, index from `first` on. Groups whose bounds are all below the best so far are passed over: after the
// first few hundred tokens that is nearly all of them, whatever the distribution, and they cost no logarithm.
Best improve(Best best, int first, const float* logits, const uint32_t* bits, int n, float top_logit, float temperature) {
  alignas(64) float bound[kNoiseBlock];
  alignas(64) float score[kScanBlock];
  for (int i = 0; i < n; ++i) bound[i] = (logits[i] - top_logit) / temperature + gumbel_bound(bits[i]);
  for (int base = 0; base < n; base += kScanBlock) {
    const int m = min_int(kScanBlock, n - base);
    if (!(max_of(bound + base, m) > best.score)) continue;
    for (int i = 0; i < m; ++i) score[i] = (logits[base + i] - top_logit) / temperature + gumbel(bits[base + i]);
    const float top = max_of(score, m);
    if (top > best.score) best = {top, first + base + first_equal(score, m, top)};
  }
  return best;
}

int draw_from_row(const LogitRow& row, const DrawParams& p) {
  alignas(64) uint32_t bits[kNoiseBlock];
  Best best{kLowest, 0};
  for (int base = 0; base < row.size; base += kNoiseBlock) {
    noise_of_block(p, base / kNoiseBlock, bits);
    best = improve(best, base, row.logits + base, bits, min_int(kNoiseBlock, row.size - base), row.best, p.temperature);
  }
  return best.index;
}

int draw_from_candidates(const LogitRow& row, const DrawParams& p, const Candidates& c, int count) {
  const uint32_t low = static_cast<uint32_t>(p.position), high = static_cast<uint32_t>(p.position >> 32);
  alignas(64) uint32_t bits[kNoiseBlock];
  Best best{kLowest, 0};
  for (int base = 0; base < count; base += kNoiseBlock) {
    const int n = min_int(kNoiseBlock, count - base);
    for (int i = 0; i < n; ++i) {
      const uint32_t id = static_cast<uint32_t>(c.ids[base + i]), word = id >> 8 & 3u;
      const Words w = philox({(id >> 10 << 8) + (id & 255u), low, high, 0}, p.seed);
      const uint32_t even = word & 2u ? w.x2 : w.x0, odd = word & 2u ? w.x3 : w.x1;
      bits[i] = word & 1u ? odd : even;
    }
    best = improve(best, base, c.logits + base, bits, n, row.best, p.temperature);
  }
  return c.ids[best.index];
}

int draw(const LogitRow& row, const DrawParams& p, Candidates c) {
  const bool use_top_k = p.top_k > 0 && p.top_k < row.size;
  const float bound = p.min_p > 0.0f ? logit_bound(row.best, p.temperature, log_positive(p.min_p)) : kLowest;
  int count = -1;  // no candidates yet: the whole row
  if (use_top_k) {
    const int n = collect_best(row, p.top_k, c);
    count = 0;
    for (int i = 0; i < n; ++i) {
      c.logits[count] = c.logits[i];
      c.ids[count] = c.ids[i];
      count += c.logits[i] >= bound ? 1 : 0;
    }
  } else if (p.min_p > 0.0f) {
    count = collect(row, bound, c);
  }
  if (p.top_p < 1.0f) count = collect_nucleus(row, p, c, count);
  return count < 0 ? draw_from_row(row, p) : draw_from_candidates(row, p, c, count);
}

// Sum of exp(logit - best) in the order of lane_sum.
float sum_of_exp(const LogitRow& row) {
  alignas(64) float e[kNoiseBlock];
  float total = 0.0f;
  for (int base = 0; base < row.size; base += kNoiseBlock) {
    const int n = min_int(kNoiseBlock, row.size - base), full = (n + 15) / 16 * 16;
    for (int i = 0; i < n; ++i) e[i] = exp_nonpositive(row.logits[base + i] - row.best);
    for (int i = n; i < full; ++i) e[i] = 0.0f;
    F32x16 lanes = f32_load(e);
    for (int i = 16; i < full; i += 16) lanes = lanes + f32_load(e + i);
    total = total + f32_sum(lanes);
  }
  return total;
}

int rank_of(const LogitRow& row, int token_id) {
  const float own = row.logits[token_id];
  int better = 0;
  for (int t = 0; t < token_id; ++t) better += row.logits[t] >= own ? 1 : 0;
  for (int t = token_id + 1; t < row.size; ++t) better += row.logits[t] > own ? 1 : 0;
  return better + 1;
}

void logprobs(const LogitRow& row, int token_id, int k, Candidates c, TokenLogprobs* out) {
  const float log_sum = log_positive(sum_of_exp(row));
  out->token_id = token_id;
  out->logprob = (row.logits[token_id] - row.best) - log_sum;
  out->rank = rank_of(row, token_id);
  out->num_top = k;
  if (k == 0) return;
  collect_best(row, k, c);
  for (int i = 0; i < k; ++i) {  // insertion by logit; candidates come by ascending id, so ties stay in order
    const float logprob = (c.logits[i] - row.best) - log_sum, logit = c.logits[i];
    const int32_t id = c.ids[i];
    int j = i;
    for (; j > 0 && c.logits[j - 1] < logit; --j) {
      c.logits[j] = c.logits[j - 1];
      out->top_ids[j] = out->top_ids[j - 1];
      out->top_logprobs[j] = out->top_logprobs[j - 1];
    }
    c.logits[j] = logit;
    out->top_ids[j] = id;
    out->top_logprobs[j] = logprob;
  }
}

}  // namespace
}  // namespace OCTAVO_ISA_NS

#define OCTAVO_CONCAT_(a, b) a##b
#define OCTAVO_CONCAT(a, b) OCTAVO_CONCAT_(a, b)
#define OCTAVO_STR_(a) #a
#define OCTAVO_STR(a) OCTAVO_STR_(a)

const SamplingKernels* OCTAVO_CONCAT(sampling_kernels_, OCTAVO_ISA_NS)() {
  namespace k = OCTAVO_ISA_NS;
  static const SamplingKernels table = {OCTAVO_STR(OCTAVO_ISA_NS), k::scan, k::find_best, k::copy_masked, k::draw, k::logprobs};
  return &table;
}

}  // namespace octavo
