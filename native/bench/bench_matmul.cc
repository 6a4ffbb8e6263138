// Speed of the matmul kernels by format: GB/s of packed weights for one row, TOP/s (2 per multiply-add) for more, beside this
// machine's own limits measured in the same run. Usage: bench_matmul [isa] [threads] [dtype...]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "checks/scalar_matmul.h"
#include "kernels/packing.h"
#include "probes/arithmetic_probe.h"
#include "probes/kernel_speed.h"
#include "probes/read_probe.h"
#include "runtime/cpu_features.h"

using namespace octavo;

namespace {

void print_limits(ThreadPool& pool) {
  double read = 0;
  for (const ReadResult& r : probe_reads(pool, size_t{128} << 20, 0.05)) read = std::max(read, r.bytes / r.seconds);
  std::printf("memory read %.1f GB/s\n", read * 1e-9);
  for (const PeakResult& r : probe_arithmetic(pool, 0.02)) std::printf("%-36s %.3f TOP/s\n", r.instruction, r.operations / r.seconds * 1e-12);
}

void print_format(const Kernels& isa, ThreadPool& pool, const char* dtype) {
  constexpr double kBudget = 0.2;  // seconds
  const int wide = 1536, tall = static_cast<int>((size_t{96} << 20) / row_bytes(dtype, wide));
  const KernelSpeed streamed = time_matmul(isa, pool, dtype, tall, wide, 1, kBudget);
  std::printf("%-5s streamed %6.1f GB/s\n", dtype, streamed.bytes / streamed.seconds * 1e-9);
  for (const auto& [n, k] : {std::pair<int, int>{1536, 768}, {768, 1536}, {1536, 576}}) {
    if (k % 256 != 0 && std::strstr(dtype, "_k") != nullptr) continue;
    const KernelSpeed cached = time_matmul(isa, pool, dtype, n, k, 1, kBudget);
    std::printf("%-5s %5d x %-5d cached %6.1f GB/s  TOP/s by rows:", dtype, n, k, cached.bytes / cached.seconds * 1e-9);
    for (const int rows : {1, 2, 4, 8, 12, 16, 64, 512}) {
      const KernelSpeed s = time_matmul(isa, pool, dtype, n, k, rows, kBudget);
      std::printf("  %d: %.3f", rows, s.operations / s.seconds * 1e-12);
    }
    std::printf("\n");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const Kernels* isa = argc > 1 ? kernels_by_name(argv[1]) : kernels_best();
  const int threads = argc > 2 ? std::atoi(argv[2]) : 1;
  if (!isa || threads < 1) {
    std::fprintf(stderr, "usage: bench_matmul [portable|avx2|avx512] [threads >= 1] [dtype...]\n");
    return 2;
  }
  std::vector<const char*> dtypes(argv + std::min(argc, 3), argv + argc);
  if (dtypes.empty()) dtypes = packable_dtypes();
  ThreadPool pool(threads);
  std::printf("%s, %d thread(s)\n", isa->name, threads);
  print_limits(pool);
  for (const char* dtype : dtypes) print_format(*isa, pool, dtype);
  return 0;
}
