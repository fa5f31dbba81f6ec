#include "serving.hpp"

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels.hpp"

namespace dense {

extern const ServingKernels serving_plain, serving_avx2, serving_avxvnni, serving_avx512vnni;

namespace {

struct Target {
  const ServingKernels* kernels;
  bool runs;  // on this CPU
};

// Best first.
std::vector<Target> targets() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
  return {{&serving_avx512vnni, has_avx512 && __builtin_cpu_supports("avx512vnni")},
#if defined(RECMILL_AVXVNNI)
          {&serving_avxvnni, has_avx2 && __builtin_cpu_supports("avxvnni")},
#endif
          {&serving_avx2, has_avx2},
          {&serving_plain, true}};
#else
  return {{&serving_plain, true}};
#endif
}

const ServingKernels& choose() {
  kernels();  // refuses an unknown name
  const char* given = std::getenv("RECMILL_SIMD");
  const std::string_view most = given ? given : "";
  for (const auto& [found, runs] : targets()) {
    const std::string_view name = found->name;
    const bool is_allowed = name == "plain" || most.empty() || most == "avx512" || most == name;
    if (runs && is_allowed) return *found;
  }
  return serving_plain;
}

}  // namespace

const ServingKernels& serving_kernels() {
  static const ServingKernels& chosen = choose();
  return chosen;
}

const ServingKernels& serving_kernels(std::string_view name) {
  for (const ServingKernels* found : runnable_serving_kernels())
    if (found->name == name) return *found;
  throw std::invalid_argument("no serving kernels that this CPU runs are called \"" + std::string(name) + "\"");
}

std::vector<const ServingKernels*> runnable_serving_kernels() {
  std::vector<const ServingKernels*> found;
  for (const Target& target : targets())
    if (target.runs) found.push_back(target.kernels);
  return found;
}

}  // namespace dense
