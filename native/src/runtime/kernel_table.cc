#include "runtime/kernel_table.h"

#include <map>
#include <memory>
#include <mutex>

#include "runtime/cpu_features.h"

namespace octavo {
namespace {

// A table and the name it points to.
struct MixedTable {
  std::string name;
  Kernels kernels;
};

// "entry:level" put into the table; false when it names no entry or a level that is not here.
bool replace_entry(Kernels& table, const std::string& part) {
  const size_t colon = part.find(':');
  if (colon == std::string::npos) return false;
  const Kernels* from = kernels_by_name(part.substr(colon + 1).c_str());
  for (const KernelEntry& entry : kernel_entries()) {
    if (!from || part.compare(0, colon, entry.name) != 0) continue;
    entry.take(table, *from);
    return true;
  }
  return false;
}

std::unique_ptr<MixedTable> make_table(const std::string& spec) {
  size_t at = spec.find('-');
  const Kernels* base = kernels_by_name(spec.substr(0, at).c_str());
  if (!base) return nullptr;
  auto table = std::make_unique<MixedTable>(MixedTable{spec, *base});
  while (at != std::string::npos) {
    const size_t next = spec.find('-', at + 1);
    if (!replace_entry(table->kernels, spec.substr(at + 1, next == std::string::npos ? next : next - at - 1))) return nullptr;
    at = next;
  }
  table->kernels.name = table->name.c_str();
  return table;
}

}  // namespace

const std::vector<KernelEntry>& kernel_entries() {
  // A function added to Kernels must be given to an entry here, and be checked (checks/kernel_check.h).
  static_assert(sizeof(Kernels) == 15 * sizeof(void*), "Kernels has other members than the entries below");
  static_assert(sizeof(SamplingKernels) == 6 * sizeof(void*), "a sampling kernel that checks/check_sampling.cc does not know");
  static const std::vector<KernelEntry> entries{
      {"rmsnorm", [](Kernels& to, const Kernels& from) { to.rmsnorm = from.rmsnorm; }},
      {"quantize", [](Kernels& to, const Kernels& from) { to.quantize = from.quantize; }},
      {"gated_act", [](Kernels& to, const Kernels& from) { to.gated_act = from.gated_act; }},
      {"add", [](Kernels& to, const Kernels& from) { to.add = from.add; }},
      {"softcap", [](Kernels& to, const Kernels& from) { to.softcap = from.softcap; }},
      {"rope", [](Kernels& to, const Kernels& from) { to.rope = from.rope; }},
      {"store_kv", [](Kernels& to, const Kernels& from) { to.store_kv = from.store_kv; }},
      {"matmul", [](Kernels& to, const Kernels& from) { to.matmul = from.matmul; }},
      {"attention",
       [](Kernels& to, const Kernels& from) {  // share scratch and the form of stored states
         to.attention = from.attention;
         to.attention_merge = from.attention_merge;
         to.attention_scratch_bytes = from.attention_scratch_bytes;
         to.attention_partial_floats = from.attention_partial_floats;
       }},
      {"pack_kv",
       [](Kernels& to, const Kernels& from) {
         to.pack_kv = from.pack_kv;
         to.unpack_kv = from.unpack_kv;
       }},
      {"sampling", [](Kernels&, const Kernels&) {}},
  };
  return entries;
}

const Kernels* kernels_by_spec(const std::string& spec) {
  static std::mutex mutex;
  static std::map<std::string, std::unique_ptr<MixedTable>> mixed;
  if (const Kernels* level = kernels_by_name(spec.c_str())) return level;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = mixed.find(spec);
  if (found != mixed.end()) return &found->second->kernels;
  auto table = make_table(spec);
  if (!table) return nullptr;
  return &mixed.emplace(spec, std::move(table)).first->second->kernels;
}

const SamplingKernels* sampling_kernels_by_spec(const std::string& spec) {
  if (!kernels_by_spec(spec)) return nullptr;
  constexpr char kPart[] = "-sampling:";
  const size_t at = spec.rfind(kPart);  // the last one holds, as in the other table
  const size_t begin = at == std::string::npos ? 0 : at + sizeof(kPart) - 1;
  return sampling_kernels_by_name(spec.substr(begin, spec.find('-', begin) - begin).c_str());
}

}  // namespace octavo
