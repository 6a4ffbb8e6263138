#include "program/step_outputs.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace octavo {

StepOutputs::StepOutputs(SamplerSlots& slots, const LogitsRequest* requests, int num_requests, std::vector<const uint32_t*> masks, LogitsOutputs out,
                         std::vector<AlignedArray<float>>& scratch)
    : slots_(slots), requests_(requests), num_requests_(num_requests), masks_(std::move(masks)), out_(out), scratch_(scratch), seconds_(scratch.size()) {
  for (AlignedArray<float>& s : scratch_) s.reserve(sampling_scratch_floats(slots_.vocab_size()));
}

void StepOutputs::consume(int request, LogitRow row, int thread) {
  const auto begun = std::chrono::steady_clock::now();
  write(request, row, thread);
  seconds_[(size_t)thread] += std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

double StepOutputs::longest_seconds() const { return seconds_.empty() ? 0.0 : *std::max_element(seconds_.begin(), seconds_.end()); }

void StepOutputs::write(int request, LogitRow row, int thread) {
  const LogitsRequest& r = requests_[request];
  if (follows(request) && (out_.status[request - 1] != (int32_t)SampleStatus::kOk || out_.token[request - 1] != requests_[request - 1].token)) {
    out_.token[request] = -1;
    out_.status[request] = (int32_t)SampleStatus::kNotDrawn;
    return;
  }
  if (row.bad_id < 0) slots_.kernels().find_best(&row);
  AlignedArray<float>& scratch = scratch_[(size_t)thread];
  const SampleOutput o = r.slot >= 0
                             ? slots_.sample(r.slot, row, scratch.data(), r.position, masks_[(size_t)request], r.num_logprobs)
                             : raw_logprobs(slots_.kernels(), row, r.token, std::max(r.num_logprobs, 0), scratch.data());
  out_.token[request] = o.token_id;
  out_.status[request] = (int32_t)o.status;
  if (o.status != SampleStatus::kOk || !o.has_logprobs) return;
  out_.logprob[request] = o.logprobs.logprob;
  out_.rank[request] = o.logprobs.rank;
  for (int i = 0; i < std::min((int)o.logprobs.num_top, out_.max_top); ++i) {
    out_.top_ids[(size_t)request * (size_t)out_.max_top + (size_t)i] = o.logprobs.top_ids[i];
    out_.top_logprobs[(size_t)request * (size_t)out_.max_top + (size_t)i] = o.logprobs.top_logprobs[i];
  }
}

}  // namespace octavo
