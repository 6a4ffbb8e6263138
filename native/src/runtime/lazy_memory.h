// Memory that costs nothing until it is written: pages of an anonymous mapping, given back as a whole.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>

namespace octavo {

class LazyMemory {
 public:
  // Throws std::bad_alloc when there are no addresses left for it.
  explicit LazyMemory(size_t bytes) : bytes_(bytes ? bytes : 1) {
    void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<uint8_t*>(p);
  }
  ~LazyMemory() { munmap(data_, bytes_); }
  LazyMemory(const LazyMemory&) = delete;
  LazyMemory& operator=(const LazyMemory&) = delete;

  // A hint: what is refused costs speed only.
  void ask_for_huge_pages() {
#if defined(MADV_HUGEPAGE)
    madvise(data_, bytes_, MADV_HUGEPAGE);
#endif
  }

  uint8_t* data() const { return data_; }

 private:
  size_t bytes_;
  uint8_t* data_;
};

}  // namespace octavo
