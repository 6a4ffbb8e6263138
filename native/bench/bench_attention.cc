// Attention: KV bytes per second of a decode step, and arithmetic of a prompt's rows against the peaks measured beside it.
// Medians of short runs on one core. Usage: bench_attention [isa]
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "probes/arithmetic_probe.h"
#include "probes/kernel_speed.h"
#include "probes/read_probe.h"
#include "runtime/cpu_features.h"

using namespace octavo;

namespace {

constexpr double kBudget = 0.3;  // seconds

struct Peaks {
  double fma = 0, bf16 = 0;
};

void report(const Kernels& isa, ThreadPool& pool, const char* model, AttentionParams params, KVType type, int context, double read, Peaks peaks) {
  const KernelSpeed decode = time_attention(isa, pool, {params, type, context, 1, size_t{48} << 20}, kBudget);
  const KernelSpeed cached = time_attention(isa, pool, {params, type, context, 1, 0}, kBudget);
  const KernelSpeed prefill = time_attention(isa, pool, {params, type, context, context, 0}, kBudget);
  std::printf("%-8s %-8s %-4s %5d  decode %5.1f GB/s of KV, %3.0f %% of a plain read (one layer in cache %5.1f)", isa.name, model,
              type == KVType::kF16 ? "f16" : type == KVType::kBF16 ? "bf16" : "int8", context, decode.bytes / decode.seconds * 1e-9, 100 * decode.bytes / decode.seconds / read,
              cached.bytes / cached.seconds * 1e-9);
  std::printf("   prefill %7.2f ms a layer, %6.1f GFLOP/s, %4.1f %% of the FMA peak, %4.1f %% of bf16\n", prefill.seconds * 1e3,
              prefill.operations / prefill.seconds * 1e-9, 100 * prefill.operations / prefill.seconds / peaks.fma, 100 * prefill.operations / prefill.seconds / peaks.bf16);
}

}  // namespace

int main(int argc, char** argv) {
  const Kernels* isa = argc > 1 ? kernels_by_name(argv[1]) : kernels_best();
  if (!isa) {
    std::fprintf(stderr, "usage: bench_attention [portable|avx2|avx512|avx512_vnni]\n");
    return 2;
  }
  ThreadPool pool(1);
  double read = 0;
  Peaks peaks;
  for (const ReadResult& r : probe_reads(pool, size_t{128} << 20, 0.05)) read = std::max(read, r.bytes / r.seconds);
  for (const PeakResult& r : probe_arithmetic(pool, 0.02)) {
    if (!std::strcmp(r.kind, "f32")) peaks.fma = std::max(peaks.fma, r.operations / r.seconds);
    if (!std::strcmp(r.kind, "bf16")) peaks.bf16 = std::max(peaks.bf16, r.operations / r.seconds);
  }
  std::printf("memory read %.1f GB/s, peaks of one core: FMA %.1f GFLOP/s, bf16 %.1f\n", read * 1e-9, peaks.fma * 1e-9, peaks.bf16 * 1e-9);
  for (const KVType type : {KVType::kF16, KVType::kBF16, KVType::kI8})
    for (const int context : {512, 2048}) {
      report(*isa, pool, "SmolLM2", {9, 3, 64, 0.125f, 0.0f, 0}, type, context, read, peaks);
      report(*isa, pool, "Gemma", {4, 1, 256, 0.0625f, 0.0f, 0}, type, context, read, peaks);
    }
  return 0;
}
