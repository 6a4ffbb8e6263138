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

// f(layer's view, the tile's place in a block of the pool, in a packed one) for each tile of a block.
template <class F>
void each_tile(const KVStore& kv, F f) {
  size_t at = 0, packed_at = 0;
  for (int l = 0; l < kv.num_layers(); ++l) {
    const KVLayerView& layer = kv.layer(l);
    const size_t tile = kv_tile_layout(layer.type, layer.head_dim).bytes, packed_tile = kv_tile_layout(KVType::kI8, layer.head_dim).bytes;
    const int count = layer.kv_heads * (layer.block_size / 16);
    for (int i = 0; i < count; ++i) f(layer, at + (size_t)i * tile, packed_at + (size_t)i * packed_tile);
    at += kv_layer_bytes(layer.type, layer.kv_heads, layer.head_dim, layer.block_size);
    packed_at += kv_layer_bytes(KVType::kI8, layer.kv_heads, layer.head_dim, layer.block_size);
  }
}

void save(const Kernels& kernels, KVStore& kv, HostStore& host, int block, int host_block) {
  const uint8_t* from = kv.block(block);
  uint8_t* to = host.block(host_block);
  if (!host.is_packed(host_block)) std::memcpy(to, from, kv.block_bytes());
  else each_tile(kv, [&](const KVLayerView& l, size_t at, size_t packed_at) { kernels.pack_kv(l.type, l.head_dim, from + at, to + packed_at); });
}

void load(const Kernels& kernels, KVStore& kv, HostStore& host, int block, int host_block) {
  const uint8_t* from = host.block(host_block);
  uint8_t* to = kv.block(block);
  if (!host.is_packed(host_block)) std::memcpy(to, from, kv.block_bytes());
  else each_tile(kv, [&](const KVLayerView& l, size_t at, size_t packed_at) { kernels.unpack_kv(l.type, l.head_dim, from + packed_at, to + at); });
}

size_t packed_block_bytes(const KVStore& kv) {
  size_t total = 0;
  for (int l = 0; l < kv.num_layers(); ++l) total += kv_layer_bytes(KVType::kI8, kv.layer(l).kv_heads, kv.layer(l).head_dim, kv.layer(l).block_size);
  return total;
}

}  // namespace

HostStore::HostStore(const KVStore& kv, int num_blocks, int num_packed)
    : num_blocks_(num_blocks), num_packed_(num_packed), block_bytes_(kv.block_bytes()), packed_bytes_(packed_block_bytes(kv)) {
  if (num_blocks < 0 || num_packed < 0 || num_blocks + (int64_t)num_packed < 1) throw std::invalid_argument("num_blocks: at least 1, packed or not");
  if (num_blocks + (int64_t)num_packed > std::numeric_limits<int32_t>::max()) throw std::bad_alloc();
  const size_t most = std::numeric_limits<size_t>::max() / 2;
  if ((size_t)num_blocks > most / block_bytes_ || (size_t)num_packed > most / packed_bytes_) throw std::bad_alloc();
  memory_ = std::make_unique<LazyMemory>(block_bytes_ * (size_t)num_blocks + packed_bytes_ * (size_t)num_packed);
}

void move_blocks(const Kernels& kernels, KVStore& kv, HostStore& host, const int32_t* saves, size_t num_saves, const int32_t* loads,
                 size_t num_loads) {
  check_pairs(kv, host, saves, num_saves);
  check_pairs(kv, host, loads, num_loads);
  for (size_t i = 0; i < num_saves; ++i) save(kernels, kv, host, saves[2 * i], saves[2 * i + 1]);
  for (size_t i = 0; i < num_loads; ++i) load(kernels, kv, host, loads[2 * i], loads[2 * i + 1]);
}

}  // namespace octavo
