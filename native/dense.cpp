// What stands between the matrix products of an MLP: bias and ReLU in one pass, forward and backward.
// torch takes two passes forward (bias into the output before the product, ReLU after it) and two backward.
#include <algorithm>
#include <optional>

#include "arrays.hpp"

// One version for each instruction set; all of them add in the same order, so every machine rounds alike.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define EVERY_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define EVERY_CPU
#endif

namespace {

using Matrix = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

EVERY_CPU void add_bias(float* __restrict values, const float* __restrict bias, size_t rows, size_t columns) {
  for (size_t row = 0; row < rows; ++row, values += columns)
    for (size_t i = 0; i < columns; ++i) values[i] += bias[i];
}

EVERY_CPU void add_bias_relu(float* __restrict values, const float* __restrict bias, size_t rows, size_t columns) {
  for (size_t row = 0; row < rows; ++row, values += columns)
    for (size_t i = 0; i < columns; ++i) {
      const float value = values[i] + bias[i];
      values[i] = value < 0.0f ? 0.0f : value;  // NaN stays NaN
    }
}

EVERY_CPU void sum_rows(const float* __restrict grads, float* __restrict sums, size_t rows, size_t columns) {
  for (size_t row = 0; row < rows; ++row, grads += columns)
    for (size_t i = 0; i < columns; ++i) sums[i] += grads[i];
}

EVERY_CPU void mask_and_sum_rows(float* __restrict grads, const float* __restrict activations, float* __restrict sums,
                                 size_t rows, size_t columns) {
  for (size_t row = 0; row < rows; ++row, grads += columns, activations += columns)
    for (size_t i = 0; i < columns; ++i) {
      const float grad = activations[i] > 0.0f ? grads[i] : 0.0f;
      grads[i] = grad;
      sums[i] += grad;
    }
}

void check_columns(const Matrix& matrix, const InOut<float>& vector) {
  if (matrix.shape(1) != vector.size()) throw std::invalid_argument("a bias needs one value for each column");
}

// values <- values + bias, and at least 0 with relu.
void bias_relu(Matrix values, InOut<float> bias, bool relu) {
  check_columns(values, bias);
  nb::gil_scoped_release release;
  (relu ? add_bias_relu : add_bias)(values.data(), bias.data(), values.shape(0), values.shape(1));
}

// bias_grads <- sums of the columns of grads; with relu, grads are first set to 0 where the activation is not above 0.
void bias_relu_backward(Matrix grads, Matrix activations, InOut<float> bias_grads, bool relu) {
  check_columns(grads, bias_grads);
  const size_t rows = grads.shape(0), columns = grads.shape(1);
  if (activations.shape(0) != rows || activations.shape(1) != columns)
    throw std::invalid_argument("gradients and activations differ in shape");
  nb::gil_scoped_release release;
  std::fill(bias_grads.data(), bias_grads.data() + columns, 0.0f);
  if (relu) mask_and_sum_rows(grads.data(), activations.data(), bias_grads.data(), rows, columns);
  else sum_rows(grads.data(), bias_grads.data(), rows, columns);
}

}  // namespace

void register_dense(nb::module_& m) {
  m.def("bias_relu", &bias_relu, nb::arg("values"), nb::arg("bias"), nb::arg("relu"));
  m.def("bias_relu_backward", &bias_relu_backward, nb::arg("grads"), nb::arg("activations"), nb::arg("bias_grads"),
        nb::arg("relu"));
}
