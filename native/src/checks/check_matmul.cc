#include <algorithm>
#include <cstring>

#include "checks/kernel_check.h"
#include "checks/scalar_matmul.h"
#include "checks/worst.h"
#include "runtime/aligned.h"

namespace octavo {
namespace {

constexpr int kGap = 3;  // columns between rows of out that no kernel may touch
constexpr float kCanary = -12345.5f;

struct RowClass {
  const char* name;
  std::vector<int> rows;
};

const std::vector<RowClass>& row_classes() {
  static const std::vector<RowClass> classes{
      {"1 row", {1}}, {"2-4 rows", {2, 3, 4}}, {"5-16 rows", {5, 11, 16}}, {"17-64 rows", {17, 40, 64}}, {"512 rows", {512}}};
  return classes;
}

// Random activation rows in both forms; halves of a group are sometimes all at one end, scales sometimes zero.
struct Activations {
  AlignedArray<float> x, scale;
  AlignedArray<int8_t> q;
  AlignedArray<int16_t> sum16;
  int k;

  Activations(int rows, int k, Rng& rng) : k(k) {
    const size_t count = static_cast<size_t>(rows) * static_cast<size_t>(k), halves = k % 32 ? 0 : count / 16;
    x.reserve(count);
    q.reserve(count);
    scale.reserve(halves / 2);
    sum16.reserve(halves);
    for (size_t i = 0; i < count; ++i) x[i] = rng.uniform();
    for (size_t h = 0; h < halves; ++h) {
      const int mode = rng.below(6);
      int sum = 0;
      for (size_t i = 16 * h; i < 16 * h + 16; ++i) {
        q[i] = static_cast<int8_t>(mode == 0 ? 127 : mode == 1 ? -127 : rng.below(255) - 127);
        sum += q[i];
      }
      sum16[h] = static_cast<int16_t>(sum);
      if (h % 2 == 0) scale[h / 2] = rng.below(10) == 0 ? 0.0f : std::fabs(rng.uniform()) * 0.03f;
    }
  }
  QuantRows quant() { return {q.data(), scale.data(), sum16.data()}; }
};

// One matrix, packed, with its scalar rows.
struct Subject {
  FileMatrix file;
  std::vector<uint8_t> raw;
  std::unique_ptr<PackedMatrix> packed;
  std::vector<ScalarRow> rows;

  Subject(const char* dtype, int n, int k, bool widen, Rng& rng) : raw(random_matrix(dtype, n, k, rng)) {
    file = {dtype, n, k, widen, raw.data()};
    packed = pack_begin(dtype, n, k, widen);
    pack_blocks(*packed, dtype, raw.data(), 0, packed->num_blocks);
    for (int i = 0; i < n; ++i) rows.push_back(scalar_row(file, i));
  }
};

// out [rows][n + kGap], computed as two ranges of blocks; starts as `start` where it is not a gap.
std::vector<float> product(const Kernels& table, const Subject& s, Activations& a, int rows, const float* bias, float start, bool accumulate) {
  const int stride = s.file.n + kGap, split = s.packed->num_blocks / 2;
  std::vector<float> out(static_cast<size_t>(rows) * static_cast<size_t>(stride), kCanary);
  for (int t = 0; t < rows; ++t) std::fill_n(out.begin() + static_cast<ptrdiff_t>(t) * stride, s.file.n, start);
  table.matmul(*s.packed, a.x.data(), a.quant(), rows, split, s.packed->num_blocks, bias, accumulate, out.data(), stride);
  table.matmul(*s.packed, a.x.data(), a.quant(), rows, 0, split, bias, accumulate, out.data(), stride);
  return out;
}

void compare(const Kernels& table, const Subject& s, Activations& a, int rows, Rng& rng, Worst& worst) {
  const int n = s.file.n, stride = n + kGap;
  const size_t k = static_cast<size_t>(s.file.k);
  const std::vector<float> bias = rng.uniform_values(static_cast<size_t>(n));
  const std::vector<float> plain = product(table, s, a, rows, nullptr, 0.0f, false);
  const std::vector<float> added = product(table, s, a, rows, bias.data(), 0.25f, true);
  const bool quantised = s.packed->quantised();
  for (int t = 0; t < rows; ++t) {
    const size_t row = static_cast<size_t>(t), at = row * static_cast<size_t>(stride);
    for (int i = 0; i < n; ++i) {
      double bound;
      const double want = scalar_dot(s.rows[static_cast<size_t>(i)], a.x.data() + row * k, quantised ? a.q.data() + row * k : nullptr,
                                     quantised ? a.scale.data() + row * (k / 32) : nullptr, &bound);
      const size_t j = at + static_cast<size_t>(i);
      worst.value(plain[j], want, bound);
      const float with_bias = plain[j] + bias[static_cast<size_t>(i)];
      worst.exact(added[j] == 0.25f + with_bias);
    }
    for (int gap = 0; gap < kGap; ++gap) worst.exact(plain[at + static_cast<size_t>(n + gap)] == kCanary);
  }
}

// k of one short and one longer row, both with an odd number of the format's units.
std::vector<int> lengths_of(const char* dtype) {
  if (std::strstr(dtype, "_k")) return {256, 768};
  return std::strchr(dtype, '_') ? std::vector<int>{32, 288} : std::vector<int>{7, 129};
}

void check_format(const Kernels& table, const char* dtype, bool widen, CheckExtent extent, std::vector<KernelCheck>& out) {
  Rng rng{2024};
  const std::string format = std::string(dtype) + (widen ? " as f32" : "");
  if (extent == CheckExtent::kStart) {
    const int k = lengths_of(dtype)[0];
    Subject subject(dtype, 17, k, widen, rng);
    Activations a(5, k, rng);
    Worst worst;
    for (const int rows : {1, 5}) compare(table, subject, a, rows, rng, worst);
    out.push_back(worst.verdict("matmul", format, "1 and 5 rows"));
    return;
  }
  std::vector<std::unique_ptr<Subject>> subjects;
  for (const int k : lengths_of(dtype))
    for (const int n : {1, 37, 64}) subjects.push_back(std::make_unique<Subject>(dtype, n, k, widen, rng));
  for (const RowClass& shape : row_classes()) {
    Worst worst;
    for (const auto& subject : subjects) {
      if (shape.rows[0] == 512 && subject->file.n == 64) continue;  // as many rows as say what they can
      Activations a(shape.rows.back(), subject->file.k, rng);
      for (const int rows : shape.rows) compare(table, *subject, a, rows, rng, worst);
    }
    out.push_back(worst.verdict("matmul", format, shape.name));
  }
}

}  // namespace

std::vector<KernelCheck> check_matmul(const Kernels& table, CheckExtent extent) {
  std::vector<KernelCheck> out;
  for (const char* dtype : packable_dtypes()) check_format(table, dtype, false, extent, out);
  if (extent == CheckExtent::kFull) check_format(table, "q4_k", true, extent, out);  // --compute f32
  return out;
}

}  // namespace octavo
