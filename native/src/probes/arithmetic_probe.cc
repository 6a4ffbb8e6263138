#include "probes/arithmetic_probe.h"

#include "probes/timing.h"
#include "runtime/cpu_features.h"

namespace octavo {

#if defined(__x86_64__)
namespace {

// Written in assembly, so that nothing else is in the loop: registers 0 and 1 are the factors (what they hold does not change
// the speed of integers; the float loops set them to 0 and stay at ordinary numbers), from 2 on each is a chain of its own.
// Ten chains hide the latency of every instruction here (4 to 5 cycles, two a cycle).
#define OCTAVO_TEN(step) step(2) step(3) step(4) step(5) step(6) step(7) step(8) step(9) step(10) step(11)
constexpr int kChains = 10;

#define OCTAVO_DPBUSD_512(i) "vpdpbusd %%zmm1, %%zmm0, %%zmm" #i "\n"
#define OCTAVO_DPBUSD_256(i) "vpdpbusd %%ymm1, %%ymm0, %%ymm" #i "\n"
#define OCTAVO_DPBUSD_VEX(i) "%{vex%} vpdpbusd %%ymm1, %%ymm0, %%ymm" #i "\n"
#define OCTAVO_MADDUBS(i) "vpmaddubsw %%ymm1, %%ymm0, %%ymm12\n vpmaddwd %%ymm13, %%ymm12, %%ymm12\n vpaddd %%ymm12, %%ymm" #i ", %%ymm" #i "\n"
#define OCTAVO_DPBF16(i) "vdpbf16ps %%zmm1, %%zmm0, %%zmm" #i "\n"
#define OCTAVO_FMA_512(i) "vfmadd231ps %%zmm1, %%zmm0, %%zmm" #i "\n"
#define OCTAVO_FMA_256(i) "vfmadd231ps %%ymm1, %%ymm0, %%ymm" #i "\n"
#define OCTAVO_CLEAR(i) "vpxor %%xmm" #i ", %%xmm" #i ", %%xmm" #i "\n"  // the upper lanes too

#define OCTAVO_CHAINS(name, isa, step)                                                                                          \
  __attribute__((target(isa))) void name(int count) {                                                                           \
    __asm__ volatile(OCTAVO_CLEAR(0) OCTAVO_CLEAR(1) OCTAVO_CLEAR(13) OCTAVO_TEN(OCTAVO_CLEAR) "1:\n" OCTAVO_TEN(step)          \
                     "decl %0\n jnz 1b\n vzeroupper\n"                                                                         \
                     : "+r"(count)::"cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",      \
                       "xmm10", "xmm11", "xmm12", "xmm13");                                                                    \
  }
OCTAVO_CHAINS(dpbusd_512, "avx512f,avx512vnni", OCTAVO_DPBUSD_512)
OCTAVO_CHAINS(dpbusd_256, "avx512f,avx512vl,avx512vnni", OCTAVO_DPBUSD_256)
#if defined(OCTAVO_HAS_VEX_PREFIX)
OCTAVO_CHAINS(dpbusd_vex, "avx2", OCTAVO_DPBUSD_VEX)
#endif
OCTAVO_CHAINS(maddubs, "avx2", OCTAVO_MADDUBS)
#if defined(OCTAVO_HAS_BF16)
OCTAVO_CHAINS(dpbf16_512, "avx512f,avx512bf16", OCTAVO_DPBF16)
#endif
OCTAVO_CHAINS(fma_512, "avx512f", OCTAVO_FMA_512)
OCTAVO_CHAINS(fma_256, "avx2,fma", OCTAVO_FMA_256)

struct Variant {
  const char* kind;
  const char* instruction;
  bool present;
  void (*run)(int count);  // count rounds of kChains steps
  int operations;          // per step
};

}  // namespace

std::vector<PeakResult> probe_arithmetic(ThreadPool& pool, double budget_s) {
  const Variant variants[] = {
      {"int8", "vpdpbusd zmm", cpu_has_avx512(), dpbusd_512, 2 * 64},
      {"int8", "vpdpbusd ymm", cpu_has_avx512(), dpbusd_256, 2 * 32},
#if defined(OCTAVO_HAS_VEX_PREFIX)
      {"int8", "vpdpbusd ymm (AVX-VNNI)", cpu_has_avx_vnni(), dpbusd_vex, 2 * 32},
#endif
      {"int8", "vpmaddubsw + vpmaddwd + vpaddd ymm", cpu_has_avx2(), maddubs, 2 * 32},
#if defined(OCTAVO_HAS_BF16)
      {"bf16", "vdpbf16ps zmm", cpu_has_avx512_bf16(), dpbf16_512, 2 * 32},
#endif
      {"f32", "vfmadd231ps zmm", cpu_has_avx512(), fma_512, 2 * 16},
      {"f32", "vfmadd231ps ymm", cpu_has_avx2(), fma_256, 2 * 8},
  };
  constexpr int kRounds = 10000;
  std::vector<PeakResult> results;
  for (const Variant& v : variants) {
    if (!v.present) continue;
    const Timing t = time_on_threads(pool, budget_s, [&](int) { v.run(kRounds); });
    results.push_back({v.kind, v.instruction, 1.0 * kRounds * kChains * v.operations * pool.size(), t.min_s});
  }
  return results;
}

#else

std::vector<PeakResult> probe_arithmetic(ThreadPool&, double) { return {}; }

#endif

}  // namespace octavo
