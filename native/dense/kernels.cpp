#include "kernels.hpp"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace dense {

extern const Kernels kernels_plain, kernels_avx2, kernels_avx512, kernels_neon;

namespace {

struct Target {
  const Kernels* kernels;
  bool runs;  // on this CPU
};

// Best first.
std::vector<Target> targets() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return {{&kernels_avx512, has_avx2 && __builtin_cpu_supports("avx512f")}, {&kernels_avx2, has_avx2}, {&kernels_plain, true}};
#elif defined(__aarch64__)
  return {{&kernels_neon, true}};
#else
  return {{&kernels_plain, true}};
#endif
}

// Where a name is in the list of targets.
size_t find_target(std::string_view name) {
  std::string names;
  const std::vector<Target> all = targets();
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].kernels->name == name) return i;
    names += (names.empty() ? "" : ", ") + std::string(all[i].kernels->name);
  }
  throw std::invalid_argument("no dense kernels are called \"" + std::string(name) + "\"; there are: " + names);
}

const Kernels& choose() {
  const char* most = std::getenv("RECMILL_SIMD");
  const std::vector<Target> all = targets();
  size_t i = 0;
  try {
    if (most && *most) i = find_target(most);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(std::string("RECMILL_SIMD: ") + error.what());
  }
  while (!all[i].runs) ++i;
  return *all[i].kernels;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

const Kernels& kernels(std::string_view name) {
  const Target target = targets()[find_target(name)];
  if (!target.runs) throw std::invalid_argument("this CPU cannot run the dense kernels \"" + std::string(name) + "\"");
  return *target.kernels;
}

size_t repeated_scratch(const std::vector<RepeatedColumns>& parts) {
  constexpr size_t WIDEST_PANEL = 32;  // of any target
  size_t vectors = REPEATED_TOGETHER, stride = 0;
  for (const RepeatedColumns& part : parts) {
    vectors = std::max(vectors, part.num_vectors);
    stride = std::max(stride, vector_stride(part.width));
  }
  return WIDEST_PANEL * (vectors + stride);
}

std::vector<const Kernels*> runnable_kernels() {
  std::vector<const Kernels*> found;
  for (const Target& target : targets())
    if (target.runs) found.push_back(target.kernels);
  return found;
}

}  // namespace dense
