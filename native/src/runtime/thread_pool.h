// Octavo's own thread pool: pinned workers that spin briefly between phases of a step and sleep between steps.
//
// One step is one run(): every thread enters the same function with its index and meets the others at barriers. The calling
// thread is thread 0, so a pool of one has no other thread and no synchronisation. Not reentrant; one caller at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace octavo {

// The CPUs the calling thread may run on, in order; empty where the system does not say.
std::vector<int> allowed_cpus();

class ThreadPool {
 public:
  // threads >= 1. Workers are pinned when there are as many threads as CPUs in this process's affinity mask. Throws
  // std::invalid_argument, or std::system_error when the system gives no more threads.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return threads_; }

  // Call fn(context, thread) on every thread; returns when all have. fn must not throw: others may be waiting for it at a
  // barrier. After a fork the child has no workers: then this throws std::runtime_error.
  void run(void (*fn)(void* context, int thread), void* context);

  // Call f(thread) on every thread. f must not throw (std::terminate) when it uses barriers; see each_or_throw.
  template <class F>
  void each(F&& f) {
    run([](void* c, int thread) noexcept { (*static_cast<std::remove_reference_t<F>*>(c))(thread); }, &f);
  }

  // As each, for an f without barriers that may throw: when all have returned, one of their exceptions goes on to the caller.
  template <class F>
  void each_or_throw(F&& f) {
    std::exception_ptr first;
    std::mutex mutex;
    each([&](int thread) {
      try {
        f(thread);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (!first) first = std::current_exception();
      }
    });
    if (first) std::rethrow_exception(first);
  }

  // Inside run(): wait until every thread is here.
  void barrier() {
    barrier_then([] {});
  }

  // As barrier; the last thread to arrive calls once() before any goes on. For work too small to share: it costs one meeting
  // where a phase of its own would cost two. once must not throw.
  template <class F>
  void barrier_then(F&& once) {
    if (threads_ == 1) {
      once();
      return;
    }
    const uint32_t phase = phase_.load();
    if (arrived_.fetch_add(1) + 1 == (uint32_t)threads_) {
      arrived_.store(0);
      once();
      release(phase_);
    } else {
      wait_for(phase_, phase);
    }
  }

 private:
  void work(int thread);
  void stop_workers();
  void release(std::atomic<uint32_t>& word);  // let those waiting for a change of word go on
  void wait_for(const std::atomic<uint32_t>& word, uint32_t old);

  const int threads_;
  int spin_;  // iterations of a busy wait before the futex
  long owner_pid_;
  std::vector<std::thread> workers_;
  void (*fn_)(void*, int) = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<uint32_t> epoch_{0};    // a new run (or stop) has begun
  alignas(64) std::atomic<uint32_t> arrived_{0};  // threads at the barrier
  alignas(64) std::atomic<uint32_t> phase_{0};    // barrier generation
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<bool> stop_{false};
};

}  // namespace octavo
