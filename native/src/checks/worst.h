// Collects one class of cases into one verdict.
#pragma once

#include <cmath>
#include <cstddef>
#include <limits>

#include "checks/kernel_check.h"
#include "checks/scalar_rows.h"

namespace octavo {

class Worst {
 public:
  void value(double got, double want, double bound) {
    const double error = std::fabs(got - want);
    const double share = error <= bound ? (bound > 0 ? error / bound : 0.0) : std::isfinite(error) && bound > 0 ? error / bound : kInfinite;
    if (share < share_) return;
    share_ = share;
    error_ = std::isfinite(error) ? error : kInfinite;
    tolerance_ = bound;
  }
  void row(const float* got, const Bounded& want) {
    for (size_t i = 0; i < want.value.size(); ++i) value(got[i], want.value[i], want.bound[i]);
  }
  // Something that must hold exactly: guards that must survive, bits that must agree.
  void exact(bool holds) {
    if (!holds) value(1.0, 0.0, 0.0);
  }
  KernelCheck verdict(const char* kernel, const std::string& format, const std::string& shape) const {
    return {kernel, format, shape, share_ <= 1.0, error_, tolerance_};
  }

 private:
  static constexpr double kInfinite = std::numeric_limits<double>::infinity();
  double share_ = 0.0, error_ = 0.0, tolerance_ = 0.0;
};

}  // namespace octavo
