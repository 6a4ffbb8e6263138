// The native module: the model, kernel paths, and what tests ask of single kernels.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#if defined(__linux__)
#include <malloc.h>
#endif

#include <string>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/model.h"
#include "kernels/packing.h"
#include "runtime/aligned.h"
#include "runtime/cpu_features.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {

void bind_sampling(nb::module_& m);
void bind_probes(nb::module_& m);

namespace {

// One matrix product on one thread, for tests: x [rows, k] -> out [rows, n].
void matmul_test(const std::string& isa, const std::string& dtype, Bytes raw, int n, int k, Matrix x, bool widen, Matrix out) {
  const Kernels& kernels = kernels_of(isa);
  check_raw("matrix", dtype, raw, n, k);
  const int rows = (int)x.shape(0);
  require((int)x.shape(1) == k && (int)out.shape(0) == rows && (int)out.shape(1) == n, "x is [rows, columns] and out [rows, matrix rows]");
  auto m = pack_begin(dtype.c_str(), n, k, widen);
  pack_blocks(*m, dtype.c_str(), raw.data(), 0, m->num_blocks);
  AlignedArray<int8_t> q((size_t)rows * (size_t)k);
  AlignedArray<float> scale((size_t)rows * (size_t)(k / 32 + 1));
  AlignedArray<int16_t> sum16((size_t)rows * (size_t)(k / 16 + 1));
  const QuantRows quant{q.data(), scale.data(), sum16.data()};
  if (m->quantised())
    for (int r = 0; r < rows; ++r) kernels.quantize(x.data() + (size_t)r * (size_t)k, k, quant, r);
  kernels.matmul(*m, x.data(), quant, rows, 0, m->num_blocks, nullptr, false, out.data(), n);
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Octavo's native CPU core: weights packed once, one call per step.";
  nb::class_<Model> model(m, "Model", "A lowered program with its weights, KV pool and threads.");
  model.def(nb::init<const std::string&, int>(), "isa"_a, "threads"_a);
  model.def("__init__", [](Model* self, const Model& base) { new (self) Model(base.runner.kernels(), base.runner.threads()); }, "base"_a,
            "On the threads of another model, to take matrices and KV of: the two take turns.");
  bind_building(model);
  bind_kv(model);
  bind_step(model);
  m.def("isa_levels", [] {
    std::vector<std::string> levels;
    for (const char* name : kIsaLevels)
      if (kernels_by_name(name)) levels.emplace_back(name);
    return levels;
  }, "Kernel paths this machine and build have, best last.");
  m.def("release_free_memory", [] {
    nb::gil_scoped_release release;
#if defined(__GLIBC__)
    malloc_trim(0);
#endif
  }, "Give memory that has been freed, and that the C library keeps for later, back to the system; nothing where it cannot be asked to.");
  m.def("isa_level", [](const std::string& isa) { return std::string(kernels_of(isa).name); }, "isa"_a, "The level that a name stands for: avx512 is the best of its kind. ValueError for one that this machine or build lacks.");
  m.def("sample_error", [](int status, int token) { return sample_error((SampleStatus)status, token); }, "status"_a, "token"_a);
  m.def("dequantize", [](const std::string& dtype, Bytes raw, int n, int k, Matrix out) {
    check_raw("matrix", dtype, raw, n, k);
    require((int)out.shape(0) == n && (int)out.shape(1) == k, "out is [rows, columns]");
    for (int r = 0; r < n; ++r) dequantize_row(dtype.c_str(), raw.data() + (size_t)r * row_bytes(dtype.c_str(), k), k, out.data() + (size_t)r * (size_t)k);
  }, "dtype"_a, "raw"_a.noconvert(), "rows"_a, "columns"_a, "out"_a.noconvert());
  m.def("matmul_test", &matmul_test, "isa"_a, "dtype"_a, "raw"_a.noconvert(), "rows"_a, "columns"_a, "x"_a.noconvert(), "widen"_a, "out"_a.noconvert());
  bind_sampling(m);
  bind_probes(m);
}

}  // namespace octavo
