// Random rankers and requests from several threads, each compared with plain loops in double: a program for the sanitizers.
// All arrays are exactly as long as promised. Build it with
//   cmake -S native -B build/asan -DRECMILL_SANITIZE=address,undefined      (or thread)
//   cmake --build build/asan --target rank_stress && build/asan/rank_stress
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>

#include "rank.hpp"

namespace {

using Random = std::mt19937;
using Floats = std::vector<float>;

size_t draw(Random& random, size_t least, size_t most) { return std::uniform_int_distribution<size_t>(least, most)(random); }

Floats draw_floats(Random& random, size_t size) {
  std::uniform_real_distribution<float> uniform(-0.5f, 0.5f);
  Floats floats(size);
  for (float& value : floats) value = uniform(random);
  floats.shrink_to_fit();
  return floats;
}

rank::Linear draw_linear(Random& random, size_t in, size_t out) {
  return {in, out, draw_floats(random, in * out), draw_floats(random, out)};
}

std::vector<rank::Linear> draw_chain(Random& random, size_t in, const std::vector<size_t>& sizes) {
  std::vector<rank::Linear> layers;
  for (const size_t out : sizes) layers.push_back(draw_linear(random, in, out)), in = out;
  return layers;
}

size_t pairs(size_t count) { return count ? count * (count - 1) / 2 : 0; }

rank::Layers draw_layers(Random& random) {
  rank::Layers l;
  l.is_dot = draw(random, 0, 1), l.user_numbers = draw(random, 0, 5), l.item_numbers = draw(random, 0, 1) * draw(random, 1, 4);
  const bool has_bottom = l.user_numbers + l.item_numbers > 0 && (l.is_dot || draw(random, 0, 1));
  l.dim = l.is_dot ? draw(random, 2, 19) : 0;
  for (size_t f = draw(random, 1, 40); f--;) {
    l.dims.push_back(l.is_dot && draw(random, 0, 1) ? l.dim : draw(random, 1, 20));
    if (l.is_dot) l.projections.push_back(l.dims.back() == l.dim ? Floats() : draw_floats(random, l.dims.back() * l.dim));
  }
  l.user_vectors = l.is_dot ? draw(random, 0, 4) * l.dim : draw(random, 0, 30);
  if (has_bottom) l.bottom = draw_chain(random, l.user_numbers + l.item_numbers, {draw(random, 1, 33), l.is_dot ? l.dim : draw(random, 1, 20)});
  const size_t below = has_bottom ? l.bottom.back().out : 0;
  const bool below_once = has_bottom && !l.item_numbers, below_each = has_bottom && l.item_numbers;
  size_t once = below_once ? below : has_bottom ? 0 : l.user_numbers, each = below_each ? below : has_bottom ? 0 : l.item_numbers;
  if (l.is_dot) {
    const size_t users = l.user_vectors / l.dim + below_once, items = l.dims.size() + below_each;
    once += pairs(users), each += users * items + pairs(items);
  } else {
    once += l.user_vectors;
    for (const size_t dim : l.dims) each += dim;
  }
  const std::vector<size_t> hidden = draw(random, 0, 4) ? std::vector<size_t>{draw(random, 1, 150), draw(random, 1, 70)} : std::vector<size_t>{};
  const size_t first = hidden.empty() ? 1 : hidden[0];
  if (!each) l.dims.push_back(3), each = 3;
  l.once = draw_linear(random, once, first), l.each = draw_linear(random, each, first);
  l.each.bias.clear();
  if (!hidden.empty()) l.rest = draw_chain(random, first, {hidden[1], 1});
  return l;
}

// Rows of every type, and what they are as floats.
struct Table {
  size_t num_rows, dim;
  dense::RowType type;
  Floats floats, scales;
  std::vector<int8_t> bytes;
  std::vector<uint16_t> halves;

  Table(Random& random, size_t dim) : num_rows(draw(random, 1, 300)), dim(dim), type(static_cast<dense::RowType>(draw(random, 0, 2))) {
    floats = draw_floats(random, num_rows * dim);
    if (type == dense::RowType::INT8) {
      scales = draw_floats(random, num_rows), bytes.resize(num_rows * dim);
      for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<int8_t>(draw(random, 0, 254)) , floats[i] = static_cast<float>(bytes[i]) * scales[i / dim];
    } else if (type == dense::RowType::FLOAT16) {
      halves.resize(num_rows * dim);
      for (size_t i = 0; i < halves.size(); ++i) {  // of the float's bits, those that a half has
        uint32_t bits;
        std::memcpy(&bits, &floats[i], 4);
        const uint32_t exponent = bits >> 23 & 0xFF;
        halves[i] = exponent < 113 ? 0 : static_cast<uint16_t>((bits >> 16 & 0x8000) | (exponent - 112) << 10 | (bits >> 13 & 0x3FF));
        bits = exponent < 113 ? 0 : bits & 0xFFFFE000;
        std::memcpy(&floats[i], &bits, 4);
      }
    }
  }
  dense::Rows rows() const {
    const void* values = type == dense::RowType::FLOAT32 ? static_cast<const void*>(floats.data())
                         : type == dense::RowType::INT8  ? static_cast<const void*>(bytes.data())
                                                         : static_cast<const void*>(halves.data());
    return {type, values, type == dense::RowType::INT8 ? scales.data() : nullptr, dim};
  }
};

struct Problem {
  rank::Layers layers;
  std::vector<Table> tables;
  Table wide;

  explicit Problem(Random& random) : layers(draw_layers(random)), wide(random, 1) {
    for (const size_t dim : layers.dims) tables.emplace_back(random, dim);
  }
};

// One request, with arrays of its own.
struct Asked {
  const Problem& problem;
  size_t count;
  Floats user_numbers, user_vectors, item_numbers;
  std::vector<std::unique_ptr<int64_t[]>> slots;

  Asked(const Problem& problem, Random& random)
      : problem(problem), count(draw(random, 1, 600)), user_numbers(draw_floats(random, problem.layers.user_numbers)),
        user_vectors(draw_floats(random, problem.layers.user_vectors)),
        item_numbers(draw_floats(random, count * problem.layers.item_numbers)) {
    for (size_t f = 0; f <= problem.tables.size(); ++f) {
      const Table& table = f < problem.tables.size() ? problem.tables[f] : problem.wide;
      const size_t different = draw(random, 0, 1) ? table.num_rows : std::min<size_t>(table.num_rows, 5);
      slots.emplace_back(new int64_t[count]);
      for (size_t i = 0; i < count; ++i) slots[f][i] = static_cast<int64_t>(draw(random, 0, different - 1));
    }
  }

  rank::Request request() const {
    rank::Request r;
    r.count = count, r.user_numbers = user_numbers.data(), r.user_vectors = user_vectors.data();
    r.item_numbers = item_numbers.data(), r.user_wide = 0.25f;
    for (size_t f = 0; f < problem.tables.size(); ++f) r.features.push_back({problem.tables[f].rows(), slots[f].get()});
    r.wide.push_back({problem.wide.rows(), slots.back().get()});
    return r;
  }

  using Doubles = std::vector<double>;
  static Doubles through(const rank::Linear& layer, const Doubles& x, bool relu) {
    Doubles y(layer.out);
    for (size_t n = 0; n < layer.out; ++n) {
      y[n] = layer.bias.empty() ? 0 : layer.bias[n];
      for (size_t k = 0; k < layer.in; ++k) y[n] += x[k] * layer.weights[n * layer.in + k];
      if (relu && y[n] < 0) y[n] = 0;
    }
    return y;
  }
  static void push_pairs(const std::vector<Doubles>& left, const std::vector<Doubles>& right, bool below, Doubles& to) {
    for (size_t i = 0; i < left.size(); ++i)
      for (size_t j = 0; j < (below ? i : right.size()); ++j) {
        double sum = 0;
        for (size_t d = 0; d < left[i].size(); ++d) sum += left[i][d] * right[j][d];
        to.push_back(sum);
      }
  }

  double logit(size_t item) const {
    const rank::Layers& l = problem.layers;
    Doubles numbers(user_numbers.begin(), user_numbers.end()), once, each;
    const float* own = item_numbers.data() + item * l.item_numbers;
    numbers.insert(numbers.end(), own, own + l.item_numbers);
    std::vector<Doubles> users, items;
    if (!l.bottom.empty()) {
      Doubles below = numbers;
      for (const rank::Linear& layer : l.bottom) below = through(layer, below, true);
      (l.item_numbers ? each : once) = below;
      if (l.is_dot) (l.item_numbers ? items : users).push_back(below);
    } else {
      once.assign(user_numbers.begin(), user_numbers.end());
      each.assign(own, own + l.item_numbers);
    }
    for (size_t f = 0; f < l.dims.size(); ++f) {
      const float* row = problem.tables[f].floats.data() + static_cast<size_t>(slots[f][item]) * l.dims[f];
      Doubles vector(row, row + l.dims[f]);
      if (!l.is_dot) {
        each.insert(each.end(), vector.begin(), vector.end());
        continue;
      }
      if (!l.projections[f].empty()) {
        Doubles projected(l.dim);
        for (size_t d = 0; d < l.dim; ++d)
          for (size_t k = 0; k < l.dims[f]; ++k) projected[d] += vector[k] * l.projections[f][k * l.dim + d];
        vector = projected;
      }
      items.push_back(vector);
    }
    if (l.is_dot) {
      for (size_t u = 0; u < l.user_vectors; u += l.dim) users.emplace_back(user_vectors.begin() + static_cast<long>(u), user_vectors.begin() + static_cast<long>(u + l.dim));
      push_pairs(users, users, true, once);
      push_pairs(items, users, false, each), push_pairs(items, items, true, each);
    } else {
      once.insert(once.end(), user_vectors.begin(), user_vectors.end());
    }
    Doubles y = through(l.once, once, false);
    const Doubles added = through(l.each, each, false);
    for (size_t n = 0; n < y.size(); ++n) y[n] = l.rest.empty() ? y[n] + added[n] : std::max(0.0, y[n] + added[n]);
    for (size_t i = 0; i < l.rest.size(); ++i) y = through(l.rest[i], y, i + 1 < l.rest.size());
    return y[0] + 0.25 + problem.wide.floats[static_cast<size_t>(slots.back()[item])];
  }
};

void require_close(double found, double expected, double tolerance, const char* what) {
  if (std::fabs(found - expected) <= tolerance * (1 + std::fabs(expected))) return;
  std::fprintf(stderr, "failed: %s gives %g, expected %g\n", what, found, expected);
  std::exit(1);
}

rank::Ranges ranges_of(const rank::Ranker& ranker, const Asked& asked) {
  const rank::Layers& l = ranker.layers();
  Floats inputs(asked.count * l.each.in);
  ranker.inputs(asked.request(), inputs.data());
  std::vector<Floats> hidden;
  std::vector<float*> outputs;
  for (const rank::Linear& layer : l.rest) hidden.emplace_back(asked.count * layer.in);
  for (Floats& one : hidden) outputs.push_back(one.data());
  ranker.hidden(asked.request(), outputs);
  const auto largest = [](const Floats& rows, size_t columns) {
    Floats most(columns);
    for (size_t i = 0; i < rows.size(); ++i) most[i % columns] = std::max(most[i % columns], std::fabs(rows[i]));
    return most;
  };
  rank::Ranges ranges{largest(inputs, l.each.in), {}};
  for (size_t i = 0; i < hidden.size(); ++i) ranges.hidden.push_back(largest(hidden[i], l.rest[i].in));
  return ranges;
}

// Products in floats are what plain loops give; those in bytes what the plain target gives for the same bytes, up to a
// rounded value that falls on the other side.
void check_request(const rank::Ranker& floats, const rank::Ranker& bytes, const rank::Ranker& plain_bytes, const Asked& asked,
                   const char* target) {
  std::unique_ptr<float[]> logits(new float[asked.count]), plain(new float[asked.count]);
  floats.rank(asked.request(), logits.get());
  double largest = 1;
  for (size_t i = 0; i < asked.count; ++i) largest = std::max<double>(largest, std::fabs(logits[i]));
  for (size_t i = 0; i < asked.count; i += 1 + i / 8) require_close(logits[i], asked.logit(i), 1e-5 * largest, target);
  bytes.rank(asked.request(), logits.get());
  plain_bytes.rank(asked.request(), plain.get());
  for (size_t i = 0; i < asked.count; ++i) require_close(logits[i], plain[i], 0.02 * largest, target);
}

void stress(uint32_t seed, const dense::Kernels& kernels, const dense::ServingKernels& serving) {
  Random random(seed);
  const Problem problem(random);
  rank::Ranker floats(problem.layers, kernels, serving), bytes(problem.layers, kernels, serving);
  rank::Ranker plain_bytes(problem.layers, kernels, dense::serving_kernels("plain"));
  if (!problem.layers.rest.empty()) {
    const rank::Ranges ranges = ranges_of(floats, Asked(problem, random));
    bytes.use_bytes(ranges), plain_bytes.use_bytes(ranges);
  }
  std::vector<std::thread> threads;
  for (uint32_t thread = 0; thread < 3; ++thread)
    threads.emplace_back([&, thread] {
      Random own(seed * 1000 + thread);
      for (int request = 0; request < 3; ++request) {
        const Asked asked(problem, own);
        check_request(floats, bytes, plain_bytes, asked, serving.name);
      }
    });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main() {
  uint32_t seed = 0;
  for (const dense::Kernels* kernels : dense::runnable_kernels())
    for (const dense::ServingKernels* serving : dense::runnable_serving_kernels())
      for (int problem = 0; problem < 8; ++problem) stress(++seed, *kernels, *serving);
  std::printf("ok: %u rankers\n", seed);
}
