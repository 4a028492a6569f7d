// Lets Python threads wait for the native side without the GIL, and handles signals meanwhile.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "binding/gil.h"

namespace fastpersist {

// Call `wait_for` with a short time, without the GIL, until it returns true or the timeout is over; returns whether it
// returned true. Raises the exception of a signal's handler.
template <class WaitFor>
bool WaitWithSignals(const std::optional<double>& timeout_s, WaitFor wait_for) {
  using std::chrono::milliseconds;
  constexpr milliseconds kSignalInterval(50);
  const auto start = std::chrono::steady_clock::now();
  for (;;) {
    milliseconds step = kSignalInterval;
    bool is_last = false;
    if (timeout_s.has_value()) {
      const std::chrono::duration<double> left =
          std::chrono::duration<double>(*timeout_s) - (std::chrono::steady_clock::now() - start);
      is_last = left <= step;
      if (is_last) step = std::max(milliseconds(0), std::chrono::ceil<milliseconds>(left));
    }
    bool there = false;
    {
      const ReleasedGil released;
      there = wait_for(step);
    }
    if (there) return true;
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
    if (is_last) return false;
  }
}

}  // namespace fastpersist
