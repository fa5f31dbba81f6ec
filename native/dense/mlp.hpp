// An MLP over blocks of rows: a block goes through all layers while its activations are in the second cache.
// Nothing here knows Python; every call is for one thread, and threads may share a PackedMlp that nobody packs anew.
#pragma once
#include <cstddef>
#include <vector>

#include "kernels.hpp"
#include "repeats.hpp"

namespace dense {

// A linear layer as torch stores it: weights[out][in] and bias[out].
struct LayerShape {
  size_t in, out;
  bool relu;
};

// Repeated features among an MLP's inputs: columns [begin + feature * width, begin + (feature + 1) * width) are the vector
// of a row's id, so that rows with the same id have the same values there.
struct Repeats {
  const RepeatedIds& ids;
  size_t begin, width;
};

// What the gradients of an MLP are computed from, all of them contiguous rows.
struct Pass {
  size_t rows;
  const float* inputs;   // [rows][in]
  const float* hidden;   // as forward left it
  const float* outputs;  // [rows][out]
  const Repeats* repeats = nullptr;  // those of forward
  const float* first_weights = nullptr;  // of the first layer as it was packed; for gradients of the inputs and repeats
};

// Where gradients are written: of each layer [out][in] and [out], and of the inputs [rows][in] or null. With repeats, the
// first row of an id has the sum over all of the id's rows, and the others have 0.
struct Gradients {
  std::vector<float*> weights, biases;
  float* inputs = nullptr;
};

class PackedMlp {
 public:
  // `trains`: weights are also packed for `backward`.
  PackedMlp(std::vector<LayerShape> shapes, bool trains, const Kernels& kernels = dense::kernels());

  // Copies the weights of a layer. All layers have to be packed before the first pass; threads may pack different ones.
  void pack(size_t layer, const float* weights, const float* bias);

  // y[rows][out] of x[rows][in]; activations between the layers are not kept.
  void forward(size_t rows, const float* x, size_t x_stride, float* y, size_t y_stride) const;
  // The same, with the activations that `backward` needs: hidden_size(rows) floats.
  void forward(size_t rows, const float* x, size_t x_stride, float* y, size_t y_stride, float* hidden,
               const Repeats* repeats = nullptr) const;
  // Gradients by those of the outputs, [rows][out].
  void backward(const Pass& pass, const float* output_grads, const Gradients& grads) const;

  size_t hidden_size(size_t rows) const;
  const std::vector<LayerShape>& shapes() const { return shapes_; }
  size_t in() const { return shapes_.front().in; }
  size_t out() const { return shapes_.back().out; }

 private:
  struct Packed {
    std::vector<float> forward, backward, bias;  // the first layer's backward pass packs what it needs
  };
  struct FirstLayer;

  void forward_repeats(size_t rows, const float* x, size_t x_stride, const Repeats& repeats, float* y, size_t y_stride) const;
  FirstLayer first_layer(const Pass& pass, bool has_input_grads) const;
  void backward_block(const Pass& pass, size_t begin, size_t rows, const float* output_grads, const Gradients& grads,
                      const FirstLayer& first) const;
  void backward_first(const Pass& pass, size_t begin, size_t rows, const float* y_grads, const Gradients& grads,
                      const FirstLayer& first) const;
  void backward_repeats(const Pass& pass, const float* y_grads, const Gradients& grads) const;
  size_t widest_stride() const;

  const Kernels& kernels_;
  std::vector<LayerShape> shapes_;
  bool trains_;
  std::vector<Packed> layers_;
};

}  // namespace dense
