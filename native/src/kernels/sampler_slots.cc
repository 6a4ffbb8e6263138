#include "kernels/sampler_slots.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "runtime/cpu_features.h"

namespace octavo {
namespace {

constexpr float kForbidden = -std::numeric_limits<float>::infinity();

// A token that penalties apply to; in the prompt alone when output_count is 0.
struct SeenToken {
  int32_t id;
  int32_t output_count;
};

struct Scratch {
  float* edited;  // [vocab_size]
  float* raw_blocks;
  float* blocks;
  Candidates room;
};

size_t rounded(int n) { return (static_cast<size_t>(n) + 15) / 16 * 16; }
size_t block_floats(int vocab_size) { return rounded((vocab_size + kScanBlock - 1) / kScanBlock); }

Scratch divide(float* scratch, int vocab_size) {
  const size_t row = rounded(vocab_size), blocks = block_floats(vocab_size);
  float* rest = scratch + row + 2 * blocks;
  return {scratch, scratch + row, scratch + row + blocks,
          {rest, reinterpret_cast<int32_t*>(rest + row), reinterpret_cast<uint32_t*>(rest + 2 * row)}};
}

LogitRow scanned(const SamplingKernels& kernels, const float* logits, int size, float* blocks) {
  LogitRow row{logits, size, blocks, 0.0f, 0, kernels.scan(logits, 0, size, blocks)};
  if (row.bad_id < 0) kernels.find_best(&row);
  return row;
}

SampleOutput failed(SampleStatus status, int token_id) {
  SampleOutput out{};
  out.token_id = token_id;
  out.status = status;
  return out;
}

// What a scan says of a row that must have a finite best logit.
SampleOutput row_status(const LogitRow& row) {
  if (row.bad_id >= 0) {
    const float value = row.logits[row.bad_id];
    return failed(value != value ? SampleStatus::kNan : SampleStatus::kInf, row.bad_id);
  }
  if (row.best == kForbidden) return failed(SampleStatus::kAllForbidden, -1);
  return failed(SampleStatus::kOk, -1);
}

}  // namespace

struct SamplerSlots::Slot {
  std::shared_ptr<const SlotParams> params;  // shared by forks
  uint64_t seed = 0;
  int64_t num_output = 0;
  std::vector<int32_t> tail;  // the newest output tokens, as many as the longest bad word can look at
  size_t tail_limit = 0;
  bool counts_prompt = false, counts_output = false;
  std::vector<SeenToken> seen;
  std::unordered_map<int32_t, size_t> seen_index;  // token id -> index in seen

  void see(int32_t id, int count) {
    const auto [at, added] = seen_index.try_emplace(id, seen.size());
    if (added) seen.push_back({id, 0});
    seen[at->second].output_count += count;
  }
  void append(int32_t id) {
    ++num_output;
    if (counts_output) see(id, 1);
    if (tail_limit == 0) return;
    if (tail.size() == tail_limit) tail.erase(tail.begin());
    tail.push_back(id);
  }
  bool completes(const std::vector<int32_t>& word) const {  // would the word's last token complete it
    const size_t n = word.size() - 1;
    if (static_cast<int64_t>(n) > num_output) return false;
    for (size_t i = 0; i < n; ++i) {
      if (tail[tail.size() - n + i] != word[i]) return false;
    }
    return true;
  }
  bool edits_logits() const {
    const SlotParams& p = *params;
    return !p.logit_bias.empty() || !p.allowed.empty() || !p.bad_words.empty() || !seen.empty() || (num_output < p.min_tokens && !p.stop_ids.empty());
  }
};

#if !(defined(__x86_64__) || defined(_M_X64))
const SamplingKernels* sampling_kernels_avx2() { return nullptr; }
const SamplingKernels* sampling_kernels_avx512_vnni() { return nullptr; }
#endif

const SamplingKernels* sampling_kernels_by_name(const char* name) {
  if (!std::strcmp(name, "portable")) return sampling_kernels_portable();
  if (!std::strcmp(name, "avx2")) return cpu_has_avx2() ? sampling_kernels_avx2() : nullptr;
  for (const char* level : {"avx512", "avx512_vnni"})
    if (!std::strcmp(name, level)) return cpu_has_avx512() ? sampling_kernels_avx512_vnni() : nullptr;
  if (!std::strcmp(name, "avx512_bf16")) return cpu_has_avx512_bf16() ? sampling_kernels_avx512_vnni() : nullptr;
  return nullptr;
}

std::string sample_error(SampleStatus status, int token_id) {
  const std::string token = "logit of token " + std::to_string(token_id) + " is ";
  switch (status) {
    case SampleStatus::kNan: return token + "nan; every logit must be finite or -inf";
    case SampleStatus::kInf: return token + "inf; every logit must be finite or -inf";
    case SampleStatus::kOverflow: return token + "inf after bias and penalties";
    case SampleStatus::kAllForbidden: return "every token is forbidden: no finite logit is left after bias, masks, bad words and min_tokens";
    case SampleStatus::kNotDrawn: return "no token was drawn: the draft before did not come true";
    case SampleStatus::kOk: break;
  }
  return "";
}

size_t sampling_scratch_floats(int vocab_size) { return 4 * rounded(vocab_size) + 2 * block_floats(vocab_size); }

LogitRow scan_row(const SamplingKernels& kernels, const float* logits, int vocab_size, float* scratch) {
  return scanned(kernels, logits, vocab_size, divide(scratch, vocab_size).raw_blocks);
}

SampleOutput raw_logprobs(const SamplingKernels& kernels, const LogitRow& row, int token_id, int k, float* scratch) {
  SampleOutput out = row_status(row);
  if (out.status != SampleStatus::kOk) return out;
  kernels.logprobs(row, token_id, std::min(k, row.size), divide(scratch, row.size).room, &out.logprobs);
  out.token_id = token_id;
  out.has_logprobs = true;
  return out;
}

SamplerSlots::SamplerSlots(int vocab_size, int max_num_slots, const SamplingKernels* kernels) : vocab_size_(vocab_size), kernels_(kernels) {
  if (vocab_size < 1) throw std::invalid_argument("vocab_size: " + std::to_string(vocab_size) + " is not at least 1");
  if (max_num_slots < 1) throw std::invalid_argument("max_num_slots: " + std::to_string(max_num_slots) + " is not at least 1");
  if (!kernels) throw std::invalid_argument("sampling kernels: this machine or build lacks the ISA level");
  slots_.resize(static_cast<size_t>(max_num_slots));
}

SamplerSlots::~SamplerSlots() = default;

void SamplerSlots::open(int slot, SlotParams params, uint64_t seed, const std::vector<int32_t>& prompt_ids, const std::vector<int32_t>& output_ids) {
  check_free(slot);
  check_params(params);
  check_ids("prompt_token_ids", prompt_ids);
  check_ids("output_token_ids", output_ids);
  auto s = std::make_unique<Slot>();
  s->seed = seed;
  s->counts_prompt = params.repetition_penalty != 1.0f;
  s->counts_output = s->counts_prompt || params.frequency_penalty != 0.0f || params.presence_penalty != 0.0f;
  for (const auto& word : params.bad_words) s->tail_limit = std::max(s->tail_limit, word.size() - 1);
  s->params = std::make_shared<const SlotParams>(std::move(params));
  if (s->counts_prompt) {
    for (const int32_t id : prompt_ids) s->see(id, 0);
  }
  for (const int32_t id : output_ids) s->append(id);
  slots_[static_cast<size_t>(slot)] = std::move(s);
}

void SamplerSlots::fork(int src, int dst, uint64_t seed) {
  const Slot& from = at(src);
  check_free(dst);
  auto s = std::make_unique<Slot>(from);
  s->seed = seed;
  slots_[static_cast<size_t>(dst)] = std::move(s);
}

void SamplerSlots::close(int slot) {
  at(slot);
  slots_[static_cast<size_t>(slot)].reset();
}

SampleOutput SamplerSlots::sample(int slot, const LogitRow& raw, float* scratch, int64_t position, const uint32_t* mask, int num_logprobs) {
  Slot& s = at(slot);
  const SlotParams& p = *s.params;
  const Scratch room = divide(scratch, vocab_size_);
  SampleOutput out = row_status(raw);
  if (out.status != SampleStatus::kOk) return out;
  LogitRow row = raw;
  if (mask || s.edits_logits()) {
    edit(s, mask, raw.logits, room.edited);
    row = scanned(*kernels_, room.edited, vocab_size_, room.blocks);
    if (row.bad_id >= 0) return failed(SampleStatus::kOverflow, row.bad_id);
    out = row_status(row);
    if (out.status != SampleStatus::kOk) return out;
  }
  const bool greedy = p.temperature == 0.0f || p.top_p == 0.0f;
  const DrawParams draw{p.temperature, p.top_p, p.min_p, p.top_k, s.seed, static_cast<uint64_t>(position)};
  out.token_id = greedy ? row.best_id : kernels_->draw(row, draw, room.room);
  if (num_logprobs >= 0) {
    kernels_->logprobs(raw, out.token_id, std::min(num_logprobs, vocab_size_), room.room, &out.logprobs);
    out.has_logprobs = true;
  }
  s.append(out.token_id);
  return out;
}

void SamplerSlots::edit(const Slot& s, const uint32_t* mask, const float* logits, float* out) const {
  const SlotParams& p = *s.params;
  kernels_->copy_masked(logits, mask, p.allowed.empty() ? nullptr : p.allowed.data(), vocab_size_, out);
  for (const auto& [id, bias] : p.logit_bias) out[id] += bias;  // forbidden stays forbidden
  for (const auto& word : p.bad_words) {
    if (s.completes(word)) out[word.back()] = kForbidden;
  }
  if (s.num_output < p.min_tokens) {
    for (const int32_t id : p.stop_ids) out[id] = kForbidden;
  }
  for (const SeenToken& token : s.seen) {
    float logit = out[token.id];
    if (s.counts_prompt) logit = logit > 0.0f ? logit / p.repetition_penalty : logit * p.repetition_penalty;
    if (token.output_count > 0) logit = (logit - static_cast<float>(token.output_count) * p.frequency_penalty) - p.presence_penalty;
    out[token.id] = logit;
  }
}

SamplerSlots::Slot& SamplerSlots::at(int slot) const {
  if (slot < 0 || static_cast<size_t>(slot) >= slots_.size() || !slots_[static_cast<size_t>(slot)]) {
    throw std::invalid_argument("slot: " + std::to_string(slot) + " is not open");
  }
  return *slots_[static_cast<size_t>(slot)];
}

void SamplerSlots::check_free(int slot) const {
  if (slot < 0 || static_cast<size_t>(slot) >= slots_.size()) {
    throw std::invalid_argument("slot: " + std::to_string(slot) + " is not in 0 .. " + std::to_string(slots_.size() - 1));
  }
  if (slots_[static_cast<size_t>(slot)]) throw std::invalid_argument("slot: " + std::to_string(slot) + " is already open");
}

void SamplerSlots::check_params(const SlotParams& p) const {
  // The draw's loops end only for these; everything else is the caller's validation.
  if (!(p.temperature >= 0.0f && p.temperature <= std::numeric_limits<float>::max())) {
    throw std::invalid_argument("temperature: " + std::to_string(p.temperature) + " is not a finite number from 0");
  }
  if (!(p.top_p >= 0.0f && p.top_p <= 1.0f)) throw std::invalid_argument("top_p: " + std::to_string(p.top_p) + " is not in 0 .. 1");
  if (!(p.min_p >= 0.0f && p.min_p <= 1.0f)) throw std::invalid_argument("min_p: " + std::to_string(p.min_p) + " is not in 0 .. 1");
  if (!(p.repetition_penalty >= std::numeric_limits<float>::min())) {
    throw std::invalid_argument("repetition_penalty: " + std::to_string(p.repetition_penalty) + " is not a positive normal float32");
  }
  check_ids("eos_token_ids", p.stop_ids);
  for (const auto& [id, bias] : p.logit_bias) check_ids("logit_bias", {id});
  for (const auto& word : p.bad_words) {
    if (word.empty()) throw std::invalid_argument("bad_words_token_ids: a sequence is empty");
    check_ids("bad_words_token_ids", word);
  }
  if (!p.allowed.empty() && p.allowed.size() != (static_cast<size_t>(vocab_size_) + 31) / 32) {
    throw std::invalid_argument("allowed: " + std::to_string(p.allowed.size()) + " mask words do not cover the vocabulary");
  }
}

void SamplerSlots::check_ids(const char* name, const std::vector<int32_t>& ids) const {
  for (const int32_t id : ids) {
    if (id < 0 || id >= vocab_size_) {
      throw std::invalid_argument(std::string(name) + ": token id " + std::to_string(id) + " is not in 0 .. " + std::to_string(vocab_size_ - 1));
    }
  }
}

}  // namespace octavo
