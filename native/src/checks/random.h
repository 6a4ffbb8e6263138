// The generator of checks and tests: the same cases on every machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace octavo {

struct Rng {
  uint64_t state;
  uint64_t next() {  // splitmix64
    uint64_t z = (state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  int below(int n) { return static_cast<int>(next() % static_cast<uint64_t>(n)); }
  float uniform() { return static_cast<float>(next() >> 40) * (2.0f / 16777216.0f) - 1.0f; }  // [-1, 1)
  std::vector<float> uniform_values(size_t n, float range = 1.0f) {
    std::vector<float> x(n);
    for (float& a : x) a = uniform() * range;
    return x;
  }
};

}  // namespace octavo
