#include "kv/host_store.h"

#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>

namespace octavo {
namespace {

void check_pairs(const KVStore& kv, const HostStore& host, const int32_t* pairs, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const int block = pairs[2 * i], host_block = pairs[2 * i + 1];
    if (block < 0 || block >= kv.num_blocks() || host_block < 0 || host_block >= host.num_blocks())
      throw std::invalid_argument("block move " + std::to_string(block) + " <-> host " + std::to_string(host_block) + ": block ids are 0 to " +
                                  std::to_string(kv.num_blocks() - 1) + ", host block ids 0 to " + std::to_string(host.num_blocks() - 1));
  }
}

}  // namespace

HostStore::HostStore(int num_blocks, size_t block_bytes) : num_blocks_(num_blocks), block_bytes_(block_bytes) {
  if (num_blocks < 1) throw std::invalid_argument("num_blocks: at least 1");
  if (block_bytes && (size_t)num_blocks > std::numeric_limits<size_t>::max() / block_bytes) throw std::bad_alloc();
  memory_ = std::make_unique<LazyMemory>(block_bytes * (size_t)num_blocks);
}

void move_blocks(KVStore& kv, HostStore& host, const int32_t* saves, size_t num_saves, const int32_t* loads, size_t num_loads) {
  check_pairs(kv, host, saves, num_saves);
  check_pairs(kv, host, loads, num_loads);
  for (size_t i = 0; i < num_saves; ++i) std::memcpy(host.block(saves[2 * i + 1]), kv.block(saves[2 * i]), host.block_bytes());
  for (size_t i = 0; i < num_loads; ++i) std::memcpy(kv.block(loads[2 * i]), host.block(loads[2 * i + 1]), host.block_bytes());
}

}  // namespace octavo
