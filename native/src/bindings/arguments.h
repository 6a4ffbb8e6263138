// What Python gives, as the core takes it: arrays by type and shape, names, sizes. A ValueError names what was given and what is allowed.
//
// native/src/bindings is the only folder that knows of Python: it checks arguments, releases the interpreter lock and calls the core.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>

#include "kernels/packing.h"
#include "kv/kv_store.h"
#include "runtime/kernel_table.h"

namespace octavo {

template <class T>
using In = nanobind::ndarray<const T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
template <class T>
using Out = nanobind::ndarray<T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using Bytes = In<uint8_t>;
using Matrix = nanobind::ndarray<float, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;

// Needs no interpreter lock.
inline void require(bool ok, const std::string& message) {
  if (!ok) throw nanobind::value_error(message.c_str());
}

template <class K>
const K& found_kernels(const K* kernels, const std::string& isa) {
  require(kernels != nullptr, "isa: " + isa + " is not a kernel path that this machine and build have; levels are portable, avx2, avx512, avx512_vnni, avx512_bf16");
  return *kernels;
}

inline const Kernels& kernels_of(const std::string& isa) { return found_kernels(kernels_by_spec(isa), isa); }
inline const SamplingKernels& sampling_kernels_of(const std::string& isa) { return found_kernels(sampling_kernels_by_spec(isa), isa); }

// `what` names the argument.
inline KVType kv_type(const char* what, const std::string& dtype) {
  if (dtype == "f16") return KVType::kF16;
  if (dtype == "bf16") return KVType::kBF16;
  if (dtype == "int8") return KVType::kI8;
  require(dtype == "f32", std::string(what) + ": " + dtype + " is not one of f16, bf16, f32, int8");
  return KVType::kF32;
}

inline void check_raw(const char* what, const std::string& dtype, const Bytes& raw, int n, int k) {
  require(n > 0 && k > 0, std::string(what) + ": rows and columns are at least 1");
  const size_t wanted = (size_t)n * row_bytes(dtype.c_str(), k);
  require(raw.size() == wanted, std::string(what) + ": " + std::to_string(raw.size()) + " bytes given, " + std::to_string(wanted) + " needed");
}

}  // namespace octavo
