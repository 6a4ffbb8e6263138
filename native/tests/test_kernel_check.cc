// The check that runs on a user's machine: it finds every kernel right here, and each of them wrong when it is. Mixed tables.
#include <stdexcept>
#include <string>

#include "checks/kernel_check.h"
#include "runtime/kernel_table.h"
#include "testing.h"

using namespace octavo;
using namespace octavo_test;

namespace {

// The checks of the part that `entry` belongs to, with a fault in it.
std::vector<KernelCheck> check_faulty(const std::string& entry, const Kernels& right, CheckExtent extent) {
  if (entry == "sampling") return check_sampling(with_sampling_fault(*sampling_kernels_by_name(right.name)), extent);
  const Kernels& table = with_fault(right, entry);
  if (entry == "matmul") return check_matmul(table, extent);
  return entry == "attention" || entry == "store_kv" || entry == "pack_kv" ? check_attention(table, extent) : check_rows(table, extent);
}

void test_all_right(const Kernels& table) {
  for (const CheckExtent extent : {CheckExtent::kStart, CheckExtent::kFull})
    for (const KernelCheck& c : check_kernels(table, *sampling_kernels_by_name(table.name), extent)) {
      check(c.right && c.error <= c.tolerance, "%s %s %s %s: error %g, tolerance %g", table.name, c.kernel.c_str(), c.format.c_str(),
            c.shape.c_str(), c.error, c.tolerance);
    }
}

// Every class of the faulty entry is wrong, and no other.
void test_fault(const Kernels& table, const std::string& entry, CheckExtent extent) {
  int found = 0;
  for (const KernelCheck& c : check_faulty(entry, table, extent)) {
    check(c.right == (c.kernel != entry), "%s with a fault in %s: %s %s %s is called %s", table.name, entry.c_str(), c.kernel.c_str(),
          c.format.c_str(), c.shape.c_str(), c.right ? "right" : "wrong");
    found += c.kernel == entry;
  }
  check(found > 0, "%s: nothing checks %s", table.name, entry.c_str());
}

void test_mixed_tables() {
  const Kernels& base = *kernels_best();
  for (const KernelEntry& entry : kernel_entries()) {
    const std::string spec = std::string(base.name) + "-" + entry.name + ":portable";
    const Kernels* mixed = kernels_by_spec(spec);
    if (!check(mixed && mixed == kernels_by_spec(spec) && mixed->name == spec, "%s is no table", spec.c_str())) continue;
    for (const KernelCheck& c : check_kernels(*mixed, *sampling_kernels_by_spec(spec), CheckExtent::kStart)) check(c.right, "%s: %s is wrong", spec.c_str(), c.kernel.c_str());
  }
  const Kernels* two = kernels_by_spec(std::string(base.name) + "-matmul:portable-rope:portable");
  check(two && two->matmul == kernels_portable()->matmul && two->rope == kernels_portable()->rope, "two entries are not replaced");
  check(two && two->add == base.add && two->attention == base.attention, "an entry that was not named is replaced");
  const std::string sampled = std::string(base.name) + "-sampling:portable";
  check(sampling_kernels_by_spec(sampled) == sampling_kernels_portable() && kernels_by_spec(sampled)->matmul == base.matmul, "sampling is not replaced");
  check(sampling_kernels_by_spec(base.name) == sampling_kernels_by_name(base.name), "a level by itself has its own sampling");
  check(kernels_by_spec(base.name) == &base, "a level by itself is its own table");
  for (const char* bad : {"", "avx1024", "portable-", "portable-matmul", "portable-matmul:", "portable-mat:portable", "portable-matmul:avx1024",
                          "portable-matmul:portable-", "-matmul:portable"})
    check(kernels_by_spec(bad) == nullptr, "'%s' is taken for a table", bad);
}

}  // namespace

int main() {
  for (const Kernels* table : levels()) {
    test_all_right(*table);
    for (const KernelEntry& entry : kernel_entries()) test_fault(*table, entry.name, CheckExtent::kStart);
  }
  for (const KernelEntry& entry : kernel_entries()) test_fault(*kernels_best(), entry.name, CheckExtent::kFull);
  bool refused = false;
  try {
    with_fault(*kernels_best(), "no such entry");
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  check(refused, "a fault in an entry that is not there is not refused");
  test_mixed_tables();
  return finish("kernel_check");
}
