// Releases the GIL while a thread waits or moves bytes, and takes it back.
//
// At shutdown Python ends every other thread that requests the GIL, by pthread_exit. That is a forced unwinding: it
// calls std::terminate at the first noexcept destructor, such as those of pybind11's guards, and would run destructors
// that need the GIL. Here such a thread stops for ever, as in Python 3.14, and the process ends without it.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace fastpersist {

// Runs `ask`, a call into Python that returns holding the GIL.
template <class Ask>
auto TakeGil(Ask&& ask) {
  try {
    return ask();
  } catch (abi::__forced_unwind&) {
    for (;;) pause();
  }
}

// REQUIRES: the thread holds the GIL.
class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ~ReleasedGil() {
    TakeGil([this] { PyEval_RestoreThread(state_); });
  }
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* const state_;
};

// Runs `call` without the GIL. REQUIRES: the thread holds it.
template <class Call>
auto WithoutGil(Call&& call) {
  const ReleasedGil released;
  return call();
}

// For any thread, whether it holds the GIL or not.
class HeldGil {
 public:
  HeldGil() : state_(TakeGil([] { return PyGILState_Ensure(); })) {}
  ~HeldGil() { PyGILState_Release(state_); }
  HeldGil(const HeldGil&) = delete;
  HeldGil& operator=(const HeldGil&) = delete;

 private:
  const PyGILState_STATE state_;
};

}  // namespace fastpersist
