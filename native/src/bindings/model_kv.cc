// Python's view of a model's KV: its pool on the device, blocks in host memory, and what goes to other workers.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "bindings/kv_wire.h"
#include "bindings/model.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

// places: (column, offset in its page) of each layer; none: one page to a block.
KVPageLayout kv_layout(int columns, size_t page_bytes, const std::vector<std::pair<int, size_t>>& places) {
  KVPageLayout layout;
  layout.num_columns = columns;
  layout.page_bytes = page_bytes;
  for (const auto& [column, offset] : places) {
    layout.columns.push_back(column);
    layout.offsets.push_back(offset);
  }
  return layout;
}

std::vector<KVLayerShape> kv_layers(const std::vector<std::pair<int, int>>& layers) {
  std::vector<KVLayerShape> out;
  for (const auto& [heads, dim] : layers) {
    require(heads > 0 && dim > 0, "KV layers: heads and head_dim are at least 1");
    out.push_back({heads, dim});
  }
  return out;
}

}  // namespace

void bind_kv(nb::class_<Model>& c) {
  c.def_static(
       "bytes_per_block",
       [](int block_size, const std::string& dtype, const std::vector<std::pair<int, int>>& layers) {
         return KVStore::bytes_per_block(block_size, kv_type("kv_cache_dtype", dtype), kv_layers(layers));
       },
       "block_size"_a, "dtype"_a, "layers"_a)
      .def(
          "allocate_kv",
          [](Model& m, int num_blocks, int block_size, const std::string& dtype, const std::vector<std::pair<int, int>>& layers, int columns,
             size_t page_bytes, const std::vector<std::pair<int, size_t>>& places) {
            require(num_blocks >= 1 && columns >= 1 && num_blocks <= std::numeric_limits<int>::max() / columns, "num_blocks: as many pages as int32 counts");
            m.runner.allocate_kv(num_blocks * columns, block_size, kv_type("kv_cache_dtype", dtype), kv_layers(layers), kv_layout(columns, page_bytes, places));
          },
          "num_blocks"_a, "block_size"_a, "dtype"_a, "layers"_a, "columns"_a, "page_bytes"_a, "places"_a,
          "places: (column, offset in its page) of each layer.")
      .def(
          "lodge_kv",
          [](Model& m, const Model& owner, int block_size, const std::string& dtype, const std::vector<std::pair<int, int>>& layers, int columns,
             size_t page_bytes, const std::vector<std::pair<int, size_t>>& places) {
            m.runner.lodge_kv(owner.runner, block_size, kv_type("kv_cache_dtype", dtype), kv_layers(layers), kv_layout(columns, page_bytes, places));
          },
          "owner"_a, "block_size"_a, "dtype"_a, "layers"_a, "columns"_a, "page_bytes"_a, "places"_a, "Layers in the pages of another model's pool.")
      .def("share_kv", [](Model& m, const Model& other, int num_layers) { m.runner.share_kv(other.runner, num_layers); }, "other"_a, "num_layers"_a)
      .def(
          "copy_page",
          [](Model& m, int src, int dst) {
            require(m.runner.kv() != nullptr, "copy_page before allocate_kv");
            m.runner.kv()->copy_page(src, dst);
          },
          "src"_a, "dst"_a)
      .def("allocate_host_kv", [](Model& m, int num_blocks, int num_packed) { m.host_kv.allocate(m.runner.kv(), num_blocks, num_packed); },
           "num_blocks"_a, "num_packed"_a, "Blocks that are kept as they are, and behind them blocks that are packed to int8.")
      .def("move_blocks", [](Model& m, In<int32_t> saves, In<int32_t> loads) { m.host_kv.move(m.runner.kernels(), m.runner.kv(), saves, loads); },
           "saves"_a.noconvert(), "loads"_a.noconvert(), "int32 (pages by column, host block), flat; page -1: not moved. All saves (pool to host), then all loads; without the interpreter lock.")
      .def("read_host_block", [](Model& m, int block) { return m.host_kv.read(block); }, "host_block"_a)
      .def("write_host_block", [](Model& m, int block, Bytes data) { m.host_kv.write(block, data); }, "host_block"_a, "data"_a.noconvert());
  KVWire::bind(c, [](Model& m) -> const Runner& { return m.runner; });
}

}  // namespace octavo
