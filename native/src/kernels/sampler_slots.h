// Sampling state of sequences, one slot each: parameters, penalty counts, the newest output tokens.
//
// A slot is a function of its sequence's tokens and parameters, and can be rebuilt from them. sample() edits a row of logits as the
// slot says (bias, masks, bad words, min_tokens, penalties), lets the ISA level's kernels draw, and appends the token to the slot.
// Slots differ in nothing but their own state, so calls for different slots may run at the same time, each with its own scratch;
// open, fork and close must have the object to themselves. Errors of use throw std::invalid_argument; errors of logits are results.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels/sampling.h"

namespace octavo {

struct SlotParams {
  float temperature = 1.0f;
  float top_p = 1.0f;
  float min_p = 0.0f;
  int top_k = 0;  // 0 or -1: off
  float repetition_penalty = 1.0f;
  float frequency_penalty = 0.0f;
  float presence_penalty = 0.0f;
  int64_t min_tokens = 0;
  std::vector<std::pair<int32_t, float>> logit_bias;
  std::vector<int32_t> stop_ids;                // stop and end tokens, forbidden until min_tokens are out
  std::vector<std::vector<int32_t>> bad_words;  // each at least one token
  std::vector<uint32_t> allowed;                // packed mask, empty: every token
};

// kNotDrawn: the row follows a draft that did not come true.
enum class SampleStatus : int32_t { kOk, kNan, kInf, kAllForbidden, kOverflow, kNotDrawn };

struct SampleOutput {
  int32_t token_id;  // drawn when kOk, else the token that status is about (-1: none)
  SampleStatus status;
  bool has_logprobs;
  TokenLogprobs logprobs;
};

// The message of a status other than kOk, the same as the reference's.
std::string sample_error(SampleStatus status, int token_id);

// Floats of scratch that one call needs.
size_t sampling_scratch_floats(int vocab_size);

// Logits [vocab_size] scanned into scratch, where they are good until that is used with another row.
LogitRow scan_row(const SamplingKernels& kernels, const float* logits, int vocab_size, float* scratch);

// Log-probabilities of raw logits: of token_id (in range) and of the k best (0 .. kMaxLogprobs).
SampleOutput raw_logprobs(const SamplingKernels& kernels, const LogitRow& row, int token_id, int k, float* scratch);

class SamplerSlots {
 public:
  SamplerSlots(int vocab_size, int max_num_slots, const SamplingKernels* kernels);
  ~SamplerSlots();
  SamplerSlots(const SamplerSlots&) = delete;
  SamplerSlots& operator=(const SamplerSlots&) = delete;

  int vocab_size() const { return vocab_size_; }
  const SamplingKernels& kernels() const { return *kernels_; }
  bool is_open(int slot) const { return slot >= 0 && static_cast<size_t>(slot) < slots_.size() && slots_[static_cast<size_t>(slot)]; }

  void open(int slot, SlotParams params, uint64_t seed, const std::vector<int32_t>& prompt_ids, const std::vector<int32_t>& output_ids);
  void fork(int src, int dst, uint64_t seed);  // dst becomes a copy of src that draws with seed
  void close(int slot);

  // Draw the token at index `position` of the slot's sequence from a row of raw logits and append it to the slot; on error the slot is
  // unchanged. mask: packed allowed bits or null. num_logprobs: -1 none, else 0 .. kMaxLogprobs best beside the token's own.
  // Never throws for an open slot.
  SampleOutput sample(int slot, const LogitRow& raw, float* scratch, int64_t position, const uint32_t* mask, int num_logprobs);

 private:
  struct Slot;

  Slot& at(int slot) const;
  void check_free(int slot) const;
  void check_params(const SlotParams& params) const;
  void check_ids(const char* name, const std::vector<int32_t>& ids) const;
  void edit(const Slot& s, const uint32_t* mask, const float* logits, float* out) const;

  int vocab_size_;
  const SamplingKernels* kernels_;
  std::vector<std::unique_ptr<Slot>> slots_;
};

}  // namespace octavo
