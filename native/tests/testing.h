// What the kernel tests share: a generator, a tally of failures, the ISA levels of this machine.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "checks/random.h"
#include "kernels/kernels.h"
#include "runtime/cpu_features.h"

namespace octavo_test {

using octavo::Rng;

inline int& failures() { static int count = 0; return count; }

// Counts a failure and prints the first few; returns ok.
template <class... Args>
bool check(bool ok, const char* format, Args... args) {
  if (!ok && ++failures() <= 20) { std::printf("FAIL "); std::printf(format, args...); std::printf("\n"); }
  return ok;
}

inline bool same_bits(const float* a, const float* b, size_t n) { return std::memcmp(a, b, n * sizeof(float)) == 0; }

// Every level this machine runs; what it cannot run is named, not passed over in silence.
inline std::vector<const octavo::Kernels*> levels() {
  std::vector<const octavo::Kernels*> found;
  for (const char* name : octavo::kIsaLevels) {
    if (const octavo::Kernels* k = octavo::kernels_by_name(name)) found.push_back(k);
    else std::printf("not on this machine: %s\n", name);
  }
  return found;
}

inline int finish(const char* name) {
  if (failures()) std::printf("%s: %d failures\n", name, failures());
  else std::printf("%s: ok\n", name);
  return failures() ? 1 : 0;
}

}  // namespace octavo_test
