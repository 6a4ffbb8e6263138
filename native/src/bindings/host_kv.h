// Python's view of the host pool of KV blocks: checks arguments and releases the GIL around copies; nothing else.
#pragma once

#include <nanobind/nanobind.h>

#include <cstring>
#include <memory>
#include <string>

#include "bindings/arguments.h"
#include "kv/host_store.h"

namespace octavo {

// Blocks may be read and written while a step runs, as long as that step does not move them.
class HostKV {
 public:
  void allocate(const KVStore* kv, int num_blocks, int num_packed) {
    require(kv != nullptr, "allocate_host_kv before allocate_kv");
    store_ = std::make_unique<HostStore>(*kv, num_blocks, num_packed);
  }

  void move(const Kernels& kernels, KVStore* kv, const In<int32_t>& saves, const In<int32_t>& loads) {
    HostStore& store = open();
    const size_t entry = (size_t)kv->num_columns() + 1;
    require(saves.size() % entry == 0 && loads.size() % entry == 0, "block moves: the pages of a pool block, and a host block");
    nanobind::gil_scoped_release release;
    move_blocks(kernels, *kv, store, saves.data(), saves.size() / entry, loads.data(), loads.size() / entry);
  }

  nanobind::bytes read(int block) { return nanobind::bytes(at(block), store_->block_bytes(block)); }

  void write(int block, const Bytes& data) {
    uint8_t* to = at(block);
    const std::string size = std::to_string(store_->block_bytes(block));
    require(data.size() == store_->block_bytes(block), "host block: " + std::to_string(data.size()) + " bytes are given, and a block has " + size);
    nanobind::gil_scoped_release release;
    std::memcpy(to, data.data(), data.size());
  }

 private:
  HostStore& open() {
    require(store_ != nullptr, "there is no host pool: allocate_host_kv comes first");
    return *store_;
  }

  uint8_t* at(int block) {
    HostStore& store = open();
    require(block >= 0 && block < store.num_blocks(), "host block " + std::to_string(block) + ": ids are 0 to " + std::to_string(store.num_blocks() - 1));
    return store.block(block);
  }

  std::unique_ptr<HostStore> store_;
};

}  // namespace octavo
