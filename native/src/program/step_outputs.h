// What a step's logits become: drawn tokens and log-probabilities, written straight into the caller's arrays.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/sampler_slots.h"
#include "program/runner.h"
#include "runtime/aligned.h"

namespace octavo {

// One thing wanted of one row's logits. slot >= 0: draw a token; else the log-probability of the known `token`. A request to draw whose
// `token` is not negative has a draft: the request after it, of the same slot, is drawn for only if the draft comes true.
struct LogitsRequest {
  int32_t logit_index;
  int32_t slot;
  int32_t position;      // of the token drawn
  int32_t token;         // known token when slot < 0; else the draft, or -1
  int32_t num_logprobs;  // -1: none wanted
};

// One entry per request; top_* are [requests][max_top].
struct LogitsOutputs {
  int32_t* token;   // drawn or known; with an error status the token it is about (-1: none)
  int32_t* status;  // SampleStatus
  int32_t* rank;
  float* logprob;
  int max_top;
  int32_t* top_ids;
  float* top_logprobs;
};

class StepOutputs : public LogitsConsumer {
 public:
  // masks: one pointer per request, null where every token is allowed. scratch: one array per thread, grown here, so that
  // nothing allocates while the threads run; it outlives this object and is kept for the next step.
  StepOutputs(SamplerSlots& slots, const LogitsRequest* requests, int num_requests, std::vector<const uint32_t*> masks, LogitsOutputs out,
              std::vector<AlignedArray<float>>& scratch);

  int num_requests() const override { return num_requests_; }
  int logit_index(int request) const override { return requests_[request].logit_index; }
  int scan(const float* logits, int begin, int end, float* block_best) const override { return slots_.kernels().scan(logits, begin, end, block_best); }
  bool follows(int request) const override { return request > 0 && requests_[request - 1].slot >= 0 && requests_[request - 1].token >= 0; }
  void consume(int request, LogitRow row, int thread) override;
  // Of the thread that spent most on drawing and log-probabilities; for after the step.
  double longest_seconds() const;

 private:
  void write(int request, LogitRow row, int thread);

  SamplerSlots& slots_;
  const LogitsRequest* requests_;
  int num_requests_;
  std::vector<const uint32_t*> masks_;
  LogitsOutputs out_;
  std::vector<AlignedArray<float>>& scratch_;  // per thread
  std::vector<double> seconds_;                 // per thread
};

}  // namespace octavo
