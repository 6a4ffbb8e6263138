// What a step's logits become: drawn tokens and log-probabilities, written straight into the caller's arrays.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/sampler_slots.h"
#include "program/runner.h"
#include "runtime/aligned.h"

namespace octavo {

// One row's request. slot >= 0: draw a token there; else: log-probability of the known token `token` (prompt logprobs).
struct LogitsRequest {
  int logit_index;
  int slot;
  int position;           // of the token drawn
  int token;              // known token when slot < 0
  int num_logprobs;       // -1: none wanted
  const uint32_t* mask;   // packed allowed bits or null
};

// Arrays of the caller, one row per request; top_* are [requests][max_top].
struct LogitsOutputs {
  int32_t* token;
  int32_t* status;  // 0 fine, else SampleStatus
  float* logprob;
  int32_t* rank;
  int max_top;
  int32_t* top_ids;
  float* top_logprobs;
};

}  // namespace octavo
