// What the kernel tests share: a generator, a tally of failures, the ISA levels of this machine.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "kernels/kernels.h"
#include "runtime/cpu_features.h"

namespace octavo_test {

struct Rng {
  uint64_t state;
  uint64_t next() {  // splitmix64
    uint64_t z = (state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  int below(int n) { return (int)(next() % (uint64_t)n); }
  float uniform() { return (float)(next() >> 40) * (2.0f / 16777216.0f) - 1.0f; }  // [-1, 1)
  std::vector<float> uniform_values(size_t n, float range = 1.0f) {
    std::vector<float> x(n);
    for (float& a : x) a = uniform() * range;
    return x;
  }
};

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
