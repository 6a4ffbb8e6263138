// Which ISA levels this machine and its operating system can run.
#pragma once

#include "kernels/kernels.h"

namespace octavo {

bool cpu_has_avx2();    // AVX2, FMA, F16C and OS support for ymm state
bool cpu_has_avx512();  // AVX-512 F, BW, VL, DQ, VNNI and OS support for zmm state
bool cpu_has_avx_vnni();     // 8-bit dot products on ymm without AVX-512
bool cpu_has_avx512_bf16();  // bfloat16 dot products, with the above

// Every level, best last. The two of AVX-512 differ in attention over bfloat16 KV alone.
constexpr const char* kIsaLevels[] = {"portable", "avx2", "avx512_vnni", "avx512_bf16"};

// The table of a level, or of "avx512": the better of the two that this machine has. Null when this machine or build lacks it.
const Kernels* kernels_by_name(const char* name);
// The best this machine has.
const Kernels* kernels_best();

}  // namespace octavo
