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

// f(page, its place in a host block) for each page that is moved.
template <class F>
void each_page(KVStore& kv, const int32_t* pages, uint8_t* host_block, F f) {
  for (int c = 0; c < kv.num_columns(); ++c)
    if (pages[c] != kLeftOut) f(kv.page(pages[c]), host_block + (size_t)c * kv.page_bytes());
}

// f(layer's view, a tile in its page, the tile's place in a packed host block) for each tile that is moved. Packed layers lie one behind
// the other, whatever pages they are from.
template <class F>
void each_tile(const KVStore& kv, const int32_t* pages, uint8_t* host_block, F f) {
  uint8_t* packed = host_block;
  for (int l = 0; l < kv.num_layers(); ++l) {
    const KVLayerView& layer = kv.layer(l);
    const size_t tile = kv_tile_layout(layer.type, layer.head_dim).bytes, packed_tile = kv_tile_layout(KVType::kI8, layer.head_dim).bytes;
    const int count = layer.kv_heads * (layer.block_size / 16), page = pages[kv.column(l)];
    if (page != kLeftOut)
      for (int i = 0; i < count; ++i) f(layer, layer.base + (size_t)page * layer.block_bytes + (size_t)i * tile, packed + (size_t)i * packed_tile);
    packed += kv_layer_bytes(KVType::kI8, layer.kv_heads, layer.head_dim, layer.block_size);
  }
}

void save(const Kernels& kernels, KVStore& kv, HostStore& host, const int32_t* move) {
  const int host_block = move[kv.num_columns()];
  uint8_t* to = host.block(host_block);
  if (!host.is_packed(host_block)) each_page(kv, move, to, [&](uint8_t* page, uint8_t* at) { std::memcpy(at, page, kv.page_bytes()); });
  else each_tile(kv, move, to, [&](const KVLayerView& l, uint8_t* tile, uint8_t* at) { kernels.pack_kv(l.type, l.head_dim, tile, at); });
}

void load(const Kernels& kernels, KVStore& kv, HostStore& host, const int32_t* move) {
  const int host_block = move[kv.num_columns()];
  uint8_t* from = host.block(host_block);
  if (!host.is_packed(host_block)) each_page(kv, move, from, [&](uint8_t* page, uint8_t* at) { std::memcpy(page, at, kv.page_bytes()); });
  else each_tile(kv, move, from, [&](const KVLayerView& l, uint8_t* tile, uint8_t* at) { kernels.unpack_kv(l.type, l.head_dim, at, tile); });
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
  check_moves(kv, host, saves, num_saves);
  check_moves(kv, host, loads, num_loads);
  const size_t entry = (size_t)kv.num_columns() + 1;
  for (size_t i = 0; i < num_saves; ++i) save(kernels, kv, host, saves + i * entry);
  for (size_t i = 0; i < num_loads; ++i) load(kernels, kv, host, loads + i * entry);
}

}  // namespace octavo
