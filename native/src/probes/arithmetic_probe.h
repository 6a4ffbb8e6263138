// Peaks of this machine's arithmetic: independent chains of one instruction on registers alone.
#pragma once

#include <vector>

#include "runtime/thread_pool.h"

namespace octavo {

struct PeakResult {
  const char* kind;         // "int8", "bf16" or "f32": products of these, sums in 32 bits
  const char* instruction;  // with its vector width
  double operations;        // by all threads in one run: 2 per multiply-add
  double seconds;           // of the fastest run
};

// Every variant that this machine runs, about budget_s each; empty on machines other than x86-64.
std::vector<PeakResult> probe_arithmetic(ThreadPool& pool, double budget_s);

}  // namespace octavo
