// Python's view of KV that goes between workers: checks arguments and releases the GIL around copies and waits; nothing else.
//
// All of it may be called from any thread while a step runs: blocks that are exported are not to be written meanwhile, and those that are
// imported not to be looked at.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "bindings/arguments.h"
#include "kv/kv_wire.h"
#include "program/runner.h"

namespace octavo {

class KVWire {
 public:
  // runner_of(model) is the model's Runner.
  template <class M, class F>
  static void bind(nanobind::class_<M>& c, F runner_of) {
    using namespace nanobind::literals;
    c.def("wire_layer_bytes", [=](M& m, int layer, bool packed) {
       const KVStore& kv = store_of(runner_of(m));
       require(layer >= 0 && layer < kv.num_layers(), "KV layer " + std::to_string(layer) + ": layers are 0 to " + std::to_string(kv.num_layers() - 1));
       return wire_layer_bytes(kv, layer, packed);
     }, "layer"_a, "packed"_a, "Bytes that a layer of one block takes in what `export_kv` gives.")
        .def("export_kv", [=](M& m, int begin, int end, const In<int32_t>& pages, const Out<uint8_t>& to, bool packed) {
          const Runner& runner = runner_of(m);
          const KVPart part = checked(store_of(runner), begin, end, pages, to.size(), packed);
          nanobind::gil_scoped_release release;
          octavo::export_kv(runner.kernels(), *runner.kv(), part, packed, to.data());
        }, "begin"_a, "end"_a, "pages"_a.noconvert(), "to"_a.noconvert(), "packed"_a,
             "Layers begin .. end - 1 of blocks whose pages by column are `pages`, int32, flat. From any thread, without the interpreter lock.")
        .def("import_kv", [=](M& m, int begin, int end, const In<int32_t>& pages, const Bytes& from, bool packed) {
          const Runner& runner = runner_of(m);
          const KVPart part = checked(store_of(runner), begin, end, pages, from.size(), packed);
          nanobind::gil_scoped_release release;
          octavo::import_kv(runner.kernels(), *runner.kv(), part, packed, from.data());
        }, "begin"_a, "end"_a, "pages"_a.noconvert(), "data"_a.noconvert(), "packed"_a, "What `export_kv` gave of as many blocks, into others.")
        .def("kv_step", [=](M& m) { return runner_of(m).kv_progress().step(); }, "The number of the step that runs, or ran last; the first is 1.")
        .def("wait_kv", [=](M& m, int64_t step, int layer, double timeout_s) {
          const Runner& runner = runner_of(m);
          const KVStore& kv = store_of(runner);
          require(layer >= 0 && layer < kv.num_layers(), "KV layer " + std::to_string(layer) + ": layers are 0 to " + std::to_string(kv.num_layers() - 1));
          require(timeout_s >= 0.0 && timeout_s <= 3600.0, "timeout_s: from 0 to 3600 seconds");
          nanobind::gil_scoped_release release;
          return runner.kv_progress().wait(step, layer, timeout_s);
        }, "step"_a, "layer"_a, "timeout_s"_a, "Whether step number `step` has stored the keys and values of `layer`; waits for it without the interpreter lock.");
  }

 private:
  static const KVStore& store_of(const Runner& runner) {
    require(runner.kv() != nullptr, "KV of a pool that is not there: allocate_kv comes first");
    return *runner.kv();
  }

  static KVPart checked(const KVStore& kv, int begin, int end, const In<int32_t>& pages, size_t num_bytes, bool packed) {
    const size_t columns = (size_t)kv.num_columns();
    require(pages.size() % columns == 0, "KV pages: one of each column for each block");
    const KVPart part{begin, end, pages.data(), pages.size() / columns};
    check_part(kv, part);
    const size_t wanted = wire_bytes(kv, part, packed);
    require(num_bytes == wanted, "KV: " + std::to_string(num_bytes) + " bytes are given, and these blocks have " + std::to_string(wanted));
    return part;
  }
};

}  // namespace octavo
