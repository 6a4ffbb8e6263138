#include <algorithm>
#include <cmath>
#include <cstring>

#include "checks/kernel_check.h"
#include "checks/random.h"
#include "checks/scalar_rows.h"
#include "checks/worst.h"

namespace octavo {
namespace {

constexpr float kGuard = 12345.0f;

// n values between guards, which must survive.
struct GuardedRow {
  std::vector<float> values;
  size_t n;
  explicit GuardedRow(size_t n) : values(n + 32, kGuard), n(n) {}
  float* data() { return values.data(); }
  bool intact() const { return std::all_of(values.begin() + static_cast<ptrdiff_t>(n), values.end(), [](float x) { return x == kGuard; }); }
};

struct DimClass {
  const char* name;
  std::vector<int> dims;
};

std::vector<DimClass> dim_classes(CheckExtent extent) {
  if (extent == CheckExtent::kStart) return {{"33 and 64 values", {33, 64}}};
  return {{"1-16 values", {1, 2, 7, 15, 16}}, {"17-64 values", {17, 31, 33, 48, 64}}, {"65-1536 values", {65, 100, 576, 1000, 1536}}};
}

void judge(Worst& worst, GuardedRow& got, const Bounded& want) {
  worst.row(got.data(), want);
  worst.exact(got.intact());
}

void check_rmsnorm(const Kernels& table, const DimClass& dims, Rng& rng, std::vector<KernelCheck>& out) {
  Worst worst;
  for (const int dim : dims.dims)
    for (const float range : {1e-4f, 1.0f, 1e4f}) {
      const size_t n = static_cast<size_t>(dim);
      const std::vector<float> x = rng.uniform_values(n, range), w = rng.uniform_values(n);
      GuardedRow got(n);
      table.rmsnorm(x.data(), w.data(), 1e-5f, dim, got.data());
      judge(worst, got, scalar_rmsnorm(x.data(), w.data(), 1e-5f, dim));
    }
  out.push_back(worst.verdict("rmsnorm", "", dims.name));
}

void check_binary(const Kernels& table, const DimClass& dims, Rng& rng, std::vector<KernelCheck>& out) {
  Worst add, cap, act[2];
  for (const int dim : dims.dims) {
    const size_t n = static_cast<size_t>(dim);
    const std::vector<float> a = rng.uniform_values(n, 20.0f), b = rng.uniform_values(n, 3.0f), wide = rng.uniform_values(n, 200.0f);
    GuardedRow sum(n), capped(n);
    table.add(a.data(), b.data(), dim, sum.data());
    judge(add, sum, scalar_add(a.data(), b.data(), dim));
    table.softcap(wide.data(), dim, 30.0f, capped.data());
    judge(cap, capped, scalar_softcap(wide.data(), dim, 30.0f));
    for (const int activation : {0, 1}) {
      GuardedRow gated(n);
      table.gated_act(a.data(), b.data(), dim, activation, gated.data());
      judge(act[activation], gated, scalar_gated_act(a.data(), b.data(), dim, activation));
    }
  }
  out.push_back(add.verdict("add", "", dims.name));
  out.push_back(cap.verdict("softcap", "", dims.name));
  out.push_back(act[0].verdict("gated_act", "silu", dims.name));
  out.push_back(act[1].verdict("gated_act", "gelu", dims.name));
}

void check_quantize(const Kernels& table, CheckExtent extent, Rng& rng, std::vector<KernelCheck>& out) {
  Worst worst;
  const std::vector<int> lengths = extent == CheckExtent::kStart ? std::vector<int>{96} : std::vector<int>{32, 96, 160, 576, 1536};
  for (const int k : lengths)
    for (const float range : {1e-20f, 1.0f, 1e20f}) {
      const size_t n = static_cast<size_t>(k);
      const std::vector<float> x = rng.uniform_values(n, range);
      std::vector<int8_t> q(2 * n, 99);
      std::vector<float> scale(2 * n / 32, kGuard);
      std::vector<int16_t> sum16(2 * n / 16, 12345);
      table.quantize(x.data(), k, {q.data(), scale.data(), sum16.data()}, 1);
      const ScalarQuantised want = scalar_quantize(x.data(), k);
      for (size_t i = 0; i < n; ++i) worst.value(q[n + i], want.q[i], 0.0);
      for (size_t g = 0; g < n / 32; ++g) worst.value(scale[n / 32 + g], want.scale[g], 0.0);
      for (size_t h = 0; h < n / 16; ++h) worst.value(sum16[n / 16 + h], want.sum16[h], 0.0);
      worst.exact(std::all_of(q.begin(), q.begin() + k, [](int8_t v) { return v == 99; }));  // the row before
    }
  out.push_back(worst.verdict("quantize", "int8", extent == CheckExtent::kStart ? "96 values" : "32-1536 values"));
}

void check_rope(const Kernels& table, CheckExtent extent, Rng& rng, std::vector<KernelCheck>& out) {
  struct Shape { int head_dim, rotary_dim; };
  const std::vector<Shape> all{{2, 2}, {16, 8}, {64, 64}, {80, 20}, {96, 96}, {256, 256}};
  const std::vector<Shape> shapes = extent == CheckExtent::kStart ? std::vector<Shape>{{64, 64}} : all;
  for (const bool interleaved : {false, true}) {
    Worst worst;
    for (const Shape& shape : shapes)
      for (const int heads : {1, 3}) {
        const std::vector<float> x = rng.uniform_values(static_cast<size_t>(heads * shape.head_dim), 4.0f);
        std::vector<float> cos_sin;
        for (int i = 0; i < shape.rotary_dim / 2; ++i) {
          const double angle = 1000 * std::pow(10000.0, -2.0 * i / shape.rotary_dim);
          cos_sin.push_back(static_cast<float>(std::cos(angle)));
          cos_sin.push_back(static_cast<float>(std::sin(angle)));
        }
        GuardedRow got(x.size());
        std::copy(x.begin(), x.end(), got.values.begin());
        table.rope(got.data(), heads, shape.head_dim, shape.rotary_dim, interleaved, cos_sin.data());
        judge(worst, got, scalar_rope(x.data(), heads, shape.head_dim, shape.rotary_dim, interleaved, cos_sin.data()));
      }
    out.push_back(worst.verdict("rope", interleaved ? "interleaved" : "half", extent == CheckExtent::kStart ? "head_dim 64" : "head_dim 2-256"));
  }
}

}  // namespace

std::vector<KernelCheck> check_rows(const Kernels& table, CheckExtent extent) {
  Rng rng{1};
  std::vector<KernelCheck> out;
  for (const DimClass& dims : dim_classes(extent)) {
    check_rmsnorm(table, dims, rng, out);
    check_binary(table, dims, rng, out);
  }
  check_quantize(table, extent, rng, out);
  check_rope(table, extent, rng, out);
  return out;
}

std::vector<KernelCheck> check_kernels(const Kernels& table, const SamplingKernels& sampling, CheckExtent extent) {
  std::vector<KernelCheck> out = check_rows(table, extent);
  for (const auto& part : {check_attention(table, extent), check_matmul(table, extent), check_sampling(sampling, extent)})
    out.insert(out.end(), part.begin(), part.end());
  return out;
}

}  // namespace octavo
