#include "kv/host_store.h"

#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>

namespace octavo {
namespace {

void check_moves(const KVStore& kv, const HostStore& host, const int32_t* moves, size_t count) {
  const int columns = kv.num_columns();
  for (size_t i = 0; i < count; ++i) {
    const int32_t* pages = moves + i * (size_t)(columns + 1);
    const int host_block = pages[columns];
    for (int c = 0; c < columns; ++c)
      if (pages[c] < (columns > 1 ? kLeftOut : 0) || pages[c] >= kv.num_pages() || host_block < 0 || host_block >= host.num_blocks())
        throw std::invalid_argument("block move " + std::to_string(pages[c]) + " <-> host " + std::to_string(host_block) + ": block ids are 0 to " +
                                    std::to_string(kv.num_pages() - 1) + ", host block ids 0 to " + std::to_string(host.num_blocks() - 1));
  }
}

void copy_pages(KVStore& kv, HostStore& host, const int32_t* moves, size_t count, bool to_host) {
  const int columns = kv.num_columns();
  const size_t bytes = kv.page_bytes();
  for (size_t i = 0; i < count; ++i) {
    const int32_t* pages = moves + i * (size_t)(columns + 1);
    uint8_t* at = host.block(pages[columns]);
    for (int c = 0; c < columns; ++c, at += bytes) {
      if (pages[c] == kLeftOut) continue;
      if (to_host) std::memcpy(at, kv.page(pages[c]), bytes);
      else std::memcpy(kv.page(pages[c]), at, bytes);
    }
  }
}

}  // namespace

HostStore::HostStore(int num_blocks, size_t block_bytes) : num_blocks_(num_blocks), block_bytes_(block_bytes) {
  if (num_blocks < 1) throw std::invalid_argument("num_blocks: at least 1");
  if (block_bytes && (size_t)num_blocks > std::numeric_limits<size_t>::max() / block_bytes) throw std::bad_alloc();
  memory_ = std::make_unique<LazyMemory>(block_bytes * (size_t)num_blocks);
}

void move_blocks(KVStore& kv, HostStore& host, const int32_t* saves, size_t num_saves, const int32_t* loads, size_t num_loads) {
  check_moves(kv, host, saves, num_saves);
  check_moves(kv, host, loads, num_loads);
  copy_pages(kv, host, saves, num_saves, true);
  copy_pages(kv, host, loads, num_loads, false);
}

}  // namespace octavo
