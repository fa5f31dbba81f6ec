// MLPs of many sizes, forward and backward, on every target that this CPU runs: a program for the sanitizers. All arrays
// are exactly as long as promised. Several threads share the packed weights. Build it with
//   cmake -S native -B build/asan -DRECMILL_SANITIZE=address,undefined      (or thread)
//   cmake --build build/asan --target dense_check && build/asan/dense_check
#include <algorithm>
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

  void solve(const dense::PackedMlp& mlp, const char* target, const dense::Repeats* repeats = nullptr) const {
    auto between = random_floats(mlp.hidden_size(rows), 5), y = random_floats(rows, 6), ones = random_floats(rows, 7);
    auto of_first = random_floats(hidden * in, 8), of_bias = random_floats(hidden, 9), of_second = random_floats(hidden, 10);
    auto of_last = random_floats(1, 11), of_x = random_floats(rows * in, 12);
    std::fill_n(ones.get(), rows, 1.0f);
    mlp.forward(rows, x.get(), in, y.get(), 1);
    mlp.forward(rows, x.get(), in, y.get(), 1, between.get(), repeats);
    mlp.backward({rows, x.get(), between.get(), y.get(), repeats, first.get()}, ones.get(),
                 {{of_first.get(), of_second.get()}, {of_bias.get(), of_last.get()}, of_x.get()});
    if (repeats) spread(*repeats, of_x.get());
    check(y.get(), of_first.get(), of_second.get(), of_x.get(), target);
    require_close(of_last[0], static_cast<float>(rows), "gradient of the last bias", target);
  }

  // Gives the last row what its id's rows have together, less what the others would have on their own.
  void spread(const dense::Repeats& repeats, float* of_x) const {
    const auto& features = repeats.ids.features;
    const auto& index = repeats.ids.index;
    const size_t count = features.size();
    const auto id_of = [&](size_t row) { return index[row * count + count - 1]; };
    size_t before = 0;  // different ids of the other features
    for (size_t f = 0; f + 1 < count; ++f) before += features[f].first.size();
    const size_t column = in - 1;
    double sum = of_x[features.back().first[id_of(rows - 1) - before] * in + column];  // thousands of terms are taken from it
    for (size_t r = 0; r + 1 < rows; ++r)
      if (id_of(r) == id_of(rows - 1))
        for (size_t u = 0; u < hidden; ++u) sum -= activation(r, u) > 0 ? second[u] * first[u * in + column] : 0;
    of_x[(rows - 1) * in + column] = static_cast<float>(sum);
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

// Three features of few ids, the last one's vectors at the very end of a row: as with plain inputs that are the same.
void check_repeats(const dense::Kernels& kernels, size_t begin, size_t width, size_t rows) {
  std::vector<std::vector<int64_t>> ids(3);
  for (size_t feature = 0; feature < ids.size(); ++feature)
    for (size_t row = 0; row < rows; ++row) ids[feature].push_back(static_cast<int64_t>(row * row % (2 + 3 * feature)));
  const auto found = dense::find_repeats(rows, {ids[0].data(), nullptr, ids[2].data()}, width);
  const Problem problem{rows, begin + ids.size() * width, 33};
  size_t before = 0;
  for (size_t f = 0; f < found.features.size(); ++f) {
    const auto& [feature, first] = found.features[f];
    for (size_t row = 0; row < rows; ++row)
      std::copy_n(&problem.x[first[found.index[row * found.features.size() + f] - before] * problem.in + begin + feature * width],
                  width, &problem.x[row * problem.in + begin + feature * width]);
    before += first.size();
  }
  const dense::Repeats repeats{found, begin, width};
  problem.solve(problem.pack(kernels), kernels.name, found.features.empty() ? nullptr : &repeats);
}

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
  for (const dense::Kernels* kernels : dense::runnable_kernels())
    for (const size_t begin : {0, 1, 16})
      for (const size_t width : {7, 8, 16, 20, 33})
        for (const size_t rows : {40, 300}) {
          std::thread other([&] { check_repeats(*kernels, begin, width, rows); });
          check_repeats(*kernels, begin, width, rows);
          other.join();
        }
  std::puts("all held");
}
