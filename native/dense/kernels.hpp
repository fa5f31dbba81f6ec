// Float32 products of dense layers for one core. Each instruction set has its own build of target.cpp; `kernels()` is
// the best one that this CPU runs.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace dense {

// Columns [begin, begin + width) of a matrix whose rows are a few different vectors.
struct RepeatedColumns {
  size_t begin, width, num_vectors;
  const float* vectors;  // [num_vectors][vector_stride(width)], zeros beyond the width
};

// All repeated columns of a matrix. Row r has vector index[r * num_parts + p] of part p, counted over the vectors of all
// parts one after the other.
struct RepeatedMatrix {
  const RepeatedColumns* parts;
  size_t num_parts;
  const uint32_t* index;   // [rows][num_parts]
  const uint32_t* begins;  // vector v of all is in rows_of[begins[v]...begins[v + 1]], in their order
  const uint32_t* rows_of;
};

// Matrices are rows with a stride in floats. Weights are packed before use: as panels of whole vectors, in an order that
// depends on the target. No kernel allocates memory, and none reads or writes beyond a row's end.
struct Kernels {
  const char* name;
  size_t lanes;  // floats of a vector
  size_t panel;  // columns of packed weights that are next to each other

  // Floats that k x n weights take when packed.
  size_t (*packed_size)(size_t k, size_t n);
  // Packs w[k][n] = weights[k * k_stride + n * n_stride], of which one stride is 1.
  void (*pack)(const float* weights, size_t k_stride, size_t n_stride, size_t k, size_t n, float* packed);
  // y[rows][n] = x[rows][k] w[k][n] + bias[n], and at least 0 with relu. A NaN stays a NaN.
  void (*forward)(size_t rows, size_t k, size_t n, const float* x, size_t x_stride, const float* packed, const float* bias,
                  bool relu, float* y, size_t y_stride);
  // x_grad[rows][n] = y_grad[rows][k] w[k][n], and 0 where x is not above 0; x may be null: all of them.
  void (*input_grad)(size_t rows, size_t k, size_t n, const float* y_grad, size_t y_stride, const float* packed,
                     const float* x, size_t x_stride, float* x_grad, size_t x_grad_stride);
  // w_grad[out][in] (+)= sum over rows of y_grad[row][out] x[row][in]; its rows are w_stride apart.
  void (*weight_grad)(size_t rows, size_t in, size_t out, const float* y_grad, size_t y_stride, const float* x,
                      size_t x_stride, bool add, float* w_grad, size_t w_stride);
  // b_grad[out] (+)= sum over rows of y_grad[row][out].
  void (*bias_grad)(size_t rows, size_t out, const float* y_grad, size_t y_stride, bool add, float* b_grad);

  // Products with repeated columns multiply each vector once. First they are summed, then the other columns are added:
  // y[rows][n] = bias[n] + sum over parts of vectors[index[row]] w[part][n], for packed w[k][n].
  void (*forward_repeated)(size_t rows, size_t k, size_t n, const RepeatedMatrix& x, const float* packed,
                           const float* bias, float* scratch, float* y, size_t y_stride);
  // y[rows][n] += x[rows][count] w[first...first + count][n], and at least 0 with relu, for packed w[k][n].
  void (*forward_add)(size_t rows, size_t first, size_t count, size_t k, size_t n, const float* x, size_t x_stride,
                      const float* packed, bool relu, float* y, size_t y_stride);
  // The gradients of the parts' weights, w_grad[out][part], and of each part's vectors, laid out like them.
  void (*backward_repeated)(size_t in, size_t out, const float* y_grad, size_t y_stride, const RepeatedMatrix& x,
                            const float* weights, float* scratch, float* w_grad, float* const* vector_grads);
};

// Vectors whose products, as wide as a panel, fit the second cache at once.
constexpr size_t REPEATED_TOGETHER = 3072;

inline size_t vector_stride(size_t width) { return (width + 15) / 16 * 16; }
// Floats of scratch that forward_repeated and backward_repeated need.
size_t repeated_scratch(const std::vector<RepeatedColumns>& parts);

// The best target that this CPU runs and that RECMILL_SIMD allows. Throws std::invalid_argument on an unknown name there.
const Kernels& kernels();
// A target by name. Throws std::invalid_argument if there is none, or if this CPU cannot run it.
const Kernels& kernels(std::string_view name);
// Those that this CPU runs, best first.
std::vector<const Kernels*> runnable_kernels();

// A stride for rows of `columns` floats: whole vectors of any target, and no two neighbours on the same cache sets.
inline size_t padded_stride(size_t columns) {
  const size_t whole = (columns + 15) / 16 * 16;
  return whole % 64 == 0 ? whole + 16 : whole;
}

}  // namespace dense
