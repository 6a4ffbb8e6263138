// Python's view of probes, kernel checks and kernel speeds: plain tuples, the interpreter lock released.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>

#include "bindings/arguments.h"
#include "checks/kernel_check.h"
#include "probes/arithmetic_probe.h"
#include "probes/kernel_speed.h"
#include "probes/read_probe.h"
#include "runtime/kernel_table.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

using Release = nb::call_guard<nb::gil_scoped_release>;

using ReadRow = std::tuple<int, int, bool, double, double>;
std::vector<ReadRow> reads(int threads, uint64_t total_bytes, double budget_s) {
  ThreadPool pool(threads);
  std::vector<ReadRow> out;
  for (const ReadResult& r : probe_reads(pool, total_bytes, budget_s))
    out.emplace_back(r.variant.streams, r.variant.prefetch_bytes, r.variant.huge_pages, r.bytes, r.seconds);
  return out;
}

using PeakRow = std::tuple<std::string, std::string, double, double>;
std::vector<PeakRow> peaks(int threads, double budget_s) {
  ThreadPool pool(threads);
  std::vector<PeakRow> out;
  for (const PeakResult& r : probe_arithmetic(pool, budget_s)) out.emplace_back(r.kind, r.instruction, r.operations, r.seconds);
  return out;
}

using CheckRow = std::tuple<std::string, std::string, std::string, bool, double, double>;
std::vector<CheckRow> rows_of(const std::vector<KernelCheck>& checks) {
  std::vector<CheckRow> out;
  for (const KernelCheck& c : checks) out.emplace_back(c.kernel, c.format, c.shape, c.right, c.error, c.tolerance);
  return out;
}

CheckExtent extent_of(bool full) { return full ? CheckExtent::kFull : CheckExtent::kStart; }

// The CPUs that each thread of a pool of this size may run on, as the system says it.
std::vector<std::vector<int>> thread_cpus(int threads) {
  ThreadPool pool(threads);
  std::vector<std::vector<int>> out(static_cast<size_t>(threads));
  pool.each([&](int thread) { out[static_cast<size_t>(thread)] = allowed_cpus(); });
  return out;
}

using SpeedRow = std::tuple<double, double, double>;
SpeedRow row_of(const KernelSpeed& s) { return {s.seconds, s.bytes, s.operations}; }

SpeedRow matmul_speed(const std::string& isa, int threads, const std::string& dtype, int n, int k, int rows, double budget_s) {
  ThreadPool pool(threads);
  return row_of(time_matmul(kernels_of(isa), pool, dtype, n, k, rows, budget_s));
}

SpeedRow attention_speed(const std::string& isa, int threads, const std::string& kv_dtype, std::tuple<int, int, int> heads, int context, int rows,
                         uint64_t kv_bytes, double budget_s) {
  const auto [num_heads, kv_heads, head_dim] = heads;
  require(kv_heads >= 1 && num_heads >= kv_heads && num_heads % kv_heads == 0 && head_dim >= 1, "heads: a multiple of the KV heads, head_dim at least 1");
  ThreadPool pool(threads);
  const AttentionCase c{{num_heads, kv_heads, head_dim, 0.125f, 0.0f, 0}, kv_type("kv dtype", kv_dtype), context, rows, kv_bytes};
  return row_of(time_attention(kernels_of(isa), pool, c, budget_s));
}

}  // namespace

void bind_probes(nb::module_& m) {
  m.def("probe_reads", &reads, "threads"_a, "total_bytes"_a, "budget_s"_a, Release(), "[(streams, prefetch bytes, huge pages, bytes, seconds)]");
  m.def("read_probe_bits", &read_probe_bits, "Bits of one load of probe_reads.");
  m.def("probe_arithmetic", &peaks, "threads"_a, "budget_s"_a, Release(), "[(int8 | bf16 | f32, instruction, operations, seconds)]");
  m.def("thread_cpus", &thread_cpus, "threads"_a, Release(), "CPUs that each thread of a pool of this size may run on.");
  m.def("kernel_entries", [] {
    std::vector<std::string> names;
    for (const KernelEntry& entry : kernel_entries()) names.emplace_back(entry.name);
    return names;
  }, "Entries of a kernel path that can be taken from another level.");
  m.def("check_kernels", [](const std::string& isa, bool full) {
    return rows_of(check_kernels(kernels_of(isa), sampling_kernels_of(isa), extent_of(full)));
  },
        "isa"_a, "full"_a, Release(), "[(kernel, format, shape, right, error, tolerance)]");
  m.def("check_kernels_test", [](const std::string& isa, bool full, const std::string& fault) {
    const Kernels& table = kernels_of(isa);
    const SamplingKernels& sampling = sampling_kernels_of(isa);
    if (fault == "sampling") return rows_of(check_kernels(table, with_sampling_fault(sampling), extent_of(full)));
    return rows_of(check_kernels(with_fault(table, fault), sampling, extent_of(full)));
  }, "isa"_a, "full"_a, "fault"_a, Release(), "As check_kernels, for tests: the entry `fault` gives a wrong value.");
  m.def("time_matmul", &matmul_speed, "isa"_a, "threads"_a, "dtype"_a, "n"_a, "k"_a, "rows"_a, "budget_s"_a, Release(),
        "(seconds, bytes of weights, operations) of one call");
  m.def("time_attention", &attention_speed, "isa"_a, "threads"_a, "kv_dtype"_a, "heads"_a, "context"_a, "rows"_a, "kv_bytes"_a, "budget_s"_a, Release(),
        "heads: (heads, kv_heads, head_dim). (seconds, bytes of KV, operations) of one call");
}

}  // namespace octavo
