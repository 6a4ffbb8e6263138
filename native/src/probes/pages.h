// Memory to probe: anonymous pages, huge ones asked for or forbidden. Sizes are whole 2 MiB pages. Write every page before reading
// it, on the thread that will read it: until then all are the system's one page of zeros, and the writer's NUMA node gets them.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>

namespace octavo {

class Pages {
 public:
  // Throws std::bad_alloc.
  Pages(size_t bytes, bool huge) : bytes_((bytes + kHugePage - 1) / kHugePage * kHugePage) {
    mapped_ = static_cast<uint8_t*>(mmap(nullptr, bytes_ + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (mapped_ == MAP_FAILED) throw std::bad_alloc();
    data_ = mapped_ + (kHugePage - reinterpret_cast<uintptr_t>(mapped_) % kHugePage) % kHugePage;
#if defined(MADV_HUGEPAGE)
    madvise(data_, bytes_, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);  // a hint: what is refused costs speed only
#else
    (void)huge;
#endif
  }
  ~Pages() { munmap(mapped_, bytes_ + kHugePage); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kHugePage = size_t{2} << 20;
  size_t bytes_;
  uint8_t* mapped_;
  uint8_t* data_;
};

}  // namespace octavo
