#include "checks/scalar_matmul.h"

#include <cmath>
#include <cstring>

#include "kernels/gguf_blocks.h"

namespace octavo {
namespace {

// Offsets of a block's float16 fields, and whether -128 is among its signed codes or scales.
struct BlockFields {
  const char* name;
  int f16_at[2];  // -1: none
  bool extreme;
};

constexpr BlockFields kFields[] = {
    {"q4_0", {0, -1}, false},  {"q4_1", {0, 2}, false},    {"q5_0", {0, -1}, false}, {"q5_1", {0, 2}, false}, {"q8_0", {0, -1}, true},
    {"q2_k", {80, 82}, false}, {"q3_k", {108, -1}, false}, {"q4_k", {0, 2}, false},  {"q5_k", {0, 2}, false}, {"q6_k", {208, -1}, true},
};

uint16_t random_half(Rng& rng) {
  const int pick = rng.below(16);
  if (pick == 0) return 0;
  if (pick == 1) return static_cast<uint16_t>((rng.below(2) << 15) | rng.below(1024));
  return static_cast<uint16_t>((rng.below(2) << 15) | ((5 + rng.below(10)) << 10) | rng.below(1024));
}

void fill_floats(const char* dtype, std::vector<uint8_t>& raw, Rng& rng) {
  const size_t width = std::strcmp(dtype, "f32") ? 2 : 4;
  for (size_t at = 0; at < raw.size(); at += width) {
    const float f = rng.uniform();
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    const uint16_t half = std::strcmp(dtype, "f16") ? static_cast<uint16_t>(bits >> 16) : random_half(rng);
    if (width == 4) std::memcpy(&raw[at], &f, 4);
    else std::memcpy(&raw[at], &half, 2);
  }
}

}  // namespace

const std::vector<const char*>& packable_dtypes() {
  static const std::vector<const char*> names{"q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k",
                                              "q4_k", "q5_k", "q6_k", "bf16", "f16",  "f32"};
  return names;
}

std::vector<uint8_t> random_matrix(const char* dtype, int n, int k, Rng& rng) {
  std::vector<uint8_t> raw(row_bytes(dtype, k) * static_cast<size_t>(n));
  const QuantType* type = find_quant_type(dtype);
  if (!type) {
    fill_floats(dtype, raw, rng);
    return raw;
  }
  const BlockFields* fields = kFields;
  while (std::strcmp(fields->name, dtype)) ++fields;  // every quantised type has a row there
  for (uint8_t& b : raw) b = static_cast<uint8_t>(rng.next());
  const size_t block = static_cast<size_t>(type->bytes);
  for (size_t at = 0; at < raw.size(); at += block) {
    if (fields->extreme && rng.below(3) == 0) std::memset(&raw[at], rng.below(2) ? 0x80 : 0x7f, block);  // whole blocks of -128 or 127
    if (rng.below(8) == 0) std::memset(&raw[at], 0xff, block);
    for (const int field : fields->f16_at) {
      if (field < 0) continue;
      const uint16_t half = random_half(rng);
      std::memcpy(&raw[at + static_cast<size_t>(field)], &half, 2);
    }
  }
  return raw;
}

ScalarRow scalar_row(const FileMatrix& m, int i) {
  ScalarRow out;
  out.weights.resize(static_cast<size_t>(m.k));
  const uint8_t* row = m.raw + row_bytes(m.dtype, m.k) * static_cast<size_t>(i);
  dequantize_row(m.dtype, row, m.k, out.weights.data());
  const QuantType* type = m.widen ? nullptr : find_quant_type(m.dtype);
  if (!type || !type->has_min) return out;
  DecodedBlock block;
  for (int k = 0; k < m.k; ++k) {
    if (k % type->values == 0) type->decode(row + k / type->values * type->bytes, block);
    const int group = k % type->values / type->group;
    out.minimum.push_back(half_to_float(block.m) * (type->scales == ScaleKind::kHalf ? 1.0 : block.min[group]));
  }
  return out;
}

double scalar_dot(const ScalarRow& row, const float* x, const int8_t* q, const float* scale, double* bound) {
  const size_t k = row.weights.size();
  double sum = 0.0, magnitude = 0.0;
  for (size_t i = 0; i < k; ++i) {
    const double a = q ? static_cast<double>(scale[i / 32]) * q[i] : x[i];
    sum += a * row.weights[i];
    magnitude += std::fabs(a * row.weights[i]);
    if (!row.minimum.empty()) magnitude += 2 * std::fabs(a * row.minimum[i]);
  }
  *bound = static_cast<double>(k + 8) * std::ldexp(1.0, -24) * magnitude + 1e-30;
  return sum;
}

}  // namespace octavo
