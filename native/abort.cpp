// Libraries that cannot allocate may end the process instead of throwing: it then ends with an explanation.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

namespace {

std::string explanation;
int exit_code = 1;

void explain() {
  // Nobody is left to hear of a failure, and nothing else may be done in a signal handler.
  if (write(STDERR_FILENO, explanation.data(), explanation.size()) < 0) return;
}

void explain_and_exit(int) {
  explain();
  _exit(exit_code);
}

// Also of a library that calls exit. An empty text says nothing; code 0 leaves aborts alone again.
void explain_aborts(const std::string& text, int code) {
  static const bool registered = std::atexit(explain) == 0;
  (void)registered;
  explanation = text;
  exit_code = code;
  struct sigaction action = {};
  action.sa_handler = code == 0 ? SIG_DFL : explain_and_exit;
  sigaction(SIGABRT, &action, nullptr);
  sigaction(SIGSEGV, &action, nullptr);
}

// glibc reserves 64 MB of address space for each of up to eight arenas a core: one arena is slower, and much smaller.
void save_address_space() {
#ifdef __GLIBC__
  mallopt(M_ARENA_MAX, 1);
#endif
}

}  // namespace

void register_abort(nanobind::module_& m) {
  m.def("explain_aborts", &explain_aborts, nanobind::arg("text"), nanobind::arg("code"));
  m.def("save_address_space", &save_address_space);
}
