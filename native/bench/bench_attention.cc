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

void report(const Kernels& isa, ThreadPool& pool, const char* model, AttentionParams params, KVType type, int context, double read, double peak) {
  const KernelSpeed decode = time_attention(isa, pool, {params, type, context, 1, size_t{48} << 20}, kBudget);
  const KernelSpeed cached = time_attention(isa, pool, {params, type, context, 1, 0}, kBudget);
  const KernelSpeed prefill = time_attention(isa, pool, {params, type, context, context, 0}, kBudget);
  std::printf("%-8s %-8s %-4s %5d  decode %5.1f GB/s of KV, %3.0f %% of a plain read (one layer in cache %5.1f)", isa.name, model,
              type == KVType::kF16 ? "f16" : "bf16", context, decode.bytes / decode.seconds * 1e-9, 100 * decode.bytes / decode.seconds / read,
              cached.bytes / cached.seconds * 1e-9);
  std::printf("   prefill %7.2f ms a layer, %6.1f GFLOP/s, %4.1f %% of FMA peak\n", prefill.seconds * 1e3,
              prefill.operations / prefill.seconds * 1e-9, 100 * prefill.operations / prefill.seconds / peak);
}

}  // namespace

int main(int argc, char** argv) {
  const Kernels* isa = argc > 1 ? kernels_by_name(argv[1]) : kernels_best();
  if (!isa) {
    std::fprintf(stderr, "usage: bench_attention [portable|avx2|avx512]\n");
    return 2;
  }
  ThreadPool pool(1);
  double read = 0, peak = 0;
  for (const ReadResult& r : probe_reads(pool, size_t{128} << 20, 0.05)) read = std::max(read, r.bytes / r.seconds);
  for (const PeakResult& r : probe_arithmetic(pool, 0.02))
    if (!std::strcmp(r.kind, "f32")) peak = std::max(peak, r.operations / r.seconds);
  std::printf("memory read %.1f GB/s, FMA peak of one core %.1f GFLOP/s\n", read * 1e-9, peak * 1e-9);
  for (const KVType type : {KVType::kF16, KVType::kBF16})
    for (const int context : {512, 2048}) {
      report(*isa, pool, "SmolLM2", {9, 3, 64, 0.125f, 0.0f, 0}, type, context, read, peak);
      report(*isa, pool, "Gemma", {4, 1, 256, 0.0625f, 0.0f, 0}, type, context, read, peak);
    }
  return 0;
}
