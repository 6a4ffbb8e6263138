// What the row kernels must give: slow, obvious loops in double, and how far float32 arithmetic may be from them.
//
// The oracle of the kernel tests and of the check that runs on a user's machine; it knows nothing of vectors, lanes or layouts
// beyond what kernels.h and packing.h promise.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/kernels.h"

namespace octavo {

// value[i], and the greatest |error| that its roundings explain.
struct Bounded {
  std::vector<double> value, bound;
  explicit Bounded(size_t n) : value(n), bound(n) {}
};

Bounded scalar_rmsnorm(const float* x, const float* w, float eps, int dim);
Bounded scalar_add(const float* a, const float* b, int dim);
Bounded scalar_softcap(const float* x, int dim, float cap);
Bounded scalar_gated_act(const float* gate, const float* up, int dim, int activation);
// Of the heads' values before the rotation; see Kernels::rope.
Bounded scalar_rope(const float* x, int heads, int head_dim, int rotary_dim, bool interleaved, const float* cos_sin);

// One row, exactly as it must come out; every group's magnitudes are finite and not vanishing (kernels.h).
struct ScalarQuantised {
  std::vector<int8_t> q;
  std::vector<float> scale;
  std::vector<int16_t> sum16;
};
ScalarQuantised scalar_quantize(const float* x, int k);

// The value of a 16-bit code of float16 or bfloat16.
float value_of_code(uint16_t code, KVType type);
// The code of a 16-bit type nearest to x, found by trying both neighbours: a tie goes to the even one.
uint16_t nearest_code(float x, KVType type);

}  // namespace octavo
