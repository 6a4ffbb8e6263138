// Element-wise kernels against scalar loops in double, at lengths around every vector boundary.
//
// Rows sit between guard values: a kernel that writes past its row's end, or whose result depends on what lies there, fails.
#include <algorithm>

#include "checks/scalar_attention.h"
#include "checks/scalar_rows.h"
#include "testing.h"

using namespace octavo;
using namespace octavo_test;

namespace {

const int kDims[] = {1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 79, 100, 127, 129, 576, 1000, 1536};
constexpr float kGuard = 12345.0f;

// A row of n values followed by guards that must survive.
struct Row {
  std::vector<float> values;
  int n;
  explicit Row(int n) : values(n + 32, kGuard), n(n) {}
  Row(const std::vector<float>& x) : Row((int)x.size()) { std::copy(x.begin(), x.end(), values.begin()); }
  operator float*() { return values.data(); }
  bool intact() const { return std::all_of(values.begin() + n, values.end(), [](float x) { return x == kGuard; }); }
};

void check_row(const char* level, const char* what, const Row& got, const Bounded& want) {
  check(got.intact(), "%s %s dim %d wrote beyond its row", level, what, got.n);
  for (int i = 0; i < got.n; ++i)
    if (!check(std::fabs(got.values[i] - want.value[i]) <= want.bound[i], "%s %s dim %d at %d: %.9g, expected %.9g +- %.2g", level, what, got.n,
               i, got.values[i], want.value[i], want.bound[i])) return;
}

void test_rmsnorm(const Kernels& k, int dim, float range, Rng& rng) {
  Row x(rng.uniform_values(dim, range)), w(rng.uniform_values(dim)), out(dim);
  const Bounded want = scalar_rmsnorm(x, w, 1e-5f, dim);
  k.rmsnorm(x, w, 1e-5f, dim, out);
  check_row(k.name, "rmsnorm", out, want);
  k.rmsnorm(x, w, 1e-5f, dim, x);
  check(same_bits(x, out, dim), "%s rmsnorm dim %d in place differs", k.name, dim);
}

void test_binary(const Kernels& k, int dim, Rng& rng) {
  Row a(rng.uniform_values(dim, 10.0f)), b(rng.uniform_values(dim, 10.0f)), out(dim);
  k.add(a, b, dim, out);
  check_row(k.name, "add", out, scalar_add(a, b, dim));
  Row wide(rng.uniform_values(dim, 200.0f));
  k.softcap(wide, dim, 30.0f, out);
  check_row(k.name, "softcap", out, scalar_softcap(wide, dim, 30.0f));
}

void test_gated_act(const Kernels& k, int dim, float range, Rng& rng) {
  Row gate(rng.uniform_values(dim, range)), up(rng.uniform_values(dim, 3.0f)), out(dim);
  for (int activation : {0, 1}) {
    k.gated_act(gate, up, dim, activation, out);
    check_row(k.name, activation ? "gelu" : "silu", out, scalar_gated_act(gate, up, dim, activation));
  }
}

void test_activation_ends(const Kernels& k) {
  const std::vector<float> gate = {0.0f, -0.0f, 88.0f, -88.0f, 1e4f, -1e4f, 1e30f, -1e30f, INFINITY, NAN, 1e-30f};
  Row g(gate), up(std::vector<float>(gate.size(), 2.0f)), out((int)gate.size());
  for (int activation : {0, 1}) {
    k.gated_act(g, up, g.n, activation, out);
    for (int i : {0, 1, 3, 5}) check(std::fabs(out[i]) < 1e-30f, "%s activation %d of %g gives %g", k.name, activation, gate[i], out[i]);
    for (int i : {2, 4, 6, 8}) check(out[i] == 2.0f * gate[i], "%s activation %d of %g gives %g", k.name, activation, gate[i], out[i]);
    check(std::isnan(out[9]), "%s activation %d loses a NaN", k.name, activation);
    check(std::fabs(out[10] - 1e-30f) < 1e-36f, "%s activation %d of 1e-30 gives %g", k.name, activation, out[10]);
  }
}

// ---- quantisation --------------------------------------------------------------------------------------------------

struct Quantised {
  int k;
  std::vector<int8_t> q;
  std::vector<float> scale;
  std::vector<int16_t> sum16;
  Quantised(int rows, int k) : k(k), q((size_t)rows * k, 99), scale(rows * (k / 32), kGuard), sum16(rows * (k / 16), 12345) {}
  QuantRows rows() { return {q.data(), scale.data(), sum16.data()}; }
};

void test_quantize(const Kernels& kernels, int k, float range, Rng& rng) {
  Quantised out(3, k);
  const std::vector<float> x = rng.uniform_values(k, range);
  kernels.quantize(x.data(), k, out.rows(), 1);
  const ScalarQuantised want = scalar_quantize(x.data(), k);
  check(std::equal(want.q.begin(), want.q.end(), out.q.begin() + k), "%s quantize k %d range %g: codes", kernels.name, k, range);
  check(std::equal(want.scale.begin(), want.scale.end(), out.scale.begin() + k / 32), "%s quantize k %d range %g: scales", kernels.name, k, range);
  check(std::equal(want.sum16.begin(), want.sum16.end(), out.sum16.begin() + k / 16), "%s quantize k %d range %g: sums", kernels.name, k, range);
  for (int row : {0, 2}) {
    for (int i = 0; i < k; ++i) check(out.q[(size_t)row * k + i] == 99, "%s quantize touched row %d", kernels.name, row);
    for (int i = 0; i < k / 32; ++i)
      check(out.scale[row * (k / 32) + i] == kGuard, "%s quantize touched scale of row %d", kernels.name, row);
    for (int i = 0; i < k / 16; ++i) check(out.sum16[row * (k / 16) + i] == 12345, "%s quantize touched sums of row %d", kernels.name, row);
  }
}

// Groups: all zero; halves that round to even; too small to scale; one NaN; one infinity; ordinary values that must not notice.
void test_quantize_ends(const Kernels& kernels) {
  std::vector<float> x(192, 0.0f);
  x[32] = 127.0f; x[33] = 0.5f; x[34] = 1.5f; x[35] = -2.5f; x[36] = -127.0f;
  x[64] = 1e-38f;
  for (int i = 96; i < 192; ++i) x[i] = (float)(i % 7) - 3.0f;
  x[100] = NAN;
  x[130] = INFINITY;
  Quantised out(1, 192);
  kernels.quantize(x.data(), 192, out.rows(), 0);
  check(out.scale[0] == 0.0f && out.sum16[0] == 0 && out.q[31] == 0, "%s quantize of a zero group", kernels.name);
  const int want[] = {127, 0, 2, -2, -127};
  for (int i = 0; i < 5; ++i) check(out.q[32 + i] == want[i], "%s quantize ties: %d for %g", kernels.name, out.q[32 + i], x[32 + i]);
  check(out.scale[2] == 0.0f && out.q[64] == 0, "%s quantize of a vanishing group", kernels.name);
  for (int8_t q : out.q) check(q >= -127, "%s quantize left the range: %d", kernels.name, q);
  for (int g : {3, 4}) check(std::isnan(out.scale[(size_t)g]), "%s quantize made numbers of group %d, which is not finite", kernels.name, g);
  check(out.scale[5] == 3.0f / 127.0f, "%s quantize: non-finite values reached another group", kernels.name);
}

// ---- rotary embedding ----------------------------------------------------------------------------------------------

void test_rope(const Kernels& k, int heads, int head_dim, int rotary_dim, bool interleaved, Rng& rng) {
  const int half = rotary_dim / 2;
  const std::vector<float> x = rng.uniform_values((size_t)heads * head_dim, 4.0f);
  std::vector<float> cos_sin(rotary_dim);
  for (int i = 0; i < half; ++i) {
    const double angle = 1000 * std::pow(10000.0, -2.0 * i / rotary_dim);
    cos_sin[2 * i] = (float)std::cos(angle);
    cos_sin[2 * i + 1] = (float)std::sin(angle);
  }
  Row got(x), single(x);
  k.rope(got, heads, head_dim, rotary_dim, interleaved, cos_sin.data());
  for (int h = 0; h < heads; ++h) k.rope((float*)single + h * head_dim, 1, head_dim, rotary_dim, interleaved, cos_sin.data());
  check(same_bits(got, single, x.size()), "%s rope: a head depends on its neighbours", k.name);
  check_row(k.name, interleaved ? "rope interleaved" : "rope half", got, scalar_rope(x.data(), heads, head_dim, rotary_dim, interleaved, cos_sin.data()));
}

// ---- KV store ------------------------------------------------------------------------------------------------------

// Finite, magnitudes over the whole range of the type, some of them exactly between two of its numbers.
std::vector<float> storable_values(int n, KVType type, Rng& rng) {
  std::vector<float> x(n);
  for (float& a : x) {
    a = std::ldexp(rng.uniform(), rng.below(44) - 28);
    const uint32_t mask = type == KVType::kF16 ? 0x1fffu : 0xffffu;
    uint32_t bits;
    std::memcpy(&bits, &a, 4);
    if (rng.below(3) == 0) bits = (bits & ~mask) | ((mask + 1) / 2);
    std::memcpy(&a, &bits, 4);
  }
  return x;
}

// Three tokens of a block one after another: each lies where kernels.h says, and what is not theirs keeps its bytes.
void test_store_kv(const Kernels& kernels, KVType type, int kv_heads, int head_dim, int block_size, Rng& rng) {
  const size_t block_bytes = kv_tile_layout(type, head_dim).bytes * kv_heads * (block_size / 16) + 64;
  std::vector<uint8_t> memory(3 * block_bytes, 0xa5);
  const KVLayerView view = {memory.data(), block_bytes, kv_heads, head_dim, block_size, type};
  const int32_t table = 1;  // a sequence of one block
  std::vector<float> stored[2];  // k and v of the tokens so far
  std::vector<int> offsets;
  for (int offset : {0, 7, block_size - 1}) {
    const int n = kv_heads * head_dim;
    const std::vector<float> k = storable_values(n, type, rng), v = storable_values(n, type, rng);
    kernels.store_kv(view, 1, offset, k.data(), v.data());
    offsets.push_back(offset);
    stored[0].insert(stored[0].end(), k.begin(), k.end());
    stored[1].insert(stored[1].end(), v.begin(), v.end());
    bool right = true;
    for (size_t i = 0; i < stored[0].size(); ++i)
      for (bool value : {false, true}) {
        const float x = stored[value][i], got = stored_kv(view, &table, offsets[i / n], (int)(i % n) / head_dim, (int)(i % head_dim), value);
        right = right && got == (type == KVType::kF32 ? x : value_of_code(nearest_code(x, type), type));
      }
    check(right, "%s store_kv type %d kv_heads %d head_dim %d block_size %d", kernels.name, (int)type, kv_heads, head_dim, block_size);
  }
  // Two values of each element of three tokens at most.
  const auto untouched = (size_t)std::count(memory.begin(), memory.end(), (uint8_t)0xa5);
  const bool others = std::all_of(memory.begin(), memory.begin() + (ptrdiff_t)block_bytes, [](uint8_t b) { return b == 0xa5; }) &&
                      std::all_of(memory.begin() + (ptrdiff_t)(2 * block_bytes), memory.end(), [](uint8_t b) { return b == 0xa5; });
  check(others && untouched >= memory.size() - 3 * 2 * (size_t)kv_heads * head_dim * kv_value_bytes(type), "%s store_kv type %d: writes elsewhere",
        kernels.name, (int)type);
}

void test_store_ends(const Kernels& kernels) {
  const std::vector<float> x = {INFINITY, -INFINITY, NAN, 70000.0f, 65519.0f, 65520.0f, -0.0f, 0.0f};
  for (KVType type : {KVType::kF16, KVType::kBF16}) {
    std::vector<uint8_t> memory(kv_tile_layout(type, 8).bytes, 0);
    const KVLayerView view = {memory.data(), memory.size(), 1, 8, 16, type};
    const int32_t table = 0;
    kernels.store_kv(view, 0, 0, x.data(), x.data());
    const auto v = [&](int d) { return stored_kv(view, &table, 0, 0, d, true); };
    check(v(0) == INFINITY && v(1) == -INFINITY && std::isnan(v(2)) && v(6) == 0 && std::signbit(v(6)) && v(7) == 0 && !std::signbit(v(7)),
          "%s store of special values", kernels.name);
    if (type == KVType::kF16) check(v(3) == INFINITY && v(4) == 65504.0f && v(5) == INFINITY, "%s store of large halves", kernels.name);
  }
}

// A token that is not finite comes back as NaN, its keys and its values, and no other token does; zeros and what is tiny come back as zeros.
void test_pack_ends(const Kernels& kernels) {
  const int head_dim = 24;
  for (KVType type : {KVType::kF16, KVType::kBF16, KVType::kF32}) {
    std::vector<uint8_t> memory(kv_tile_layout(type, head_dim).bytes, 0xff), packed(kv_tile_layout(KVType::kI8, head_dim).bytes, 0x77);
    const KVLayerView view = {memory.data(), memory.size(), 1, head_dim, 16, type};
    const int32_t table = 0;
    for (int t = 0; t < 16; ++t) {
      std::vector<float> k(head_dim, t == 5 ? 0.0f : t == 6 ? 1e-38f : 1.0f + t), v = k;
      if (t == 3) k[7] = INFINITY;
      if (t == 9) v[23] = NAN;
      kernels.store_kv(view, 0, t, k.data(), v.data());
    }
    kernels.pack_kv(type, head_dim, memory.data(), packed.data());
    std::fill(memory.begin(), memory.end(), (uint8_t)0xff);
    kernels.unpack_kv(type, head_dim, packed.data(), memory.data());
    // The greatest value of a head comes back as it was, but for the scale's 16 bits in float32.
    const auto near = [&](float x, int t) { return std::fabs(x - (t == 5 || t == 6 ? 0.0f : 1.0f + t)) <= (type == KVType::kF32 ? 1e-4f * x : 0.0f); };
    bool right = true;
    for (int t = 0; t < 16; ++t)
      for (int d = 0; d < head_dim; ++d) {
        const float k = stored_kv(view, &table, t, 0, d, false), v = stored_kv(view, &table, t, 0, d, true);
        if (t == 3) right = right && std::isnan(k) && std::isnan(v);
        else right = right && near(k, t) && (t == 9 ? std::isnan(v) : near(v, t));
      }
    check(right, "%s packing of special values, type %d", kernels.name, (int)type);
  }
}

// Clamps inside must not turn a NaN into a number: a row of them must be seen to be wrong.
void test_nan_stays(const Kernels& k) {
  std::vector<float> x(33, NAN), ones(33, 1.0f), out(33);
  k.softcap(x.data(), 33, 30.0f, out.data());
  bool nan = std::all_of(out.begin(), out.end(), [](float a) { return std::isnan(a); });
  for (int activation : {0, 1}) {
    k.gated_act(x.data(), ones.data(), 33, activation, out.data());
    nan = nan && std::all_of(out.begin(), out.end(), [](float a) { return std::isnan(a); });
  }
  check(nan, "%s: a NaN became a number", k.name);
}

void test_level(const Kernels& kernels) {
  Rng rng{1};
  for (int dim : kDims) {
    for (float range : {1e-4f, 1.0f, 1e4f}) test_rmsnorm(kernels, dim, range, rng);
    test_binary(kernels, dim, rng);
    for (float range : {0.01f, 3.0f, 20.0f}) test_gated_act(kernels, dim, range, rng);
  }
  test_activation_ends(kernels);
  test_nan_stays(kernels);
  for (int k : {32, 64, 96, 160, 576, 1536})
    for (float range : {1e-20f, 1.0f, 1e20f}) test_quantize(kernels, k, range, rng);
  test_quantize_ends(kernels);
  const int rope_dims[][2] = {{2, 2}, {8, 8}, {16, 8}, {64, 64}, {64, 32}, {80, 20}, {96, 96}, {128, 128}, {256, 256}};
  for (const int* d : rope_dims)
    for (bool interleaved : {false, true})
      for (int heads : {1, 3, 9}) test_rope(kernels, heads, d[0], d[1], interleaved, rng);
  for (KVType type : {KVType::kF16, KVType::kBF16, KVType::kF32})
    for (int head_dim : {2, 8, 16, 24, 64, 80, 256})
      for (int block_size : {16, 32, 48}) test_store_kv(kernels, type, 1 + head_dim % 3, head_dim, block_size, rng);
  test_store_ends(kernels);
  test_pack_ends(kernels);
}

}  // namespace

int main() {
  for (const Kernels* kernels : levels()) test_level(*kernels);
  return finish("test_elementwise");
}
