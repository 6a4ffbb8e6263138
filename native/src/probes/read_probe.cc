#include "probes/read_probe.h"

#include <algorithm>
#include <cstring>

#include "probes/pages.h"
#include "probes/timing.h"
#include "runtime/cpu_features.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {
namespace {

constexpr size_t kStep = 256;  // bytes a stream advances by, so that four loads of each are in flight

// Reads kStreams pieces of part_bytes each (a multiple of kStep), which lie one after the other.
using ReadFunction = uint64_t (*)(const uint8_t* data, size_t part_bytes, size_t prefetch_bytes);

template <int kStreams, bool kPrefetch>
uint64_t read_words(const uint8_t* data, size_t part_bytes, size_t prefetch_bytes) {
  uint64_t sum[4] = {0};
  for (size_t i = 0; i < part_bytes; i += kStep) {
    for (int s = 0; s < kStreams; ++s) {
      const uint8_t* p = data + static_cast<size_t>(s) * part_bytes + i;
      for (size_t line = 0; line < kStep; line += 64) {
        if (kPrefetch) __builtin_prefetch(p + line + prefetch_bytes);
        for (size_t w = 0; w < 8; ++w) sum[w % 4] += reinterpret_cast<const uint64_t*>(p + line)[w];
      }
    }
  }
  return sum[0] + sum[1] + sum[2] + sum[3];
}

#if defined(__x86_64__)
// The sums keep the loads alive; four of them, so that no addition waits for another.
template <int kStreams, bool kPrefetch>
__attribute__((target("avx512f"))) uint64_t read_512(const uint8_t* data, size_t part_bytes, size_t prefetch_bytes) {
  __m512i sum[4] = {_mm512_set1_epi64(0), _mm512_set1_epi64(0), _mm512_set1_epi64(0), _mm512_set1_epi64(0)};
  for (size_t i = 0; i < part_bytes; i += kStep) {
    for (int s = 0; s < kStreams; ++s) {
      const uint8_t* p = data + static_cast<size_t>(s) * part_bytes + i;
      for (int line = 0; line < 4; ++line) {
        if (kPrefetch) _mm_prefetch(reinterpret_cast<const char*>(p + 64 * line + prefetch_bytes), _MM_HINT_T0);
        sum[line] = _mm512_add_epi64(sum[line], _mm512_load_si512(p + 64 * line));
      }
    }
  }
  uint64_t out[8];
  _mm512_storeu_si512(out, _mm512_add_epi64(_mm512_add_epi64(sum[0], sum[1]), _mm512_add_epi64(sum[2], sum[3])));
  return out[0] ^ out[1] ^ out[2] ^ out[3] ^ out[4] ^ out[5] ^ out[6] ^ out[7];
}

template <int kStreams, bool kPrefetch>
__attribute__((target("avx2"))) uint64_t read_256(const uint8_t* data, size_t part_bytes, size_t prefetch_bytes) {
  __m256i sum[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
  for (size_t i = 0; i < part_bytes; i += kStep) {
    for (int s = 0; s < kStreams; ++s) {
      const uint8_t* p = data + static_cast<size_t>(s) * part_bytes + i;
      for (int half = 0; half < 8; ++half) {
        if (kPrefetch && half % 2 == 0) _mm_prefetch(reinterpret_cast<const char*>(p + 32 * half + prefetch_bytes), _MM_HINT_T0);
        sum[half % 4] = _mm256_add_epi64(sum[half % 4], _mm256_load_si256(reinterpret_cast<const __m256i*>(p + 32 * half)));
      }
    }
  }
  uint64_t out[4];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_add_epi64(_mm256_add_epi64(sum[0], sum[1]), _mm256_add_epi64(sum[2], sum[3])));
  return out[0] ^ out[1] ^ out[2] ^ out[3];
}
#endif

template <int kStreams, bool kPrefetch>
ReadFunction widest() {
#if defined(__x86_64__)
  if (cpu_has_avx512()) return read_512<kStreams, kPrefetch>;
  if (cpu_has_avx2()) return read_256<kStreams, kPrefetch>;
#endif
  return read_words<kStreams, kPrefetch>;
}

ReadFunction function_of(const ReadVariant& v) {
  const bool ahead = v.prefetch_bytes > 0;
  if (v.streams == 1) return ahead ? widest<1, true>() : widest<1, false>();
  if (v.streams == 2) return ahead ? widest<2, true>() : widest<2, false>();
  return ahead ? widest<4, true>() : widest<4, false>();
}

struct alignas(64) Sink {
  uint64_t value;
};

ReadResult time_variant(ThreadPool& pool, const Pages& pages, const ReadVariant& variant, double budget_s) {
  const size_t threads = static_cast<size_t>(pool.size()), streams = static_cast<size_t>(variant.streams);
  const size_t part = pages.bytes() / threads / streams / kStep * kStep;
  const ReadFunction read = function_of(variant);
  std::vector<Sink> sinks(threads);
  const Timing t = time_on_threads(pool, budget_s, [&](int thread) {
    const size_t at = static_cast<size_t>(thread);
    sinks[at].value += read(pages.data() + at * part * streams, part, static_cast<size_t>(variant.prefetch_bytes));
  });
  return {variant, static_cast<double>(part * streams * threads), t.min_s};
}

}  // namespace

int read_probe_bits() { return cpu_has_avx512() ? 512 : cpu_has_avx2() ? 256 : 64; }

std::vector<ReadResult> probe_reads(ThreadPool& pool, size_t total_bytes, double budget_s) {
  const size_t bytes = std::max(total_bytes, static_cast<size_t>(pool.size()) << 16);
  std::vector<ReadResult> results;
  const auto touch = [&](const Pages& pages) {
    const size_t part = pages.bytes() / static_cast<size_t>(pool.size());
    pool.each([&](int thread) { std::memset(pages.data() + static_cast<size_t>(thread) * part, 1, part); });
  };
  {
    const Pages pages(bytes, true);
    touch(pages);
    for (const int streams : {1, 2, 4})
      for (const int prefetch : {0, 512, 1024, 4096}) results.push_back(time_variant(pool, pages, {streams, prefetch, true}, budget_s));
  }
  const Pages pages(bytes, false);
  touch(pages);
  results.push_back(time_variant(pool, pages, {1, 0, false}, budget_s));
  results.push_back(time_variant(pool, pages, {4, 1024, false}, budget_s));
  return results;
}

}  // namespace octavo
