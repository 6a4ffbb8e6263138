// Is every kernel of a table right on this machine? Each entry x format x class of shapes against its scalar loop.
//
// Owns the cases; the loops are scalar_*.h. Judges results alone, never speed. The same cases on every machine and in every run.
#pragma once

#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/sampling.h"

namespace octavo {

struct KernelCheck {
  std::string kernel;  // an entry of kernel_entries()
  std::string format;  // of weights, of KV, or a mode of the kernel; empty where there is none
  std::string shape;   // class of shapes, such as "5-16 rows"
  bool right;
  double error, tolerance;  // of the value nearest to its tolerance, or furthest beyond it
};

// How much is checked. kStart: the fewest cases that reach every entry and format, for every load of a model.
enum class CheckExtent { kFull, kStart };

std::vector<KernelCheck> check_matmul(const Kernels& table, CheckExtent extent);
std::vector<KernelCheck> check_attention(const Kernels& table, CheckExtent extent);
// Everything else: norm, quantisation, activations, rotary embedding, KV store.
std::vector<KernelCheck> check_rows(const Kernels& table, CheckExtent extent);
// The vocabulary loops.
std::vector<KernelCheck> check_sampling(const SamplingKernels& table, CheckExtent extent);

// All of the above.
std::vector<KernelCheck> check_kernels(const Kernels& table, const SamplingKernels& sampling, CheckExtent extent);

// A copy of the table whose `entry` gives one wrong value per call, to test that the checks and their users see it. Not for use by
// more than one thread: the copy lives until the next call. Throws std::invalid_argument for an entry that is not there.
const Kernels& with_fault(const Kernels& table, const std::string& entry);
const SamplingKernels& with_sampling_fault(const SamplingKernels& table);

}  // namespace octavo
