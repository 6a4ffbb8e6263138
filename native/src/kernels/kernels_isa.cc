// The one source of every ISA level's kernels: compiled with -DOCTAVO_ISA_NS=<level> and that level's machine flags.
#include "kernels/kernels.h"

#include <type_traits>

#include "kernels/simd.h"
// Order matters: each .inl uses what is above it.
#include "kernels/elementwise.inl"
#include "kernels/matmul.inl"
#include "kernels/kv_layout.inl"
#include "kernels/kv_packing.inl"
#include "kernels/attention.inl"

#define OCTAVO_CONCAT_(a, b) a##b
#define OCTAVO_CONCAT(a, b) OCTAVO_CONCAT_(a, b)
#define OCTAVO_STR_(a) #a
#define OCTAVO_STR(a) OCTAVO_STR_(a)

namespace octavo {

const Kernels* OCTAVO_CONCAT(kernels_, OCTAVO_ISA_NS)() {
  namespace k = OCTAVO_ISA_NS;
  static const Kernels table = {
      OCTAVO_STR(OCTAVO_ISA_NS), k::rmsnorm, k::quantize, k::gated_act, k::add, k::softcap, k::rope, k::store_kv,
      k::matmul, k::attention, k::attention_merge, k::attention_scratch_bytes, k::attention_partial_floats, k::pack_kv, k::unpack_kv,
  };
  return &table;
}

}  // namespace octavo
