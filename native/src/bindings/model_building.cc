// Python's view of building a model: weights, buffers, and ops in their order; checks what the runner does not.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "bindings/model.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {

nb::tuple Model::add_matrix(const std::string& dtype, Bytes raw, int n, int k, bool widen, bool mapped) {
  check_raw("matrix", dtype, raw, n, k);
  const int index = runner.add_matrix(dtype.c_str(), raw.data(), n, k, widen, mapped);
  unpacked_raw_.push_back(raw);
  return nb::make_tuple(index, runner.matrix(index).quantised());
}

nb::tuple Model::add_matrix_of(const Model& other, int index) {
  return nb::make_tuple(runner.add_matrix_of(other.runner, index), other.runner.matrix(index).quantised());
}

void Model::pack() {
  {
    nb::gil_scoped_release release;
    runner.pack();
  }
  unpacked_raw_.clear();
}

int Model::add_embedding(const std::string& dtype, Bytes raw, int n, int k) {
  check_raw("embedding", dtype, raw, n, k);
  embedding_rows_ = n;
  embedding_raw_.push_back(raw);
  return runner.add_embedding(dtype.c_str(), raw.data(), k);
}

int Model::add_embedding_of(int matrix) {
  embedding_rows_ = runner.matrix(matrix).n;
  return runner.add_embedding_of(matrix);
}

namespace {

void extend_rope(Model& m, int index, nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu> rows) {
  require(rows.shape(2) == 2, "rope table: the last axis holds cosine and sine");
  m.runner.extend_rope(index, rows.data(), (int)rows.shape(0), (int)rows.shape(1));
}

RowOp row_op(RowOpKind kind) {
  RowOp op;
  op.kind = kind;
  return op;
}

}  // namespace

void bind_building(nb::class_<Model>& c) {
  c.def("add_buffer", [](Model& m, int width) { return m.runner.add_buffer(width); }, "width"_a)
      .def("add_vector", [](Model& m, In<float> v) { return m.runner.add_vector(v.data(), (int)v.size()); }, "values"_a.noconvert())
      .def("add_matrix", &Model::add_matrix, "dtype"_a, "raw"_a.noconvert(), "rows"_a, "columns"_a, "widen"_a, "mapped"_a = false,
           "-> (id, takes quantised activations). Keeps `raw` alive until `pack`; `mapped`: it lies in a read-only map of a file, whose pages are given up then.")
      .def("add_matrix_of", &Model::add_matrix_of, "other"_a, "matrix"_a, "A matrix of another model. -> (id, takes quantised activations)")
      .def("packed_bytes", [](Model& m) { return m.runner.packed_bytes(); })
      .def("pack", &Model::pack, "Pack the matrices added since the last call, on all threads, without the interpreter lock.")
      .def("add_embedding", &Model::add_embedding, "dtype"_a, "raw"_a.noconvert(), "rows"_a, "columns"_a, "Reads `raw` in place and keeps it alive.")
      .def("add_embedding_of", &Model::add_embedding_of, "matrix"_a, "The rows of a matrix that is there anyway.")
      .def("add_rope", [](Model& m) { return m.runner.add_rope(); })
      .def("extend_rope", &extend_rope, "index"_a, "rows"_a.noconvert(), "rows: float32 [more positions, rotary_dim / 2, 2]")
      .def("begin_group", [](Model& m) { m.runner.begin_group(); })
      .def("matmul",
           [](Model& m, int x, int weight, int bias, int out, int out_col, bool accumulate) {
             m.runner.add_matmul(MatmulOp{x, weight, bias, out, out_col, accumulate});
           },
           "x"_a, "weight"_a, "bias"_a, "out"_a, "out_col"_a, "accumulate"_a)
      .def("embed",
           [](Model& m, int weight, float scale, int out) {
             RowOp op = row_op(RowOpKind::kEmbed);
             op.weight = weight, op.scale = scale, op.out = out;
             m.runner.add_row_op(op);
           },
           "weight"_a, "scale"_a, "out"_a)
      .def("norm",
           [](Model& m, int x, int x_col, int weight, float eps, int dim, int heads, int out, int out_col) {
             RowOp op = row_op(RowOpKind::kNorm);
             op.in = x, op.in_col = x_col, op.weight = weight, op.eps = eps, op.dim = dim, op.heads = heads, op.out = out, op.out_col = out_col;
             m.runner.add_row_op(op);
           },
           "x"_a, "x_col"_a, "weight"_a, "eps"_a, "dim"_a, "heads"_a, "out"_a, "out_col"_a)
      .def("rope",
           [](Model& m, int x, int x_col, int table, int heads, int head_dim, int rotary_dim, bool interleaved) {
             RowOp op = row_op(RowOpKind::kRope);
             op.in = x, op.in_col = x_col, op.weight = table, op.heads = heads, op.dim = head_dim, op.rotary_dim = rotary_dim, op.interleaved = interleaved;
             m.runner.add_row_op(op);
           },
           "x"_a, "x_col"_a, "table"_a, "heads"_a, "head_dim"_a, "rotary_dim"_a, "interleaved"_a)
      .def("store_kv",
           [](Model& m, int k, int k_col, int v, int v_col, int layer) {
             RowOp op = row_op(RowOpKind::kStoreKV);
             op.in = k, op.in_col = k_col, op.in2 = v, op.in2_col = v_col, op.layer = layer;
             m.runner.add_row_op(op);
           },
           "k"_a, "k_col"_a, "v"_a, "v_col"_a, "layer"_a)
      .def("attention",
           [](Model& m, int layer, int q, int q_col, int out, int heads, int kv_heads, int head_dim, float scale, float softcap, int window) {
             m.runner.add_attention(AttentionOp{layer, q, q_col, out, AttentionParams{heads, kv_heads, head_dim, scale, softcap, window}});
           },
           "layer"_a, "q"_a, "q_col"_a, "out"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "scale"_a, "softcap"_a, "window"_a)
      .def("gated_act",
           [](Model& m, int gate, int gate_col, int up, int up_col, int dim, int activation, int out) {
             RowOp op = row_op(RowOpKind::kGatedAct);
             op.in = gate, op.in_col = gate_col, op.in2 = up, op.in2_col = up_col, op.dim = dim, op.activation = activation, op.out = out;
             m.runner.add_row_op(op);
           },
           "gate"_a, "gate_col"_a, "up"_a, "up_col"_a, "dim"_a, "activation"_a, "out"_a)
      .def("add",
           [](Model& m, int a, int a_col, int b, int b_col, int dim, int out, int out_col) {
             RowOp op = row_op(RowOpKind::kAdd);
             op.in = a, op.in_col = a_col, op.in2 = b, op.in2_col = b_col, op.dim = dim, op.out = out, op.out_col = out_col;
             m.runner.add_row_op(op);
           },
           "a"_a, "a_col"_a, "b"_a, "b_col"_a, "dim"_a, "out"_a, "out_col"_a)
      .def("quantize",
           [](Model& m, int x) {
             RowOp op = row_op(RowOpKind::kQuantize);
             op.in = x;
             m.runner.add_row_op(op);
           },
           "x"_a)
      .def("select", [](Model& m, std::vector<int> buffers) { m.runner.add_select(buffers); }, "buffers"_a)
      .def("head", [](Model& m, int x, int weight, float softcap) { m.runner.set_head(HeadOp{x, weight, softcap}); }, "x"_a, "weight"_a, "softcap"_a);
}

}  // namespace octavo
