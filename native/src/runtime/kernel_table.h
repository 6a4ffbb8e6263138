// Kernel tables by name, with single entries taken from other ISA levels.
//
// Owns the list of entries that can be replaced one by one. Packed weights and KV have one layout on all levels, so any mix of
// entries computes; a mix has a name of its own, because its results need not be those of either level.
#pragma once

#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/sampling.h"

namespace octavo {

// One replaceable entry: functions that must come from the same level.
struct KernelEntry {
  const char* name;
  void (*take)(Kernels& to, const Kernels& from);  // does nothing for "sampling", whose functions have a table of their own
};

const std::vector<KernelEntry>& kernel_entries();

// The table of a level, or of a level with entries replaced: "avx512", "avx512-matmul:avx2", "avx512-matmul:avx2-rope:portable".
// Null for anything else, and for levels this machine or build lacks. Tables live as long as the process.
const Kernels* kernels_by_spec(const std::string& spec);
const SamplingKernels* sampling_kernels_by_spec(const std::string& spec);

}  // namespace octavo
