// MLPs of many sizes, forward and backward, on every target that this CPU runs: a program for the sanitizers. All arrays
// are exactly as long as promised. Several threads share the packed weights. Build it with
//   cmake -S native -B build/asan -DRECMILL_SANITIZE=address,undefined      (or thread)
//   cmake --build build/asan --target dense_check && build/asan/dense_check
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>

#include "dense/mlp.hpp"

namespace {

constexpr float TOLERANCE = 2e-4f;

// On the heap and exactly this long, so that a read beyond the end is seen.
std::unique_ptr<float[]> random_floats(size_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-0.5f, 0.5f);
  std::unique_ptr<float[]> floats(new float[size]);
  for (size_t i = 0; i < size; ++i) floats[i] = uniform(random);
  return floats;
}

void require_close(float found, float expected, const char* what, const char* target) {
  if (std::fabs(found - expected) <= TOLERANCE) return;
  std::fprintf(stderr, "failed: %s of %s is %g, expected %g\n", what, target, found, expected);
  std::exit(1);
}

// Sizes in -> hidden -> 1, outputs summed: gradients by the chain rule in plain loops.
struct Problem {
  size_t rows, in, hidden;
  std::unique_ptr<float[]> x = random_floats(rows * in, 1), first = random_floats(hidden * in, 2),
                           bias = random_floats(hidden, 3), second = random_floats(hidden, 4);

  float activation(size_t row, size_t unit) const {
    float sum = bias[unit];
    for (size_t i = 0; i < in; ++i) sum += x[row * in + i] * first[unit * in + i];
    return sum > 0 ? sum : 0;
  }

  dense::PackedMlp pack(const dense::Kernels& kernels) const {
    dense::PackedMlp mlp({{in, hidden, true}, {hidden, 1, false}}, true, kernels);
    const float zero = 0;
    mlp.pack(0, first.get(), bias.get());
    mlp.pack(1, second.get(), &zero);
    return mlp;
  }

  void solve(const dense::PackedMlp& mlp, const char* target) const {
    auto between = random_floats(mlp.hidden_size(rows), 5), y = random_floats(rows, 6), ones = random_floats(rows, 7);
    auto of_first = random_floats(hidden * in, 8), of_bias = random_floats(hidden, 9), of_second = random_floats(hidden, 10);
    auto of_last = random_floats(1, 11), of_x = random_floats(rows * in, 12);
    std::fill_n(ones.get(), rows, 1.0f);
    mlp.forward(rows, x.get(), in, y.get(), 1, between.get());
    mlp.forward(rows, x.get(), in, y.get(), 1);
    mlp.backward({rows, x.get(), between.get(), y.get()}, ones.get(),
                 {{of_first.get(), of_second.get()}, {of_bias.get(), of_last.get()}, of_x.get()});
    check(y.get(), of_first.get(), of_second.get(), of_x.get(), target);
    require_close(of_last[0], static_cast<float>(rows), "gradient of the last bias", target);
  }

  void check(const float* y, const float* of_first, const float* of_second, const float* of_x, const char* target) const {
    const size_t row = rows - 1, unit = hidden - 1, column = in - 1;  // where remainders are
    float output = 0, by_column = 0, by_unit = 0, by_weight = 0;
    for (size_t u = 0; u < hidden; ++u) {
      output += activation(row, u) * second[u];
      by_column += activation(row, u) > 0 ? second[u] * first[u * in + column] : 0;
    }
    for (size_t r = 0; r < rows; ++r) {
      by_unit += activation(r, unit);
      by_weight += activation(r, unit) > 0 ? second[unit] * x[r * in + column] : 0;
    }
    require_close(y[row], output, "an output", target);
    require_close(of_x[row * in + column], by_column, "gradient of an input", target);
    require_close(of_second[unit], by_unit, "gradient of a weight", target);
    require_close(of_first[unit * in + column], by_weight, "gradient of a weight through ReLU", target);
  }
};

}  // namespace

int main() {
  for (const dense::Kernels* kernels : dense::runnable_kernels())
    for (const size_t in : {1, 13, 16, 33})
      for (const size_t hidden : {1, 8, 17, 31, 64})
        for (const size_t rows : {1, 5, 257}) {
          const Problem problem{rows, in, hidden};
          const dense::PackedMlp mlp = problem.pack(*kernels);
          std::thread other([&] { problem.solve(mlp, kernels->name); });
          problem.solve(mlp, kernels->name);
          other.join();
        }
  std::puts("all held");
}
