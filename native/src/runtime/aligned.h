// Memory aligned to cache lines, sized once or grown; contents are not kept across a growth.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace octavo {

template <class T>
class AlignedArray {
 public:
  AlignedArray() = default;
  explicit AlignedArray(size_t n) { reserve(n); }
  ~AlignedArray() { std::free(data_); }
  AlignedArray(const AlignedArray&) = delete;
  AlignedArray& operator=(const AlignedArray&) = delete;
  AlignedArray(AlignedArray&& o) noexcept : data_(o.data_), size_(o.size_) { o.data_ = nullptr; o.size_ = 0; }

  // At least n elements; old contents are lost when it grows. Throws std::bad_alloc.
  void reserve(size_t n) {
    if (n <= size_) return;
    std::free(data_);
    data_ = nullptr;
    size_ = 0;
    const size_t bytes = (n * sizeof(T) + 127) / 64 * 64;  // one line of slack: vector tails may read past the end
    data_ = static_cast<T*>(std::aligned_alloc(64, bytes));
    if (!data_) throw std::bad_alloc();
    size_ = n;
  }
  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t size() const { return size_; }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace octavo
