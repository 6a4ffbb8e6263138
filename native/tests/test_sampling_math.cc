// The bound by which a draw passes over tokens must never be below their noise. Bit-exactness of everything else is tested from Python.
#define OCTAVO_ISA_NS portable
#include "kernels/sampling_math.h"

#include "testing.h"

using namespace octavo_test;
using octavo::portable::gumbel;
using octavo::portable::gumbel_bound;

int main() {
  const auto holds = [](uint32_t bits) { return gumbel(bits) <= gumbel_bound(bits) && gumbel(bits) > gumbel_bound(bits) - 3.2f; };
  for (uint64_t bits = 0; bits < 1ull << 32; bits += 2 * 509) check(holds((uint32_t)bits), "noise bits %08x", (unsigned)bits);
  for (uint32_t i = 0; i < 1u << 16; ++i) {  // both ends, and around the change of branch
    for (const uint32_t bits : {i, ~i, 2 * 0x257d8666u - 65536 + i}) check(holds(bits), "noise bits %08x", (unsigned)bits);
  }
  return finish("sampling_math");
}
