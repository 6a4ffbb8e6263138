// Octavo's own thread pool: pinned workers that poll briefly between phases of a step and sleep between steps.
//
// A step is one share(): threads enter the same function and walk the same phases. What a phase waits for is its work, not its
// threads: once all of the work is done everybody goes on, and a thread that the system had put aside meanwhile comes after. So a
// process whose threads have not each a core to themselves goes on with those that run. each() is for work that every thread has
// to do. The calling thread is thread 0, so a pool of one has no other thread and no synchronisation. Not reentrant; one caller
// at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace octavo {

// The CPUs the calling thread may run on, in order; empty where the system does not say.
std::vector<int> allowed_cpus();

// A number that threads wait for. It never comes back to a value that somebody may wait to see gone.
class alignas(64) WaitedNumber {
 public:
  uint32_t get() const { return (uint32_t)state_.load(); }
  // The next value, and those that wait are woken. By one thread at a time.
  void set(uint32_t value) {
    if (state_.exchange(value) & kSleepers) wake();
  }
  // Returns as soon as the value is another than `old`. own_core: whether the threads waited for should each have a core.
  void wait_while(uint32_t old, bool own_core);
  // Those that sleep look again. Whoever sets a value does it, and may be held up before: others have set further ones by then.
  void wake();

 private:
  // Beside the value, whether somebody sleeps until it changes. In one word: whoever is late to wake those of one value clears nothing
  // that those of the next have set.
  static constexpr uint64_t kSleepers = uint64_t{1} << 32;
  std::atomic<uint64_t> state_{0};
};

// Of a phase's work, what one thread has done and what there is in all, in units of the caller's choice.
struct Work {
  int done = 0, total = 0;
};

class ThreadPool {
 public:
  // threads >= 1. Workers are pinned when there are as many threads as CPUs in this process's affinity mask. Throws
  // std::invalid_argument, or std::system_error when the system gives no more threads.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return threads_; }

  // How far a thread has come in a share().
  class Turn {
   public:
    int thread() const { return thread_; }

    // Whether the phase still has work, for all that is known. A thread that comes late passes over what has none.
    bool open() const { return pool_.threads_ == 1 || pool_.phase_.get() == phase_; }

    // End of a phase: returns when all of its work is done. False: the share is over without this thread, which must return at
    // once and touch nothing that belongs to it. The caller's own thread never gets false.
    [[nodiscard]] bool meet(Work work) {
      return meet_then(work, [] {});
    }

    // As meet; whoever does the last of the work calls once() before any goes on (without work, whoever is first). For work too
    // small to share: it costs one meeting where a phase of its own would cost two. once must not throw.
    template <class F>
    [[nodiscard]] bool meet_then(Work work, F&& once) {
      if (pool_.threads_ == 1) {
        once();
        return true;
      }
      if (!pool_.finishes(work, phase_)) return follow();
      once();
      pool_.phase_.set(++phase_);
      return true;
    }

   private:
    friend class ThreadPool;
    Turn(ThreadPool& pool, int thread) : pool_(pool), thread_(thread), run_(pool.members_[(size_t)thread].run), phase_(pool.first_phase_) {}
    bool follow();

    ThreadPool& pool_;
    const int thread_;
    const uint32_t run_;  // which share this is
    uint32_t phase_;
  };

  // Call f(turn) on the calling thread, and on those others that come in time; returns when the caller has and nobody is left in
  // f. All of them must come to the same meetings in the same order, and the last phase must end in one. What threads take to do
  // between meetings must be handed out (by a counter of its own for each phase), since nobody is sure to come. f must not throw.
  template <class F>
  void share(F&& f) {
    run([](void* c, Turn& turn) noexcept { (*static_cast<std::remove_reference_t<F>*>(c))(turn); }, &f);
  }

  // Call f(thread) on every thread; returns when all have. f must not throw (std::terminate); see each_or_throw. After a fork the
  // child has no workers: then this and share throw std::runtime_error.
  template <class F>
  void each(F&& f) {
    share([&](Turn& turn) {
      f(turn.thread());
      (void)turn.meet({1, threads_});
    });
  }

  // As each, for an f that may throw: when all have returned, one of their exceptions goes on to the caller.
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

 private:
  // A worker is inside while it may touch what belongs to a share. It is outside while it waits, so that a share can end without it.
  struct Member {
    WaitedNumber moves;  // odd: inside
    uint32_t run = 0;    // which share it has entered last; its own
  };

  void run(void (*fn)(void*, Turn&), void* context);
  void work(int thread);
  bool enter(int thread, uint32_t run);
  void leave(int thread);
  void stop_workers();
  bool finishes(Work work, uint32_t phase);

  const int threads_;
  const long owner_pid_;
  bool own_core_ = false;
  std::unique_ptr<Member[]> members_;
  std::vector<std::thread> workers_;
  // Of the share; written while nobody is inside.
  void (*fn_)(void*, Turn&) = nullptr;
  void* context_ = nullptr;
  uint32_t first_phase_ = 0;
  WaitedNumber runs_;                               // odd: a share is open
  WaitedNumber phase_;                              // phases that have ended, of all shares
  alignas(64) std::atomic<int> done_{0};            // units of the phase's work
  alignas(64) std::atomic<uint32_t> claimed_{~0u};  // the last phase without work that somebody has taken
  std::atomic<bool> stop_{false};
};

}  // namespace octavo
