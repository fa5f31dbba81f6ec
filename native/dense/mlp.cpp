#include "mlp.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>

namespace dense {

namespace {

constexpr size_t BLOCK = 256;  // rows; 128 and 512 measured no better

// Room for one block, kept by each thread for its next call. In huge pages where the system has them: columns of a block
// are on as many pages as it has rows.
class Scratch {
 public:
  float* room(size_t size) {
    if (size > size_) {
      const size_t bytes = (size * sizeof(float) + PAGE - 1) / PAGE * PAGE;
      floats_.reset(static_cast<float*>(std::aligned_alloc(PAGE, bytes)));
      if (!floats_) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
      madvise(floats_.get(), bytes, MADV_HUGEPAGE);
#endif
      size_ = bytes / sizeof(float);
    }
    return floats_.get();
  }

 private:
  static constexpr size_t PAGE = 2 << 20;
  struct Free {
    void operator()(float* floats) const { std::free(floats); }
  };
  std::unique_ptr<float, Free> floats_;
  size_t size_ = 0;
};

thread_local Scratch block_scratch;

// run(begin, rows) for each block.
template <class Run>
void for_blocks(size_t rows, Run run) {
  for (size_t begin = 0; begin < rows; begin += BLOCK) run(begin, std::min(BLOCK, rows - begin));
}

void copy_rows(size_t rows, size_t columns, const float* from, size_t from_stride, float* to, size_t to_stride) {
  for (size_t row = 0; row < rows; ++row)
    std::memcpy(to + row * to_stride, from + row * from_stride, columns * sizeof(float));
}

// Gradients [rows][columns] where the activation is above 0, else 0.
void mask_rows(size_t rows, size_t columns, const float* grads, const float* activations, float* masked, size_t stride) {
  for (size_t row = 0; row < rows; ++row, grads += columns, activations += columns, masked += stride)
    for (size_t i = 0; i < columns; ++i) masked[i] = activations[i] > 0.0f ? grads[i] : 0.0f;
}

}  // namespace

PackedMlp::PackedMlp(std::vector<LayerShape> shapes, bool trains, const Kernels& kernels)
    : kernels_(kernels), shapes_(std::move(shapes)), trains_(trains), layers_(shapes_.size()) {
  if (shapes_.empty()) throw std::invalid_argument("an MLP needs at least one layer");
  for (size_t i = 0; i < shapes_.size(); ++i) {
    const auto [in, out, relu] = shapes_[i];
    if (in == 0 || out == 0) throw std::invalid_argument("a layer needs inputs and outputs");
    if (i > 0 && in != shapes_[i - 1].out) throw std::invalid_argument("a layer's inputs are not the outputs of the one before");
    layers_[i].forward.resize(kernels_.packed_size(in, out));
    layers_[i].bias.resize(out);
    if (trains) layers_[i].backward.resize(kernels_.packed_size(out, in));
  }
}

void PackedMlp::pack(size_t layer, const float* weights, const float* bias) {
  const auto [in, out, relu] = shapes_[layer];
  Packed& packed = layers_[layer];
  kernels_.pack(weights, 1, in, in, out, packed.forward.data());
  if (trains_) kernels_.pack(weights, in, 1, out, in, packed.backward.data());
  std::copy(bias, bias + out, packed.bias.begin());
}

size_t PackedMlp::hidden_size(size_t rows) const {
  size_t size = 0;
  for (size_t i = 0; i + 1 < shapes_.size(); ++i) size += rows * padded_stride(shapes_[i].out);
  return size;
}

size_t PackedMlp::widest_stride() const {
  size_t widest = padded_stride(in());
  for (const LayerShape& shape : shapes_) widest = std::max(widest, padded_stride(shape.out));
  return widest;
}

void PackedMlp::forward(size_t rows, const float* x, size_t x_stride, float* y, size_t y_stride) const {
  for_blocks(rows, [&](size_t begin, size_t count) {
    float* hidden = block_scratch.room(hidden_size(count));
    forward(count, x + begin * x_stride, x_stride, y + begin * y_stride, y_stride, hidden);
  });
}

void PackedMlp::forward(size_t rows, const float* x, size_t x_stride, float* y, size_t y_stride, float* hidden) const {
  for_blocks(rows, [&](size_t begin, size_t count) {
    const float* from = x + begin * x_stride;
    size_t from_stride = x_stride;
    float* activations = hidden;
    for (size_t i = 0; i < shapes_.size(); ++i) {
      const auto [in, out, relu] = shapes_[i];
      const bool last = i + 1 == shapes_.size();
      const size_t to_stride = last ? y_stride : padded_stride(out);
      float* to = (last ? y : activations) + begin * to_stride;
      kernels_.forward(count, in, out, from, from_stride, layers_[i].forward.data(), layers_[i].bias.data(), relu, to, to_stride);
      from = to;
      from_stride = to_stride;
      activations += rows * to_stride;
    }
  });
}

void PackedMlp::backward(const Pass& pass, const float* output_grads, const Gradients& grads) const {
  if (!trains_) throw std::invalid_argument("this MLP was packed for forward passes only");
  if (pass.rows == 0) {
    for (size_t i = 0; i < shapes_.size(); ++i) {
      std::fill_n(grads.weights[i], shapes_[i].in * shapes_[i].out, 0.0f);
      std::fill_n(grads.biases[i], shapes_[i].out, 0.0f);
    }
  }
  for_blocks(pass.rows, [&](size_t begin, size_t rows) { backward_block(pass, begin, rows, output_grads, grads); });
}

void PackedMlp::backward_block(const Pass& pass, size_t begin, size_t rows, const float* output_grads,
                               const Gradients& grads) const {
  const size_t stride = widest_stride();
  float* given = block_scratch.room(2 * BLOCK * stride);  // gradients of a layer's outputs
  float* next = given + BLOCK * stride;
  const float* activations = pass.hidden + hidden_size(pass.rows);
  const size_t last = shapes_.size() - 1;
  output_grads += begin * out();
  if (shapes_[last].relu) mask_rows(rows, out(), output_grads, pass.outputs + begin * out(), given, padded_stride(out()));
  else copy_rows(rows, out(), output_grads, out(), given, padded_stride(out()));
  for (size_t i = last;; --i) {
    const auto [in, out, relu] = shapes_[i];
    const size_t out_stride = padded_stride(out);
    const float* weights = layers_[i].backward.data();
    const float* x = pass.inputs + begin * in;
    size_t x_stride = in;
    if (i > 0) {
      x_stride = padded_stride(in);
      activations -= pass.rows * x_stride;
      x = activations + begin * x_stride;
      kernels_.input_grad(rows, out, in, given, out_stride, weights, shapes_[i - 1].relu ? x : nullptr, x_stride, next, x_stride);
    } else if (grads.inputs) {
      kernels_.input_grad(rows, out, in, given, out_stride, weights, nullptr, 0, grads.inputs + begin * in, in);
    }
    kernels_.weight_grad(rows, in, out, given, out_stride, x, x_stride, begin > 0, grads.weights[i]);
    kernels_.bias_grad(rows, out, given, out_stride, begin > 0, grads.biases[i]);
    if (i == 0) return;
    std::swap(given, next);
  }
}

}  // namespace dense
