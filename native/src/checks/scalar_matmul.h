// What a product on packed weights must give: dequantised rows times activations in double, and how far float32 arithmetic may
// be from it. Also random matrices of every type a file may hold.
#pragma once

#include <cstdint>
#include <vector>

#include "checks/random.h"
#include "kernels/packing.h"

namespace octavo {

// GGML's names of the types that can be packed, as row_bytes and pack_begin take them.
const std::vector<const char*>& packable_dtypes();

// A random n x k matrix as a file holds it: any bytes are valid codes and integer scales; float fields are finite, of magnitude
// 2^-10 .. 2^-1, sometimes zero or subnormal; some blocks hold the codes' ends.
std::vector<uint8_t> random_matrix(const char* dtype, int n, int k, Rng& rng);

// A matrix in a file: what is packed, and how.
struct FileMatrix {
  const char* dtype;
  int n, k;
  bool widen;  // packed as float32
  const uint8_t* raw;
};

// Row i of the matrix for products with many activation rows: its weights, and per weight the magnitude of the minimum it holds.
struct ScalarRow {
  std::vector<float> weights;    // [k]
  std::vector<double> minimum;   // [k]; empty for types without one
};
ScalarRow scalar_row(const FileMatrix& m, int i);

// x: the activation row's [k] floats; q, scale: the same row as QuantRows has it, for quantised matrices (else null).
// Returns the sum; *bound gets (number of roundings) * 2^-24 * (sum of the magnitudes that were added, code part and minimum apart).
double scalar_dot(const ScalarRow& row, const float* x, const int8_t* q, const float* scale, double* bound);

}  // namespace octavo
