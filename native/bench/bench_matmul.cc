// Speed of the matmul kernels by format: GB/s of packed weights for one row, TOP/s (2 per multiply-add) for more, beside this
// machine's own limits measured in the same run. Usage: bench_matmul [isa] [threads] [dtype...]
// Times are medians of short runs in CPU seconds of the slowest thread, so that a shared machine's other processes count little.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kernels/packing.h"
#include "runtime/cpu_features.h"

using namespace octavo;

namespace {

double thread_cpu_s() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Median seconds of one call of work(thread), run on all threads at once, over 9 timed batches of about batch_s each.
template <class F>
double median_s(int threads, double batch_s, F&& work) {
  const auto batch = [&](int repeats) {
    std::vector<std::thread> others;
    std::vector<double> spent(threads);
    const auto loop = [&](int t) {
      const double start = thread_cpu_s();
      for (int i = 0; i < repeats; ++i) work(t);
      spent[t] = (thread_cpu_s() - start) / repeats;
    };
    for (int t = 1; t < threads; ++t) others.emplace_back(loop, t);
    loop(0);
    for (std::thread& t : others) t.join();
    return *std::max_element(spent.begin(), spent.end());
  };
  batch(1);
  const int repeats = std::max(1, static_cast<int>(batch_s / batch(1)));
  std::vector<double> seconds;
  for (int i = 0; i < 9; ++i) seconds.push_back(batch(repeats));
  std::nth_element(seconds.begin(), seconds.begin() + 4, seconds.end());
  return seconds[4];
}

#if defined(__x86_64__)
// 12 independent chains per pass, in assembly so that nothing else is in the loop.
__attribute__((target("avx512f,avx512vnni"))) void dot_loop(int count) {
  for (int i = 0; i < count; ++i)
    __asm__ volatile(
        "vpdpbusd %%zmm1, %%zmm0, %%zmm2\n vpdpbusd %%zmm1, %%zmm0, %%zmm3\n vpdpbusd %%zmm1, %%zmm0, %%zmm4\n"
        "vpdpbusd %%zmm1, %%zmm0, %%zmm5\n vpdpbusd %%zmm1, %%zmm0, %%zmm6\n vpdpbusd %%zmm1, %%zmm0, %%zmm7\n"
        "vpdpbusd %%zmm1, %%zmm0, %%zmm8\n vpdpbusd %%zmm1, %%zmm0, %%zmm9\n vpdpbusd %%zmm1, %%zmm0, %%zmm10\n"
        "vpdpbusd %%zmm1, %%zmm0, %%zmm11\n vpdpbusd %%zmm1, %%zmm0, %%zmm12\n vpdpbusd %%zmm1, %%zmm0, %%zmm13\n" ::
            : "zmm2", "zmm3", "zmm4", "zmm5", "zmm6", "zmm7", "zmm8", "zmm9", "zmm10", "zmm11", "zmm12", "zmm13");
}
#endif

void print_limits(int threads) {
  constexpr size_t words = size_t{1} << 24;  // 128 MiB a thread
  std::vector<std::vector<uint64_t>> buffers(threads, std::vector<uint64_t>(words, 1));
  std::vector<uint64_t> sums(8 * threads);
  const double read_s = median_s(threads, 0.05, [&](int t) {
    uint64_t sum = 0;
    for (const uint64_t word : buffers[t]) sum += word;
    sums[8 * t] = sum;
  });
  std::printf("memory read            %7.1f GB/s\n", threads * words * 8e-9 / read_s);
#if defined(__x86_64__)
  if (!cpu_has_avx512()) return;
  const double dot_s = median_s(threads, 0.02, [](int) { dot_loop(10000); });
  std::printf("vpdpbusd peak          %7.3f TOP/s\n", threads * 10000.0 * 12 * 128e-12 / dot_s);
#endif
}

struct Inputs {
  std::vector<float> x, scale, out;
  std::vector<int8_t> q;
  std::vector<int16_t> sum16;
  Inputs(size_t rows, size_t k, size_t n)
      : x(rows * k, 0.5f), scale(rows * k / 32, 0.01f), out(rows * n), q(rows * k, 3), sum16(rows * k / 16, 48) {}
};

std::unique_ptr<PackedMatrix> zeros(const char* dtype, int n, int k) {  // times do not depend on the values
  auto w = pack_begin(dtype, n, k, false);
  std::memset(w->data, 0, w->bytes);
  return w;
}

double matmul_s(const Kernels& isa, const PackedMatrix& w, int rows, int threads) {
  Inputs in(rows, w.k, w.n);
  const QuantRows q{in.q.data(), in.scale.data(), in.sum16.data()};
  return median_s(threads, 0.02, [&](int t) {
    const auto bound = [&](int64_t part) { return static_cast<int>(w.num_blocks * part / threads); };
    isa.matmul(w, in.x.data(), q, rows, bound(t), bound(t + 1), nullptr, false, in.out.data(), w.n);
  });
}

void print_format(const Kernels& isa, const char* dtype, int threads) {
  const int k = 1536;
  const auto big = zeros(dtype, static_cast<int>((size_t{96} << 20) / row_bytes(dtype, k)), k);
  const double streamed_s = matmul_s(isa, *big, 1, threads);
  std::printf("%-5s streamed %6.1f GB/s, TOP/s by rows:", dtype, big->bytes * 1e-9 / streamed_s);
  for (const int rows : {4, 8, 16, 32}) std::printf("  %d: %.3f", rows, 2e-12 * rows * big->n * k / matmul_s(isa, *big, rows, threads));
  std::printf("\n");
  for (const auto& [n, wide] : {std::pair<int, int>{1536, 768}, {768, 1536}, {1536, 576}}) {
    if (wide % 256 != 0 && std::strstr(dtype, "_k") != nullptr) continue;
    const auto w = zeros(dtype, n, wide);
    std::printf("%-5s %5d x %-5d cached %6.1f GB/s  TOP/s by rows:", dtype, n, wide, w->bytes * 1e-9 / matmul_s(isa, *w, 1, threads));
    for (const int rows : {1, 2, 4, 8, 12, 16, 64, 512})
      std::printf("  %d: %.3f", rows, 2e-12 * rows * n * wide / matmul_s(isa, *w, rows, threads));
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
  if (dtypes.empty()) dtypes = {"q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "bf16", "f16", "f32"};
  std::printf("%s, %d thread(s)\n", isa->name, threads);
  print_limits(threads);
  for (const char* dtype : dtypes) print_format(*isa, dtype, threads);
  return 0;
}
