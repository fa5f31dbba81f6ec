// What ranking a request's candidates needs beside the float32 products: products of bytes, rows of tables, sums of rows.
// Each instruction set has its own build of serving_target.cpp, as for kernels.hpp.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace dense {

enum class RowType { FLOAT32, FLOAT16, INT8 };

// Rows of an embedding table; int8 rows are their bytes times their scale.
struct Rows {
  RowType type;
  const void* values;
  const float* scales;  // of int8 rows
  size_t dim;
};

// A hidden layer in bytes: y = max(0, (x w) scales + bias). Columns are filled up to whole panels, inputs to fours.
struct ByteLayer {
  size_t k, n;             // k a multiple of 4, n one of ServingKernels::panel
  const int8_t* packed;    // [panel][k / 4][column][4]
  const float* scales;     // [n]
  const float* inverse;    // [n]: outputs are bytes, y times this; null: outputs are floats
};

struct ServingKernels {
  const char* name;
  size_t panel;  // columns of byte weights that are multiplied at once

  // to[i][dim] = rows[slots[i]] as float32.
  void (*gather)(const Rows& rows, const int64_t* slots, size_t count, float* to, size_t stride);
  // y[row][n] = max(0, y[row][n] + sum over t of tables[t][slots[t * slots_stride + row]]).
  void (*add_rows)(size_t rows, size_t n, float* y, size_t stride, const float* const* tables, size_t num_tables,
                   const int32_t* slots, size_t slots_stride);
  // Dot products of all pairs of vectors, in the order (1, 0), (2, 0), (2, 1), ...
  void (*pair_dots)(size_t count, size_t dim, const float* vectors, float* dots);
  // bytes[i] = x[i] times inverse[i], rounded, within -127 and 127, plus 128; count is a multiple of 16.
  void (*to_bytes)(size_t count, const float* x, const float* inverse, uint8_t* bytes);
  // Rows of bytes through a layer; `bias` differs from request to request.
  void (*byte_layer)(const ByteLayer& layer, size_t rows, const uint8_t* x, size_t x_stride, const float* bias, void* y,
                     size_t y_stride);
};

// The best target that this CPU runs and that RECMILL_SIMD allows: avx512 allows all of them, avx2 and plain no VNNI.
const ServingKernels& serving_kernels();
// A target by name. Throws std::invalid_argument if there is none, or if this CPU cannot run it.
const ServingKernels& serving_kernels(std::string_view name);
// Those that this CPU runs, best first.
std::vector<const ServingKernels*> runnable_serving_kernels();

}  // namespace dense
