// Packing and matmul of every dtype on every ISA level of this machine.
//
// Two oracles. `ordered` repeats the documented order of operations (matmul.inl, matmul_float.inl) in scalar code from decoded
// file blocks: the kernels must match it bit for bit, whatever the tile, the block range and the number of rows. The scalar loop of
// scalar_matmul.h multiplies dequantised rows in double: it knows nothing of the order, and the result must lie within the rounding bound.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "checks/scalar_matmul.h"
#include "kernels/gguf_blocks.h"
#include "kernels/packing.h"
#include "runtime/cpu_features.h"

using namespace octavo;

namespace {

int failures = 0;

void check(bool ok, const std::string& what) {
  if (ok) return;
  ++failures;
  if (failures <= 20) std::fprintf(stderr, "FAILED: %s\n", what.c_str());
}

struct Activations {
  int rows, k;
  std::vector<float> x;      // [rows][k], for float formats
  std::vector<int8_t> q;     // [rows][k]
  std::vector<float> scale;  // [rows][k / 32]
  std::vector<int16_t> sum16;
  QuantRows quant() { return {q.data(), scale.data(), sum16.data()}; }
};

Activations random_activations(int rows, int k, Rng& r) {
  Activations a{rows, k, {}, {}, {}, {}};
  a.x.resize(static_cast<size_t>(rows) * k);
  a.q.resize(a.x.size());
  for (float& v : a.x) v = r.uniform();
  const size_t halves = k % 32 ? 0 : a.x.size() / 16;
  a.sum16.resize(halves);
  a.scale.resize(halves / 2);
  for (size_t h = 0; h < halves; ++h) {
    const int mode = r.below(6);  // all 127, all -127, or anything
    int sum = 0;
    for (int i = 0; i < 16; ++i) sum += a.q[16 * h + i] = static_cast<int8_t>(mode == 0 ? 127 : mode == 1 ? -127 : r.below(255) - 127);
    a.sum16[h] = static_cast<int16_t>(sum);
  }
  for (float& s : a.scale) s = r.below(10) == 0 ? 0.0f : std::fabs(r.uniform()) * 0.03f;
  return a;
}

float fused(bool fma, float a, float b, float c) {
  if (fma) return std::fma(a, b, c);
  const float product = a * b;
  return product + c;
}

// One output in the documented order. `row`: the weights' file bytes.
float ordered_quantised(const QuantType& type, const uint8_t* row, Activations& a, int t, bool fma) {
  float acc = 0.0f;
  DecodedBlock block;
  for (int begin = 0; begin < a.k; begin += type.values, row += type.bytes) {
    type.decode(row, block);
    for (int v = 0; v < type.values; v += type.group) {
      const int g = v / type.group, at = begin + v;
      float d = half_to_float(block.d), m = type.has_min ? half_to_float(block.m) : 0.0f;
      if (type.scales == ScaleKind::kSuperU8) d *= static_cast<float>(block.scale[g]), m = -m * static_cast<float>(block.min[g]);
      if (type.scales == ScaleKind::kSuperS8) d *= static_cast<float>(static_cast<int8_t>(block.scale[g]));
      int dot = 0, sum = 0;
      for (int i = 0; i < type.group; ++i) {
        const int q = a.q[static_cast<size_t>(t) * a.k + at + i];
        dot += (block.codes[v + i] - type.zero_point) * q;
        sum += q;
      }
      const float scale = a.scale[static_cast<size_t>(t) * (a.k / 32) + at / 32];
      acc = fused(fma, static_cast<float>(dot), d * scale, acc);
      if (type.has_min) acc = fused(fma, m, scale * static_cast<float>(sum), acc);
    }
  }
  return acc;
}

float ordered_float(const float* w, const float* x, int k, bool fma) {
  float chain[2] = {0.0f, 0.0f};
  for (int i = 0; i < k; ++i) chain[i % 2] = fused(fma, w[i], x[i], chain[i % 2]);
  return chain[0] + chain[1];
}

struct Case {
  const char* dtype;
  int n, k;
  bool widen;
  const std::vector<uint8_t>& raw;
  const PackedMatrix& w;
  Activations& a;
  std::string name(const Kernels& isa) const {
    return std::string(isa.name) + " " + dtype + (widen ? " widened" : "") + " n=" + std::to_string(n) + " k=" + std::to_string(k);
  }
};

std::vector<float> ordered(const Case& c, bool fma) {
  const QuantType* type = c.widen ? nullptr : find_quant_type(c.dtype);
  std::vector<float> out(static_cast<size_t>(c.a.rows) * c.n), w(c.k);
  for (int n = 0; n < c.n; ++n) {
    const uint8_t* row = c.raw.data() + row_bytes(c.dtype, c.k) * n;
    dequantize_row(c.dtype, row, c.k, w.data());
    for (int t = 0; t < c.a.rows; ++t) {
      const float* x = &c.a.x[static_cast<size_t>(t) * c.k];
      out[static_cast<size_t>(t) * c.n + n] = type ? ordered_quantised(*type, row, c.a, t, fma) : ordered_float(w.data(), x, c.k, fma);
    }
  }
  return out;
}

constexpr int kGap = 3;  // columns between rows of out that no kernel may touch
constexpr float kCanary = -12345.5f;

// Activation rows [first, first + rows) against the blocks in two ranges split at `split`; out starts as `start` everywhere.
std::vector<float> run(const Kernels& isa, const Case& c, int first, int rows, int split, const float* bias = nullptr,
                       float start = 0.0f, bool accumulate = false) {
  const int stride = c.n + kGap;
  std::vector<float> out(static_cast<size_t>(rows) * stride, kCanary), result;
  for (int t = 0; t < rows; ++t)
    for (int n = 0; n < c.n; ++n) out[static_cast<size_t>(t) * stride + n] = start;
  QuantRows q = c.a.quant();
  q.q += static_cast<size_t>(first) * c.k;
  q.scale += static_cast<size_t>(first) * (c.k / 32);
  q.sum16 += static_cast<size_t>(first) * (c.k / 16);
  const float* x = c.a.x.data() + static_cast<size_t>(first) * c.k;
  isa.matmul(c.w, x, q, rows, split, c.w.num_blocks, bias, accumulate, out.data(), stride);
  isa.matmul(c.w, x, q, rows, 0, split, bias, accumulate, out.data(), stride);
  for (int t = 0; t < rows; ++t) {
    const float* row = &out[static_cast<size_t>(t) * stride];
    result.insert(result.end(), row, row + c.n);
    for (int i = 0; i < kGap; ++i) check(row[c.n + i] == kCanary, c.name(isa) + ": wrote past its columns");
  }
  return result;
}

bool same_bits(const float* a, const float* b, size_t count) { return std::memcmp(a, b, count * sizeof(float)) == 0; }

void check_order(const Kernels& isa, const Case& c) {
  const std::vector<float> expected = ordered(c, std::strcmp(isa.name, "portable") != 0);
  const std::vector<float> all = run(isa, c, 0, c.a.rows, 0);
  check(same_bits(all.data(), expected.data(), expected.size()), c.name(isa) + ": differs from the ordered scalar loop");
  for (const int rows : {1, 2, 3, 5, 11, 12, 13, 25})
    for (const int split : {0, c.w.num_blocks / 2}) {
      if (rows > c.a.rows) continue;
      const int first = c.a.rows - rows;
      const std::vector<float> some = run(isa, c, first, rows, split);
      check(same_bits(some.data(), expected.data() + static_cast<size_t>(first) * c.n, some.size()),
            c.name(isa) + ": rows=" + std::to_string(rows) + " split=" + std::to_string(split) + " differ from all rows at once");
    }
}

void check_bias(const Kernels& isa, const Case& c, Rng& r) {
  std::vector<float> bias(c.n);
  for (float& b : bias) b = r.uniform();
  const std::vector<float> plain = run(isa, c, 0, c.a.rows, 0);
  const std::vector<float> biased = run(isa, c, 0, c.a.rows, 0, bias.data(), 0.25f, true);
  for (size_t i = 0; i < plain.size(); ++i) {
    const float with_bias = plain[i] + bias[i % c.n];
    check(biased[i] == 0.25f + with_bias, c.name(isa) + ": bias, then accumulate");
  }
}

void check_value(const Kernels& isa, const Case& c) {
  const FileMatrix file{c.dtype, c.n, c.k, c.widen, c.raw.data()};
  const bool quantised = c.w.quantised();
  const std::vector<float> actual = run(isa, c, 0, c.a.rows, 0);
  for (int n = 0; n < c.n; ++n) {
    const ScalarRow row = scalar_row(file, n);
    for (int t = 0; t < c.a.rows; ++t) {
      const size_t at = static_cast<size_t>(t) * c.k;
      double bound;
      const double sum = scalar_dot(row, &c.a.x[at], quantised ? &c.a.q[at] : nullptr, quantised ? &c.a.scale[at / 32] : nullptr, &bound);
      check(std::fabs(actual[static_cast<size_t>(t) * c.n + n] - sum) <= bound, c.name(isa) + ": outside the rounding bound");
    }
  }
}

std::vector<const Kernels*> levels() {
  std::vector<const Kernels*> found;
  for (const char* name : kIsaLevels)
    if (const Kernels* k = kernels_by_name(name)) found.push_back(k);
  return found;
}

// Packed rows come back bit for bit: nothing of the file is lost.
void check_unpacked(const char* dtype, const std::vector<uint8_t>& file, const PackedMatrix& w) {
  std::vector<float> expected(w.k), actual(w.k);
  for (int row = 0; row < w.n; ++row) {
    dequantize_row(dtype, file.data() + row_bytes(dtype, w.k) * row, w.k, expected.data());
    unpack_row(w, row, actual.data());
    check(std::memcmp(expected.data(), actual.data(), sizeof(float) * w.k) == 0, std::string(dtype) + ": a packed row has changed");
  }
}

void test_shape(const char* dtype, int n, int k, int rows, bool widen, Rng& r) {
  const std::vector<uint8_t> file = random_matrix(dtype, n, k, r);
  std::vector<uint8_t> unaligned(file.size() + 1);
  std::memcpy(unaligned.data() + 1, file.data(), file.size());
  const auto w = pack_begin(dtype, n, k, widen), again = pack_begin(dtype, n, k, widen);
  pack_blocks(*w, dtype, unaligned.data() + 1, 0, w->num_blocks);
  for (int b = w->num_blocks - 1; b >= 0; --b) pack_blocks(*again, dtype, file.data(), b, b + 1);
  check(std::memcmp(w->data, again->data, w->bytes) == 0, std::string(dtype) + ": packing depends on the range");
  check(reinterpret_cast<uintptr_t>(w->data) % 64 == 0 && w->block_bytes % 64 == 0, std::string(dtype) + ": alignment");
  check_unpacked(dtype, file, *w);
  Activations a = random_activations(rows, k, r);
  const Case c{dtype, n, k, widen, file, *w, a};
  for (const Kernels* isa : levels()) {
    check_order(*isa, c);
    check_value(*isa, c);
    check_bias(*isa, c, r);
  }
}

void test_dtype(const char* dtype, Rng& r) {
  const QuantType* type = find_quant_type(dtype);
  const int unit = type ? type->values : 1;
  std::vector<int> ks{1, 2, 7, 65, 288};
  if (unit == 32) ks = {32, 96, 576};
  if (unit == 256) ks = {256, 768};
  for (const int k : ks)
    for (const int n : {1, 15, 16, 17, 70}) test_shape(dtype, n, k, n == 17 ? 40 : 7, false, r);
  test_shape(dtype, 33, ks.back(), 13, true, r);
}

// k so long that the activations' scratch holds fewer rows than a full tile, down to one.
void test_long_rows(Rng& r) {
  for (const char* dtype : {"q8_0", "q6_k", "q4_1"}) {
    test_shape(dtype, 2, 25600, 13, false, r);
    test_shape(dtype, 1, kMaxQuantisedK, 2, false, r);
  }
}

template <class F>
void check_refused(F&& f, const char* word) {
  try {
    f();
    check(false, std::string("accepted what must be refused: ") + word);
  } catch (const std::invalid_argument& e) {
    check(std::string(e.what()).find(word) != std::string::npos, std::string("message does not name ") + word + ": " + e.what());
  }
}

void test_refusals() {
  check_refused([] { pack_begin("iq4_nl", 16, 32, false); }, "iq4_nl");
  check_refused([] { pack_begin("q4_0", 16, 33, false); }, "33");
  check_refused([] { pack_begin("q4_k", 16, 128, true); }, "128");
  check_refused([] { pack_begin("f32", 16, 0, false); }, "k = 0");
  check_refused([] { pack_begin("f32", 0, 16, false); }, "n = 0");
  check_refused([] { pack_begin("q8_0", 16, kMaxQuantisedK + 32, false); }, "exceeds");
}

}  // namespace

int main() {
  Rng r{88172645463325252ull};
  for (const char* dtype : packable_dtypes()) test_dtype(dtype, r);
  test_long_rows(r);
  test_refusals();
  std::string names;
  for (const Kernels* k : levels()) names += std::string(" ") + k->name;
  std::printf("matmul on%s: %s\n", names.c_str(), failures ? "FAILED" : "ok");
  return failures ? 1 : 0;
}
