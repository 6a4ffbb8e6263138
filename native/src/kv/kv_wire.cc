#include "kv/kv_wire.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace octavo {
namespace {

// f(layer's view, its bytes in a block of the pool, offset on the wire) for each layer and block, in the order of the wire.
template <class F>
void each_layer_block(const KVStore& kv, const KVPart& part, bool packed, F f) {
  const size_t columns = (size_t)kv.num_columns();
  size_t at = 0;
  for (int l = part.begin; l < part.end; ++l) {
    const KVLayerView& layer = kv.layer(l);
    const size_t bytes = wire_layer_bytes(kv, l, packed), column = (size_t)kv.column(l);
    for (size_t b = 0; b < part.num_blocks; ++b, at += bytes) f(layer, layer.base + (size_t)part.pages[b * columns + column] * layer.block_bytes, at);
  }
}

// f(a tile in the pool, its place among packed ones)
template <class F>
void each_tile(const KVLayerView& layer, uint8_t* block, F f) {
  const size_t tile = kv_tile_layout(layer.type, layer.head_dim).bytes, packed_tile = kv_tile_layout(KVType::kI8, layer.head_dim).bytes;
  const int count = layer.kv_heads * (layer.block_size / 16);
  for (int i = 0; i < count; ++i) f(block + (size_t)i * tile, (size_t)i * packed_tile);
}

}  // namespace

size_t wire_layer_bytes(const KVStore& kv, int layer, bool packed) {
  const KVLayerView& l = kv.layer(layer);
  return kv_layer_bytes(packed ? KVType::kI8 : l.type, l.kv_heads, l.head_dim, l.block_size);
}

size_t wire_bytes(const KVStore& kv, const KVPart& part, bool packed) {
  size_t total = 0;
  for (int l = part.begin; l < part.end; ++l) total += wire_layer_bytes(kv, l, packed);
  return total * part.num_blocks;
}

void check_part(const KVStore& kv, const KVPart& part) {
  if (part.begin < 0 || part.end <= part.begin || part.end > kv.num_layers())
    throw std::invalid_argument("KV layers " + std::to_string(part.begin) + " to " + std::to_string(part.end) + ": at least one of the " + std::to_string(kv.num_layers()) + " that there are");
  const size_t columns = (size_t)kv.num_columns();
  for (int l = part.begin; l < part.end; ++l)
    for (size_t b = 0; b < part.num_blocks; ++b) {
      const int32_t page = part.pages[b * columns + (size_t)kv.column(l)];
      if (page < 0 || page >= kv.num_pages())
        throw std::invalid_argument("KV page " + std::to_string(page) + " of layer " + std::to_string(l) + ": pages are 0 to " + std::to_string(kv.num_pages() - 1));
    }
}

void export_kv(const Kernels& kernels, const KVStore& kv, const KVPart& part, bool packed, uint8_t* to) {
  each_layer_block(kv, part, packed, [&](const KVLayerView& layer, uint8_t* block, size_t at) {
    const size_t bytes = kv_layer_bytes(packed ? KVType::kI8 : layer.type, layer.kv_heads, layer.head_dim, layer.block_size);
    if (!packed) {
      std::memcpy(to + at, block, bytes);
      return;
    }
    std::memset(to + at, 0, bytes);  // what lies between the tiles and the next layer
    each_tile(layer, block, [&](uint8_t* tile, size_t place) { kernels.pack_kv(layer.type, layer.head_dim, tile, to + at + place); });
  });
}

void import_kv(const Kernels& kernels, const KVStore& kv, const KVPart& part, bool packed, const uint8_t* from) {
  each_layer_block(kv, part, packed, [&](const KVLayerView& layer, uint8_t* block, size_t at) {
    if (!packed) {
      std::memcpy(block, from + at, kv_layer_bytes(layer.type, layer.kv_heads, layer.head_dim, layer.block_size));
      return;
    }
    each_tile(layer, block, [&](uint8_t* tile, size_t place) { kernels.unpack_kv(layer.type, layer.head_dim, from + at + place, tile); });
  });
}

}  // namespace octavo
