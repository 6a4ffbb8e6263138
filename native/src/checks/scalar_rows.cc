#include "checks/scalar_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace octavo {
namespace {

constexpr double kEps = 5.97e-8;  // half a unit in the last place

// 1 + tanh(u) as it stands, or for negative u, where it cancels even in double, as 2 exp(2u) / (1 + exp(2u)).
double gelu(double x) {
  const double u = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
  return 0.5 * x * (u > 0 ? 1 + std::tanh(u) : 2 * std::exp(2 * u) / (1 + std::exp(2 * u)));
}

double silu(double x) { return x / (1 + std::exp(-x)); }

double magnitude_of(uint16_t code, KVType type) { return std::fabs(static_cast<double>(value_of_code(code, type))); }

}  // namespace

Bounded scalar_rmsnorm(const float* x, const float* w, float eps, int dim) {
  Bounded out(static_cast<size_t>(dim));
  double sum = 0;
  for (int i = 0; i < dim; ++i) sum += static_cast<double>(x[i]) * x[i];
  for (int i = 0; i < dim; ++i) {
    out.value[i] = x[i] / std::sqrt(sum / dim + static_cast<double>(eps)) * w[i];
    out.bound[i] = std::fabs(out.value[i]) * kEps * (2 * (dim / 64 + 8) + 8) + 1e-40;  // chains of dim / 64 and a tree; then five roundings
  }
  return out;
}

Bounded scalar_add(const float* a, const float* b, int dim) {
  Bounded out(static_cast<size_t>(dim));
  for (int i = 0; i < dim; ++i) out.value[i] = a[i] + b[i];  // rounded once, as the kernel's
  return out;
}

Bounded scalar_softcap(const float* x, int dim, float cap) {
  Bounded out(static_cast<size_t>(dim));
  for (int i = 0; i < dim; ++i) {
    out.value[i] = cap * std::tanh(static_cast<double>(x[i]) / cap);
    out.bound[i] = cap * kEps * 8;
  }
  return out;
}

Bounded scalar_gated_act(const float* gate, const float* up, int dim, int activation) {
  Bounded out(static_cast<size_t>(dim));
  for (int i = 0; i < dim; ++i) {
    const double g = gate[i], z = activation ? 1.5957691216057308 * (g + 0.044715 * g * g * g) : g;
    out.value[i] = (activation ? gelu(g) : silu(g)) * up[i];
    // The argument's few roundings are amplified by |z|; beyond the exp's range the result is below 1e-34.
    out.bound[i] = std::fabs(out.value[i]) * kEps * (12 + 8 * std::fabs(z)) + 1e-34;
  }
  return out;
}

Bounded scalar_rope(const float* x, int heads, int head_dim, int rotary_dim, bool interleaved, const float* cos_sin) {
  const int half = rotary_dim / 2;
  Bounded out(static_cast<size_t>(heads) * static_cast<size_t>(head_dim));
  std::copy(x, x + out.value.size(), out.value.begin());  // what is not rotated stays
  for (int h = 0; h < heads; ++h)
    for (int i = 0; i < half; ++i) {
      const int a = h * head_dim + (interleaved ? 2 * i : i), b = h * head_dim + (interleaved ? 2 * i + 1 : i + half);
      const double c = cos_sin[2 * i], s = cos_sin[2 * i + 1];
      out.value[a] = x[a] * c - x[b] * s;
      out.value[b] = x[a] * s + x[b] * c;
      out.bound[a] = out.bound[b] = 2 * kEps * (std::fabs(x[a]) + std::fabs(x[b])) * 1.01;
    }
  return out;
}

ScalarQuantised scalar_quantize(const float* x, int k) {
  ScalarQuantised out;
  for (int g = 0; g < k / 32; ++g) {
    float max = 0;
    for (int i = 0; i < 32; ++i) max = std::max(max, std::fabs(x[32 * g + i]));
    out.scale.push_back(max / 127.0f);
    for (int half = 0; half < 2; ++half) {
      int sum = 0;
      for (int i = 0; i < 16; ++i) {
        const int q = static_cast<int>(std::nearbyint(x[32 * g + 16 * half + i] * (127.0f / max)));
        out.q.push_back(static_cast<int8_t>(q));
        sum += q;
      }
      out.sum16.push_back(static_cast<int16_t>(sum));
    }
  }
  return out;
}

float value_of_code(uint16_t code, KVType type) {
  if (type == KVType::kBF16) {
    const uint32_t bits = static_cast<uint32_t>(code) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
  const int exponent = (code >> 10) & 31, fraction = code & 1023;
  if (exponent == 31) return fraction ? NAN : (code >> 15 ? -INFINITY : INFINITY);
  const float value = exponent ? std::ldexp(static_cast<float>(1024 + fraction), exponent - 25) : std::ldexp(static_cast<float>(fraction), -24);
  return code >> 15 ? -value : value;
}

uint16_t nearest_code(float x, KVType type) {
  const double a = std::fabs(static_cast<double>(x));
  uint16_t low = 0;
  for (int bit = 14; bit >= 0; --bit)
    if (magnitude_of(static_cast<uint16_t>(low | (1 << bit)), type) <= a) low = static_cast<uint16_t>(low | (1 << bit));
  const double down = a - magnitude_of(low, type), up = magnitude_of(static_cast<uint16_t>(low + 1), type) - a;
  const int code = down < up || (down == up && low % 2 == 0) ? low : low + 1;
  return static_cast<uint16_t>(code | (std::signbit(x) ? 0x8000 : 0));
}

}  // namespace octavo
