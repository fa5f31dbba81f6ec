// Fused sparse optimizers. One call is one update of one row by the summed gradient of its key.
//
// w row, g gradient, a/m/v/z/n/t state, lr learning rate, wd weight decay; all per coordinate unless said:
//   sgd              g += wd w;  w -= lr g
//   adagrad          g += wd w;  a += g^2;  w -= lr g / (sqrt(a) + eps)                    state a[dim], from a0
//   rowwise_adagrad  g += wd w;  a += mean(g^2);  w -= lr / (sqrt(a) + eps) g              state a, from a0
//   adam             t += 1;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
//                    w -= lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + wd w)        state m[dim] v[dim] t, from 0
//                    Lazy: t counts the updates of this row. Weight decay is decoupled (AdamW).
//   ftrl             s = (sqrt(n + g^2) - sqrt(n)) / lr;  z += g - s w;  n += g^2;
//                    w = 0 if |z| <= l1 else -(z - sign(z) l1) / ((beta + sqrt(n)) / lr + l2)
//                                                                                          state z[dim] n[dim], from 0, a0
//   adagrad_decay    p = step / decay_period;  a = max(a rate^(p - q), a0);  q = p;  then adagrad
//                    Every period missed since the row's last update counts.               state a[dim] q, from a0, 0
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace embedding {

enum class Optimizer { sgd, adagrad, rowwise_adagrad, adam, ftrl, adagrad_decay };

struct OptimizerOptions {
  Optimizer kind = Optimizer::sgd;
  float eps = 1e-8f, initial_accumulator = 0.0f, weight_decay = 0.0f;
  double beta1 = 0.9, beta2 = 0.999;
  float l1 = 0.0f, l2 = 0.0f, beta = 1.0f;
  double decay_rate = 0.9;
  int64_t decay_period = 100000;
};

inline Optimizer optimizer_named(const std::string& name) {
  if (name == "sgd") return Optimizer::sgd;
  if (name == "adagrad") return Optimizer::adagrad;
  if (name == "rowwise_adagrad") return Optimizer::rowwise_adagrad;
  if (name == "adam") return Optimizer::adam;
  if (name == "ftrl") return Optimizer::ftrl;
  if (name == "adagrad_decay") return Optimizer::adagrad_decay;
  throw std::invalid_argument("no optimizer is called \"" + name +
                              "\"; there are: sgd, adagrad, rowwise_adagrad, adam, ftrl, adagrad_decay");
}

inline size_t state_size(Optimizer kind, size_t dim) {
  switch (kind) {
    case Optimizer::sgd: return 0;
    case Optimizer::adagrad: return dim;
    case Optimizer::rowwise_adagrad: return 1;
    case Optimizer::adam: return 2 * dim + 1;
    case Optimizer::ftrl: return 2 * dim;
    case Optimizer::adagrad_decay: return dim + 1;
  }
  return 0;
}

inline void initialise_state(const OptimizerOptions& options, float* state, size_t dim) {
  const size_t size = state_size(options.kind, dim);
  std::fill(state, state + size, 0.0f);
  const float first = options.initial_accumulator;
  if (options.kind == Optimizer::adagrad || options.kind == Optimizer::adagrad_decay) std::fill(state, state + dim, first);
  if (options.kind == Optimizer::rowwise_adagrad) state[0] = first;
  if (options.kind == Optimizer::ftrl) std::fill(state + dim, state + 2 * dim, first);
}

// Eight partial sums, so that the compiler may use vectors without reordering what we wrote.
inline float sum_of_squares(const float* values, size_t size) {
  float lanes[8] = {};
  size_t i = 0;
  for (; i + 8 <= size; i += 8)
    for (size_t lane = 0; lane < 8; ++lane) lanes[lane] += values[i + lane] * values[i + lane];
  for (size_t lane = 0; i < size; ++i, ++lane) lanes[lane] += values[i] * values[i];
  return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
}

inline void add_decay(float* __restrict grad, const float* __restrict row, float decay, size_t dim) {
  if (decay == 0.0f) return;
  for (size_t i = 0; i < dim; ++i) grad[i] += decay * row[i];
}

inline void adagrad_step(float* __restrict row, float* __restrict sums, const float* __restrict grad, size_t dim, float lr,
                         float eps) {
  for (size_t i = 0; i < dim; ++i) {
    sums[i] += grad[i] * grad[i];
    row[i] -= lr * grad[i] / (std::sqrt(sums[i]) + eps);
  }
}

inline void adam_step(const OptimizerOptions& o, float* __restrict row, float* __restrict m, float* __restrict v,
                      const float* __restrict grad, size_t dim, float lr, double updates) {
  const float b1 = static_cast<float>(o.beta1), b2 = static_cast<float>(o.beta2);
  const float rest1 = static_cast<float>(1.0 - o.beta1), rest2 = static_cast<float>(1.0 - o.beta2);
  const float unbias1 = static_cast<float>(1.0 / (1.0 - std::pow(o.beta1, updates)));
  const float unbias2 = static_cast<float>(1.0 / (1.0 - std::pow(o.beta2, updates)));
  for (size_t i = 0; i < dim; ++i) {
    m[i] = b1 * m[i] + rest1 * grad[i];
    v[i] = b2 * v[i] + rest2 * grad[i] * grad[i];
    row[i] -= lr * (m[i] * unbias1 / (std::sqrt(v[i] * unbias2) + o.eps) + o.weight_decay * row[i]);
  }
}

inline void ftrl_step(const OptimizerOptions& o, float* __restrict row, float* __restrict z, float* __restrict n,
                      const float* __restrict grad, size_t dim, float lr) {
  for (size_t i = 0; i < dim; ++i) {
    const float next = n[i] + grad[i] * grad[i], root = std::sqrt(next);
    z[i] += grad[i] - (root - std::sqrt(n[i])) / lr * row[i];
    n[i] = next;
    const float shrunk = z[i] - std::copysign(o.l1, z[i]);
    row[i] = std::fabs(z[i]) <= o.l1 ? 0.0f : -shrunk / ((o.beta + root) / lr + o.l2);
  }
}

// The gradient is scratch of the caller: weight decay is added in place.
inline void apply(const OptimizerOptions& o, float* row, float* state, float* grad, size_t dim, float lr, int64_t step) {
  switch (o.kind) {
    case Optimizer::sgd:
      add_decay(grad, row, o.weight_decay, dim);
      for (size_t i = 0; i < dim; ++i) row[i] -= lr * grad[i];
      return;
    case Optimizer::adagrad:
      add_decay(grad, row, o.weight_decay, dim);
      return adagrad_step(row, state, grad, dim, lr, o.eps);
    case Optimizer::rowwise_adagrad: {
      add_decay(grad, row, o.weight_decay, dim);
      state[0] += sum_of_squares(grad, dim) / static_cast<float>(dim);
      const float rate = lr / (std::sqrt(state[0]) + o.eps);
      for (size_t i = 0; i < dim; ++i) row[i] -= rate * grad[i];
      return;
    }
    case Optimizer::adam: {
      float& updates = state[2 * dim];
      updates += 1.0f;
      return adam_step(o, row, state, state + dim, grad, dim, lr, updates);
    }
    case Optimizer::ftrl: return ftrl_step(o, row, state, state + dim, grad, dim, lr);
    case Optimizer::adagrad_decay: {
      const float period = static_cast<float>(step / o.decay_period), missed = period - state[dim];
      if (missed > 0.0f) {
        const float kept = static_cast<float>(std::pow(o.decay_rate, static_cast<double>(missed)));
        for (size_t i = 0; i < dim; ++i) state[i] = std::max(state[i] * kept, o.initial_accumulator);
        state[dim] = period;
      }
      add_decay(grad, row, o.weight_decay, dim);
      return adagrad_step(row, state, grad, dim, lr, o.eps);
    }
  }
}

}  // namespace embedding
