// Attention: KV bytes per second of a decode step, and arithmetic of a prompt's rows against the peaks measured beside it: of float32
// fused multiply-adds and, where the machine has them, of bfloat16 dot products.
// Medians of short runs on one core: OCTAVO_ISA=portable|avx2|avx512|avx512_vnni bench_attention
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "kernels/kernels.h"
#include "runtime/cpu_features.h"

using namespace octavo;

namespace {

// CPU time of this thread: what other processes take of the core does not count.
double now_s() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

template <class F>
double median_s(int runs, F run) {
  std::vector<double> times;
  for (int i = 0; i < runs; ++i) {
    const double begin = now_s();
    run();
    times.push_back(now_s() - begin);
  }
  std::nth_element(times.begin(), times.begin() + runs / 2, times.end());
  return times[runs / 2];
}

#if defined(__x86_64__)
// Independent chains of packed FMA, enough to hide their latency; the widest vectors the level may use.
#include <immintrin.h>
#define OCTAVO_FMA_CHAINS(name, target_isa, type, set1, fmadd, lanes)                                       \
  __attribute__((target(target_isa))) double name() {                                                      \
    constexpr int rounds = 200000;                                                                         \
    std::vector<double> times;                                                                             \
    for (int run = 0; run < 9; ++run) {                                                                    \
      const type a = set1(0.999f), b = set1(0.001f);                                                       \
      type s0 = a, s1 = a, s2 = a, s3 = a, s4 = a, s5 = a, s6 = a, s7 = a, s8 = a, s9 = a;                 \
      const double begin = now_s();                                                                        \
      for (int i = 0; i < rounds; ++i) {                                                                   \
        s0 = fmadd(s0, a, b); s1 = fmadd(s1, a, b); s2 = fmadd(s2, a, b); s3 = fmadd(s3, a, b);            \
        s4 = fmadd(s4, a, b); s5 = fmadd(s5, a, b); s6 = fmadd(s6, a, b); s7 = fmadd(s7, a, b);            \
        s8 = fmadd(s8, a, b); s9 = fmadd(s9, a, b);                                                        \
        asm volatile("" : "+v"(s0), "+v"(s1), "+v"(s2), "+v"(s3), "+v"(s4), "+v"(s5), "+v"(s6), "+v"(s7), "+v"(s8), "+v"(s9)); \
      }                                                                                                    \
      times.push_back(now_s() - begin);                                                                    \
    }                                                                                                      \
    std::sort(times.begin(), times.end());                                                                 \
    return rounds * 10.0 * 2 * lanes / times[0];                                                           \
  }
OCTAVO_FMA_CHAINS(fma_flops_512, "avx512f", __m512, _mm512_set1_ps, _mm512_fmadd_ps, 16)
OCTAVO_FMA_CHAINS(fma_flops_256, "avx2,fma", __m256, _mm256_set1_ps, _mm256_fmadd_ps, 8)
// The same chains with sums of bfloat16 pairs, each lane two multiply-adds.
#define OCTAVO_DOT_BF16(s, a, b) _mm512_dpbf16_ps(s, (__m512bh)(a), (__m512bh)(b))
OCTAVO_FMA_CHAINS(dot_flops_512, "avx512f,avx512bf16", __m512, _mm512_set1_ps, OCTAVO_DOT_BF16, 32)
double dot_peak_flops() { return cpu_has_avx512_bf16() ? dot_flops_512() : NAN; }
double peak_flops() { return cpu_has_avx512() ? fma_flops_512() : cpu_has_avx2() ? fma_flops_256() : NAN; }
#else
double peak_flops() { return NAN; }
double dot_peak_flops() { return NAN; }
#endif

// Pages that a KV pool would ask for: huge where the system grants them.
struct Pages {
  uint8_t* data;
  size_t bytes;
  explicit Pages(size_t n) : bytes((n + (2u << 20) - 1) >> 21 << 21) {
    data = (uint8_t*)std::aligned_alloc(2u << 20, bytes);
#if defined(__linux__)
    madvise(data, bytes, MADV_HUGEPAGE);
#endif
    std::memset(data, 0, bytes);
  }
  ~Pages() { std::free(data); }
  Pages(const Pages&) = delete;
};

// What this core reads of the same memory with nothing else to do.
double read_bytes_per_s(const Pages& pages) {
  volatile uint64_t sink = 0;
  const double s = median_s(9, [&] {
    uint64_t sum[8] = {0};
    const uint64_t* p = (const uint64_t*)pages.data;
    for (size_t i = 0; i < pages.bytes / 8; i += 8) for (int j = 0; j < 8; ++j) sum[j] += p[i + j];
    for (uint64_t x : sum) sink = sink + x;
  });
  return (double)pages.bytes / s;
}

struct Model { const char* name; int heads, kv_heads, head_dim, layers, window; };

// KV of several layers, so that a decode step does not find it in a cache that a real step has overwritten.
struct Setup {
  const Kernels& kernels;
  AttentionParams params;
  int context, width;
  std::vector<KVLayerView> layers;
  std::vector<int32_t> table;
  Pages memory;
  std::vector<uint8_t> scratch;
  std::vector<float> q, out;
  size_t layer_bytes;

  static size_t bytes_of(const Model& m, KVType type, int context) {
    return kv_tile_layout(type, m.head_dim).bytes * m.kv_heads * ((context + 15) / 16);
  }
  Setup(const Kernels& k, const Model& m, KVType type, int context)
      : kernels(k), context(context), width(m.heads * m.head_dim), memory(bytes_of(m, type, context) * m.layers),
        layer_bytes(bytes_of(m, type, context)) {
    params = {m.heads, m.kv_heads, m.head_dim, 0.1f, 0.0f, m.window};
    const int block_size = 16, blocks = (context + block_size - 1) / block_size;
    const size_t block_bytes = layer_bytes / blocks;
    for (int i = 0; i < blocks; ++i) table.push_back((i * 7 + 3) % blocks);
    if (blocks % 7 == 0) for (int i = 0; i < blocks; ++i) table[i] = blocks - 1 - i;
    std::vector<float> row(m.kv_heads * m.head_dim);
    uint32_t state = 1;
    for (int l = 0; l < m.layers; ++l) {
      layers.push_back({memory.data + l * layer_bytes, block_bytes, m.kv_heads, m.head_dim, block_size, type});
      for (int t = 0; t < context; ++t) {
        for (float& x : row) x = (float)((state = state * 1664525u + 1013904223u) >> 8) / 8388608.0f - 1.0f;
        kernels.store_kv(layers[l], table[t / block_size], t % block_size, row.data(), row.data());
      }
    }
    q.resize((size_t)context * width, 0.25f);
    out.resize(q.size());
    scratch.resize(kernels.attention_scratch_bytes(params) + 64);
  }
  void run(int layer, int start, int rows) {
    void* at = (void*)(((uintptr_t)scratch.data() + 63) & ~(uintptr_t)63);
    const AttentionSequence s = {&q[(size_t)start * width], &out[(size_t)start * width], width, width, start, rows, table.data()};
    const int splits = attention_num_splits(s);
    for (int h = 0; h < params.kv_heads; ++h) kernels.attention(layers[layer], params, s, h, 0, rows, 0, splits, nullptr, at);
  }
};

struct Peaks { double fma, dot; };

void report(const Kernels& kernels, const Model& model, KVType type, int context, Peaks peaks) {
  Setup setup(kernels, model, type, context);
  const double decode = median_s(31, [&] { for (int l = 0; l < model.layers; ++l) setup.run(l, context - 1, 1); }) / model.layers;
  const double cached = median_s(31, [&] { setup.run(0, context - 1, 1); });
  const double prefill = median_s(5, [&] { setup.run(0, 0, context); });
  const int window = model.window ? std::min(model.window, context) : context;
  const double pairs = window * (window + 1) / 2.0 + (double)window * (context - window);  // of a row and a token that it sees
  const double flop = 4.0 * pairs * model.heads * model.head_dim;
  const double bytes = (double)setup.layer_bytes * window / context, giga = 1e-9;
  const char* type_name = type == KVType::kF16 ? "f16" : type == KVType::kBF16 ? "bf16" : type == KVType::kI8 ? "int8" : "f32";
  std::printf("%-11s %-8s %-4s %5d  decode %6.1f us a layer, %5.1f GB/s of KV (one layer in cache %5.1f, plain read %5.1f)", kernels.name,
              model.name, type_name, context, decode * 1e6, bytes / decode * giga, bytes / cached * giga,
              read_bytes_per_s(setup.memory) * giga);
  std::printf("   prefill %7.2f ms a layer, %5.1f GFLOP/s, %.0f %% of the FMA peak, %.0f %% of bf16\n", prefill * 1e3,
              flop / prefill * giga, 100 * flop / prefill / peaks.fma, 100 * flop / prefill / peaks.dot);
}

}  // namespace

int main() {
  const char* name = std::getenv("OCTAVO_ISA");
  const Kernels* kernels = name ? kernels_by_name(name) : kernels_best();
  if (!kernels) { std::fprintf(stderr, "OCTAVO_ISA=%s: not on this machine\n", name); return 1; }
  const Peaks peaks = {peak_flops(), dot_peak_flops()};
  std::printf("peaks of one core: FMA %.1f GFLOP/s, bf16 dot products %.1f GFLOP/s\n", peaks.fma * 1e-9, peaks.dot * 1e-9);
  const Model models[] = {{"SmolLM2", 9, 3, 64, 30, 0}, {"Gemma", 4, 1, 256, 18, 0}, {"window", 4, 1, 256, 18, 512}};
  for (const Model& model : models)
    for (KVType type : {KVType::kF16, KVType::kBF16, KVType::kI8})
      for (int context : {512, 2048}) report(*kernels, model, type, context, peaks);
  return 0;
}
