// A model as Python holds it: a runner, and what has to be kept for it while it lives.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/host_kv.h"
#include "kernels/sampler_slots.h"
#include "program/runner.h"

namespace octavo {

struct StepArrays;

class Model {
 public:
  Model(const std::string& isa, int threads) : Model(kernels_of(isa), std::make_shared<ThreadPool>(threads)) {}
  Model(const Kernels& kernels, std::shared_ptr<ThreadPool> threads) : runner(kernels, threads), sampling_scratch_((size_t)threads->size()) {}

  Runner runner;
  HostKV host_kv;

  // Weights: see model_building.cc.
  nanobind::tuple add_matrix(const std::string& dtype, Bytes raw, int n, int k, bool widen, bool mapped);
  nanobind::tuple add_matrix_of(const Model& other, int index);
  void pack();
  int add_embedding(const std::string& dtype, Bytes raw, int n, int k);
  int add_embedding_of(int matrix);

  // See model_step.cc.
  double step(SamplerSlots& slots, In<int32_t> tokens, In<int32_t> seq_start, In<int32_t> seq_rows, In<int32_t> table_offset, In<int32_t> tables,
              In<int32_t> logit_rows, In<int32_t> requests, In<uint32_t> masks, In<int32_t> mask_offset, Out<int32_t> out_token,
              Out<int32_t> out_status, Out<int32_t> out_rank, Out<float> out_logprob, int max_top, Out<int32_t> out_top_ids,
              Out<float> out_top_logprobs, std::optional<Matrix> logits, std::optional<In<int32_t>> pages);

 private:
  void check_sequences(const StepArrays& s) const;
  void check_requests(const StepArrays& s, const SamplerSlots& slots, int max_top) const;
  std::vector<AlignedArray<float>> sampling_scratch_;  // per thread
  std::vector<Bytes> unpacked_raw_;             // until pack()
  std::vector<Bytes> embedding_raw_;            // read in place for as long as the model lives
  int embedding_rows_ = 0;
};

void bind_building(nanobind::class_<Model>& c);
void bind_kv(nanobind::class_<Model>& c);
void bind_step(nanobind::class_<Model>& c);

}  // namespace octavo
