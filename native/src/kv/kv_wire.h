// KV of single layers and blocks, copied out of a pool and into one: what goes from worker to worker. No policy, no sockets.
//
// The order on the wire is layer by layer, block by block, and within these that of the tiles of the KV type (kernels.h), or of int8 where
// it is packed. It depends on block size, type and shapes alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"
#include "kv/kv_store.h"

namespace octavo {

// Layers [begin, end) of `num_blocks` blocks, whose pages by column follow each other.
struct KVPart {
  int begin, end;
  const int32_t* pages;  // [num_blocks][columns]; of columns in which none of the layers lies, anything
  size_t num_blocks;
};

// Bytes that a layer of a block takes.
size_t wire_layer_bytes(const KVStore& kv, int layer, bool packed);
size_t wire_bytes(const KVStore& kv, const KVPart& part, bool packed);

// Throws std::invalid_argument for layers or pages that the pool does not have.
void check_part(const KVStore& kv, const KVPart& part);

// A checked part to or from wire_bytes() bytes. `packed`: rounded to int8 with a scale per token and head, as in packed host blocks.
void export_kv(const Kernels& kernels, const KVStore& kv, const KVPart& part, bool packed, uint8_t* to);
void import_kv(const Kernels& kernels, const KVStore& kv, const KVPart& part, bool packed, const uint8_t* from);

}  // namespace octavo
