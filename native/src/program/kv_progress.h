// Which layers' keys and values the running step has stored, told while it runs: so that a layer can be sent on while later ones are
// computed. Threads of the step count rows; any other thread may ask, or wait.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace octavo {

class KVProgress {
 public:
  // Before the first step.
  void resize(size_t num_layers) {
    stored_.clear();
    for (size_t i = 0; i < num_layers; ++i) stored_.push_back(std::make_unique<Counter>());
  }

  // The next step begins, with `rows` rows. Everything of the step before is stored.
  void begin(int rows) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (auto& s : stored_) s->rows.store(0, std::memory_order_relaxed);
      rows_ = rows;
      ++step_;
    }
    changed_.notify_all();
  }

  // By threads of the step: `rows` more rows of a layer are stored.
  void add(int layer, int rows) {
    const int before = stored_[(size_t)layer]->rows.fetch_add(rows);
    if (before + rows < rows_ || !num_waiting_.load()) return;
    { std::lock_guard<std::mutex> lock(mutex_); }  // whoever has looked already waits by now
    changed_.notify_all();
  }

  // The number of the step that runs, or ran last; the first is 1.
  int64_t step() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return step_;
  }

  // Whether `layer` of step number `step` is stored, waiting for it up to `timeout_s`.
  bool wait(int64_t step, int layer, double timeout_s) const {
    num_waiting_.fetch_add(1);
    std::unique_lock<std::mutex> lock(mutex_);
    const auto over = [&] { return step_ > step || (step_ == step && stored_[(size_t)layer]->rows.load() >= rows_); };
    const bool done = changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), over);
    num_waiting_.fetch_sub(1);
    return done;
  }

 private:
  struct alignas(64) Counter { std::atomic<int> rows{0}; };

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  mutable std::atomic<int> num_waiting_{0};
  std::vector<std::unique_ptr<Counter>> stored_;  // by layer
  int rows_ = 0;  // written between steps alone
  int64_t step_ = 0;
};

}  // namespace octavo
