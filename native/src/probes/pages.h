// Memory to probe: zeroed anonymous pages, huge ones asked for or forbidden. The sizes are whole 2 MiB pages.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>

namespace octavo {

class Pages {
 public:
  // Throws std::bad_alloc. Every page is written, so that none is the system's shared page of zeros.
  Pages(size_t bytes, bool huge) : bytes_((bytes + kHugePage - 1) / kHugePage * kHugePage) {
    mapped_ = static_cast<uint8_t*>(mmap(nullptr, bytes_ + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (mapped_ == MAP_FAILED) throw std::bad_alloc();
    data_ = mapped_ + (kHugePage - reinterpret_cast<uintptr_t>(mapped_) % kHugePage) % kHugePage;
#if defined(MADV_HUGEPAGE)
    madvise(data_, bytes_, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);  // a hint: what is refused costs speed only
#else
    (void)huge;
#endif
    std::memset(data_, 1, bytes_);
  }
  ~Pages() { munmap(mapped_, bytes_ + kHugePage); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  const uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kHugePage = size_t{2} << 20;
  size_t bytes_;
  uint8_t* mapped_;
  uint8_t* data_;
};

}  // namespace octavo
