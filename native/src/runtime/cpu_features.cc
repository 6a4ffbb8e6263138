#include "runtime/cpu_features.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace octavo {

#if defined(__x86_64__)
namespace {

// Bit of EAX of cpuid leaf 7, subleaf 1: features that older compilers' builtins have no name for.
bool cpuid_7_1_eax(int bit) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> bit & 1);
}

}  // namespace

// GCC's builtin reads cpuid and xgetbv, so a feature whose register state the OS does not save counts as absent.
bool cpu_has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool cpu_has_avx512() {
  __builtin_cpu_init();
  return cpu_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}
bool cpu_has_avx_vnni() { return cpu_has_avx2() && cpuid_7_1_eax(4); }
#if defined(OCTAVO_HAS_BF16)
bool cpu_has_avx512_bf16() { return cpu_has_avx512() && cpuid_7_1_eax(5); }
#else  // the compiler could not make that level
bool cpu_has_avx512_bf16() { return false; }
const Kernels* kernels_avx512_bf16() { return nullptr; }
#endif
#else
bool cpu_has_avx2() { return false; }
bool cpu_has_avx512() { return false; }
bool cpu_has_avx_vnni() { return false; }
bool cpu_has_avx512_bf16() { return false; }
const Kernels* kernels_avx2() { return nullptr; }
const Kernels* kernels_avx512_vnni() { return nullptr; }
const Kernels* kernels_avx512_bf16() { return nullptr; }
#endif

const Kernels* kernels_by_name(const char* name) {
  if (!std::strcmp(name, "portable")) return kernels_portable();
  if (!std::strcmp(name, "avx2")) return cpu_has_avx2() ? kernels_avx2() : nullptr;
  if (!std::strcmp(name, "avx512_vnni")) return cpu_has_avx512() ? kernels_avx512_vnni() : nullptr;
  if (!std::strcmp(name, "avx512_bf16")) return cpu_has_avx512_bf16() ? kernels_avx512_bf16() : nullptr;
  if (!std::strcmp(name, "avx512")) {
    const Kernels* k = kernels_by_name("avx512_bf16");
    return k ? k : kernels_by_name("avx512_vnni");
  }
  return nullptr;
}

const Kernels* kernels_best() {
  const Kernels* best = nullptr;
  for (const char* name : kIsaLevels)
    if (const Kernels* k = kernels_by_name(name)) best = k;
  return best;
}

}  // namespace octavo
