#pragma once

#include <Python.h>
#include <unistd.h>

namespace aio {

// Lets other threads of Python run while one of these lives. At the program's end the interpreter does not give the lock
// back to a thread that still runs: before Python 3.14 it unwinds the thread's stack, which ends the process at the first
// destructor (std::terminate, SIGABRT). Such a thread stays where it is instead, as it does since 3.14.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      for (;;) ::pause();
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace aio
