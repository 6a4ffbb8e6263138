#include "runtime/cpu_features.h"

#include <cstring>

namespace octavo {

#if defined(__x86_64__)
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
#else
bool cpu_has_avx2() { return false; }
bool cpu_has_avx512() { return false; }
const Kernels* kernels_avx2() { return nullptr; }
const Kernels* kernels_avx512() { return nullptr; }
#endif

const Kernels* kernels_by_name(const char* name) {
  if (!std::strcmp(name, "portable")) return kernels_portable();
  if (!std::strcmp(name, "avx2")) return cpu_has_avx2() ? kernels_avx2() : nullptr;
  if (!std::strcmp(name, "avx512")) return cpu_has_avx512() ? kernels_avx512() : nullptr;
  return nullptr;
}

const Kernels* kernels_best() {
  if (const Kernels* k = kernels_by_name("avx512")) return k;
  if (const Kernels* k = kernels_by_name("avx2")) return k;
  return kernels_portable();
}

}  // namespace octavo
